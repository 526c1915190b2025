"""Levels 2 and 3: passes over the operators of level 1.

Each pass takes the graph and the autocast dtype in force and returns what it did: `(name, count, declined)`.
They are functions rather than patterns because the number of branches varies: one projection or three behind
a norm, with or without bias.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hasten.graph.nodes import (
    annotate,
    aten,
    call,
    calls,
    draws_random_numbers,
    dtype_of,
    first_position,
    full_args,
    getitem,
    is_call,
    is_view,
    mutated_nodes,
    prune,
    replace,
    same_shape,
    segments,
    value,
)
from hasten.graph.rules import Applied
from hasten.ops import packed

hops = torch.ops.hasten

_NORMS = {"rms": lambda: hops.rms_norm.default, "layer": lambda: hops.layer_norm.default}


def _order(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def _only_output(node: fx.Node, index: int) -> fx.Node | None:
    """The getitem of output `index`, if no other output of `node` is used."""
    picked = [user for user in node.users if user.users]
    if len(picked) == 1 and getitem(picked[0]) == index:
        return picked[0]
    return None


def _plain_linear(node: Any) -> bool:
    return is_call(node, aten.linear.default)


def _pick(graph: fx.Graph, node: fx.Node, index: int) -> fx.Node:
    return call(graph, operator.getitem, node, index)


def linear_with_activation(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """activation(x W^T + b), where the activation does not feed another product: `hasten.linear`."""
    done = Applied("linear_activation", 1, 0, [])
    for node in calls(graph):
        if not is_call(node, hops.activation.default) or not node.users:
            continue
        source = node.args[0]
        if not _plain_linear(source) or len(source.users) != 1 or any(_plain_linear(u) for u in node.users):  # type: ignore[union-attr]
            continue
        x, weight, bias = full_args(source)  # type: ignore[arg-type]
        with graph.inserting_before(node):
            replace(node, call(graph, hops.linear.default, x, weight, bias, node.args[1]))
        done.count += 1
    prune(graph)
    return done


def activation_into_linear(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """(activation(x) [* up]) W^T + b: the product is rebuilt in the backward pass, never stored."""
    done = Applied("activation_linear", 2, 0, [])
    for node in calls(graph):
        if not _plain_linear(node) or not isinstance(node.args[0], fx.Node):
            continue
        inner = node.args[0]
        if is_call(inner, hops.gated_activation.default):
            x, up, kind = full_args(inner)
        elif is_call(inner, hops.activation.default):
            (x, kind), up = full_args(inner), None
        else:
            continue
        if len(inner.users) != 1:
            done.declined.append("the activation is used more than once")
            continue
        _, weight, bias = full_args(node)
        with graph.inserting_before(node):
            replace(node, call(graph, hops.activation_linear.default, x, up, kind, weight, bias))
        done.count += 1
    prune(graph)
    return done


def _biased_first(linears: list[fx.Node]) -> tuple[list[fx.Node], list[fx.Node], list[fx.Node]]:
    """(projections, weights, biases), the projections with a bias first: as the operators take them."""
    ordered = sorted(linears, key=lambda node: full_args(node)[2] is None)
    weights = [full_args(node)[1] for node in ordered]
    return ordered, weights, [b for node in ordered if (b := full_args(node)[2]) is not None]


def _weights_first(linears: list[fx.Node], place: fx.Node, order: dict[fx.Node, int]) -> bool:
    """Whether all weights and biases exist before `place`."""
    needed = [a for node in linears for a in full_args(node)[1:3] if isinstance(a, fx.Node)]
    return all(order[a] < order[place] for a in needed)


def products_by_packed_weights(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """For a bf16 graph without gradients: every product is `hasten.linear`, which may use a packed weight.

    An activation between two products then belongs to the first one, which applies it to its sums: nothing is
    stored for a backward pass, so there is nothing to rebuild.
    """
    done = Applied("packed_weights", 3, 0, [])
    narrow = autocast or min((dtype_of(n) or torch.float32 for n in graph.nodes), key=lambda d: d.itemsize)
    if narrow != torch.bfloat16:
        return done
    for node in calls(graph):
        if is_call(node, hops.activation_linear.default):
            x, up, kind, weight, bias, *_ = full_args(node)
            if up is not None or not _plain_linear(x) or len(x.users) != 1 or kind not in packed.ATTRIBUTES:
                continue
            inner, inner_weight, inner_bias = full_args(x)
            with graph.inserting_before(node):
                hidden = call(graph, hops.linear.default, inner, inner_weight, inner_bias, kind)
                replace(node, call(graph, hops.linear.default, hidden, weight, bias))
            done.count += 2
    prune(graph)
    for node in calls(graph):
        if _plain_linear(node):
            with graph.inserting_before(node):
                replace(node, call(graph, hops.linear.default, *full_args(node)))
            done.count += 1
    prune(graph)
    return done


def norm_into_linears(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """[residual +] norm, then every projection of it, as one operator that stores the statistics and not the
    norm.

    Only where all users of the norm are projections; the residual sum becomes an output of the operator.
    """
    done = Applied("norm_linear", 2, 0, [])
    for node in calls(graph):
        kind = next((k for k, target in _NORMS.items() if is_call(node, target())), None)
        if kind is None:
            continue
        normed = _only_output(node, 0)
        if normed is None or not normed.users:
            continue
        users = list(normed.users)
        linears = [u for u in users if _plain_linear(u) and u.args[0] is normed]
        if len(linears) != len(users):
            done.declined.append("the norm also feeds something that is no projection")
            continue
        order, segment = _order(graph), segments(graph)
        linears.sort(key=order.__getitem__)
        place = linears[0]
        if not _weights_first(linears, place, order) or len({segment[n] for n in (node, *linears)}) > 1:
            done.declined.append("a weight of a later projection is computed after the first one")
            continue
        if kind == "rms":
            source, weight, eps, offset, round_first, out_dtype = full_args(node)
            norm_bias = None
        else:
            source, weight, norm_bias, eps, out_dtype = full_args(node)
            offset, round_first = 0.0, False
        if out_dtype is not None and dtype_of(normed) != _default_norm_dtype(
            kind, source, weight, round_first
        ):
            done.declined.append("the norm is rounded to a dtype of its own")
            continue
        x, residual = _residual_of(source, place, order, segment)
        own_weights = [a for a in (weight, norm_bias) if isinstance(a, fx.Node)]
        if residual is not None and not (
            _weights_first(linears, source, order) and all(order[a] < order[source] for a in own_weights)
        ):
            x, residual = source, None
        linears, weights, biases = _biased_first(linears)
        with graph.inserting_before(place if residual is None else source):
            norm = (kind, weight, norm_bias, eps, offset, round_first)
            fused = call(graph, hops.norm_linear.default, x, residual, *norm, weights, biases)
            first = 0
            if residual is not None:
                replace(source, _pick(graph, fused, 0))
                first = 1
            for i, linear in enumerate(linears):
                replace(linear, _pick(graph, fused, first + i))
        done.count += 1
        prune(graph)
    return done


def _default_norm_dtype(kind: str, source: fx.Node, weight: Any, round_first: bool) -> torch.dtype | None:
    own = dtype_of(source)
    if kind == "rms" and round_first and isinstance(weight, fx.Node):
        return torch.promote_types(own, dtype_of(weight))  # type: ignore[arg-type]
    return own


def _residual_of(
    source: Any, place: fx.Node, order: dict[fx.Node, int], segment: dict[fx.Node, int]
) -> tuple[Any, fx.Node | None]:
    """(x, residual) if `source` is their sum and an operator can stand in its place, else (source, None)."""
    if not is_call(source, aten.add.Tensor) or full_args(source)[2] != 1:
        return source, None
    a, b = source.args[:2]
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or not same_shape(a, b):
        return source, None
    if segment[source] != segment[place]:
        return source, None
    return b, a


def residual_into_norm(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """A residual sum and the norm behind it as one operator; across layers too, within one graph."""
    done = Applied("add_norm", 2, 0, [])
    order, segment = _order(graph), segments(graph)
    for node in calls(graph):
        kind = next((k for k, target in _NORMS.items() if is_call(node, target())), None)
        if kind is None:
            continue
        source = node.args[0]
        normed = _only_output(node, 0)
        if normed is None:
            continue
        x, residual = _residual_of(source, node, order, segment)
        if residual is None:
            continue
        if not all(order.get(a, 0) < order[source] for a in node.all_input_nodes if a is not source):  # type: ignore[index]
            done.declined.append("the norm's weight is computed after the sum")
            continue
        rest = full_args(node)[1:]
        target = hops.add_rms_norm.default if kind == "rms" else hops.add_layer_norm.default
        rest[-1] = dtype_of(normed)
        with graph.inserting_before(source):  # type: ignore[arg-type]
            fused = call(graph, target, x, residual, *rest)
            h, y = _pick(graph, fused, 1), _pick(graph, fused, 0)
        if dtype_of(h) != dtype_of(source):  # type: ignore[arg-type]
            done.declined.append("the sum has a dtype of its own")
            prune(graph)
            continue
        replace(source, h)  # type: ignore[arg-type]
        replace(normed, y)
        fused.args = (x, residual, *rest)
        done.count += 1
    prune(graph)
    return done


def group_projections(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """Several projections of one input (q, k, v; gate and up) as one product."""
    done = Applied("linear_group", 2, 0, [])
    mutated = mutated_nodes(graph)
    for source in list(graph.nodes):
        linears = [u for u in source.users if _plain_linear(u) and u.args[0] is source]
        if len(linears) < 2:
            continue
        order, segment = _order(graph), segments(graph)
        linears.sort(key=order.__getitem__)
        if (
            source in mutated
            or len({segment[n] for n in linears}) > 1
            or not _weights_first(linears, linears[0], order)
        ):
            done.declined.append("the projections do not stand together")
            continue
        with graph.inserting_before(linears[0]):
            linears, weights, biases = _biased_first(linears)
            fused = call(graph, hops.linear_group.default, source, weights, biases)
            for i, linear in enumerate(linears):
                replace(linear, _pick(graph, fused, i))
        done.count += 1
    prune(graph)
    return done


def narrow_results(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """Under autocast, a norm or rotary whose users all cast to the low dtype writes that dtype at once.

    The value is the same, since the cast happens right behind; one fp32 tensor less is written and read.
    """
    done = Applied("narrow", 2, 0, [])
    if autocast is None:
        return done
    casting = {
        aten.linear.default, aten.matmul.default, aten.bmm.default, aten.scaled_dot_product_attention.default,
        hops.linear.default, hops.linear_group.default, hops.activation_linear.default,
        hops.attention.default,
    }  # fmt: skip
    for node in calls(graph):
        result = node
        if is_call(node, hops.rms_norm.default, hops.layer_norm.default):
            picked = _only_output(node, 0)
            if picked is None:
                continue
            result = picked
        elif not is_call(node, hops.rotary.default):
            continue
        if dtype_of(result) != torch.float32 or not _all_users_cast(result, casting):
            continue
        position = len(node.target._schema.arguments) - 1  # type: ignore[union-attr]
        args = full_args(node)
        args[position] = autocast
        node.args, node.kwargs = tuple(args), {}
        _reannotate(node)
        done.count += 1
    return done


def _all_users_cast(node: fx.Node, casting: set[Any]) -> bool:
    if not node.users:
        return False
    for user in node.users:
        if user.op == "call_function" and user.target in casting:
            continue
        if is_view(user) and _all_users_cast(user, casting):
            continue
        return False
    return True


def _reannotate(node: fx.Node) -> None:
    """Values of a changed node and of the views behind it."""
    annotate(node)
    for user in node.users:
        if is_view(user) or getitem(user) is not None:
            _reannotate(user)


def fold_constants(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """What depends on no input (positions, masks, scales from the config) is computed once, at capture."""
    done = Applied("fold_constants", 3, 0, [])
    constant: dict[fx.Node, bool] = {}
    mutated = mutated_nodes(graph)
    for node in graph.nodes:
        if node.op == "get_attr":
            # A weight that the code holds by itself is no constant: it is trained.
            held = _evaluate(node)
            constant[node] = isinstance(held, torch.Tensor) and not held.requires_grad
        elif node.op == "call_function":
            inputs = node.all_input_nodes
            symbolic = any(isinstance(d, torch.SymInt) for d in getattr(value(node), "shape", ()))
            constant[node] = (
                bool(getattr(node.target, "_schema", None))
                and not draws_random_numbers(node)
                and node not in mutated
                and not symbolic
                and all(constant.get(i, False) for i in inputs)
                and isinstance(value(node), torch.Tensor)
            )
        else:
            constant[node] = False
    module = graph.owning_module
    for node in calls(graph):
        # Only the last constant of a chain is kept, and only what is small enough to hold beside the model.
        if (
            not constant[node]
            or all(constant.get(u, False) for u in node.users)
            or value(node).numel() > 1 << 20
        ):
            continue
        name = f"_folded_{done.count}"
        with torch.no_grad():
            module.register_buffer(name, _evaluate(node), persistent=False)  # type: ignore[union-attr]
        with graph.inserting_before(first_position(graph)):
            folded = graph.get_attr(name)
        folded.meta["val"] = value(node)
        replace(node, folded)
        done.count += 1
    prune(graph)
    return done


def _evaluate(node: fx.Node) -> Any:
    if node.op == "get_attr":
        found: Any = node.graph.owning_module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found
    args = fx.node.map_arg(node.args, _evaluate)
    kwargs = fx.node.map_arg(node.kwargs, _evaluate)
    return node.target(*args, **kwargs)  # type: ignore[operator]

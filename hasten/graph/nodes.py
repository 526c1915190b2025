"""Questions about one node of an ATen graph, and the two ways a graph is changed.

Every pass works on `torch.fx` graphs whose tensor nodes carry `meta["val"]`: a fake tensor with the shape,
dtype and strides that the node has when the graph runs in the state (autocast, shapes) it was captured in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_leaves

aten = torch.ops.aten


def is_call(node: Any, *targets: Any) -> bool:
    """Whether `node` calls one of `targets` (overloads, or packets that stand for all their overloads)."""
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return False
    target = node.target
    return any(target is t or getattr(target, "overloadpacket", None) is t for t in targets)


def value(node: fx.Node) -> Any:
    return node.meta.get("val")


def dtype_of(node: fx.Node) -> torch.dtype | None:
    return getattr(value(node), "dtype", None)


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    val = value(node)
    return tuple(val.shape) if isinstance(val, torch.Tensor) else ()


def rank_of(node: fx.Node) -> int:
    return len(shape_of(node))


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal without adding a guard: symbols are compared as expressions."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    return str(a) == str(b)


def same_shape(a: fx.Node, b: fx.Node) -> bool:
    sa, sb = shape_of(a), shape_of(b)
    return len(sa) == len(sb) and all(map(same_size, sa, sb))


def full_args(node: fx.Node) -> list[Any]:
    """The node's arguments in schema order, defaults filled in. Plain functions: args, then kwargs."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return [*node.args, *(node.kwargs[k] for k in sorted(node.kwargs))]
    filled: list[Any] = []
    for position, argument in enumerate(schema.arguments):
        if position < len(node.args):
            filled.append(node.args[position])
        elif argument.name in node.kwargs:
            filled.append(node.kwargs[argument.name])
        else:
            filled.append(argument.default_value if argument.has_default_value() else None)
    return filled


def is_mutation(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    return bool(schema is not None and schema.is_mutable)


_VIEWS = (
    aten.view, aten.reshape, aten.transpose, aten.permute, aten.t, aten.unsqueeze, aten.squeeze, aten.expand,
    aten.slice, aten.select, aten.split, aten.chunk, aten.unbind, aten.alias, aten.split_with_sizes,
    aten.flatten,    aten.unflatten,
)  # fmt: skip


def is_view(node: Any) -> bool:
    return is_call(node, *_VIEWS)


def is_barrier(node: fx.Node) -> bool:
    """A node that changes the state under which later nodes run; no match may reach across it."""
    if node.op != "call_function":
        return node.op in ("call_module", "call_method")
    return getattr(node.target, "__name__", "") in (
        "_enter_autocast",
        "_exit_autocast",
        "_set_grad_enabled",
    )


def segments(graph: fx.Graph) -> dict[fx.Node, int]:
    """For each node, how many barriers stand before it."""
    count, found = 0, {}
    for node in graph.nodes:
        found[node] = count
        if is_barrier(node):
            count += 1
    return found


def mutated_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Every node whose storage some node writes in place, views followed in both directions."""
    roots: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "call_function" and is_mutation(node):
            for argument, given in zip(node.target._schema.arguments, full_args(node), strict=True):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    roots.update(
                        n
                        for n in (given if isinstance(given, (list, tuple)) else [given])
                        if isinstance(n, fx.Node)
                    )
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        if is_view(node) or is_mutation(node) or is_call(node, operator.getitem):
            stack.extend(node.all_input_nodes[:1])
        stack.extend(
            user
            for user in node.users
            if is_view(user) or is_mutation(user) or is_call(user, operator.getitem)
        )
    return found


def getitem(node: fx.Node) -> int | None:
    """The index if `node` picks one output of an operator, else None."""
    return node.args[1] if is_call(node, operator.getitem) and isinstance(node.args[1], int) else None


def annotate(node: fx.Node) -> None:
    """Computes `meta["val"]` of a new node from its inputs' values."""

    def fake(argument: Any) -> Any:
        return value(argument) if isinstance(argument, fx.Node) else argument

    args, kwargs = fx.node.map_aggregate(node.args, fake), fx.node.map_aggregate(node.kwargs, fake)
    # The mode of the inputs, not the one of Dynamo's tracing context, which is renewed for every backend
    # call.
    mode = next(
        (leaf.fake_mode for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor)), None
    )
    if mode is None:
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]
        return
    with mode, torch.no_grad():
        node.meta["val"] = node.target(*args, **kwargs)  # type: ignore[operator]


def call(graph: fx.Graph, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    """A new, annotated call at the graph's insertion point."""
    node = graph.call_function(target, args, kwargs)
    annotate(node)
    return node


def replace(node: fx.Node, other: fx.Node) -> None:
    """Every user of `node` uses `other` instead; `node` is left for dead-code elimination."""
    node.replace_all_uses_with(other, propagate_meta=False)


def calls(graph: fx.Graph) -> Iterator[fx.Node]:
    """The call nodes in order, safe against changes made while iterating."""
    return iter([n for n in graph.nodes if n.op == "call_function"])


def prune(graph: fx.Graph) -> None:
    """Removes pure nodes that nobody uses; mutations, barriers and random operators stay."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or node.users or is_barrier(node) or is_mutation(node):
            continue
        if draws_random_numbers(node):
            continue
        graph.erase_node(node)


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether running the node moves the random generator on."""
    if is_call(node, aten.dropout.default):
        _, p, training = full_args(node)
        return bool(training) and p > 0
    return torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())


def first_position(graph: fx.Graph) -> fx.Node:
    """The first node that is no input: what depends on parameters alone is put before it."""
    return next(n for n in graph.nodes if n.op not in ("placeholder", "get_attr"))

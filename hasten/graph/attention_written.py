"""The pass that makes `hasten.attention` of attention written out: two products with a softmax between them.

Between the first product and the softmax models put, in any order: a scale, a soft-cap, added masks and
position biases, masked fills, casts, and views that split batch and heads. What is added becomes the
operator's bias, gradient included; what is filled becomes a bias too.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from hasten.graph.nodes import (
    aten,
    call,
    calls,
    dtype_of,
    full_args,
    is_call,
    mutated_nodes,
    prune,
    rank_of,
    replace,
    same_size,
    segments,
    shape_of,
)
from hasten.graph.rules import Applied

_hops = torch.ops.hasten
_VIEWS = (aten.view.default, aten.reshape.default, aten.unflatten.int, aten.flatten.using_ints)
_SAME_VALUE = (
    aten.scalar_tensor.default, aten.to.dtype, aten.lift_fresh.default, aten.lift_fresh_copy.default,
    aten.detach.default, aten.detach_.default,
)  # fmt: skip
_PRODUCTS = (aten.matmul.default, aten.bmm.default)
# A score below this has weight zero beside any other, so replacing it and adding to it come to the same.
_HIDDEN = -1e30


class _DeclinedError(Exception):
    """It is attention, but not one that the operator computes; the message goes into the report."""


@dataclass
class _Found:
    """One occurrence, read backwards from the product with the values."""

    product: fx.Node
    values: fx.Node
    queries: fx.Node = field(init=False)
    keys_transposed: fx.Node = field(init=False)
    heads: Any = 1
    """Heads that stand with the batch in the first of three dims."""

    covered: list[fx.Node] = field(default_factory=list)
    steps: list[tuple[str, Any]] = field(default_factory=list)
    """What happens to the scores, in order: (`mul` | `div` | `softcap`, number), (`add` | `subtract`, node),
    (`fill`, (mask, number, where)), (`clamp`, number), (`rank`, dims from there on)."""


def written_attention(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """softmax(f(q k^T)) v -> attention, where f is of the steps that the operator knows."""
    done = Applied("attention", 1, 0, [])
    for node in calls(graph):
        if not is_call(node, *_PRODUCTS) or not node.users:
            continue
        found = _Found(node, node.args[1])  # type: ignore[arg-type]
        softmax = _softmax_behind(node.args[0], found)
        if softmax is None:
            continue
        try:
            if not _read_scores(softmax.args[0], found):
                continue
            _check(graph, found, autocast)
            with graph.inserting_before(node):
                _rewrite(graph, found)
        except _DeclinedError as reason:
            done.declined.append(f"attention: {reason}")
            continue
        done.count += 1
    prune(graph)
    return done


def _softmax_behind(node: Any, found: _Found) -> fx.Node | None:
    """The softmax over keys that `node` comes from by casts and views alone."""
    while isinstance(node, fx.Node):
        found.covered.append(node)
        if is_call(node, aten.softmax.int, aten._softmax.default):
            return node if node.args[1] in (-1, rank_of(node) - 1) else None
        if not is_call(node, aten.to.dtype, *_VIEWS) or not _keeps_rows(node):
            return None
        _note_heads(node, found)
        node = node.args[0]
    return None


def _keeps_rows(node: fx.Node) -> bool:
    """Whether a cast or view leaves the last two dims as they are."""
    before = shape_of(node.args[0])  # type: ignore[arg-type]
    return len(before) >= 3 and all(map(same_size, before[-2:], shape_of(node)[-2:]))


def _note_heads(view: fx.Node, found: _Found) -> None:
    source: fx.Node = view.args[0]  # type: ignore[assignment]
    if rank_of(view) != rank_of(source):
        found.heads = shape_of(view if rank_of(view) == 4 else source)[1]


def _read_scores(node: Any, found: _Found) -> bool:
    """Follows the scores back to the product of queries and keys; the steps come out in order."""
    if not isinstance(node, fx.Node):
        return False
    before, steps, heads = len(found.covered), len(found.steps), found.heads
    found.covered.append(node)
    args = full_args(node) if node.op == "call_function" else []
    inner: list[tuple[Any, tuple[str, Any] | None]] = []
    if is_call(node, *_PRODUCTS):
        found.queries, found.keys_transposed = args[0], args[1]
        return True
    if is_call(node, aten.baddbmm.default) and args[3] == 1 and _number(args[4]) is not None:
        found.queries, found.keys_transposed = args[1], args[2]
        found.steps += [("mul", _number(args[4])), ("add", args[0])]
        return True
    if is_call(node, aten.to.dtype):
        inner = [(args[0], None)]
    elif is_call(node, *_VIEWS) and _keeps_rows(node) and {rank_of(node), rank_of(args[0])} <= {3, 4}:
        _note_heads(node, found)
        inner = [(args[0], ("rank", rank_of(node)))]
    elif is_call(node, aten.mul.Tensor, aten.div.Tensor):
        name = "mul" if is_call(node, aten.mul.Tensor) else "div"
        number = _number(args[1])
        if name == "mul" and number is not None and is_call(args[0], aten.tanh.default):
            return _read_capped(args[0], number, found)
        if number is not None:
            inner = [(args[0], (name, number))]
        elif isinstance(args[1], fx.Node) and rank_of(args[1]) == 0:
            inner = [(args[0], (name, args[1]))]
    elif is_call(node, aten.add.Tensor) and args[1] == 0:
        inner = [(args[0], None)]
    elif is_call(node, aten.add.Tensor) and args[2] == 1:
        inner = [(args[0], ("add", args[1])), (args[1], ("add", args[0]))]
    elif is_call(node, aten.sub.Tensor) and args[2] == 1:
        inner = [(args[0], ("subtract", args[1]))]
    elif is_call(node, aten.masked_fill.Scalar, aten.masked_fill.Tensor):
        inner = [(args[0], ("fill", (args[1], _number(args[2]), True)))]
    elif is_call(node, aten.where.self, aten.where.ScalarOther):
        inner = [(args[1], ("fill", (args[0], _number(args[2]), False)))]
    elif is_call(node, aten.maximum.default, aten.max.other, aten.clamp_min.default):
        inner = [(args[0], ("clamp", _number(args[1])))]
    for source, step in inner:
        if _read_scores(source, found):
            if step is not None:
                found.steps.append(step)
            return True
        del found.covered[before + 1 :], found.steps[steps:]
        found.heads = heads
    return False


def _read_capped(tanh: fx.Node, cap: float, found: _Found) -> bool:
    """`tanh(scores / cap) * cap`."""
    divided: Any = tanh.args[0]
    if not is_call(divided, aten.div.Tensor) or _number(divided.args[1]) != cap:
        return False
    found.covered += [tanh, divided]
    if not _read_scores(divided.args[0], found):
        return False
    found.steps.append(("softcap", cap))
    return True


def _number(given: Any) -> float | None:
    """The value of a number, or of a node that holds one constant."""
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        return float(given)
    if is_call(given, aten.full.default) and list(given.args[0]) == []:
        return _number(given.args[1])
    if is_call(given, *_SAME_VALUE):
        return _number(given.args[0])
    if isinstance(given, fx.Node) and given.op == "get_attr":
        held: Any = given.graph.owning_module
        for part in str(given.target).split("."):
            held = getattr(held, part)
        if isinstance(held, torch.Tensor) and not held.requires_grad and held.numel() == 1:
            return float(held)
    return None


def _check(graph: fx.Graph, found: _Found, autocast: torch.dtype | None) -> None:
    mutated, segment = mutated_nodes(graph), segments(graph)
    if any(set(node.users) - {found.product, *found.covered} for node in found.covered):
        raise _DeclinedError("scores or weights are used elsewhere too")
    if mutated.intersection((found.product, *found.covered)):
        raise _DeclinedError("scores or weights are changed in place")
    if len({segment[node] for node in (found.product, *found.covered)}) > 1:
        raise _DeclinedError("it crosses a change of autocast or grad mode")
    ranks = [rank_of(n) for n in (found.queries, found.keys_transposed, found.values)]
    if ranks[0] != ranks[1] or not {3, 4}.issuperset(ranks) or not isinstance(found.heads, int):
        raise _DeclinedError(f"queries {shape_of(found.queries)} are not [batch, heads, positions, head dim]")
    inputs = (found.queries, found.keys_transposed, found.values)
    if autocast is None and len({dtype_of(n) for n in inputs}) > 1:
        raise _DeclinedError("queries, keys and values have different dtypes")
    for name, given in found.steps:
        number = given[1] if name == "fill" else given
        if name in ("fill", "clamp") and (number is None or number > _HIDDEN):
            raise _DeclinedError(f"hidden scores are set to {number}, which may still count")


def _rewrite(graph: fx.Graph, found: _Found) -> None:
    """New nodes before the product, which they replace."""
    k = _split(graph, _swapped(graph, found.keys_transposed), found.heads)
    q, v = (_split(graph, t, found.heads) for t in (found.queries, found.values))
    scale, softcap, rank = 1.0, 0.0, rank_of(found.queries)
    bias: fx.Node | None = None
    hidden: fx.Node | None = None
    for name, given in found.steps:
        if name == "rank":
            rank = given
        elif name in ("mul", "div") and isinstance(given, fx.Node):
            if bias is not None or softcap:
                raise _DeclinedError("a scale that is a tensor comes behind a bias or a soft-cap")
            q = call(graph, aten.mul.Tensor if name == "mul" else aten.div.Tensor, q, given)
        elif name in ("mul", "div"):
            if softcap:
                raise _DeclinedError("a scale comes behind the soft-cap")
            factor = given if name == "mul" else 1.0 / given
            scale *= factor
            bias = None if bias is None else call(graph, aten.mul.Tensor, bias, factor)
        elif name == "softcap":
            if bias is not None or softcap:
                raise _DeclinedError("a soft-cap comes behind a bias or another soft-cap")
            softcap = given
        elif name == "clamp":
            bias = None if bias is None else call(graph, aten.clamp_min.default, bias, given)
        elif name == "fill":
            mask, number, where = given
            mask = _term(graph, mask, rank, found.heads)
            bias = _filled(graph, bias, mask, number, where, found)
            mask = mask if where else call(graph, aten.logical_not.default, mask)
            hidden = mask if hidden is None else call(graph, aten.logical_or.default, hidden, mask)
        else:
            term = _term(graph, given, rank, found.heads)
            if not dtype_of(term).is_floating_point:  # type: ignore[union-attr]
                raise _DeclinedError("what is added to the scores is not floating")
            term = term if name == "add" else call(graph, aten.neg.default, term)
            bias = term if bias is None else call(graph, aten.add.Tensor, bias, term)
    _check_inputs(q, k, v)
    bias = _full_bias(graph, bias, q, k)
    if hidden is not None:
        # A row whose scores are all filled spreads evenly over the values and gives queries and keys no
        # gradient: so does a query of zeros.
        row = call(graph, aten.all.dim, hidden, -1, True)
        q = call(graph, aten.masked_fill.Scalar, q, row, 0.0)
    out = call(graph, _hops.attention.default, q, k, v, None, bias, None, None, scale, False, 0, softcap)
    picked = call(graph, operator.getitem, out, 0)
    result = call(graph, aten.transpose.int, picked, 1, 2)
    if rank_of(found.product) == 3:
        result = call(graph, aten.flatten.using_ints, result, 0, 1)
    if dtype_of(result) != dtype_of(found.product):
        raise _DeclinedError(f"gives {dtype_of(found.product)}, the operator {dtype_of(result)}")
    replace(found.product, result)


def _term(graph: fx.Graph, given: Any, rank: int, heads: int) -> fx.Node:
    """What is added to or masks scores of `rank` dims, for scores of four."""
    if not isinstance(given, fx.Node):
        raise _DeclinedError("a number is added to the scores")
    return _split(graph, given, heads) if rank == 3 else given


def _swapped(graph: fx.Graph, node: fx.Node) -> fx.Node:
    """The last two dims the other way round."""
    if is_call(node, aten.transpose.int) and {d % rank_of(node) for d in node.args[1:]} == {  # type: ignore[operator]
        rank_of(node) - 1,
        rank_of(node) - 2,
    }:
        return node.args[0]  # type: ignore[return-value]
    return call(graph, aten.transpose.int, node, -1, -2)


def _split(graph: fx.Graph, node: fx.Node, heads: int) -> fx.Node:
    """[B H, ..] -> [B, H, ..]; what has four dims, or no such dim, or one row for all, keeps its meaning."""
    if rank_of(node) != 3:
        return node
    if shape_of(node)[0] == 1:
        return call(graph, aten.unsqueeze.default, node, 0)
    return call(graph, aten.unflatten.int, node, 0, [-1, heads])


def _filled(
    graph: fx.Graph, bias: fx.Node | None, mask: fx.Node, number: float, where: bool, found: _Found
) -> fx.Node:
    """`number` where the mask is `where`, elsewhere the bias."""
    if dtype_of(mask) != torch.bool:
        raise _DeclinedError("the mask is not boolean")
    if bias is None:
        # In the low dtype the number may round to infinity, and a row without keys would change.
        dtype = torch.promote_types(dtype_of(found.queries), torch.float32)  # type: ignore[arg-type]
        bias = call(graph, aten.new_zeros.default, mask, [], dtype=dtype)
    if where:
        return call(graph, aten.where.ScalarSelf, mask, number, bias)
    return call(graph, aten.where.ScalarOther, mask, bias, number)


def _full_bias(graph: fx.Graph, bias: fx.Node | None, q: fx.Node, k: fx.Node) -> fx.Node | None:
    """The bias as a view [B or 1, H or 1, Sq, Sk]."""
    if bias is None:
        return None
    while rank_of(bias) < 4:
        bias = call(graph, aten.unsqueeze.default, bias, 0)
    sizes, wanted = shape_of(bias), (*shape_of(q)[:3], shape_of(k)[2])
    known = [(s, w) for s, w in zip(sizes, wanted, strict=False) if isinstance(s, int) and isinstance(w, int)]
    if rank_of(bias) > 4 or any(s not in (1, w) for s, w in known):
        raise _DeclinedError(f"a bias of {sizes} does not fit scores of {wanted}")
    expanded: list[Any] = [-1] * 4
    for dim, (size, full) in enumerate(zip(sizes, wanted, strict=True)):
        if not same_size(size, full) and (dim > 1 or not isinstance(size, int)):
            expanded[dim] = call(graph, aten.sym_size.int, k if dim == 3 else q, min(dim, 2))
    return bias if expanded == [-1] * 4 else call(graph, aten.expand.default, bias, expanded)


def _check_inputs(q: fx.Node, k: fx.Node, v: fx.Node) -> None:
    (b, h, _, d), (kb, kh, ks, kd), (vb, vh, vs, _) = shape_of(q), shape_of(k), shape_of(v)
    pairs = [(b, kb), (b, vb), (kh, vh), (ks, vs), (d, kd)]
    if not all(same_size(x, y) for x, y in pairs) or not (same_size(h, kh) or kh == 1):
        raise _DeclinedError(
            f"queries {shape_of(q)}, keys {shape_of(k)} and values {shape_of(v)} do not match"
        )

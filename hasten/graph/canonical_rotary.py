"""The steps of the canonical form that belong to rotary position embedding: halves, pairs and their turns.

| written as | becomes |
|---|---|
| the halves of the last dim, sliced or split | `chunk(x, 2, -1)`, once |
| the even and odd channels, of a view or unbound | `x[..., 0::2]`, `x[..., 1::2]` |
| `stack((a, b), -1)` with its two last dims merged | `interleave(a, b)` |
| `cat((-x2, x1))`; `cat((x2, -x1))` | `rotate_half(x)`; `rotate_half_back(x)` |
| `interleave(-x_odd, x_even)` | `rotate_pairs(x)` |
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from hasten.graph.nodes import (
    aten,
    call,
    full_args,
    is_call,
    rank_of,
    replace,
    same_shape,
    same_size,
    shape_of,
    value,
)

_END = 2**63 - 1
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.tensor_split.sections, aten.chunk.default)
_TURNING = (aten.mul.Tensor, aten.neg.default, aten.cat.default, aten.to.dtype)
_RESHAPES = (
    aten.view.default, aten.reshape.default, aten.flatten.using_ints, aten.view_as.default,
    aten.reshape_as.default,
)  # fmt: skip


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    """`cat(-x2, x1)` for the halves of the last dim: half-split rotary (GPT-NeoX order)."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((-x2, x1), dim=-1)


def rotate_half_back(x: torch.Tensor) -> torch.Tensor:
    """`cat(x2, -x1)`: the turn by the opposite angle."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x2, -x1), dim=-1)


def interleave(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """`a[..., 0], b[..., 0], a[..., 1], b[..., 1], ...` of two tensors of one shape."""
    return torch.stack((a, b), dim=-1).flatten(-2)


def rotate_pairs(x: torch.Tensor) -> torch.Tensor:
    """`(-x[2i+1], x[2i])` for the pairs of the last dim: interleaved rotary (GPT-J order)."""
    return interleave(-x[..., 1::2], x[..., ::2])


def _half(node: Any) -> tuple[fx.Node, int] | None:
    """(source, 0 or 1) if `node` is the first or second half of the last dim of `source`."""
    if is_call(node, operator.getitem):
        pieces = node.args[0]
        if is_call(pieces, *_SPLITS) and full_args(pieces)[2] == -1:
            sizes = value(pieces)
            if len(sizes) == 2 and same_size(sizes[0].shape[-1], sizes[1].shape[-1]):
                return pieces.args[0], node.args[1]
        return None
    if not is_call(node, aten.slice.Tensor):
        return None
    source, dim, start, end, step = full_args(node)
    width = shape_of(source)[-1]
    if dim not in (-1, rank_of(source) - 1) or step != 1 or not isinstance(width, int) or width % 2:
        return None
    if not isinstance(start, int | None) or not isinstance(end, int | None):
        return None
    start, end = start or 0, width if end is None else end
    start, end = (start + width if start < 0 else start), (end + width if end < 0 else min(end, width))
    return {(0, width // 2): (source, 0), (width // 2, width): (source, 1)}.get((start, end))


def _halves(graph: fx.Graph, node: fx.Node) -> bool:
    """A half, however it was cut -> one output of the one `chunk(x, 2, -1)`."""
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.chunk.default):
        return False
    found = _half(node)
    # Other users may write in place, and torch refuses that for outputs of one operator among several.
    if found is None or not all(is_call(user, *_TURNING) for user in node.users):
        return False
    source, index = found
    chunk = next(
        (u for u in source.users if is_call(u, aten.chunk.default) and u.args[1:] == (2, -1) and u < node),
        None,
    )
    with graph.inserting_before(node):
        if chunk is None:
            chunk = call(graph, aten.chunk.default, source, 2, -1)
        replace(node, call(graph, operator.getitem, chunk, index))
    return True


def _pairs_of(view: Any) -> fx.Node | None:
    """x if `view` is x with its last dim split into pairs, `[..., D] -> [..., D / 2, 2]`."""
    if not is_call(view, aten.view.default, aten.reshape.default, aten.unflatten.int):
        return None
    source = view.args[0]
    if shape_of(view)[-1] != 2 or rank_of(source) != rank_of(view) - 1:
        return None
    return source if all(map(same_size, shape_of(source)[:-1], shape_of(view)[:-2])) else None


def _every_second(node: Any) -> tuple[fx.Node, int] | None:
    """(source, 0 or 1) if `node` is the even or odd channels of the last dim of `source`."""
    if is_call(node, aten.select.int) and node.args[1] in (-1, rank_of(node)):
        source = _pairs_of(node.args[0])
        return None if source is None else (source, node.args[2] % 2)
    if is_call(node, operator.getitem) and is_call(node.args[0], aten.unbind.int):
        pieces = node.args[0]
        source = _pairs_of(pieces.args[0]) if full_args(pieces)[1] in (-1, rank_of(node)) else None
        return None if source is None else (source, node.args[1])
    if is_call(node, aten.slice.Tensor):
        source, dim, start, end, step = full_args(node)
        whole = end is None or (isinstance(end, int) and end == _END) or same_size(end, shape_of(source)[-1])
        even = isinstance(shape_of(source)[-1], int) and shape_of(source)[-1] % 2 == 0
        if dim in (-1, rank_of(source) - 1) and step == 2 and whole and even and start in (None, 0, 1):
            return source, start or 0
    return None


def _pairs(graph: fx.Graph, node: fx.Node) -> bool:
    """The even or odd channels, however they were picked -> a slice with step 2."""
    found = _every_second(node)
    if found is None or (is_call(node, aten.slice.Tensor) and node.args[1:] == (-1, found[1], _END, 2)):
        return False
    with graph.inserting_before(node):
        replace(node, call(graph, aten.slice.Tensor, found[0], -1, found[1], _END, 2))
    return True


def _interleave(graph: fx.Graph, node: fx.Node) -> bool:
    if not is_call(node, *_RESHAPES) or not is_call(node.args[0], aten.stack.default):
        return False
    stack: fx.Node = node.args[0]  # type: ignore[assignment]
    tensors, dim = full_args(stack)
    rank = rank_of(stack) - 1
    if len(tensors) != 2 or dim not in (-1, rank) or rank_of(node) != rank:
        return False
    if not all(map(same_size, shape_of(node)[:-1], shape_of(stack)[:-2])):
        return False
    with graph.inserting_before(node):
        replace(node, call(graph, interleave, *tensors))
    return True


def _turned(graph: fx.Graph, node: fx.Node) -> bool:
    """The turn by a right angle, in one of its three spellings."""
    if is_call(node, aten.cat.default):
        pieces, dim = full_args(node)
        if len(pieces) != 2 or dim not in (-1, rank_of(node) - 1):
            return False
        function, of = (
            (rotate_half, _half) if is_call(pieces[0], aten.neg.default) else (rotate_half_back, _half)
        )
    elif is_call(node, interleave):
        pieces, function, of = node.args, rotate_pairs, _every_second
    else:
        return False
    negated = int(function is rotate_half_back)
    if not is_call(pieces[negated], aten.neg.default):
        return False
    parts = [of(piece.args[0] if i == negated else piece) for i, piece in enumerate(pieces)]
    if parts[0] is None or parts[1] is None or parts[0][0] is not parts[1][0]:
        return False
    if (parts[0][1], parts[1][1]) != (1, 0) or not same_shape(parts[0][0], node):
        return False
    with graph.inserting_before(node):
        replace(node, call(graph, function, parts[0][0]))
    return True


ROTARY_STEPS = (_halves, _pairs, _interleave, _turned)

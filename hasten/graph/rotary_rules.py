"""The rules that make `hasten.rotary` of rotary position embedding, and the pass that takes the rest in.

The model's own cos and sin are used, in the layout in which it holds them: of the whole width, of half of it
(each angle once), or as one complex number an angle.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from hasten.graph.canonical_rotary import interleave, rotate_half, rotate_half_back, rotate_pairs
from hasten.graph.nodes import (
    aten,
    call,
    calls,
    dtype_of,
    full_args,
    is_call,
    prune,
    rank_of,
    replace,
    same_size,
    shape_of,
    value,
)
from hasten.graph.rules import Applied, Context, Rule

hasten_ops = torch.ops.hasten
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default)
_Pattern = Callable[..., torch.Tensor]


def _rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _half(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotate_half(x) * sin


def _half_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotate_half_back(x) * sin


def _pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + rotate_pairs(x) * sin


def _turned_halves(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """cos and sin of half the width, each half of x turned by itself."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos - x2 * sin, x2 * cos + x1 * sin), dim=-1)


def _turned_halves_back(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The same by the opposite angle."""
    x1, x2 = x.chunk(2, dim=-1)
    return torch.cat((x1 * cos + x2 * sin, x2 * cos - x1 * sin), dim=-1)


def _turned_parts(a: torch.Tensor, b: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Two partners that are no halves of one tensor, put one behind the other (DeepSeek-V3)."""
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _turned_pairs(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """cos and sin of half the width, the even and the odd channels turned by themselves."""
    even, odd = x[..., ::2], x[..., 1::2]
    return interleave(even * cos - odd * sin, odd * cos + even * sin)


def _complex(x: torch.Tensor, angles: torch.Tensor) -> torch.Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles).flatten(3).type_as(x)


def _wide(pattern: _Pattern) -> _Pattern:
    """The pattern on x in fp32, rounded back behind it."""

    def wide(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return pattern(x.to(torch.float32), cos, sin).to(x.dtype)

    return wide


def _heads_dim(table: Any, x_shape: tuple[Any, ...]) -> int | None:
    """Which dim of x [.., .., .., D] the table spreads over as the heads: 1 for [B,1,S,R], 2 for [B,S,1,R].

    None where it cannot be told. A table without a batch ([S,R], [1,S,R], [S,1,R]) is told by its place too;
    x without one ([S,H,D], of vision towers) counts as a batch of one.
    """
    sizes = shape_of(table)
    if len(x_shape) not in (3, 4) or not 2 <= len(sizes) <= 4:
        return None
    x_shape = (1,) * (4 - len(x_shape)) + x_shape
    padded = (1,) * (4 - len(sizes)) + sizes
    ones = [d for d in (1, 2) if padded[d] == 1 and x_shape[d] != 1]
    if len(ones) == 1:
        return ones[0]
    if len(sizes) == 2:
        return 1
    while is_call(table, aten.to.dtype):
        table = table.args[0]
    if len(sizes) == 4 and is_call(table, aten.unsqueeze.default):
        dim = table.args[1] % 4
        return dim if dim in (1, 2) and sizes[dim] == 1 else None
    return None


def _condition(context: Context, table: str = "cos", half_width: bool = False, turned: str = "x") -> str:
    x = context.shape(turned)
    if _heads_dim(context.match.inputs[table], x) is None:
        return f"rotary: cos {context.shape(table)} does not tell heads from positions of x {x}"
    width = context.shape(table)[-1]
    if isinstance(width, int) and isinstance(x[-1], int) and width * (1 + half_width) != x[-1]:
        return f"rotary: {width} angles for {x[-1]} channels"
    return ""


def _without_heads(table: Any, dim: int) -> Any:
    """The table as [B or 1, S, R] or [S, R]."""
    node: fx.Node = table.node
    if is_call(node, aten.unsqueeze.default) and node.args[1] % rank_of(node) == dim + rank_of(node) - 4:  # type: ignore[operator]
        return fx.Proxy(node.args[0], table.tracer)  # type: ignore[arg-type]
    place = dim - (4 - rank_of(node))
    return aten.squeeze.dim(table, place) if place >= 0 else table


def _apply(x: Any, cos: Any, sin: Any, dim: int, interleaved: bool, dtype: torch.dtype | None) -> Any:
    if rank_of(x.node) == 3:
        return aten.squeeze.dim(_apply(aten.unsqueeze.default(x, 0), cos, sin, dim, interleaved, dtype), 0)
    if dim == 1:
        return hasten_ops.rotary(x, cos, sin, interleaved, dtype)
    turned = hasten_ops.rotary(aten.transpose.int(x, 1, 2), cos, sin, interleaved, dtype)
    return aten.transpose.int(turned, 1, 2)


def _whole_width(table: Any, interleaved: bool) -> Any:
    if interleaved:
        return aten.repeat_interleave.self_int(table, 2, -1)
    return aten.cat.default([table, table], -1)


def _replacement(interleaved: bool, half_width: bool = False, back: bool = False) -> Callable[..., Any]:
    def replacement(x: Any, cos: Any, sin: Any, context: Context) -> Any:
        dim = _place(context, "cos")
        cos, sin = _without_heads(cos, dim), _without_heads(sin, dim)
        if back:
            sin = aten.neg.default(sin)
        if half_width:
            cos, sin = _whole_width(cos, interleaved), _whole_width(sin, interleaved)
        return _apply(x, cos, sin, dim, interleaved, context.dtype())

    return replacement


def _from_complex(x: Any, angles: Any, context: Context) -> Any:
    dim = _place(context, "angles")
    parts = aten.view_as_real.default(_without_heads(angles, dim))
    cos, sin = (_whole_width(aten.select.int(parts, -1, i), True) for i in (0, 1))
    return _apply(x, cos, sin, dim, True, context.dtype())


def _from_parts(a: Any, b: Any, cos: Any, sin: Any, context: Context) -> Any:
    dim = _place(context, "cos", "a")
    cos, sin = (_whole_width(_without_heads(t, dim), False) for t in (cos, sin))
    return _apply(aten.cat.default([a, b], -1), cos, sin, dim, False, context.dtype())


def _place(context: Context, table: str, turned: str = "x") -> int:
    dim = _heads_dim(context.match.inputs[table], context.shape(turned))
    if dim is None:
        raise ValueError("replacement called where the condition did not hold")
    return dim


def rotaries() -> Iterator[Rule]:
    """Every rule of rotary, in order."""
    reason = "rotary position embedding (Su et al. 2021) with the model's own cos and sin"
    # (pattern, interleaved, cos and sin of half the width, the opposite angle)
    spellings: list[tuple[_Pattern, bool, bool, bool]] = [
        (_turned_halves, False, True, False),
        (_turned_halves_back, False, True, True),
        (_turned_pairs, True, True, False),
        (_half, False, False, False),
        (_half_back, False, False, True),
        (_pairs, True, False, False),
    ]

    def examples(x_dtype: torch.dtype, width: int) -> Sequence[torch.Tensor]:
        return [_rand(2, 3, 5, 8, dtype=x_dtype), _rand(2, 1, 5, width), _rand(2, 1, 5, width)]

    def complex_examples(x_dtype: torch.dtype) -> Sequence[torch.Tensor]:
        return [_rand(2, 3, 5, 8, dtype=x_dtype), _rand(2, 1, 5, 4, dtype=torch.complex64)]

    def parts() -> Sequence[torch.Tensor]:
        return [_rand(2, 3, 5, 4), _rand(2, 3, 5, 4), _rand(2, 1, 5, 4), _rand(2, 1, 5, 4)]

    for x_dtype, shape, wide in ((torch.bfloat16, _wide, True), (torch.float32, lambda p: p, False)):
        for pattern, interleaved, half_width, back in spellings:
            yield Rule(
                "rotary", shape(pattern), _replacement(interleaved, half_width, back),
                functools.partial(examples, x_dtype, 4 if half_width else 8), 1,
                reason + "; the operator computes in fp32 by itself" * wide,
                functools.partial(_condition, half_width=half_width),
            )  # fmt: skip
        yield Rule(
            "rotary", _complex, _from_complex,
            functools.partial(complex_examples, x_dtype), 1,
            reason + " as complex numbers", functools.partial(_condition, table="angles", half_width=True),
        )  # fmt: skip
    yield Rule(
        "rotary", _turned_parts, _from_parts, parts, 1, reason + ", the two parts put together first",
        functools.partial(_condition, turned="a"),
    )  # fmt: skip


def partial_rotary(graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    """`cat(rotary(x[..., :R]), x[..., R:])` -> `rotary(x)`, which passes the channels behind R on."""
    done = Applied("partial_rotary", 1, 0, [])
    for node in calls(graph):
        if not is_call(node, aten.cat.default) or not node.users:
            continue
        pieces, dim = full_args(node)
        if len(pieces) != 2 or dim not in (-1, rank_of(node) - 1):
            continue
        turned, swapped = _behind_transpose(pieces[0])
        if not is_call(turned, hasten_ops.rotary.default) or len(pieces[0].users) != 1:
            continue
        head, again = _behind_transpose(turned.args[0])
        source = _first_and_rest(head, pieces[1])
        if source is None or again != swapped or not same_size(shape_of(source)[-1], shape_of(node)[-1]):
            continue
        _, cos, sin, interleaved, _ = full_args(turned)
        with graph.inserting_before(node):
            x = call(graph, aten.transpose.int, source, 1, 2) if swapped else source
            whole = call(graph, hasten_ops.rotary.default, x, cos, sin, interleaved, dtype_of(node))
            replace(node, call(graph, aten.transpose.int, whole, 1, 2) if swapped else whole)
        done.count += 1
    prune(graph)
    return done


def _behind_transpose(node: Any) -> tuple[Any, bool]:
    """(what stands behind a swap of heads and positions, whether there is one)."""
    if is_call(node, aten.transpose.int) and {d % 4 for d in node.args[1:]} == {1, 2} and rank_of(node) == 4:
        return node.args[0], True
    return node, False


def _first_and_rest(first: Any, rest: Any) -> fx.Node | None:
    """x if `first` and `rest` are x[..., :R] and x[..., R:], sliced or split."""
    before, behind = _cut(first), _cut(rest)
    if before is None or behind is None:
        return None
    (source, begin, middle), (other, second, last) = before, behind
    whole = begin == 0 and middle == second and last == shape_of(source)[-1]
    return source if source is other and whole else None


def _cut(piece: Any) -> tuple[fx.Node, int, int] | None:
    """(x, begin, end) if `piece` is x[..., begin:end] of a last dim of known size."""
    if is_call(piece, operator.getitem) and is_call(piece.args[0], *_SPLITS):
        source, dim = piece.args[0].args[0], full_args(piece.args[0])[2]
        sizes = [part.shape[-1] for part in value(piece.args[0])]
        start, end, step = sum(sizes[: piece.args[1]]), sum(sizes[: piece.args[1] + 1]), 1
    elif is_call(piece, aten.slice.Tensor):
        source, dim, start, end, step = full_args(piece)
    else:
        return None
    width = shape_of(source)[-1]
    if dim != -1 or step != 1 or not isinstance(width, int):
        return None
    start, end = 0 if start is None else start, width if end is None else end
    return (source, start, min(end, width)) if isinstance(start, int) and isinstance(end, int) else None

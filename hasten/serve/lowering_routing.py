"""Along the numbers of a row: sums, softmax, the largest, picking and putting; experts behind a router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx

from hasten.graph.nodes import aten, dtype_of, is_call, shape_of
from hasten.ops.panels import LANES
from hasten.serve.lowering_points import compared, copy_over
from hasten.serve.lowering_rows import RefusedError, Rows, Value, name_of

_MOST_EXPERTS = 4096


def _dim(rows: Rows, node: fx.Node, given: Any, rank: int) -> int:
    """One dim, which is not the tokens'."""
    dims = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(dims) != 1 or dims[0] is None:
        raise RefusedError(f"{node}: {node.target} over the dims {given}")
    return int(dims[0]) % rank


def _source(rows: Rows, node: fx.Node, x: Any, dim: Any) -> tuple[Value, int]:
    source = rows.value(x)
    found = _dim(rows, node, dim, source.meta.dim())
    if source.meta.shape[found] == rows.T:
        raise RefusedError(f"{node}: {node.target} over the tokens")
    return source, found


def reduced(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """A sum, a mean or an extreme over one dim, kept or not."""
    name = name_of(node).split(".")[1]
    if len(args) < 2:
        raise RefusedError(f"{node}: {node.target} over the tokens")
    source, dim = _source(rows, node, args[0], args[1])
    shape = [1 if i == dim else size for i, size in enumerate(source.meta.shape)]
    kept = rows.new(shape, node)
    factor = 1.0 / source.meta.shape[dim] if name == "mean" else 1.0
    code = {"sum": 0, "mean": 0, "amax": 1, "amin": 2}[name]
    rows.along(node, "reduce", dim, [kept, source], (code,), (factor,))
    return kept if args[2] else Value("root", kept.index, kept.meta.squeeze(dim))


def softmax(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    source, dim = _source(rows, node, args[0], args[1])
    new = rows.new(source.meta.shape, node)
    rows.along(node, "softmax", dim, [new, source], ())
    return new


def topk(rows: Rows, node: fx.Node, args: list[Any]) -> list[Value]:
    """[values, places]: places are numbers of a row, lower ones first where values are equal."""
    source, dim = _source(rows, node, args[0], args[2])
    shape = [args[1] if i == dim else size for i, size in enumerate(source.meta.shape)]
    places = rows.new(shape, node)
    rows.along(node, "places", dim, [places, source], (args[1], int(args[3])))
    values = rows.new(shape, node)
    rows.along(node, "gather", dim, [values, source, places], (), size=args[1])
    return [values, places]


def extreme(rows: Rows, node: fx.Node, args: list[Any]) -> Value | list[Value]:
    """The larger or smaller of two, or along a dim with its place."""
    if is_call(node, aten.max.other, aten.min.other):
        return compared(rows, node, args)
    if not is_call(node, aten.max.dim, aten.min.dim):
        raise RefusedError(f"{node}: {node.target} over the tokens")
    values = topk(rows, node, [args[0], 1, args[1], is_call(node, aten.max.dim)])
    if args[2]:
        return values
    return [Value(value.kind, value.index, value.meta.squeeze(args[1])) for value in values]


def argmax(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    source, dim = _source(rows, node, args[0], args[1])
    shape = [1 if i == dim else size for i, size in enumerate(source.meta.shape)]
    places = rows.new(shape, node)
    rows.along(node, "places", dim, [places, source], (1, 1))
    return places if args[2] else Value("root", places.index, places.meta.squeeze(dim))


def gather(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    source, dim = _source(rows, node, args[0], args[1])
    places = rows.value(args[2])
    wanted = [source.meta.shape[i] if i == dim else size for i, size in enumerate(places.meta.shape)]
    if any(size > held for size, held in zip(wanted, source.meta.shape, strict=True)):
        raise RefusedError(f"{node}: gathers {tuple(places.meta.shape)} from {tuple(source.meta.shape)}")
    source = Value(source.kind, source.index, source.meta[tuple(slice(size) for size in wanted)])
    new = rows.new(shape_of(node), node)
    size = places.meta.shape[dim]
    rows.along(node, "gather", dim, [new, source, places], (), size=size)
    return new


def scatter(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """A copy of the first operand with a number, or a row's own, at the places."""
    source, dim = _source(rows, node, args[0], args[1])
    places, given = rows.value(args[2]), rows.value(args[3])
    if list(places.meta.shape) != [
        places.meta.shape[i] if i == dim else size for i, size in enumerate(source.meta.shape)
    ] or (len(args) > 4 and args[4] is not None):
        raise RefusedError(f"{node}: {node.target} of {tuple(places.meta.shape)} places")
    new = rows.copy(source, node)
    given = Value(given.kind, given.index, given.meta.expand(places.meta.shape))
    rows.along(node, "scatter", dim, [new, places, given], ())
    return copy_over(rows, node, args[0], new) if name_of(node).endswith("_") else new


def picked(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """x[.., constant places, ..], or a vector's numbers at a row's own places."""
    x, given = args[:2]
    where = [i for i, index in enumerate(given) if index is not None]
    if len(where) != 1:
        raise RefusedError(f"{node}: {node.target} by {len(where)} indices")
    index = given[where[0]]
    if rows.kind(index) == "rows" and len(shape_of(x)) == 1 and dtype_of(index) != torch.bool:
        places = rows.value(index)
        new = rows.new(places.meta.shape, node)
        source = rows.value(x)
        flat = source.meta.expand(*places.meta.shape[:-1], -1)
        size = places.meta.shape[-1]
        rows.along(node, "gather", -1, [new, Value(source.kind, source.index, flat), places], (), size=size)
        return new
    return _at(rows, node, x, where[0], index)


def index_select(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    return _at(rows, node, args[0], args[1], args[2])


def _at(rows: Rows, node: fx.Node, x: Any, dim: int, index: Any) -> Value:
    """Constant places along a dim: a view where they are evenly spaced, else copies."""
    source, dim = _source(rows, node, x, dim)
    held = rows.evaluator.value(index) if rows.kind(index) == "constant" else None
    if not isinstance(held, Tensor) or held.dim() != 1 or held.dtype == torch.bool:
        raise RefusedError(f"{node}: {node.target} by what is no list of constant places")
    places = [int(p) % source.meta.shape[dim] for p in held]
    step = places[1] - places[0] if len(places) > 1 else 1
    if step > 0 and places == list(range(places[0], places[0] + step * len(places), step)):
        index = tuple(
            slice(places[0], places[-1] + 1, step) if i == dim else slice(None) for i in range(dim + 1)
        )
        return Value(source.kind, source.index, source.meta[index])
    new = rows.new(shape_of(node), node)
    for i, place in enumerate(places):
        parts = (new.meta.narrow(dim, i, 1), source.meta.narrow(dim, place, 1))
        dst, src = Value("root", new.index, parts[0]), Value(source.kind, source.index, parts[1])
        rows.apply(node, dst, [src], "unary", (-1,), (1.0, 0.0))
    return new


def experts(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """Each slot's product with the matrix of its expert, from one matrix of all."""
    x, weight, bias, index, turned = args
    E = shape_of(weight)[0]
    S, N = shape_of(node)[1:]
    source, places = rows.value(x), rows.value(index)
    slots, K = source.meta.shape[1:]
    if source.kind != "root" or (source.meta.stride(2) != 1 and K > 1):
        source = rows.copy(source, node)
    if places.kind != "root":
        places = rows.copy(places, node)
    if E > _MOST_EXPERTS:
        raise RefusedError(f"{node}: {E} experts; at most {_MOST_EXPERTS}")
    vector = -1
    if bias is not None:
        vector = rows.vector(rows.evaluator.value(bias), node).index
    # Each expert's rows begin with a panel of their own.
    padded = -(-N // LANES) * LANES
    matrix = rows.matrix(weight, E * padded, K, vector, "projection")
    if turned:
        use = rows.matrices[matrix]
        rows.matrices[matrix] = replace(use, weight=replace(use.weight, transposed=True))
    new = rows.new((rows.T, S, N), node)
    rows.emit(
        "experts", node, n0=S, n1=K, dst=rows.ref(new, N),
        a=rows.ref(source, source.meta.stride(1) if slots > 1 else 0),
        b=rows.ref(places, 0, places.meta.stride(1)), matrix=matrix, ints=(N, E),
    )  # fmt: skip
    return new


HANDLERS: dict[str, Callable[[Rows, fx.Node, list[Any]], Any]] = {
    **dict.fromkeys(("aten.sum", "aten.mean", "aten.amax", "aten.amin"), reduced),
    **dict.fromkeys(("aten.softmax", "aten._softmax"), softmax),
    **dict.fromkeys(("aten.scatter", "aten.scatter_"), scatter),
    **dict.fromkeys(("aten.max", "aten.min"), extreme),
    "aten.topk": topk,
    "aten.argmax": argmax,
    "aten.gather": gather,
    "aten.index": picked,
    "aten.index_select": index_select,
    "hasten.routed_linear": experts,
}

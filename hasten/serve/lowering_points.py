"""What works on each number of a row by itself."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from hasten.graph.nodes import aten, dtype_of, is_call, shape_of
from hasten.serve.lowering_rows import RefusedError, Rows, Value, name_of
from hasten.serve.program import BINARY, FUNCTION, FUNCTIONS, KINDS

_hops = torch.ops.hasten


def unary(rows: Rows, node: fx.Node, x: Any, code: int, factor: float = 1.0, added: float = 0.0) -> Value:
    source = rows.value(x)
    new = rows.new(source.meta.shape, node)
    rows.apply(node, new, [source], "unary", (code,), (factor, added))
    return new


def activation(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    kind = args[1] if is_call(node, _hops.activation.default) else _ATEN_KINDS[_plain(node)]
    if is_call(node, aten.gelu.default) and args[1] == "tanh":
        kind = "gelu_tanh"
    if kind == "identity":
        return rows.value(args[0])
    if kind not in KINDS:
        raise RefusedError(f"{node}: no instruction for the activation {kind}")
    return unary(rows, node, args[0], KINDS.index(kind))


def gated(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    gate, up, kind = args[:3]
    if kind not in KINDS:
        raise RefusedError(f"{node}: no instruction for the activation {kind}")
    return two(rows, node, "gated", gate, up, KINDS.index(kind))


def two(rows: Rows, node: fx.Node, op: str, a: Any, b: Any, code: int) -> Value:
    new = rows.new(shape_of(node), node)
    rows.apply(node, new, [rows.value(a), rows.value(b)], op, (code,))
    return new


def arithmetic(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    a, b = args[:2]
    op = _ARITHMETIC[_plain(node)]
    alpha = args[2] if op in ("add", "subtract") and len(args) > 2 else 1
    if alpha != 1:
        raise RefusedError(f"{node}: {op} with a factor of {alpha}")
    if op == "divide" and len(args) > 2 and args[2] is not None:
        raise RefusedError(f"{node}: a division that rounds")
    number = rows.number(b)
    if number is not None:
        factor, added = {
            "add": (1.0, number), "subtract": (1.0, -number), "multiply": (number, 0.0),
            "divide": (1.0 / number if number else math.inf, 0.0),
        }[op]  # fmt: skip
        return unary(rows, node, a, -1, factor, added)
    number = rows.number(a)
    if number is not None and op != "divide":
        factor, added = {"add": (1.0, number), "subtract": (-1.0, number), "multiply": (number, 0.0)}[op]
        return unary(rows, node, b, -1, factor, added)
    return two(rows, node, "binary", a, b, BINARY.index(op))


def compared(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """Comparisons give 1 and 0, and so do the logical ones of such numbers."""
    name = str(node.target) if is_call(node, aten.max, aten.min) else _plain(node)
    if name in _LOGICAL and dtype_of(node) != torch.bool:
        raise RefusedError(f"{node}: {node.target} of integers")
    return two(rows, node, "binary", args[0], args[1], BINARY.index((_COMPARED | _LOGICAL)[name]))


def negated(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """1 - x of what is 1 or 0."""
    if dtype_of(args[0]) != torch.bool:
        raise RefusedError(f"{node}: {node.target} of what is no truth value")
    return unary(rows, node, args[0], -1, -1.0, 1.0)


def negative(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    return unary(rows, node, args[0], -1, -1.0)


def function(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    name = _plain(node).split(".")[1]
    return unary(rows, node, args[0], FUNCTION + FUNCTIONS.index(name))


def softplus(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    if args[1:] != [1, 20]:
        raise RefusedError(f"{node}: a softplus with beta and threshold {args[1:]}")
    return unary(rows, node, args[0], FUNCTION + FUNCTIONS.index("softplus"))


def power(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    exponent = rows.number(args[1])
    name = {2.0: "square", 0.5: "sqrt", -0.5: "rsqrt", -1.0: "reciprocal"}.get(exponent or 0.0)
    if name is not None:
        return unary(rows, node, args[0], FUNCTION + FUNCTIONS.index(name))
    return two(rows, node, "binary", args[0], args[1], BINARY.index("power"))


def clamp(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    name = _plain(node)
    low = None if name == "aten.clamp_max" else args[1]
    high = args[1] if name == "aten.clamp_max" else None if name == "aten.clamp_min" else args[2]
    found = rows.value(args[0])
    for limit, op in ((low, "maximum"), (high, "minimum")):
        if limit is not None:
            new = rows.new(shape_of(node), node)
            rows.apply(node, new, [found, rows.value(limit)], "binary", (BINARY.index(op),))
            found = new
    return found


def where(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    return chosen(rows, node, *args[:3])


def masked_fill(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    return chosen(rows, node, args[1], args[2], args[0])


def chosen(rows: Rows, node: fx.Node, condition: Any, a: Any, b: Any) -> Value:
    """a where the condition holds, else b."""
    if rows.kind(condition) == "constant":
        held = rows.evaluator.value(condition)
        # Also in longer rows: a mask by place may hold further on.
        if rows.T not in held.shape or bool(held.all()) or not bool(held.any()):
            if rows.T in held.shape:
                held, tokens = rows.further.value(condition, rows.context_tokens)
                rows.context_tokens = min(rows.context_tokens, tokens)
            picked = a if bool(held.all()) else b if not bool(held.any()) else None
            if picked is not None:
                found = rows.value(picked)
                return Value(found.kind, found.index, found.meta.expand(shape_of(node)))
    new = rows.new(shape_of(node), node)
    rows.apply(node, new, [rows.value(x) for x in (condition, a, b)], "where", ())
    return new


def same(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """Casts and copies; rows are fp32. A copy of what is written later is one."""
    source = rows.value(args[0])
    before, after = dtype_of(args[0]), dtype_of(node)
    if before is not None and after is not None and before != after:
        if after == torch.bool:
            return two(rows, node, "binary", args[0], 0, BINARY.index("not_equal"))
        if before.is_floating_point and not after.is_floating_point:
            return unary(rows, node, args[0], FUNCTION + FUNCTIONS.index("trunc"))
    if name_of(node) not in ("aten.alias", "aten.detach") and rows.changed.intersection((node, args[0])):
        return rows.copy(source, node)
    return source


def copy_into(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """x[..] = y, in place."""
    target = rows.value(args[0])
    if target.kind != "root":
        raise RefusedError(f"{node}: writes into what is no row")
    rows.apply(node, target, [rows.value(args[1])], "unary", (-1,), (1.0, 0.0))
    return target


def filled(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """New rows of one number; of any, where they are written before they are read."""
    name = name_of(node)
    number: float | None = float("ones" in name)
    if "full" in name:
        number = rows.number(args[2] if name == "aten.new_full" else args[1])
        if number is None:
            raise RefusedError(f"{node}: filled with what is no number")
    if node not in rows.changed:
        held = rows.vector(torch.tensor(number), node)
        return Value("vector", held.index, held.meta.expand(shape_of(node)))
    new = rows.new(shape_of(node), node)
    if "empty" not in name:
        rows.apply(node, new, [rows.vector(torch.tensor(number), node)], "unary", (-1,), (1.0, 0.0))
    return new


def in_place(handler: Callable[[Rows, fx.Node, list[Any]], Value]) -> Callable[..., Value]:
    """The operator that writes its result over its first operand."""

    def run(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
        result = handler(rows, node, args)
        return copy_over(rows, node, args[0], result)

    return run


def copy_over(rows: Rows, node: fx.Node, target: Any, result: Value) -> Value:
    """`result` written over a node, if one of its memory's other names is read later."""
    place = rows.value(target)
    if place.kind != "root":
        raise RefusedError(f"{node}: writes into what is no row")
    names = [
        name
        for name, held in rows.values.items()
        if any(
            one.kind == "root" and one.index == place.index
            for one in ([held] if isinstance(held, Value) else held)
        )
    ]
    if not any(rows.order[user] > rows.order[node] for name in names for user in name.users):
        return result
    rows.apply(node, place, [result], "unary", (-1,), (1.0, 0.0))
    return place


def _plain(node: fx.Node) -> str:
    """The name of the operator that gives a new tensor, for one that writes in place."""
    name = name_of(node)
    return name if name.endswith("__") else name.removesuffix("_")


_ARITHMETIC = {"aten.add": "add", "aten.sub": "subtract", "aten.mul": "multiply", "aten.div": "divide"}
_COMPARED = {
    "aten.gt": "greater", "aten.ge": "greater_equal", "aten.lt": "less", "aten.le": "less_equal",
    "aten.eq": "equal", "aten.ne": "not_equal", "aten.maximum": "maximum", "aten.minimum": "minimum",
    "aten.max.other": "maximum", "aten.min.other": "minimum",
}  # fmt: skip
_LOGICAL = {
    "aten.logical_and": "multiply", "aten.logical_or": "maximum", "aten.bitwise_and": "multiply",
    "aten.bitwise_or": "maximum", "aten.__and__": "multiply", "aten.__or__": "maximum",
}  # fmt: skip
_ATEN_KINDS = {
    "aten.silu": "silu", "aten.gelu": "gelu", "aten.relu": "relu", "aten.sigmoid": "sigmoid",
    "aten.tanh": "tanh",
}  # fmt: skip
_SAME = ("to", "_to_copy", "type_as", "contiguous", "clone", "detach", "alias", "dropout", "lift_fresh_copy")
_FILLED = (
    "new_empty", "empty_like", "new_zeros", "zeros_like", "new_ones", "ones_like", "new_full", "full_like",
)  # fmt: skip
_OUT_OF_PLACE: dict[str, Callable[[Rows, fx.Node, list[Any]], Any]] = {
    **dict.fromkeys(_ARITHMETIC, arithmetic),
    **dict.fromkeys((*_COMPARED, *_LOGICAL), compared),
    **dict.fromkeys((f"aten.{name}" for name in FUNCTIONS if name != "softplus"), function),
    **dict.fromkeys(("aten.clamp", "aten.clamp_min", "aten.clamp_max"), clamp),
    **dict.fromkeys(_ATEN_KINDS, activation),
    "aten.logical_not": negated,
    "aten.bitwise_not": negated,
    "aten.neg": negative,
    "aten.pow": power,
    "aten.softplus": softplus,
    "aten.masked_fill": masked_fill,
}
HANDLERS: dict[str, Callable[[Rows, fx.Node, list[Any]], Any]] = {
    **_OUT_OF_PLACE,
    **{f"{name}_": in_place(handler) for name, handler in _OUT_OF_PLACE.items()},
    **dict.fromkeys((f"aten.{name}" for name in _SAME), same),
    **dict.fromkeys((f"aten.{name}" for name in _FILLED), filled),
    "aten.where": where,
    **dict.fromkeys(("aten.copy_", "aten.fill_"), copy_into),
    "hasten.activation": activation,
    "hasten.gated_activation": gated,
}

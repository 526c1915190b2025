"""From the graph of a whole decoder to a program.

Every node is of one kind: a constant, a weight, a function of the position, the tokens, or *rows*, which is
everything that depends on the tokens. Rows are instructions; the rest is computed here, once.

What a node becomes is told by its operator alone: here views, norms, linear layers and rotary; the rest in
`lowering_attention`, `lowering_points` and `lowering_routing`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from hasten.base.errors import CaptureError
from hasten.graph.nodes import aten, full_args, getitem, is_call, shape_of
from hasten.graph.whole import Whole
from hasten.serve import lowering_points, lowering_routing
from hasten.serve.lowering_attention import attention
from hasten.serve.lowering_rows import RefusedError, Rows, Value, name_of
from hasten.serve.program import KINDS, Program

_hops = torch.ops.hasten


def lower(whole: Whole, dense: Callable[[str], Tensor], vocab_size: int, context_tokens: int) -> Program:
    """The program of a captured decoder.

    Args:
        dense: a parameter's values by its name; asked for small ones.
        vocab_size: columns of the logits.
        context_tokens: rows of the tables by position. The program may have fewer: see `lowering_attention`.

    Raises:
        CaptureError: names the node that has no instruction.
    """
    rows = Rows(whole, dense, context_tokens)
    output = rows.graph.output_node().args[0]
    if isinstance(output, (tuple, list)):
        output = output[0]
    rows.head = _find_head(rows, output)
    for node in rows.graph.nodes:
        if node.op == "call_function" and rows.kind(node) == "rows":
            _node(rows, node)
    logits = rows.values[output]  # type: ignore[index]
    if not isinstance(logits, Value) or logits.kind != "root" or not rows.roots[logits.index].selected:
        raise CaptureError("the logits do not come from one last linear layer")
    if rows.roots[logits.index].width != vocab_size or logits.meta.storage_offset():
        raise CaptureError(
            f"the logits have {rows.roots[logits.index].width} columns a row, not {vocab_size}"
        )
    return Program(
        tuple(rows.instructions), tuple(rows.roots), tuple(rows.matrices), tuple(rows.layers),
        logits.index, vocab_size, rows.context_tokens, _floats(rows.vectors), _floats(rows.tables),
    )  # fmt: skip


def _floats(tensors: Sequence[Tensor]) -> tuple[np.ndarray, ...]:
    return tuple(tensor.detach().float().contiguous().numpy() for tensor in tensors)


def _find_head(rows: Rows, node: Any) -> fx.Node:
    """The linear layer behind the logits; what follows it works on the wanted rows alone."""
    while isinstance(node, fx.Node):
        if is_call(node, aten.linear.default, _hops.linear.default):
            return node
        sources = [n for n in node.all_input_nodes if rows.kind(n) == "rows"]
        if len(sources) != 1:
            break
        node = sources[0]
    raise CaptureError(f"no linear layer makes the logits; the search ended at {node}")


def _node(rows: Rows, node: fx.Node) -> None:
    if (index := getitem(node)) is not None:
        found = rows.values[node.args[0]]  # type: ignore[index]
        several = isinstance(found, list)
        if index >= (len(found) if several else 1):  # type: ignore[arg-type]
            if node.users:
                raise RefusedError(f"{node}: a statistic of {node.args[0]} is used")
            return
        rows.values[node] = found[index] if several else found  # type: ignore[index]
        return
    handler = _HANDLERS.get(name_of(node))
    if handler is None:
        raise RefusedError(f"{node}: no instruction for {node.target}")
    result = handler(rows, node, full_args(node))
    if result is not None:
        rows.values[node] = result


def _view(rows: Rows, node: fx.Node, args: list[Any]) -> Value | list[Value]:
    source = rows.value(args[0])
    if is_call(node, aten.expand_as):
        return Value(source.kind, source.index, source.meta.expand(shape_of(node)))
    result = node.target(source.meta, *node.args[1:], **node.kwargs)  # type: ignore[operator]
    if isinstance(result, (tuple, list)):
        return [Value(source.kind, source.index, meta) for meta in result]
    return Value(source.kind, source.index, result)


def _reshape(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    source, shape = rows.value(args[0]), shape_of(node)
    if list(shape).count(rows.T) != 1:
        raise RefusedError(f"{node}: {node.target} joins tokens: {shape}")
    try:
        return Value(source.kind, source.index, source.meta.view(*shape))
    except RuntimeError:
        return rows.copy(source, node, shape)


def _repeat(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    """Dims side by side several times: a view of a dim of its own for the times, then copied."""
    source, times = rows.value(args[0]), list(args[1])
    meta, shape = source.meta, [1] * (len(times) - source.meta.dim()) + list(source.meta.shape)
    split = [part for pair in zip([1] * len(times), shape, strict=True) for part in pair]
    wide = [part for pair in zip(times, shape, strict=True) for part in pair]
    if times[shape.index(rows.T)] != 1:
        raise RefusedError(f"{node}: {node.target} of tokens")
    spread = Value(source.kind, source.index, meta.reshape(shape).view(split).expand(wide))
    return rows.copy(spread, node, shape_of(node))


def _embedding(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    if rows.kind(args[1]) != "tokens":
        raise RefusedError(f"{node}: looks up something other than the tokens")
    new = rows.new(shape_of(node), node)
    K = shape_of(node)[-1]
    matrix = rows.matrix(args[0], shape_of(args[0])[0], K, -1, "embedding")
    rows.emit("embed", node, n0=1, n1=K, dst=rows.ref(new), matrix=matrix, floats=(1.0,))
    return new


def _linear(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    x, weight, bias = args[:3]
    kind = args[3] if is_call(node, _hops.linear.default) else "identity"
    if kind not in ("identity", *KINDS):
        raise RefusedError(f"{node}: no instruction for the activation {kind}")
    source = rows.value(x)
    source, n0, _, K = rows.heads(source, node)
    if n0 != 1:
        raise RefusedError(f"{node}: a linear layer over {n0} parts of each row")
    if source.kind != "root":
        raise RefusedError(f"{node}: a linear layer over what depends on the position alone")
    head = node is rows.head
    if head:
        before = source
        rows.selected = True
        source = rows.new(before.meta.shape, node)
        rows.emit("select", node, n0=1, n1=K, dst=rows.ref(source), a=rows.ref(before))
    N = shape_of(node)[-1]
    vector = -1
    if bias is not None:
        vector = rows.vector(rows.evaluator.value(bias), node).index
    matrix = rows.matrix(weight, N, K, vector, "head" if head else "projection")
    new = rows.new(shape_of(node), node)
    code = -1 if kind == "identity" else KINDS.index(kind)
    rows.emit(
        "linear", node, n0=1, n1=K, dst=rows.ref(new), a=rows.ref(source), matrix=matrix, ints=(code,),
        floats=(1.0,),
    )  # fmt: skip
    return new


def _norm(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    layer = is_call(node, _hops.layer_norm.default, aten.layer_norm.default)
    if is_call(node, aten.layer_norm.default, aten.rms_norm.default):
        x, shape, weight = args[:3]
        bias, eps = args[3:5] if layer else (None, args[3])
        offset = 0.0
        if len(shape) != 1 or eps is None:
            raise RefusedError(f"{node}: a norm over {len(shape)} dims with epsilon {eps}")
    elif layer:
        x, weight, bias, eps = args[:4]
        offset = 0.0
    else:
        x, weight, eps, offset = args[:4]
        bias = None
    source, n0, stride, K = rows.heads(rows.value(x), node)
    new = rows.new(source.meta.shape, node)
    _, m0, to, _ = rows.heads(new, node)
    if m0 != n0:
        raise RefusedError(f"{node}: a norm over rows in an order of their own")
    vectors = {
        name: rows.ref(rows.vector(rows.evaluator.value(given), node))
        for name, given in (("b", weight), ("c", bias))
        if given is not None
    }
    rows.emit(
        "norm", node, n0=n0, n1=K, dst=rows.ref(new, to), a=rows.ref(source, stride), **vectors,
        ints=(int(layer),), floats=(float(eps), float(offset)),
    )  # fmt: skip
    return new


def _rotary(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    x, cos, sin, interleaved = args[:4]
    source, n0, stride, D = rows.heads(rows.value(x), node)
    angles = [rows.value(given) for given in (cos, sin)]
    if any(value.kind != "table" for value in angles):
        raise RefusedError(f"{node}: rotary angles that are no function of the position")
    new = rows.new(source.meta.shape, node)
    _, _, to, _ = rows.heads(new, node)
    rows.emit(
        "rotary", node, n0=n0, n1=D, dst=rows.ref(new, to), a=rows.ref(source, stride),
        b=rows.ref(angles[0]), c=rows.ref(angles[1]), ints=(shape_of(cos)[-1], int(interleaved)),
    )  # fmt: skip
    return new


def _cat(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    parts, dim = args[0], args[1] if len(args) > 1 else 0
    new = rows.new(shape_of(node), node)
    stacked = is_call(node, aten.stack.default)
    start = 0
    for part in parts:
        value = rows.value(part)
        if stacked:
            value = Value(value.kind, value.index, value.meta.unsqueeze(dim))
        size = value.meta.shape[dim]
        place = Value("root", new.index, new.meta.narrow(dim, start, size))
        start += size
        rows.apply(node, place, [value], "unary", (-1,), (1.0, 0.0))
    return new


_VIEWED = (
    "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "chunk",
    "unbind", "split_with_sizes", "expand_as", "narrow", "movedim", "swapaxes", "broadcast_to",
)  # fmt: skip
_HANDLERS: dict[str, Callable[[Rows, fx.Node, list[Any]], Any]] = {
    **lowering_points.HANDLERS,
    **lowering_routing.HANDLERS,
    **dict.fromkeys((f"aten.{name}" for name in _VIEWED), _view),
    **dict.fromkeys(
        ("aten.view", "aten.reshape", "aten.flatten", "aten.unflatten", "aten.view_as"), _reshape
    ),
    "aten.repeat": _repeat,
    **dict.fromkeys(("aten.linear", "hasten.linear"), _linear),
    **dict.fromkeys(("hasten.rms_norm", "hasten.layer_norm", "aten.layer_norm", "aten.rms_norm"), _norm),
    **dict.fromkeys(("aten.embedding", "hasten.embedding"), _embedding),
    **dict.fromkeys(("aten.cat", "aten.concat", "aten.stack"), _cat),
    "hasten.rotary": _rotary,
    "hasten.attention": attention,
}

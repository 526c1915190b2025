"""Attention in a program: where keys come from, and what a mask that was written out comes to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from hasten.graph.nodes import full_args, is_call, shape_of
from hasten.serve.lowering_rows import RefusedError, Rows, Value
from hasten.serve.program import Layer

_hops = torch.ops.hasten
# A score below this has weight zero beside any other.
_HIDDEN = -1e30
# Scores of a written mask that are looked at: bounds the memory (1 GiB of floats).
_MOST_SCORES = 1 << 28


def attention(rows: Rows, node: fx.Node, args: list[Any]) -> Value:
    q, k, v, ranges, bias, sinks, alibi, scale, causal, window, softcap = args
    slopes = None
    if bias is not None:
        slopes, limit = _written(rows, node, bias, shape_of(q)[1])
        causal, window = True, min(filter(None, (limit, window)), default=0)
    if is_call(ranges, _hops.window_ranges.default):
        limit = full_args(ranges)[1]
        if limit < 0:
            raise RefusedError(f"{node}: attention that is not causal")
        window = min(filter(None, (limit, window)), default=0)
    elif ranges is not None or not causal:
        raise RefusedError(f"{node}: attention that is not causal")
    sources = [rows.value(x) for x in (q, k, v)]
    heads, kv_heads = sources[0].meta.shape[1], sources[1].meta.shape[1]
    D, Dv = sources[0].meta.shape[3], sources[2].meta.shape[3]
    if sources[0].meta.stride(3) != 1:
        sources[0] = rows.copy(sources[0], node)
    refs = [rows.ref(s, s.meta.stride(1), s.meta.stride(3)) for s in sources]
    if any(s.kind != "root" for s in sources):
        raise RefusedError(f"{node}: keys or values that depend on the position alone")
    rows.layers.append(Layer(kv_heads, D, Dv, int(window)))
    layer = len(rows.layers) - 1
    vectors = {
        name: rows.ref(rows.vector(rows.evaluator.value(given), node))
        for name, given in (("b", sinks), ("c", alibi))
        if given is not None
    }
    if slopes is not None:
        if alibi is not None:
            raise RefusedError(f"{node}: two biases by distance")
        vectors["c"] = rows.ref(rows.vector(slopes, node))
    new = rows.new((1, rows.T, heads, Dv), node)
    rows.emit("store", node, n0=kv_heads, n1=D, a=refs[1], b=refs[2], ints=(layer, Dv))
    factor = D**-0.5 if scale is None else float(scale)
    for op in ("attend", "merge"):
        rows.emit(
            op, node, n0=heads, n1=D, dst=rows.ref(new, Dv), a=refs[0], **vectors,
            ints=(layer, Dv, kv_heads, int(window)), floats=(factor, float(softcap)),
        )  # fmt: skip
    return new


def _written(rows: Rows, node: fx.Node, bias: Any, heads: int) -> tuple[Tensor | None, int]:
    """(ALiBi's slopes or None, window or 0) behind a constant bias: causal, and linear in the key's place.

    What is the same for all keys of a row does not change its softmax. It is looked at for a row as long as
    the context; where that takes too much memory, the context ends with what was looked at.
    """
    if rows.kind(bias) != "constant":
        raise RefusedError(f"{node}: attention with a bias that is no constant")
    key = rows.further.key(bias)
    if key not in rows.masks:
        rows.masks[key] = _looked_at(rows, node, bias)
    slopes, window = rows.masks[key]
    return None if slopes is None else slopes.expand(heads).contiguous(), window


def _looked_at(rows: Rows, node: fx.Node, bias: fx.Node) -> tuple[Tensor | None, int]:
    different = shape_of(bias)[1] if rows.evaluator.value(bias).stride(1) else 1
    tokens = min(rows.context_tokens, int((_MOST_SCORES // different) ** 0.5))
    held, tokens = rows.further.value(bias, tokens)
    rows.context_tokens = min(rows.context_tokens, tokens)
    found = [_head(node, held[0, h]) for h in range(held.shape[1] if held.stride(1) else 1)]
    windows = {window for _, window in found}
    if len(windows) > 1:
        raise RefusedError(f"{node}: a window of its own for each head")
    slopes = torch.tensor([slope for slope, _ in found])
    return slopes if bool(slopes.abs().amax() > 1e-12) else None, windows.pop()


def _head(node: fx.Node, table: Tensor) -> tuple[float, int]:
    """(slope, window) of one head's [T, T]."""
    if table.dtype == torch.bool:
        table = torch.zeros(table.shape).masked_fill_(~table, float("-inf"))
    T = len(table)
    seen = table > _HIDDEN
    window = int(seen[-1].sum())
    causal = torch.ones(T, T, dtype=torch.bool).tril_().triu_(1 - window)
    if window < 1 or not torch.equal(seen, causal):
        raise RefusedError(f"{node}: a mask that is not causal with at most a window")
    last = table[-1, T - window :].double()
    slope = float((last[1:] - last[:-1]).mean()) if window > 1 else 0.0
    level = table.float() - slope * torch.arange(T)
    spread = (level - level.diagonal()[:, None]).masked_fill_(~causal, 0).abs().amax()
    if float(spread) > 1e-4 * max(1.0, float(table.masked_fill(~causal, 0).abs().amax())):
        raise RefusedError(f"{node}: a bias that is not linear in the distance")
    return slope, window if window < T else 0

"""The rules that make `hasten.attention` of torch's own attention function in a layer's code.

Models that dispatch attention through transformers' registry never need them (see `attention_bridge.py`);
attention that is written out with a softmax is the work of a pass (see `attention_written.py`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hasten.graph.nodes import aten, same_size
from hasten.graph.rules import Context, Rule

hasten_ops = torch.ops.hasten


def _rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype)


def _sdpa_patterns() -> Iterator[tuple[Callable[..., Any], bool, bool, bool, bool]]:
    for masked, causal, scaled, gqa in itertools.product((False, True), repeat=4):
        if masked and causal:
            continue
        if masked and scaled:

            def pattern(q: Any, k: Any, v: Any, bias: Any, scale: float, g: bool = gqa) -> Any:
                return F.scaled_dot_product_attention(q, k, v, bias, scale=scale, enable_gqa=g)
        elif masked:

            def pattern(q: Any, k: Any, v: Any, bias: Any, g: bool = gqa) -> Any:  # type: ignore[misc]
                return F.scaled_dot_product_attention(q, k, v, bias, enable_gqa=g)
        elif scaled:

            def pattern(q: Any, k: Any, v: Any, scale: float, c: bool = causal, g: bool = gqa) -> Any:  # type: ignore[misc]
                return F.scaled_dot_product_attention(q, k, v, is_causal=c, scale=scale, enable_gqa=g)
        else:

            def pattern(q: Any, k: Any, v: Any, c: bool = causal, g: bool = gqa) -> Any:  # type: ignore[misc]
                return F.scaled_dot_product_attention(q, k, v, is_causal=c, enable_gqa=g)

        yield pattern, masked, causal, scaled, gqa


def _attention_condition(causal: bool) -> Callable[[Context], str]:
    def condition(context: Context) -> str:
        q, k = context.shape("q"), context.shape("k")
        if len(q) != 4:
            return f"attention: q has {len(q)} dims, not [batch, heads, positions, head dim]"
        if causal and str(q[2]) != str(k[2]):
            return (
                "attention: causal with different lengths (torch aligns top-left, the operator bottom-right)"
            )
        if "bias" in context.match.inputs and len(context.shape("bias")) != 4:
            return f"attention: mask of shape {context.shape('bias')} is not [batch, heads, queries, keys]"
        return ""

    return condition


def _one_row_a_query(bias: Any, q: Any, context: Context) -> Any:
    """A mask of one row for all queries (padding of keys) as a view with a row for each of them."""
    if bias is None or same_size(context.shape("bias")[2], context.shape("q")[2]):
        return bias
    return aten.expand.default(bias, [-1, -1, aten.sym_size.int(q, 2), -1])


def attentions() -> Iterator[Rule]:
    """The rules for torch's own attention function."""
    for pattern, masked, causal, _scaled, gqa in _sdpa_patterns():

        def replacement(
            q: Any,
            k: Any,
            v: Any,
            context: Context,
            bias: Any = None,
            scale: float | None = None,
            c: bool = causal,
        ) -> Any:
            bias = _one_row_a_query(bias, q, context)
            out = hasten_ops.attention(q, k, v, None, bias, None, None, scale, c, 0, 0.0)[0]
            return aten.transpose.int(out, 1, 2)

        def examples(masked: bool = masked, gqa: bool = gqa) -> Sequence[torch.Tensor]:
            kv = _rand(2, 2 if gqa else 4, 5, 8)
            return [_rand(2, 4, 5, 8), kv, kv.clone(), *([_rand(2, 1, 5, 5)] if masked else [])]

        yield Rule(
            "attention", pattern, replacement, examples, 1, "softmax(q k^T scale + mask) v, never stored",
            _attention_condition(causal),
        )  # fmt: skip

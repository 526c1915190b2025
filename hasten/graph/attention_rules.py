"""The rules that make `hasten.attention` of attention written in a layer's own code.

Models that dispatch attention through transformers' registry never need them (see `attention_bridge.py`).
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


def _attentions() -> Iterator[Rule]:
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

    def explicit(q: Any, k: Any, v: Any, bias: Any, scale: float) -> Any:
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * scale + bias, -1), v)

    def explicit_unmasked(q: Any, k: Any, v: Any, scale: float) -> Any:
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) * scale, -1), v)

    def explicit_divided(q: Any, k: Any, v: Any, bias: Any, divisor: float) -> Any:
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / divisor + bias, -1), v)

    def explicit_unmasked_divided(q: Any, k: Any, v: Any, divisor: float) -> Any:
        return torch.matmul(torch.softmax(torch.matmul(q, k.transpose(-1, -2)) / divisor, -1), v)

    def from_explicit(
        q: Any, k: Any, v: Any, context: Context, bias: Any = None, scale: float = 1.0, divisor: float = 1.0
    ) -> Any:
        bias = _one_row_a_query(bias, q, context)
        out = hasten_ops.attention(q, k, v, None, bias, None, None, scale / divisor, False, 0, 0.0)[0]
        return aten.transpose.int(out, 1, 2)

    def four(masked: bool) -> Sequence[torch.Tensor]:
        qkv = [_rand(2, 4, 5, 8) for _ in range(3)]
        return [*qkv, _rand(2, 1, 5, 5)] if masked else qkv

    for pattern, masked in (
        (explicit, True), (explicit_unmasked, False),
        (explicit_divided, True), (explicit_unmasked_divided, False),
    ):  # fmt: skip
        yield Rule(
            "attention", pattern, from_explicit, lambda m=masked: four(m), 1,
            "softmax(q k^T scale + mask) v, written out", _attention_condition(False),
        )  # fmt: skip


def _baddbmm_scores(q: Any, k: Any, alibi: Any, scale: float) -> Any:
    """[B,H,Sq,Sk] as some models write it: batch and heads merged, the position bias as the addend."""
    q_3d, k_3d = q.reshape(-1, *q.shape[2:]), k.reshape(-1, *k.shape[2:])
    scores = torch.baddbmm(alibi, q_3d, k_3d.transpose(-1, -2), beta=1.0, alpha=scale)
    return scores.view(*q.shape[:3], -1)


def _baddbmm_output(scores: Any, v: Any) -> Any:
    weights = torch.softmax(scores, -1, dtype=torch.float32).to(v.dtype)
    weights_3d, v_3d = weights.view(-1, *weights.shape[2:]), v.reshape(-1, *v.shape[2:])
    return torch.bmm(weights_3d, v_3d).view(*weights.shape[:3], -1)


def _attention_baddbmm(q: Any, k: Any, v: Any, alibi: Any, bias: Any, scale: float) -> Any:
    return _baddbmm_output(_baddbmm_scores(q, k, alibi, scale) + bias, v)


def _attention_baddbmm_unmasked(q: Any, k: Any, v: Any, alibi: Any, scale: float) -> Any:
    return _baddbmm_output(_baddbmm_scores(q, k, alibi, scale), v)


def _baddbmm_attentions() -> Iterator[Rule]:
    def condition(context: Context) -> str:
        if len(context.shape("alibi")) != 3 or len(context.shape("q")) != 4:
            return f"attention: bias {context.shape('alibi')} is not [batch x heads, queries or 1, keys]"
        return _attention_condition(False)(context)

    def replacement(
        q: Any, k: Any, v: Any, alibi: Any, scale: float, context: Context, bias: Any = None
    ) -> Any:
        added = aten.unflatten.int(alibi, 0, [-1, context.shape("q")[1]])
        if bias is not None:
            added = aten.add.Tensor(added, bias)
        elif not same_size(context.shape("alibi")[1], context.shape("q")[2]):
            added = aten.expand.default(added, [-1, -1, aten.sym_size.int(q, 2), -1])
        out = hasten_ops.attention(q, k, v, None, added, None, None, scale, False, 0, 0.0)[0]
        return aten.transpose.int(out, 1, 2)

    reason = "softmax(q k^T scale + position bias + mask) v, written with merged batch and heads"
    for dtype, masked in itertools.product((torch.float32, torch.bfloat16), (True, False)):

        def examples(dtype: torch.dtype = dtype, masked: bool = masked) -> Sequence[torch.Tensor]:
            qkv = [_rand(2, 4, 5, 8, dtype=dtype) for _ in range(3)]
            return [*qkv, _rand(8, 1, 5, dtype=dtype), *([_rand(2, 1, 5, 5, dtype=dtype)] if masked else [])]

        pattern = _attention_baddbmm if masked else _attention_baddbmm_unmasked
        yield Rule("attention", pattern, replacement, examples, 1, reason, condition)


def attentions() -> Iterator[Rule]:
    """Every rule of attention, in order."""
    yield from _attentions()
    yield from _baddbmm_attentions()

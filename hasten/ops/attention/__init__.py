"""Attention: grouped query heads, causal order, window, key ranges, bias, soft-cap, sinks, ALiBi."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops.attention import blocked, cpu, flash
from hasten.ops.attention.plan import ranges_from_mask
from hasten.ops.attention.window import window_ranges
from hasten.ops.registry import cast, operator

__all__ = ["attention", "ranges_from_mask", "window_ranges"]

_ARGUMENTS = (
    "Tensor? ranges=None, Tensor? bias=None, Tensor? sinks=None, Tensor? alibi=None, float? scale=None, "
    "bool causal=False, int window=0, float softcap=0.0"
)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """softmax(mask(softcap(q k^T scale) + alibi + bias)) v, without ever holding all the scores.

    With offset = Sk - Sq (query and key sequences end together, as when a cache precedes the queries):

        score_ij = q_i . k_j * scale                        accumulated in float32 (float64 for float64)
        score_ij = softcap * tanh(score_ij / softcap)       if softcap > 0 (Gemma 2)
        score_ij += alibi_h * (j - (i + offset))            (Press et al. 2022)
        score_ij += bias_ij                                 if bias is floating
        visible_ij = ranges and causal and window and bool bias, all of them
        lse_i = log(sum over visible j of exp(score_ij) [+ exp(sink_h)])
        out_i = sum over visible j of exp(score_ij - lse_i) v_j

    Args:
        q: [B, Hq, Sq, D], float32, float64, bfloat16 or float16; any strides.
        k: [B, Hkv, Sk, D]; query head h reads KV head h // (Hq // Hkv), without a copy for each query head.
        v: [B, Hkv, Sk, Dv].
        ranges: int32 or int64, keys [start, end) that are visible: [B or 1, Sq, 2] for each query row, or
            [B, 2] for each batch row.
        bias: [B or 1, Hq or 1, Sq, Sk], floating (added to the scores) or bool (True = visible).
        sinks: [Hq]: a logit per head that takes probability and has no value (gpt-oss).
        alibi: [Hq] slopes; they get no gradient.
        scale: default D ** -0.5.
        causal: i sees j only if j <= i + offset.
        window: w > 0 limits i to the keys with |i + offset - j| < w (with causal: the w keys up to its own).
        softcap: 0 is none.

    Returns:
        out [B, Sq, Hq, Dv], contiguous, in q.dtype; and lse [B, Hq, Sq] in float32 (float64 for float64),
        which carries no gradient. A row without a visible key gives out = 0, zero gradients and lse = -inf
        (or its sink). NaN stays NaN in the rows that see it and reaches no other; an infinite v may show as
        NaN.

    Gradients reach q, k, v, sinks and a floating bias. Saved for them: the inputs, out and lse.

    Raises:
        ShapeError: shapes or dtypes do not fit together.
    """
    out, lse = torch.ops.hasten.attention(q, k, v, ranges, bias, sinks, alibi, scale, causal, window, softcap)
    return out, lse


def _check(q: Tensor, k: Tensor, v: Tensor, options: blocked.Options) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ShapeError(
            f"attention takes q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; got {shapes}"
        )
    if not q.is_floating_point() or k.dtype != q.dtype or v.dtype != q.dtype:
        raise ShapeError(f"q, k and v must share a floating dtype; got {q.dtype}, {k.dtype}, {v.dtype}")
    if k.shape[0] != q.shape[0] or v.shape[:3] != k.shape[:3] or k.shape[3] != q.shape[3]:
        raise ShapeError(f"q and k must share B and D, k and v must share B, Hkv and Sk; got {shapes}")
    batch, heads, queries, keys = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if k.shape[1] == 0 or heads % k.shape[1]:
        divisors = [h for h in range(1, heads + 1) if heads % h == 0]
        raise ShapeError(f"{heads} query heads cannot share {k.shape[1]} KV heads; allowed: {divisors}")
    ranges, bias = options.ranges, options.bias
    if ranges is not None:
        fits = tuple(ranges.shape) in {(1, queries, 2), (batch, queries, 2), (batch, 2)}
        if not fits or ranges.dtype not in (torch.int32, torch.int64):
            raise ShapeError(
                f"ranges must be int32 or int64 [{batch} or 1, {queries}, 2] or [{batch}, 2]; "
                f"got {ranges.dtype} {tuple(ranges.shape)}"
            )
    if bias is not None:
        fits = bias.dim() == 4 and bias.shape[0] in (1, batch) and bias.shape[1] in (1, heads)
        if not fits or tuple(bias.shape[2:]) != (queries, keys):
            raise ShapeError(
                f"bias must be [{batch} or 1, {heads} or 1, {queries}, {keys}]; got {tuple(bias.shape)}"
            )
        if bias.dtype != torch.bool and not bias.is_floating_point():
            raise ShapeError(f"bias must be floating or bool; got {bias.dtype}")
    for name, per_head in (("sinks", options.sinks), ("alibi", options.alibi)):
        if per_head is not None and tuple(per_head.shape) != (heads,):
            raise ShapeError(
                f"{name} must have one value a query head, [{heads}]; got {tuple(per_head.shape)}"
            )
    if options.window < 0 or options.softcap < 0:
        raise ShapeError(f"window and softcap must be >= 0; got {options.window} and {options.softcap}")


def _options(q: Tensor, *arguments: Any) -> blocked.Options:
    ranges, bias, sinks, alibi, scale, causal, window, softcap = arguments
    return blocked.Options(
        ranges, bias, sinks, alibi, q.shape[-1] ** -0.5 if scale is None else scale, causal, window, softcap
    )


def _as_intervals(options: blocked.Options) -> blocked.Options:
    """A dense boolean mask that is one interval a row becomes ranges, so that whole blocks can be skipped."""
    bias = options.bias
    if options.ranges is not None or bias is None or bias.dtype != torch.bool or bias.shape[1] != 1:
        return options
    ranges = ranges_from_mask(bias)
    return options if ranges is None else replace(options, ranges=ranges, bias=None)


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
) -> tuple[Tensor, Tensor]:
    options = _options(q, ranges, bias, sinks, alibi, scale, causal, window, softcap)
    _check(q, k, v, options)
    if not cpu.refusal(q):
        options = _as_intervals(options)
        native = cpu.forward(q, k, v, options)
        if native is not None:
            return native
    calls = flash.plan(q, k, v, options)
    if calls is not None:
        return flash.forward(q, k, v, options, calls)
    return blocked.forward(q, k, v, options)


def _fake(q: Tensor, k: Tensor, v: Tensor, *arguments: Any, **_: Any) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _dim = q.shape
    wide = torch.promote_types(q.dtype, torch.float32)
    return q.new_empty(batch, queries, heads, v.shape[3]), q.new_empty(batch, heads, queries, dtype=wide)


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    q, k, v, ranges, bias, sinks, alibi, *rest = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse, ranges, bias, sinks, alibi)
    ctx.rest = rest


def _backward(ctx: Any, grad_out: Tensor, _grad_lse: Any) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    bias, sinks = saved[6], saved[7]
    wants_bias = bias is not None and bool(ctx.needs_input_grad[4])
    dq, dk, dv, dsinks, dbias = torch.ops.hasten.attention_backward(grad_out, *saved, *ctx.rest, wants_bias)
    return (
        dq,
        dk,
        dv,
        None,
        dbias.to(bias.dtype) if wants_bias else None,
        dsinks.to(sinks.dtype) if sinks is not None else None,
        *(None,) * 5,
    )


def _backward_forward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    options = _options(q, ranges, bias, sinks, alibi, scale, causal, window, softcap)
    if not cpu.refusal(q, bias_grad):
        native = cpu.backward(grad_out, q, k, v, out, lse, _as_intervals(options))
        if native is not None:
            return (*native, lse.new_empty(0))
    calls = flash.plan(q, k, v, options) if blocked.all_finite(grad_out) else None
    if calls is not None:
        return (
            *flash.backward(grad_out, q, k, v, out, lse, options, calls),
            lse.new_empty(0),
            lse.new_empty(0),
        )
    return blocked.backward(grad_out, q, k, v, out, lse, _as_intervals(options), bias_grad)


def _backward_fake(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    ranges: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi: Tensor | None = None,
    scale: float | None = None,
    causal: bool = False,
    window: int = 0,
    softcap: float = 0.0,
    bias_grad: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    dsinks = lse.new_empty(q.shape[1] if sinks is not None else 0)
    dbias = lse.new_empty(bias.shape if bias_grad and bias is not None else (0,))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), dsinks, dbias


def _autocast(
    dtype: torch.dtype,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranges: Tensor | None = None,
    bias: Tensor | None = None,
    *rest: Any,
) -> tuple[Any, ...]:
    # The bias is added in float32 anyway; cast to bf16, a large negative float32 would become infinite.
    return cast(q, dtype), cast(k, dtype), cast(v, dtype), ranges, bias, *rest


operator(
    "attention",
    f"(Tensor q, Tensor k, Tensor v, {_ARGUMENTS}) -> (Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    save=_save,
    backward=_backward,
    autocast=_autocast,
)
operator(
    "attention_backward",
    f"(Tensor grad_out, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, {_ARGUMENTS}, "
    "bool bias_grad=False) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    forward=_backward_forward,
    fake=_backward_fake,
)

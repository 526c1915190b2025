"""The meaning of attention: the dense definition, one line of the formula at a time.

Shapes: q [B, Hq, Sq, D], k [B, Hkv, Sk, D], v [B, Hkv, Sk, Dv]; query head h reads KV head h // (Hq // Hkv).
"""

from __future__ import annotations

import torch
from torch import Tensor


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
    """softmax(mask(softcap(q k^T scale) + alibi + bias)) v; see `hasten.ops.attention.attention`.

    Returns:
        out [B, Sq, Hq, Dv] in q.dtype and lse [B, Hq, Sq] in float32 (float64 for float64 inputs).
    """
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    k_BHSD, v_BHSD = (t.to(wide).repeat_interleave(group, dim=1) for t in (k, v))
    scores = q.to(wide) @ k_BHSD.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap > 0:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(q.shape[2], device=q.device)[:, None] + (k.shape[2] - q.shape[2])
    key = torch.arange(k.shape[2], device=q.device)
    if alibi is not None:
        scores = scores + alibi.to(wide)[:, None, None] * (key - position).to(wide)
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias.to(wide)
    visible = visible_keys(scores, ranges, bias, position, key, causal, window)
    scores = scores.masked_fill(~visible, float("-inf"))
    if sinks is not None:
        column = sinks.to(wide)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, column), dim=-1)
    lse = scores.logsumexp(dim=-1)
    empty = (scores == float("-inf")).all(dim=-1, keepdim=True)
    p = torch.softmax(scores.masked_fill(empty, 0.0), dim=-1)[..., : k.shape[2]]
    p = p.masked_fill(~visible | empty, 0.0)
    if bool(v.detach().isfinite().all()):
        out = p @ v_BHSD
    else:
        # A hidden key must not count even if its value is NaN: 0 * NaN is NaN.
        out = torch.where(visible[..., None], p[..., None] * v_BHSD[:, :, None], 0.0).sum(dim=-2)
    return out.transpose(1, 2).to(q.dtype).contiguous(), lse


def visible_keys(
    scores: Tensor,
    ranges: Tensor | None,
    bias: Tensor | None,
    position: Tensor,
    key: Tensor,
    causal: bool,
    window: int,
) -> Tensor:
    """bool, broadcastable to `scores` [B, Hq, Sq, Sk]: True where the query sees the key."""
    visible = torch.ones(1, 1, *scores.shape[2:], dtype=torch.bool, device=scores.device)
    if causal:
        visible = visible & (key <= position)
    if window > 0:
        visible = visible & (key > position - window) & (key < position + window)
    if ranges is not None:
        interval = ranges[:, None, :] if ranges.dim() == 2 else ranges
        start, end = interval[:, None, :, 0, None], interval[:, None, :, 1, None]
        visible = visible & (key >= start) & (key < end)
    if bias is not None and bias.dtype == torch.bool:
        visible = visible & bias
    return visible

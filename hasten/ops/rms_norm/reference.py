"""What the RMS norm means (Zhang and Sennrich, 2019, equation 4), in plain torch that autograd can follow."""

from __future__ import annotations

import torch
from torch import Tensor


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    round_first: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y [..., K] = x / sqrt(mean(x^2) + eps) * (offset + weight).

    `round_first` rounds the normalised value to `x.dtype` before the weight is applied, as Llama does;
    without it the product is rounded once, as Gemma does.
    """
    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    n = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        y = n.to(x.dtype)
    elif round_first:
        y = (weight + offset if offset else weight) * n.to(x.dtype)
    else:
        y = (n * (offset + weight.to(n.dtype))).to(x.dtype)
    return y if out_dtype is None else y.to(out_dtype)


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    round_first: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = x + residual."""
    h = x + residual
    return rms_norm(h, weight, eps, offset, round_first, out_dtype), h

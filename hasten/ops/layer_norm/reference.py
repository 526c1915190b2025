"""What the layer norm means (Ba, Kiros and Hinton, 2016, equation 3), in plain torch with autograd."""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y [..., K] = (x - mean) / sqrt(var + eps) * weight + bias, computed in float32, rounded once."""
    x32 = x.to(torch.promote_types(x.dtype, torch.float32))
    centred = x32 - x32.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.pow(2).mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight
    y = y if bias is None else y + bias
    return y.to(x.dtype if out_dtype is None else out_dtype)


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(h), h) with h = x + residual."""
    h = x + residual
    return layer_norm(h, weight, bias, eps, out_dtype), h

"""The layer norm through ATen's fused kernels, with float32 parameters and statistics for any dtype of x.

ATen accepts bfloat16 x with float32 parameters ("mixed") and then keeps float32 statistics and rounds y once
to bfloat16; with bfloat16 parameters it would round the statistics as well. A missing weight becomes ones for
the same reason. The gradient is taken in float32 throughout: for bfloat16 x, ATen adds up the gradients of
weight and bias in bfloat16. Under torch.autocast("cpu") in torch 2.13 layer_norm keeps the dtype of x, and so
does this.
"""

from __future__ import annotations

import torch
from torch import Tensor


def layer_norm_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [..., K], mean [..., 1], rstd [..., 1]); the statistics are float32, or float64 for float64."""
    dtype = x.dtype if out_dtype is None else out_dtype
    if dtype != x.dtype and torch.promote_types(dtype, x.dtype) == dtype:
        x = x.to(dtype)
    weight, bias = _parameters(x, weight, bias)
    y, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
    return y.to(dtype), mean, rstd


def layer_norm_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    need: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of (x, weight, bias), each in the dtype of its tensor; what is not needed is None."""
    wide_x = x.to(mean.dtype)
    wide_weight, wide_bias = _parameters(wide_x, weight, bias)
    mask = [need[0], need[1] and weight is not None, need[2] and bias is not None]
    dx, dweight, dbias = torch.ops.aten.native_layer_norm_backward(
        dy.to(wide_x.dtype), wide_x, [x.shape[-1]], mean, rstd, wide_weight, wide_bias, mask
    )
    return (
        dx.to(x.dtype) if mask[0] else None,
        dweight.to(weight.dtype) if weight is not None and mask[1] else None,
        dbias.to(bias.dtype) if bias is not None and mask[2] else None,
    )


def _parameters(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    wide = torch.promote_types(x.dtype, torch.float32)
    if weight is not None:
        weight = weight.to(wide)
    elif x.dtype != wide:
        weight = torch.ones(x.shape[-1], dtype=wide, device=x.device)
    return weight, None if bias is None else bias.to(wide)

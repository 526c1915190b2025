"""The layer norm: the native kernels where they can run, else ATen's fused ones with float32 parameters.

ATen accepts bfloat16 x with float32 parameters ("mixed") and then keeps float32 statistics and rounds y once
to bfloat16; with bfloat16 parameters it would round the statistics as well. A missing weight becomes ones for
the same reason. The gradient is taken in float32 throughout: for bfloat16 x, ATen adds up the gradients of
weight and bias in bfloat16. Under torch.autocast("cpu") in torch 2.13 layer_norm keeps the dtype of x, and so
does this.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.ops.rms_norm import cpu
from hasten.ops.rms_norm.cpu import Summands
from hasten.ops.rms_norm.kernel import split_sum_gradient


def layer_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None,
    cast_to: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(y [..., K], h = x (+ residual), mean [..., 1], rstd [..., 1]).

    y is rounded to `out_dtype` (None: the dtype of h) and then, if given, to `cast_to`. The statistics are
    float32, or float64 for float64.
    """
    if residual is not None and residual.shape != x.shape:
        x, residual = x + residual, None
    if not cpu.refusal(x, residual, weight, bias, dtypes=(out_dtype, cast_to)):
        h_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        rounding = _rounding(h_dtype if out_dtype is None else out_dtype, cast_to)
        y, h, (mean, rstd) = cpu.forward(x, residual, weight, bias, eps, layer=True, **rounding)
        return y, h, mean, rstd
    h = (x if residual is None else x + residual).contiguous()
    y, mean, rstd = _torch_forward(h, weight, bias, eps, out_dtype)
    return y if cast_to is None else y.to(cast_to), h, mean, rstd


def layer_norm_rebuild(
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    cast_to: torch.dtype,
) -> Tensor:
    """y of `layer_norm_forward` without an `out_dtype`, from h and its statistics."""
    if not cpu.refusal(h, weight, bias, dtypes=(cast_to,)):
        return cpu.rebuild(h, weight, bias, [mean, rstd], **_rounding(h.dtype, cast_to))
    return _torch_forward(h, weight, bias, eps, None)[0].to(cast_to)


def layer_norm_backward(
    dy: Tensor,
    h: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    dh: Tensor | None,
    summands: Summands,
    need: Sequence[bool],
    need_parameters: Sequence[bool],
) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
    """(gradient of each summand of h, dweight, dbias): dh is the gradient of h that is there, or None.

    What is not needed is None. Each gradient has the dtype of its tensor.
    """
    need_weight = need_parameters[0] and weight is not None
    need_bias = need_parameters[1] and bias is not None
    if not cpu.refusal(h, dy, dh, weight, bias, dtypes=[dtype for _, dtype in summands]):
        statistics, need_sums = [mean, rstd], need_weight or need_bias
        gradients, sums = cpu.backward(dy, h, statistics, weight, dh, summands, need, need_sums)
        dweight = sums[0].to(weight.dtype) if need_weight and weight is not None else None
        return gradients, dweight, sums[1].to(bias.dtype) if need_bias and bias is not None else None
    dnorm, dweight, dbias = _torch_backward(
        dy, h, mean, rstd, weight, bias, [any(need), need_weight, need_bias]
    )
    if dnorm is not None:
        dh = dnorm if dh is None else dnorm.add_(dh)
    return split_sum_gradient(dh, summands, need), dweight, dbias


def _rounding(dtype: torch.dtype, cast_to: torch.dtype | None) -> dict[str, torch.dtype]:
    return {"inner": torch.float32, "middle": dtype, "out": dtype if cast_to is None else cast_to}


def _torch_forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if out_dtype is None else out_dtype
    if dtype != x.dtype and torch.promote_types(dtype, x.dtype) == dtype:
        x = x.to(dtype)
    weight, bias = _parameters(x, weight, bias)
    y, mean, rstd = torch.native_layer_norm(x, [x.shape[-1]], weight, bias, eps)
    return y.to(dtype), mean, rstd


def _torch_backward(
    dy: Tensor,
    x: Tensor,
    mean: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    mask: list[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    wide_x = x.to(mean.dtype)
    wide_weight, wide_bias = _parameters(wide_x, weight, bias)
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

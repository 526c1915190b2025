"""The RMS norm and its gradient: the native kernels where they can run, else torch in few passes.

With n = h * rstd and m = offset + weight:

    dh = rstd * (m*dy - n * mean(m*dy*n)),    dweight = sum over rows of dy*n

Statistics and sums are float32, or float64 for float64 inputs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.ops.rms_norm import cpu
from hasten.ops.rms_norm.cpu import Summands


def rms_norm_forward(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y [..., K], h = x (+ residual), rstd [..., 1]); the rounding is that of the reference."""
    if residual is not None and residual.shape != x.shape:
        x, residual = x + residual, None
    if not cpu.refusal(x, residual, weight, dtypes=(out_dtype,)):
        h_dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
        multiplier, rounding = _native_form(h_dtype, weight, offset, round_first, out_dtype)
        y, h, (rstd,) = cpu.forward(x, residual, multiplier, None, eps, layer=False, **rounding)
        return y, h, rstd
    h = (x if residual is None else x + residual).contiguous()
    rstd = reciprocal_rms(h, eps)
    return _normalise(h, rstd, weight, offset, round_first, out_dtype), h, rstd


def rms_norm_rebuild(
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    round_first: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """y of `rms_norm_forward` from h and its statistic."""
    if not cpu.refusal(h, weight, dtypes=(out_dtype,)):
        multiplier, rounding = _native_form(h.dtype, weight, offset, round_first, out_dtype)
        return cpu.rebuild(h, multiplier, None, [rstd], **rounding)
    return _normalise(h, rstd, weight, offset, round_first, out_dtype)


def rms_norm_backward(
    dy: Tensor,
    h: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    dh: Tensor | None,
    summands: Summands,
    need: Sequence[bool],
    need_weight: bool,
) -> tuple[list[Tensor | None], Tensor | None]:
    """(gradient of each summand of h, dweight): dh is the gradient of h that is there, or None.

    What is not needed is None. Each gradient has the dtype of its tensor.
    """
    need_weight = need_weight and weight is not None
    if not cpu.refusal(h, dy, dh, weight, dtypes=[dtype for _, dtype in summands]):
        multiplier = None if weight is None else _multiplier(weight, offset, torch.float32)
        gradients, sums = cpu.backward(dy, h, [rstd], multiplier, dh, summands, need, need_weight)
        return gradients, sums[0].to(weight.dtype) if sums and weight is not None else None
    dnorm, dweight = _torch_backward(dy, h, rstd, weight, offset, any(need), need_weight)
    if dnorm is not None:
        dh = dnorm if dh is None else dnorm.add_(dh)
    return split_sum_gradient(dh, summands, need), dweight


def split_sum_gradient(dh: Tensor | None, summands: Summands, need: Sequence[bool]) -> list[Tensor | None]:
    """The gradient of h = x + residual for each (shape, dtype) of the two, broadcast dimensions summed."""
    if dh is None:
        return [None for _ in summands]
    return [
        dh.sum_to_size(shape).to(dtype) if wanted else None
        for (shape, dtype), wanted in zip(summands, need, strict=True)
    ]


def reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) as [..., 1] in float32 (float64 for float64); one read of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def output_dtype(x_dtype: torch.dtype, weight: Tensor | None, round_first: bool) -> torch.dtype:
    """The dtype in which plain torch would leave y."""
    return torch.promote_types(x_dtype, weight.dtype) if weight is not None and round_first else x_dtype


def _native_form(
    h_dtype: torch.dtype,
    weight: Tensor | None,
    offset: float,
    round_first: bool,
    out_dtype: torch.dtype | None,
) -> tuple[Tensor | None, dict[str, torch.dtype]]:
    """The multiplier as the reference rounds it, and where the kernel rounds."""
    dtype = output_dtype(h_dtype, weight, round_first)
    multiplier = None
    if weight is not None:
        multiplier = _multiplier(weight, offset, weight.dtype if round_first else torch.float32)
    inner = h_dtype if round_first or weight is None else torch.float32
    return multiplier, {"inner": inner, "middle": dtype, "out": dtype if out_dtype is None else out_dtype}


def _normalise(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    round_first: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    dtype = output_dtype(x.dtype, weight, round_first)
    n = x * rstd
    if round_first or weight is None:
        n = n.to(x.dtype)
    if weight is not None:
        multiplier = _multiplier(weight, offset, weight.dtype if round_first else n.dtype)
        n = (
            n.mul_(multiplier)
            if torch.promote_types(n.dtype, multiplier.dtype) == n.dtype
            else n * multiplier
        )
    return n.to(dtype).to(dtype if out_dtype is None else out_dtype)


def _torch_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    need_x: bool,
    need_weight: bool,
) -> tuple[Tensor | None, Tensor | None]:
    """(dx in the dtype of rstd, dweight in the dtype of weight); what is not needed is None."""
    width = x.shape[-1]
    dy_NK = dy.reshape(-1, width).to(rstd.dtype)
    rstd_N1 = rstd.reshape(-1, 1)
    n_NK = x.reshape(-1, width) * rstd_N1
    product_NK = dy_NK * n_NK
    dweight = product_NK.sum(0).to(weight.dtype) if weight is not None and need_weight else None
    if not need_x:
        return None, dweight
    if weight is None:
        mean_N1 = product_NK.mean(-1, keepdim=True)
        scaled_NK = product_NK.copy_(dy_NK)
    else:
        multiplier = _multiplier(weight, offset, rstd.dtype)
        mean_N1 = (product_NK @ multiplier).div_(width).unsqueeze(-1)
        scaled_NK = torch.mul(dy_NK, multiplier, out=product_NK)
    return scaled_NK.addcmul_(n_NK, mean_N1, value=-1).mul_(rstd_N1).view(x.shape), dweight


def _multiplier(weight: Tensor, offset: float, dtype: torch.dtype) -> Tensor:
    weight = weight.to(dtype)
    return weight + offset if offset else weight

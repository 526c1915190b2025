"""The RMS norm in few passes, and its gradient.

With n = x * rstd and m = offset + weight:

    dx = rstd * (m*dy - n * mean(m*dy*n)),    dweight = sum over rows of dy*n

Statistics and sums are float32, or float64 for float64 inputs.
"""

from __future__ import annotations

import torch
from torch import Tensor


def reciprocal_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) as [..., 1] in float32 (float64 for float64); one read of x."""
    wide = torch.promote_types(x.dtype, torch.float32)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide)
    return norm.square_().div_(x.shape[-1]).add_(eps).rsqrt_()


def output_dtype(x_dtype: torch.dtype, weight: Tensor | None, round_first: bool) -> torch.dtype:
    """The dtype in which plain torch would leave y."""
    return torch.promote_types(x_dtype, weight.dtype) if weight is not None and round_first else x_dtype


def normalise(
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    round_first: bool,
    out_dtype: torch.dtype | None,
) -> Tensor:
    """y [..., K] from x and its statistic; the rounding is that of the reference."""
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


def rms_norm_backward(
    dy: Tensor,
    x: Tensor,
    rstd: Tensor,
    weight: Tensor | None,
    offset: float,
    need_x: bool = True,
    need_weight: bool = True,
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

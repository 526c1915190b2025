"""The meaning of rotary position embedding (Su et al. 2021, RoFormer), and the body that runs."""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y[..., :R] = x cos + rot(x) sin, the rest unchanged; x [B, H, S, D], cos and sin [(B | 1,) S, R]."""
    dtype = out_dtype or torch.promote_types(x.dtype, cos.dtype)
    wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    rotated, rest = x[..., : cos.shape[-1]].to(wide), x[..., cos.shape[-1] :]
    if interleaved:
        turned = torch.stack((-rotated[..., 1::2], rotated[..., 0::2]), dim=-1).flatten(-2)
    else:
        first, second = rotated.chunk(2, dim=-1)
        turned = torch.cat((-second, first), dim=-1)
    y = rotated * cos.unsqueeze(-3).to(wide) + turned * sin.unsqueeze(-3).to(wide)
    return torch.cat((y.to(dtype), rest.to(dtype)), dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, out: Tensor) -> Tensor:
    """Writes the rotation of x, or with `transposed` the transpose of that linear map, into `out`, like x.

    With a, b the two partners of each pair of x: y_a = a cos_a - b sin_a and y_b = b cos_b + a sin_b; the
    transpose is y_a = a cos_a + b sin_b and y_b = b cos_b - a sin_a.
    """
    width = cos.shape[-1]
    wide = torch.promote_types(torch.promote_types(x.dtype, cos.dtype), torch.float32)
    cos, sin = cos.to(wide).unsqueeze(-3), sin.to(wide).unsqueeze(-3)
    source = x[..., :width].to(wide)
    result = out[..., :width] if out.dtype == wide else torch.empty_like(source)
    torch.mul(source, cos, out=result)
    a, b = _partners(source, interleaved)
    y_a, y_b = _partners(result, interleaved)
    sin_a, sin_b = _partners(sin, interleaved)
    if transposed:
        y_a.addcmul_(b, sin_b)
        y_b.addcmul_(a, sin_a, value=-1)
    else:
        y_a.addcmul_(b, sin_a, value=-1)
        y_b.addcmul_(a, sin_b)
    if out.dtype != wide:
        out[..., :width] = result
    out[..., width:] = x[..., width:]
    return out


def _partners(x: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    if interleaved:
        return x[..., 0::2], x[..., 1::2]
    half = x.shape[-1] // 2
    return x[..., :half], x[..., half:]

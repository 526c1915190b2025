"""Rotary position embedding: half-split, interleaved and partial, from the model's own cos and sin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops.registry import operator
from hasten.ops.rotary import cpu
from hasten.ops.rotary.reference import rotate

__all__ = ["rotary"]


def rotary(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """y[..., :R] = x[..., :R] cos + rot(x[..., :R]) sin; y[..., R:] = x[..., R:].

    Computed in float32 (float64 if an input is float64) and rounded once. Su et al. 2021, RoFormer.

    Args:
        x: [B, H, S, D], any strides.
        cos, sin: [B or 1, S, R] or [S, R] with R even and R <= D, as the model's rotary module gives them.
            Half-split: the angles of the first R/2 dims, then those of the second; interleaved: each angle
            twice in a row. They get no gradient.
        interleaved: pairs are (2i, 2i + 1) and rot(x) = (-x[2i+1], x[2i]); otherwise pairs are (i, i + R/2)
            and rot(x) = (-x[R/2:], x[:R/2]).
        out_dtype: default torch.promote_types(x.dtype, cos.dtype).

    Returns:
        [B, H, S, D], contiguous. The gradient of x comes in x's dtype and order of dimensions in memory.
        Saved for it: cos and sin.

    Raises:
        ShapeError: shapes or dtypes do not fit together.
    """
    return torch.ops.hasten.rotary(x, cos, sin, interleaved, out_dtype)  # type: ignore[no-any-return]


def _check(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    if x.dim() != 4 or not x.is_floating_point() or not cos.is_floating_point():
        raise ShapeError(
            f"rotary takes a floating x [B, H, S, D]; got {x.dtype} {tuple(x.shape)}, cos {cos.dtype}"
        )
    batch, _, length, dim = x.shape
    fits = cos.dim() in (2, 3) and cos.shape == sin.shape and cos.dtype == sin.dtype
    fits = fits and cos.shape[-2] == length and (cos.dim() == 2 or cos.shape[0] in (1, batch))
    if not fits or cos.shape[-1] > dim or cos.shape[-1] % 2:
        raise ShapeError(
            f"cos and sin must share a dtype and be [{batch} or 1, {length}, R] or [{length}, R] with R even "
            f"and at most {dim}; got {cos.dtype} {tuple(cos.shape)} and {sin.dtype} {tuple(sin.shape)}"
        )


def _forward(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    _check(x, cos, sin)
    out = _fake(x, cos, sin, interleaved, out_dtype)
    body = rotate if cpu.refusal(x, cos, sin, out) else cpu.rotate
    return body(x, cos, sin, interleaved, False, out)


def _fake(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    return x.new_empty(x.shape, dtype=out_dtype or torch.promote_types(x.dtype, cos.dtype))


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, cos, sin, interleaved, _ = inputs
    ctx.save_for_backward(cos, sin)
    ctx.interleaved = interleaved
    ctx.dtype = x.dtype
    ctx.sequence_first = x.stride(1) < x.stride(2)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cos, sin = ctx.saved_tensors
    dx = torch.ops.hasten.rotary_backward(grad, cos, sin, ctx.interleaved, ctx.dtype, ctx.sequence_first)
    return dx, None, None, None, None


def _backward_forward(
    grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype, sequence_first: bool
) -> Tensor:
    out = _backward_fake(grad, cos, sin, interleaved, dtype, sequence_first)
    body = rotate if cpu.refusal(grad, cos, sin, out) else cpu.rotate
    return body(grad, cos, sin, interleaved, True, out)


def _backward_fake(
    grad: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, dtype: torch.dtype, sequence_first: bool
) -> Tensor:
    batch, heads, length, dim = grad.shape
    if sequence_first:
        return grad.new_empty((batch, length, heads, dim), dtype=dtype).transpose(1, 2)
    return grad.new_empty(grad.shape, dtype=dtype)


operator(
    "rotary",
    "(Tensor x, Tensor cos, Tensor sin, bool interleaved=False, ScalarType? out_dtype=None) -> Tensor",
    forward=_forward,
    fake=_fake,
    save=_save,
    backward=_backward,
)
operator(
    "rotary_backward",
    "(Tensor grad, Tensor cos, Tensor sin, bool interleaved, ScalarType dtype, bool sequence_first) "
    "-> Tensor",
    forward=_backward_forward,
    fake=_backward_fake,
)

"""RMS norm, alone or after the residual sum. Saves its input and one statistic a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops.registry import operator
from hasten.ops.rms_norm.kernel import (
    output_dtype,
    rms_norm_backward,
    rms_norm_forward,
    split_sum_gradient,
)

__all__ = ["add_rms_norm", "rms_norm"]


def rms_norm(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    round_first: bool = True,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight) over the last dimension.

    Args:
        x: [..., K], floating.
        weight: [K] or None (no multiplier at all).
        offset: 1.0 for Gemma's (1 + w).
        round_first: True rounds to `x.dtype` before the weight (Llama), False after it (Gemma).
        out_dtype: dtype of y; None is what plain torch would give.

    Returns:
        y [..., K].

    Raises:
        ShapeError: weight is not [K], or x has no dimension or is not floating.
    """
    check_norm("rms_norm", x, weight=weight)
    y, _ = torch.ops.hasten.rms_norm(x, weight, eps, offset, round_first, out_dtype)
    return y


def add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    *,
    offset: float = 0.0,
    round_first: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(rms_norm(h), h) with h = x + residual; shapes broadcast, h has the promoted dtype. See `rms_norm`."""
    check_norm("add_rms_norm", x, residual=residual, weight=weight)
    y, h, _ = torch.ops.hasten.add_rms_norm(x, residual, weight, eps, offset, round_first, out_dtype)
    return y, h


def check_norm(name: str, x: Tensor, residual: Tensor | None = None, **parameters: Tensor | None) -> None:
    """Shapes of a norm over the last dimension.

    Raises:
        ShapeError: x is not floating or has no dimension, the residual does not broadcast, a parameter is
            not [K].
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ShapeError(f"{name}: x is {x.dtype} {list(x.shape)}; needs a floating tensor [..., K]")
    if residual is not None:
        try:
            shape = torch.broadcast_shapes(x.shape, residual.shape)
        except RuntimeError as error:
            shapes = f"x {list(x.shape)} and residual {list(residual.shape)}"
            raise ShapeError(f"{name}: {shapes} do not broadcast; give both the same shape") from error
        width = shape[-1]
    else:
        width = x.shape[-1]
    for key, parameter in parameters.items():
        if parameter is not None and parameter.shape != (width,):
            raise ShapeError(f"{name}: {key} is {list(parameter.shape)}; needs [{width}], the last size of x")


def _forward(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    round_first: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    y, _, rstd = rms_norm_forward(x, None, weight, eps, offset, round_first, out_dtype)
    return y, rstd


def _fake(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    round_first: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    dtype = output_dtype(x.dtype, weight, round_first) if out_dtype is None else out_dtype
    rstd = x.new_empty([*x.shape[:-1], 1], dtype=torch.promote_types(x.dtype, torch.float32))
    return x.new_empty(x.shape, dtype=dtype), rstd


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, weight, _, ctx.offset, *_ = inputs
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, weight, output[1])


def _backward(ctx: Any, dy: Tensor | None, _: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 6
    x, weight, rstd = ctx.saved_tensors
    need_x, need_weight = ctx.needs_input_grad[:2]
    summands = [(x.shape, x.dtype)]
    (dx,), dweight = rms_norm_backward(dy, x, rstd, weight, ctx.offset, None, summands, [need_x], need_weight)
    return dx, dweight, None, None, None, None


def _add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    round_first: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    return rms_norm_forward(x, residual, weight, eps, offset, round_first, out_dtype)


def _add_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    eps: float,
    offset: float = 0.0,
    round_first: bool = True,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    h = x.new_empty(torch.broadcast_shapes(x.shape, residual.shape), dtype=torch.result_type(x, residual))
    y, rstd = _fake(h, weight, eps, offset, round_first, out_dtype)
    return y, h, rstd


def _add_save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, residual, weight, _, ctx.offset, *_ = inputs
    _, h, rstd = output
    ctx.summands = [(x.shape, x.dtype), (residual.shape, residual.dtype)]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(rstd)
    ctx.save_for_backward(h, weight, rstd)


def _add_backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, _: Any) -> tuple[Any, ...]:
    need, need_weight = ctx.needs_input_grad[:2], ctx.needs_input_grad[2]
    if dy is None:
        dx, dresidual = split_sum_gradient(dh, ctx.summands, need)
        return dx, dresidual, None, None, None, None, None
    h, weight, rstd = ctx.saved_tensors
    (dx, dresidual), dweight = rms_norm_backward(
        dy, h, rstd, weight, ctx.offset, dh, ctx.summands, need, need_weight
    )
    return dx, dresidual, dweight, None, None, None, None


operator(
    "rms_norm",
    "(Tensor x, Tensor? weight, float eps, float offset=0.0, bool round_first=True, "
    "ScalarType? out_dtype=None) -> (Tensor, Tensor)",
    forward=_forward,
    fake=_fake,
    save=_save,
    backward=_backward,
)
operator(
    "add_rms_norm",
    "(Tensor x, Tensor residual, Tensor? weight, float eps, float offset=0.0, bool round_first=True, "
    "ScalarType? out_dtype=None) -> (Tensor y, Tensor h, Tensor rstd)",
    forward=_add_forward,
    fake=_add_fake,
    save=_add_save,
    backward=_add_backward,
)

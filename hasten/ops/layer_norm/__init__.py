"""Layer norm, alone or after the residual sum. Saves its input and two statistics a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.ops.layer_norm.kernel import layer_norm_backward, layer_norm_forward
from hasten.ops.registry import operator
from hasten.ops.rms_norm import check_norm
from hasten.ops.rms_norm.kernel import split_sum_gradient

__all__ = ["add_layer_norm", "layer_norm"]


def layer_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out_dtype: torch.dtype | None = None,
) -> Tensor:
    """y = (x - mean) / sqrt(var + eps) * weight + bias over the last dimension.

    Args:
        x: [..., K], floating.
        weight, bias: [K] or None; any floating dtype, used in float32 (float64 for float64 x).
        out_dtype: dtype of y; None is the dtype of x.

    Returns:
        y [..., K].

    Raises:
        ShapeError: weight or bias is not [K], or x has no dimension or is not floating.
    """
    check_norm("layer_norm", x, weight=weight, bias=bias)
    return torch.ops.hasten.layer_norm(x, weight, bias, eps, out_dtype)[0]


def add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """(layer_norm(h), h) with h = x + residual; shapes broadcast, h has the promoted dtype."""
    check_norm("add_layer_norm", x, residual=residual, weight=weight, bias=bias)
    y, h, _, _ = torch.ops.hasten.add_layer_norm(x, residual, weight, bias, eps, out_dtype)
    return y, h


def _forward(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    y, _, mean, rstd = layer_norm_forward(x, None, weight, bias, eps, out_dtype)
    return y, mean, rstd


def _fake(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, out_dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = x.dtype if out_dtype is None else out_dtype
    shape, wide = [*x.shape[:-1], 1], torch.promote_types(x.dtype, torch.float32)
    return (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(shape, dtype=torch.promote_types(wide, dtype)),
        x.new_empty(shape, dtype=torch.promote_types(wide, dtype)),
    )


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, weight, bias, *_ = inputs
    _, mean, rstd = output
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(x, weight, bias, mean, rstd)


def _backward(ctx: Any, dy: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 5
    x, weight, bias, mean, rstd = ctx.saved_tensors
    need_x, *need_parameters = ctx.needs_input_grad[:3]
    summands = [(x.shape, x.dtype)]
    (dx,), dweight, dbias = layer_norm_backward(
        dy, x, mean, rstd, weight, bias, None, summands, [need_x], need_parameters
    )
    return dx, dweight, dbias, None, None


def _add_forward(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return layer_norm_forward(x, residual, weight, bias, eps, out_dtype)


def _add_fake(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    out_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = x.new_empty(torch.broadcast_shapes(x.shape, residual.shape), dtype=torch.result_type(x, residual))
    y, mean, rstd = _fake(h, weight, bias, eps, out_dtype)
    return y, h, mean, rstd


def _add_save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, residual, weight, bias, *_ = inputs
    _, h, mean, rstd = output
    ctx.summands = [(x.shape, x.dtype), (residual.shape, residual.dtype)]
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(mean, rstd)
    ctx.save_for_backward(h, weight, bias, mean, rstd)


def _add_backward(ctx: Any, dy: Tensor | None, dh: Tensor | None, *_: Any) -> tuple[Any, ...]:
    need, need_parameters = ctx.needs_input_grad[:2], ctx.needs_input_grad[2:4]
    if dy is None:
        dx, dresidual = split_sum_gradient(dh, ctx.summands, need)
        return dx, dresidual, None, None, None, None
    h, weight, bias, mean, rstd = ctx.saved_tensors
    (dx, dresidual), dweight, dbias = layer_norm_backward(
        dy, h, mean, rstd, weight, bias, dh, ctx.summands, need, need_parameters
    )
    return dx, dresidual, dweight, dbias, None, None


operator(
    "layer_norm",
    "(Tensor x, Tensor? weight, Tensor? bias, float eps, ScalarType? out_dtype=None) "
    "-> (Tensor y, Tensor mean, Tensor rstd)",
    forward=_forward,
    fake=_fake,
    save=_save,
    backward=_backward,
)
operator(
    "add_layer_norm",
    "(Tensor x, Tensor residual, Tensor? weight, Tensor? bias, float eps, ScalarType? out_dtype=None) "
    "-> (Tensor y, Tensor h, Tensor mean, Tensor rstd)",
    forward=_add_forward,
    fake=_add_fake,
    save=_add_save,
    backward=_add_backward,
)

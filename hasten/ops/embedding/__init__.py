"""Embedding lookup with an exact dense gradient of the weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops import native
from hasten.ops.registry import operator

__all__ = ["embedding"]


def embedding(ids: Tensor, weight: Tensor, padding_idx: int = -1, scale: float = 1.0) -> Tensor:
    """weight[ids] * scale.

    Args:
        ids: int32 or int64, any shape [...], values in [0, V).
        weight: [V, H], floating.
        padding_idx: this row gets no gradient; negative is none.
        scale: multiplies the rows (Gemma: sqrt(H)); the product is rounded once to weight.dtype.

    Returns:
        [..., H] in weight.dtype. The gradient of the weight is dense [V, H], summed in float32 (float64 for
        float64) over repeated ids, and rounded once. Saved for it: ids.

    Raises:
        ShapeError: ids are not integers or the weight is not a floating matrix.
        IndexError: an id is outside [0, V) (from torch).
    """
    return torch.ops.hasten.embedding(ids, weight, padding_idx, scale)  # type: ignore[no-any-return]


def _forward(ids: Tensor, weight: Tensor, padding_idx: int = -1, scale: float = 1.0) -> Tensor:
    if weight.dim() != 2 or not weight.is_floating_point() or ids.dtype not in (torch.int32, torch.int64):
        raise ShapeError(
            "embedding takes int32 or int64 ids [...] and a floating weight [V, H]; "
            f"got {ids.dtype} {tuple(ids.shape)} and {weight.dtype} {tuple(weight.shape)}"
        )
    rows = torch.embedding(weight, ids)
    return rows if scale == 1.0 else rows.mul_(scale)


def _fake(ids: Tensor, weight: Tensor, padding_idx: int = -1, scale: float = 1.0) -> Tensor:
    return weight.new_empty((*ids.shape, weight.shape[1]))


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    ids, weight, padding_idx, scale = inputs
    ctx.save_for_backward(ids)
    ctx.rows, ctx.dtype, ctx.padding_idx, ctx.scale = weight.shape[0], weight.dtype, padding_idx, scale


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    (ids,) = ctx.saved_tensors
    dweight = torch.ops.hasten.embedding_backward(grad, ids, ctx.rows, ctx.dtype, ctx.padding_idx, ctx.scale)
    return None, dweight, None, None


def _backward_forward(
    grad: Tensor, ids: Tensor, rows: int, dtype: torch.dtype, padding_idx: int, scale: float
) -> Tensor:
    grad_TH = grad.reshape(ids.numel(), grad.shape[-1])
    flat = ids.reshape(-1).to(torch.int64)
    if dtype in native.DTYPES and not native.refusal(grad):
        return torch.ops.hasten_cpu.embedding_backward(grad_TH, flat, rows, dtype, padding_idx, scale)
    wide = torch.promote_types(grad.dtype, torch.float32)
    grad_TH = grad_TH.to(wide)
    if scale != 1.0:
        grad_TH = grad_TH * scale
    if dtype == wide:
        return torch.ops.aten.embedding_dense_backward(grad_TH, flat, rows, padding_idx, False)
    # A narrow gradient is summed over the distinct ids alone: a wide [V, H] would be most of the work.
    distinct, place = torch.unique(flat, return_inverse=True)
    summed = torch.ops.aten.embedding_dense_backward(grad_TH, place, distinct.numel(), -1, False)
    dweight = torch.zeros(rows, grad.shape[-1], dtype=dtype, device=grad.device)
    dweight[distinct] = summed.to(dtype)
    if padding_idx >= 0:
        dweight[padding_idx] = 0
    return dweight


def _backward_fake(
    grad: Tensor, ids: Tensor, rows: int, dtype: torch.dtype, padding_idx: int, scale: float
) -> Tensor:
    return grad.new_empty((rows, grad.shape[-1]), dtype=dtype)


operator(
    "embedding",
    "(Tensor ids, Tensor weight, int padding_idx=-1, float scale=1.0) -> Tensor",
    forward=_forward,
    fake=_fake,
    save=_save,
    backward=_backward,
)
operator(
    "embedding_backward",
    "(Tensor grad, Tensor ids, SymInt rows, ScalarType dtype, int padding_idx, float scale) -> Tensor",
    forward=_backward_forward,
    fake=_backward_fake,
)

"""AdamW: one step of decoupled weight decay on lists of tensors, and the optimizer around it."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops import native, shadow
from hasten.ops.adamw.reference import adamw
from hasten.ops.registry import operator

__all__ = ["adamw_", "total_norm"]

PIECE = 2**20
"""Elements whose scaled gradient is held at once: 4 MB stay in cache between the scaling and the update."""


def adamw_(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> None:
    """One AdamW step in place (Loshchilov & Hutter 2019); the gradients are left as they are.

        g = grad * grad_scale;  m = beta1 m + (1 - beta1) g;  v = beta2 v + (1 - beta2) g^2;  t = step + 1
        param = param (1 - lr weight_decay) - lr m / (1 - beta1^t) / (sqrt(v / (1 - beta2^t)) + eps)

    Args:
        params: any shapes; narrower ones than float32 are updated in float32, then rounded.
        grads: as the params, in shape and number; any floating dtype.
        exp_avg, exp_avg_sq: m and v, float32 (float64 for float64 params).
        steps: one float32 scalar for each param, the steps done so far; each is raised by one.
        grad_scale: e.g. the clipping factor.

    Raises:
        ShapeError: the lists differ in length, or a param from its gradient or state in shape.
    """
    with torch.no_grad():
        torch.ops.hasten.adamw_(
            params, grads, exp_avg, exp_avg_sq, steps, lr, beta1, beta2, eps, weight_decay, grad_scale
        )


def _forward(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    steps: list[Tensor],
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> None:
    _check(params, grads, exp_avg, exp_avg_sq, steps)
    # Below autograd a change in place is not counted, and a graph that saved a parameter would not notice it.
    changed = [t for t in (*params, *exp_avg, *exp_avg_sq, *steps) if not t.is_inference()]
    torch.autograd.graph.increment_version(changed)
    fused: tuple[list[Tensor], ...] = ([], [], [], [], [])
    kernel: tuple[list[Tensor], ...] = ([], [], [], [], [])
    for row in zip(params, grads, exp_avg, exp_avg_sq, steps, strict=True):
        if _one_layout(row) and not native.refusal(*row):
            for column, tensor in zip(kernel, row, strict=True):
                column.append(tensor)
            continue
        same = len({t.dtype for t in row[:4]}) == 1 and row[0].dtype in (torch.float32, torch.float64)
        flat = all(t.is_contiguous() for t in row[:4])
        if same and (flat or grad_scale == 1.0) and row[0].numel():
            for column, tensor in zip(fused, row, strict=True):
                column.append(tensor)
        else:
            new = adamw(*row, lr, beta1, beta2, eps, weight_decay, grad_scale)
            for tensor, value in zip((row[0], row[2], row[3], row[4]), new, strict=True):
                tensor.copy_(value)
    if kernel[0]:
        with shadow.rewritten(kernel[0]) as shadows:
            torch.ops.hasten_cpu.adamw_(*kernel, shadows, lr, beta1, beta2, eps, weight_decay, grad_scale)
    if not fused[0]:
        return
    torch._foreach_add_(fused[4], 1)
    pieces = (fused,) if grad_scale == 1.0 else _scaled_pieces(fused, grad_scale)
    with shadow.rewritten(fused[0]) as shadows:
        for p, g, m, v, t in pieces:
            torch._fused_adamw_(
                p, g, m, v, [], t, lr=lr, beta1=beta1, beta2=beta2, weight_decay=weight_decay, eps=eps,
                amsgrad=False, maximize=False,
            )  # fmt: skip
        for param, copy in zip(fused[0], shadows, strict=True):
            if copy.numel():
                copy.copy_(param)


def _one_layout(row: tuple[Tensor, ...]) -> bool:
    """Whether the kernel can walk param, grad and float32 moments as flat arrays."""
    first, *others = row[:4]
    if not all(t.dtype == torch.float32 for t in row[2:]):
        return False
    if all(t.is_contiguous() for t in row[:4]):
        return True
    return _is_dense(first) and all(t.stride() == first.stride() for t in others)


def _is_dense(tensor: Tensor) -> bool:
    """Whether the elements fill one block of memory, in whatever order of dimensions."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    return tensor.permute(order).is_contiguous()


def total_norm(grads: list[Tensor]) -> Tensor:
    """The 2-norm of all elements of all gradients together: a scalar in float32 (float64 for float64).

    One pass over memory; squares are summed in float32 over fixed pieces and in double over all of them, so
    that the number of threads does not matter. As `torch.nn.utils.get_total_norm`, which runs where the
    kernel cannot.
    """
    if grads and not native.refusal(*grads) and all(_is_dense(g) for g in grads):
        return torch.tensor(math.sqrt(torch.ops.hasten_cpu.sum_of_squares(grads)))
    return torch.nn.utils.get_total_norm(grads)


def _scaled_pieces(rows: tuple[list[Tensor], ...], scale: float) -> Iterator[tuple[list[Tensor], ...]]:
    """Pieces of the tensors whose scaled gradients share one buffer: the gradients themselves stay."""
    buffers = {g.dtype: torch.empty(PIECE, dtype=g.dtype, device=g.device) for g in rows[1]}
    for p, g, m, v, t in zip(*rows, strict=True):
        flat = [x.view(-1) for x in (p, g, m, v)]
        for first in range(0, p.numel(), PIECE):
            part = [x[first : first + PIECE] for x in flat]
            scaled = torch.mul(part[1], scale, out=buffers[g.dtype][: part[1].numel()])
            yield [part[0]], [scaled], [part[2]], [part[3]], [t]


def _check(
    params: list[Tensor],
    grads: list[Tensor],
    exp_avg: list[Tensor],
    exp_avg_sq: list[Tensor],
    steps: list[Tensor],
) -> None:
    lengths = [len(x) for x in (params, grads, exp_avg, exp_avg_sq, steps)]
    if len(set(lengths)) != 1:
        raise ShapeError(f"params, grads, exp_avg, exp_avg_sq and steps must be equally many; got {lengths}")
    for index, row in enumerate(zip(params, grads, exp_avg, exp_avg_sq, strict=True)):
        shapes = [tuple(t.shape) for t in row]
        if len(set(shapes)) != 1:
            raise ShapeError(
                f"param {index} and its gradient, exp_avg and exp_avg_sq differ in shape: {shapes}"
            )


def _fake(*arguments: object, **_: object) -> None:
    return None


operator(
    "adamw_",
    "(Tensor(a!)[] params, Tensor[] grads, Tensor(b!)[] exp_avg, Tensor(c!)[] exp_avg_sq, "
    "Tensor(d!)[] steps, float lr, float beta1, float beta2, float eps, float weight_decay, "
    "float grad_scale=1.0) -> ()",
    forward=_forward,
    fake=_fake,
)

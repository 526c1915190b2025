"""The native kernels of both norms (`cpu_forward.cpp`, `cpu_backward.cpp`): float32, bfloat16, float16."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.ops import native

Summands = Sequence[tuple[Any, torch.dtype]]
"""(shape, dtype) of what was added to make the norm's input: one entry, or two with a residual."""


def refusal(x: Tensor, *tensors: Tensor | None, dtypes: Sequence[torch.dtype | None] = ()) -> str:
    """Why the kernel cannot run on x [..., K] with these tensors and result types; empty if it can."""
    if x.numel() == 0:
        return "no elements"
    for dtype in dtypes:
        if dtype is not None and dtype not in native.DTYPES:
            return f"no kernel for {dtype}"
    return native.refusal(x, *tensors)


def forward(
    x: Tensor,
    residual: Tensor | None,
    multiplier: Tensor | None,
    bias: Tensor | None,
    eps: float,
    *,
    layer: bool,
    inner: torch.dtype,
    middle: torch.dtype,
    out: torch.dtype,
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(y, h, statistics): y = n * multiplier + bias with n the normalised h = x (+ residual).

    Args:
        x: [..., K]. residual: the same shape, or None; h has the promoted dtype.
        multiplier, bias: [K] or None, used in float32.
        layer: subtract the mean; the statistics, [..., 1] float32, are then mean and 1 / std, else 1 / rms.
        inner, middle, out: n is rounded to `inner`, the result to `middle` and then to `out`.
    """
    y, *rest = torch.ops.hasten_cpu.norm(
        x, residual, multiplier, bias, None, None, eps, layer, inner, middle, out
    )
    return y, x if residual is None else rest.pop(0), rest


def rebuild(
    h: Tensor,
    multiplier: Tensor | None,
    bias: Tensor | None,
    statistics: Sequence[Tensor],
    *,
    inner: torch.dtype,
    middle: torch.dtype,
    out: torch.dtype,
) -> Tensor:
    """y of `forward` from h and its statistics."""
    layer, mean = len(statistics) == 2, statistics[0]
    arguments = (mean if layer else None, statistics[-1], 0.0, layer, inner, middle, out)
    y: Tensor = torch.ops.hasten_cpu.norm(h, None, multiplier, bias, *arguments)[0]
    return y


def backward(
    dy: Tensor,
    h: Tensor,
    statistics: Sequence[Tensor],
    multiplier: Tensor | None,
    dh: Tensor | None,
    summands: Summands,
    need: Sequence[bool],
    need_sums: bool,
) -> tuple[list[Tensor | None], list[Tensor]]:
    """(gradient of each summand, float32 sums over rows [K]: of dy * n and, with a mean, of dy).

    Args:
        dy, h, dh: [..., K], dh the gradient of h that is already there, or None.
        need: which summands get a gradient. Those of one dtype share one tensor.
        need_sums: False leaves the list of sums empty.
    """
    wanted = [summand for summand, needed in zip(summands, need, strict=True) if needed]
    whole = all(torch.Size(shape) == h.shape for shape, _ in wanted)
    dtypes = list(dict.fromkeys(dtype for _, dtype in wanted)) if whole else [torch.float32]
    first, second = [*dtypes, None, None][:2] if wanted else (None, None)
    mean = statistics[0] if len(statistics) == 2 else None
    results = torch.ops.hasten_cpu.norm_backward(
        dy, h, mean, statistics[-1], multiplier, dh, first, second, need_sums
    )
    if not wanted:
        return [None for _ in summands], results
    made = dict(zip(dtypes, results, strict=False))
    gradients: list[Tensor | None] = []
    for (shape, dtype), needed in zip(summands, need, strict=True):
        if not needed:
            gradients.append(None)
        elif whole:
            gradients.append(made[dtype])
        else:
            gradients.append(made[torch.float32].sum_to_size(shape).to(dtype))
    return gradients, results[len(dtypes) :]

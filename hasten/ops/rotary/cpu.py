"""The native kernel of rotary position embedding (`cpu.cpp`)."""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.ops import native


def refusal(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> str:
    """Why the kernel cannot run; empty if it can."""
    if x.numel() == 0 or cos.numel() == 0:
        return "no elements"
    return native.refusal(x, cos, sin, out)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool, out: Tensor) -> Tensor:
    """As `reference.rotate`: writes the rotation of x [B, H, S, D], or its transpose, into `out`."""
    torch.ops.hasten_cpu.rotary(x, cos, sin, interleaved, transposed, out)
    return out

"""The native kernels of the activations (`cpu_plain.cpp`, `cpu_gated.cpp`), for tensors of one dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.ops import native

CODES = {
    kind: code
    for code, kind in enumerate(
        ("silu", "gelu", "gelu_tanh", "gelu_quick", "relu", "relu2", "sigmoid", "tanh")
    )
}


def refusal(kind: str, x: Tensor, *others: Tensor) -> str:
    """Why the kernel cannot run; empty if it can."""
    if kind not in CODES:
        return f"{kind} has no kernel"
    if x.numel() == 0:
        return "no elements"
    if any(other.shape != x.shape or other.dtype != x.dtype for other in others):
        return "tensors of different shapes or dtypes"
    return native.refusal(x, *others)


def forward(x: Tensor, up: Tensor | None, kind: str, own: bool = False) -> Tensor:
    """kind(x) [* up], contiguous; with `own` it is written over x if x is contiguous."""
    y: Tensor = torch.ops.hasten_cpu.activation(x, up, CODES[kind], own)
    return y


def backward(dy: Tensor, x: Tensor, kind: str, own: bool = False) -> Tensor:
    """dx, contiguous; with `own` it is written over dy if dy is contiguous."""
    dx: Tensor = torch.ops.hasten_cpu.activation_backward(dy, x, None, CODES[kind], False, own)[0]
    return dx


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, kind: str, rebuild: bool, own: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dgate, dup, kind(gate) * up if `rebuild`) in one pass; with `own` dup is written over dy."""
    dgate, dup, *product = torch.ops.hasten_cpu.activation_backward(dy, gate, up, CODES[kind], rebuild, own)
    return dgate, dup, product[0] if product else None

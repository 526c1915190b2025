"""What `hasten calibrate` measures of the kernels that a training step runs: attention, elementwise
operators, the optimizer.

On a processor these are hasten's own, which `hasten train` runs; elsewhere torch's. Imports torch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from hasten.plan.measure import timed


class Attention(NamedTuple):
    """Causal attention at one head size; FLOPs of the pairs that are seen (half the square), five
    products backward where there are two forward."""

    dtype: str
    head_size: int
    sequence: int
    forward_flops_per_s: float
    backward_flops_per_s: float


def attention(
    dtype: str,
    device: str = "cpu",
    sequence: int = 1024,
    heads: int = 8,
    head_sizes: Sequence[int] = (64, 128),
) -> list[Attention]:
    """Forward and backward of causal attention, for each head size."""
    found = []
    for head_size in head_sizes:
        shape = (1, heads, sequence, head_size)
        q, k, v = (
            torch.randn(shape, device=device).to(getattr(torch, dtype)).requires_grad_() for _ in range(3)
        )
        forward = _attention(q, k, v)
        flops = 2.0 * heads * sequence * sequence * head_size
        forward_s = timed(forward, device)
        out = forward()
        gradient = torch.ones_like(out)

        def backward(
            out: Tensor = out, inputs: tuple[Tensor, ...] = (q, k, v), g: Tensor = gradient
        ) -> object:
            return torch.autograd.grad(out, inputs, g, retain_graph=True)

        found.append(
            Attention(dtype, head_size, sequence, flops / forward_s, 2.5 * flops / timed(backward, device))
        )
    return found


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Callable[[], Tensor]:
    if q.device.type != "cpu":
        return lambda: torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    from hasten.ops.attention import attention as ours

    return lambda: ours(q, k, v, causal=True)[0]


def elementwise_bandwidth(dtype: str, device: str = "cpu", rows: int = 2048, columns: int = 2048) -> float:
    """Bytes/s, read and written, of silu(gate) * up: what norms, residuals, rotations and activations reach.

    On a processor arithmetic and not memory bounds it.
    """
    gate, up = (torch.randn(rows, columns, device=device).to(getattr(torch, dtype)) for _ in range(2))
    if device == "cpu":
        from hasten.ops.activation import gated_activation

        seconds = timed(lambda: gated_activation(gate, up, "silu"), device)
        return 3 * gate.numel() * gate.element_size() / seconds
    # Two kernels: silu reads and writes, the product reads two and writes one.
    seconds = timed(lambda: torch.nn.functional.silu(gate) * up, device)
    return 5 * gate.numel() * gate.element_size() / seconds


def optimizer_seconds(device: str = "cpu", parameters: int = 1 << 25) -> float:
    """Seconds for each parameter of the gradients' norm and one AdamW step over fp32 weights and states."""
    weights = [torch.zeros(parameters // 8, device=device, requires_grad=True) for _ in range(8)]
    for weight in weights:
        weight.grad = torch.full_like(weight, 1e-3)
    if device == "cpu":
        from hasten.ops.adamw import total_norm
        from hasten.ops.adamw.optimizer import AdamW

        ours = AdamW(weights, lr=1e-6, max_grad_norm=1.0)

        def step() -> None:
            total_norm([weight.grad for weight in weights if weight.grad is not None])
            ours.step()
    else:
        theirs = torch.optim.AdamW(weights, lr=1e-6, fused=True)

        def step() -> None:
            torch.nn.utils.clip_grad_norm_(weights, 1.0)
            theirs.step()

    return timed(step, device) / (parameters // 8 * 8)

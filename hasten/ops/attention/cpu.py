"""The native kernels of attention (`cpu_forward.cpp`, `cpu_backward.cpp`).

They assume finite keys and values (and queries and output gradients in the backward pass), since a
probability of zero times infinity is no zero. They look, and answer None where they find another value; the
torch body, which keeps NaN to the rows that see it, then does the work.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.ops import native
from hasten.ops.attention.blocked import Options


def refusal(q: Tensor, bias_grad: bool = False) -> str:
    """Why the kernel cannot run; empty if it can."""
    if bias_grad:
        return "the bias gets a gradient"
    return native.refusal(q)


def _arguments(options: Options) -> tuple[object, ...]:
    bias = options.bias
    if bias is not None and bias.dtype == torch.bool:
        bias = torch.zeros(bias.shape, dtype=torch.float32).masked_fill_(bias.logical_not(), float("-inf"))
    return (
        options.ranges,
        bias,
        options.sinks,
        options.alibi,
        options.scale,
        options.causal,
        options.window,
        options.softcap,
    )


def forward(q: Tensor, k: Tensor, v: Tensor, options: Options) -> tuple[Tensor, Tensor] | None:
    """out [B, Sq, Hq, Dv] in q.dtype and lse [B, Hq, Sq] in float32; None if k or v is not finite."""
    out, lse, finite = torch.ops.hasten_cpu.attention(q, k, v, *_arguments(options))
    return (out, lse) if finite else None


def backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor, Tensor] | None:
    """dq, dk, dv, dsinks [Hq] (empty without sinks); None if an operand is not finite or |lse| is huge."""
    dq, dk, dv, delta_BHS, finite = torch.ops.hasten_cpu.attention_backward(
        grad, q, k, v, out, lse, *_arguments(options)
    )
    if not finite:
        return None
    dsinks = lse.new_empty(0)
    if options.sinks is not None:
        share_BHS = torch.exp(options.sinks.to(lse.dtype)[None, :, None] - lse)
        dsinks = -(share_BHS * delta_BHS).sum((0, 2))
    return dq, dk, dv, dsinks

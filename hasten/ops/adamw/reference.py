"""The meaning of AdamW (Loshchilov & Hutter 2019, Decoupled Weight Decay Regularization, algorithm 2)."""

from __future__ import annotations

from torch import Tensor


def adamw(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    step: Tensor,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    weight_decay: float,
    grad_scale: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The next (param, exp_avg, exp_avg_sq, step) of one parameter; nothing is changed in place."""
    g = grad.to(exp_avg.dtype) * grad_scale
    t = float(step) + 1
    m = beta1 * exp_avg + (1 - beta1) * g
    v = beta2 * exp_avg_sq + (1 - beta2) * g * g
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    decayed = param.to(m.dtype) * (1 - lr * weight_decay)
    return (decayed - lr * m_hat / (v_hat.sqrt() + eps)).to(param.dtype), m, v, step + 1

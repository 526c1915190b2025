"""What a norm followed by projections means, in plain torch that autograd can follow."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from hasten.ops.layer_norm.reference import layer_norm
from hasten.ops.linear.reference import linear_group
from hasten.ops.rms_norm.reference import rms_norm


def norm_linear(
    x: Tensor,
    residual: Tensor | None,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    compute: torch.dtype | None = None,
) -> list[Tensor]:
    """h = x (+ residual); [h if there is a residual] + [norm(h) W_i^T + b_i]."""
    h = x if residual is None else x + residual
    if norm == "rms":
        n = rms_norm(h, norm_weight, eps, offset, round_first)
    else:
        n = layer_norm(h, norm_weight, norm_bias, eps)
    return ([] if residual is None else [h]) + linear_group(n, weights, biases, compute)

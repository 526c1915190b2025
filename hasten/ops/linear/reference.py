"""What the linear operators mean, in plain torch that autograd can follow."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops.activation.reference import KINDS


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kind: str = "identity",
    compute: torch.dtype | None = None,
) -> Tensor:
    """kind(x W^T + b) in the dtype `compute`: x [..., K], W [M, K], b [M] -> [..., M]."""
    dtype = x.dtype if compute is None else compute
    bias = None if bias is None else bias.to(dtype)
    return KINDS[kind](F.linear(x.to(dtype), weight.to(dtype), bias))


def linear_group(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None], compute: torch.dtype | None = None
) -> list[Tensor]:
    """[x W_i^T + b_i]: several projections of one input; where biases end or are None, there is none."""
    return [linear(x, weight, bias, "identity", compute) for weight, bias in zip_longest(weights, biases)]


def activation_linear(
    x: Tensor,
    up: Tensor | None,
    kind: str,
    weight: Tensor,
    bias: Tensor | None = None,
    compute: torch.dtype | None = None,
) -> Tensor:
    """(kind(x) [* up]) W^T + b."""
    product = KINDS[kind](x) if up is None else KINDS[kind](x) * up
    return linear(product, weight, bias, "identity", compute)

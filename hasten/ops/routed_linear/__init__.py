"""Linear layers of which each row uses some: the experts behind a router. By name, so that a graph that holds
it tells which weights belong together; it has no gradient and no kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.ops.registry import operator
from hasten.ops.routed_linear import reference

__all__ = ["routed_linear"]


def routed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool = False
) -> Tensor:
    """out[t, s] = weight[e] x[t, s] + bias[e] with e = experts[t, s].

    Args:
        x: [T, S, K], or [T, 1, K] where all slots of a row see the same.
        weight: [E, N, K]; [E, K, N] if `transposed`.
        bias: [E, N] or None.
        experts: integers [T, S] from 0 to E - 1.

    Returns:
        [T, S, N] in x.dtype.

    Raises:
        ShapeError: shapes do not fit together.
    """
    return torch.ops.hasten.routed_linear(x, weight, bias, experts, transposed)  # type: ignore[no-any-return]


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool = False
) -> Tensor:
    return x.new_empty(*experts.shape, reference.columns(x, weight, bias, experts, transposed))


operator(
    "routed_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor experts, bool transposed=False) -> Tensor",
    forward=reference.routed_linear,
    fake=_fake,
)

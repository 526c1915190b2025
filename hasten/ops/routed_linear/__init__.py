"""Linear layers of which each row uses some: the experts behind a router. By name, so that a graph that holds
it tells which weights belong together; it has no gradient and no kernel of its own."""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops.registry import operator

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


def _sizes(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> int:
    """N, after a look at the shapes."""
    K, N = weight.shape[1:] if transposed else reversed(weight.shape[1:])
    fits = x.dim() == 3 and experts.dim() == 2 and x.shape[0] == experts.shape[0] and x.shape[2] == K
    if not fits or x.shape[1] not in (1, experts.shape[1]):
        raise ShapeError(
            f"routed_linear takes x [T, S or 1, {K}] and experts [T, S] for weights {tuple(weight.shape)}; "
            f"got {tuple(x.shape)} and {tuple(experts.shape)}"
        )
    if bias is not None and tuple(bias.shape) != (weight.shape[0], N):
        raise ShapeError(f"bias must be [{weight.shape[0]}, {N}]; got {tuple(bias.shape)}")
    return int(N)


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool = False
) -> Tensor:
    N = _sizes(x, weight, bias, experts, transposed)
    x = x.expand(-1, experts.shape[1], -1)
    out = x.new_zeros(*experts.shape, N)
    for e in experts.unique().tolist():
        chosen = experts == e
        y = x[chosen] @ (weight[e] if transposed else weight[e].t())
        out[chosen] = y if bias is None else y + bias[e]
    return out


def _fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool = False
) -> Tensor:
    return x.new_empty(*experts.shape, _sizes(x, weight, bias, experts, transposed))


operator(
    "routed_linear",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor experts, bool transposed=False) -> Tensor",
    forward=_forward,
    fake=_fake,
)

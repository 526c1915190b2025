"""The meaning in plain torch, which can be differentiated: one product for each expert that is chosen."""

from __future__ import annotations

from torch import Tensor

from hasten.base.errors import ShapeError


def columns(x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool) -> int:
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


def routed_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, experts: Tensor, transposed: bool = False
) -> Tensor:
    """[T, S, N]; the arguments are those of the operator."""
    N = columns(x, weight, bias, experts, transposed)
    x = x.expand(-1, experts.shape[1], -1)
    out = x.new_zeros(*experts.shape, N)
    for e in experts.unique().tolist():
        chosen = experts == e
        y = x[chosen] @ (weight[e] if transposed else weight[e].t())
        out[chosen] = y if bias is None else y + bias[e]
    return out

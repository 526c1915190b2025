"""Linear layers: one, several of one input, and one after an activation.

`compute` is the dtype of the product; None is the dtype of x. Inside `torch.autocast` it is autocast's dtype.
Weights may have any dtype: they are cast for the product, and their gradients come back in their own dtype.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops import packed, shadow
from hasten.ops.activation import check_gate
from hasten.ops.activation.kernel import activate, activation_backward, check_kind, gated, gated_backward
from hasten.ops.linear.kernel import bias_gradient, input_gradient, product, products, weight_gradient
from hasten.ops.registry import cast, operator

__all__ = ["activation_linear", "linear", "linear_group"]


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    kind: str = "identity",
    compute: torch.dtype | None = None,
) -> Tensor:
    """kind(x W^T + b).

    Args:
        x: [..., K]. weight: [M, K]. bias: [M] or None.
        kind: an activation of `hasten.ops.activation`.
        compute: dtype of the product and of the result; None is the dtype of x.

    Returns:
        [..., M].

    Raises:
        ShapeError: sizes do not fit.
        ConfigError: the kind does not exist.
    """
    check_kind(kind)
    check_projections("linear", x, [weight], [] if bias is None else [bias])
    return torch.ops.hasten.linear(x, weight, bias, kind, compute)


def linear_group(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    *,
    compute: torch.dtype | None = None,
) -> list[Tensor]:
    """[x W_i^T + b_i] for several projections of one input, e.g. query, key and value, or gate and up.

    Args:
        x: [..., K]. weights: each [M_i, K]. biases: none, or one [M_i] or None for each weight.
        compute: dtype of the products and of the results; None is the dtype of x.

    Returns:
        One [..., M_i] for each weight.

    Raises:
        ShapeError: sizes do not fit, or there are neither zero nor as many biases as weights.
    """
    check_projections("linear_group", x, weights, biases)
    order = biased_first(weights, biases)
    outputs = torch.ops.hasten.linear_group(x, *in_order(weights, biases, order), compute)
    return [outputs[order.index(i)] for i in range(len(order))]


def activation_linear(
    x: Tensor,
    up: Tensor | None,
    kind: str,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    compute: torch.dtype | None = None,
) -> Tensor:
    """(kind(x) [* up]) W^T + b: the second half of an MLP. kind(x) and the product with up are not stored.

    Args:
        x: [..., K]. up: [..., K] or None. weight: [M, K]. bias: [M] or None.
        kind: an activation of `hasten.ops.activation`.
        compute: dtype of the product and of the result; None is the dtype of x.

    Returns:
        [..., M].

    Raises:
        ShapeError: sizes do not fit.
        ConfigError: the kind does not exist.
    """
    check_kind(kind)
    if up is not None:
        check_gate("activation_linear", x, up)
    check_projections("activation_linear", x, [weight], [] if bias is None else [bias])
    return torch.ops.hasten.activation_linear(x, up, kind, weight, bias, compute)


def biased_first(weights: Sequence[Tensor], biases: Sequence[Tensor | None]) -> list[int]:
    """Indices of the weights, those with a bias first: the order in which the operators take them.

    A list of tensors in a schema has no holes that autograd could follow, so a missing bias stands behind the
    others, where it needs no place.
    """
    return sorted(range(len(weights)), key=lambda i: not biases or biases[i] is None)


def in_order(
    weights: Sequence[Tensor], biases: Sequence[Tensor | None], order: Sequence[int]
) -> tuple[list[Tensor], list[Tensor]]:
    """Weights in the order of `biased_first`, and the biases that exist."""
    present = [bias for i in order if biases and (bias := biases[i]) is not None]
    return [weights[i] for i in order], present


def check_projections(
    name: str, x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> None:
    """Sizes of projections of one input.

    Raises:
        ShapeError: a weight is not [M, K], a bias is not [M], or their number differs.
    """
    if x.dim() == 0 or not x.is_floating_point():
        raise ShapeError(f"{name}: x is {x.dtype} {list(x.shape)}; needs a floating tensor [..., K]")
    if len(biases) not in (0, len(weights)):
        raise ShapeError(
            f"{name}: {len(biases)} biases for {len(weights)} weights; give none, or one or None for each"
        )
    for index, weight in enumerate(weights):
        if weight.dim() != 2 or weight.shape[1] != x.shape[-1]:
            raise ShapeError(f"{name}: weight {list(weight.shape)} needs [M, {x.shape[-1]}], x's last size")
        bias = biases[index] if biases else None
        if bias is not None and bias.shape != (weight.shape[0],):
            raise ShapeError(f"{name}: bias {list(bias.shape)} needs [{weight.shape[0]}]")


def resolve(x: Tensor, compute: torch.dtype | None) -> torch.dtype:
    """The dtype of the product."""
    return x.dtype if compute is None else compute


def autocast_compute(dtype: torch.dtype, x: Tensor, compute: torch.dtype | None) -> torch.dtype | None:
    """`compute` inside autocast: autocast's dtype, but float64 stays float64, as in torch."""
    return compute if x.dtype == torch.float64 else dtype


def needs(ctx: Any, count: int) -> tuple[Any, ...]:
    """`ctx.needs_input_grad` of the first `count` arguments; torch drops trailing ones that are defaults."""
    given = tuple(ctx.needs_input_grad[:count])
    return given + (False,) * (count - len(given))


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kind: str = "identity",
    compute: torch.dtype | None = None,
) -> Tensor:
    if (done := packed.product(x, weight, bias, kind, resolve(x, compute))) is not None:
        return done
    return activate(product(x, weight, bias, resolve(x, compute)), kind, own_x=True)


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kind: str = "identity",
    compute: torch.dtype | None = None,
) -> Tensor:
    check_kind(kind)
    return x.new_empty([*x.shape[:-1], weight.shape[0]], dtype=resolve(x, compute))


def _pair_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, compute: torch.dtype | None
) -> list[Tensor]:
    z = product(x, weight, bias, resolve(x, compute))
    return [z] if kind == "identity" else [activate(z, kind), z]


def _pair_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, kind: str, compute: torch.dtype | None
) -> list[Tensor]:
    count = 1 if kind == "identity" else 2
    return [_fake(x, weight, bias, kind, compute) for _ in range(count)]


def _pair_save(ctx: Any, inputs: Sequence[Any], output: list[Tensor]) -> None:
    x, weight, bias, ctx.kind, compute = inputs
    ctx.x_shape, ctx.x_dtype, ctx.compute = x.shape, x.dtype, resolve(x, compute)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    need_weight = ctx.needs_input_grad[1]
    copies = shadow.claim([weight], ctx.compute) if ctx.needs_input_grad[0] else [None]
    kept = _kept_input(x, ctx.compute) if need_weight else None
    ctx.save_for_backward(kept, weight, bias, *copies, *output[1:])


def _pair_backward(ctx: Any, dys: list[Tensor | None]) -> tuple[Any, ...]:
    dy = dys[0]
    if dy is None:
        return (None,) * 5
    x, weight, bias, copy, *preactivation = ctx.saved_tensors
    if preactivation:
        dy = activation_backward(dy, preactivation[0], ctx.kind)
    need_x, need_weight, need_bias = ctx.needs_input_grad[:3]
    dx = dweight = dbias = None
    if need_x:
        rows = input_gradient([dy], shadow.saved([weight], [copy]), ctx.compute)
        dx = None if rows is None else rows.view(ctx.x_shape).to(ctx.x_dtype)
    if need_weight:
        dweight = weight_gradient(dy, x.reshape(-1, x.shape[-1]), weight)
    if need_bias:
        dbias = bias_gradient(dy, bias)
    return dx, dweight, dbias, None, None


def _kept_input(x: Tensor, compute: torch.dtype) -> Tensor:
    # Below autograd torch refuses a cast that returns its input.
    return x if x.dtype == compute else x.to(compute)


def _linear_autograd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kind: str = "identity",
    compute: torch.dtype | None = None,
) -> Tensor:
    if torch.is_grad_enabled() and torch._C._any_requires_grad(x, weight, bias):
        return torch.ops.hasten.linear_and_preactivation(x, weight, bias, kind, compute)[0]
    with torch._C._AutoDispatchBelowAutograd():
        return torch.ops.hasten.linear(x, weight, bias, kind, compute)


def _autocast(
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    kind: str = "identity",
    compute: torch.dtype | None = None,
) -> tuple[Any, ...]:
    return cast(x, dtype), weight, bias, kind, autocast_compute(dtype, x, compute)


def _group_forward(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], compute: torch.dtype | None = None
) -> list[Tensor]:
    return products(x, weights, biases, resolve(x, compute))


def _group_fake(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], compute: torch.dtype | None = None
) -> list[Tensor]:
    return [_fake(x, weight, None, "identity", compute) for weight in weights]


def _group_save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, weights, biases, compute = inputs
    ctx.x_shape, ctx.x_dtype, ctx.compute, ctx.count = x.shape, x.dtype, resolve(x, compute), len(weights)
    ctx.set_materialize_grads(False)
    need_weights = any(ctx.needs_input_grad[1 : 1 + len(weights)])
    copies = shadow.claim(weights, ctx.compute) if ctx.needs_input_grad[0] else [None] * len(weights)
    kept = _kept_input(x, ctx.compute) if need_weights else None
    ctx.save_for_backward(kept, *copies, *weights, *biases)


def _group_backward(ctx: Any, dys: list[Tensor | None]) -> tuple[Any, ...]:
    x, *rest = ctx.saved_tensors
    copies, weights, biases = rest[: ctx.count], rest[ctx.count : 2 * ctx.count], rest[2 * ctx.count :]
    need_x, need_weights, need_biases = ctx.needs_input_grad[:3]
    dx = None
    if need_x:
        rows = input_gradient(dys, shadow.saved(weights, copies), ctx.compute)
        dx = None if rows is None else rows.view(ctx.x_shape).to(ctx.x_dtype)
    x_NK = None if x is None else x.reshape(-1, x.shape[-1])
    gradients = group_parameter_gradients(dys, x_NK, weights, biases, need_weights, need_biases)
    return (dx, *gradients, None)[: len(ctx.needs_input_grad)]


def group_parameter_gradients(
    dys: Sequence[Tensor | None],
    x_NK: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor],
    need_weights: Sequence[bool],
    need_biases: Sequence[bool],
) -> tuple[list[Tensor | None], list[Tensor | None]]:
    """(dweights, dbiases) of several projections of x [N, K]; None where not needed or without a gradient.

    The biases belong to the first weights.
    """
    dweights = [
        weight_gradient(dy, x_NK, weight) if need and x_NK is not None else None
        for dy, weight, need in zip(dys, weights, need_weights, strict=True)
    ]
    dbiases = [
        bias_gradient(dy, bias) if need else None
        for dy, bias, need in zip(dys, biases, need_biases, strict=False)
    ]
    return dweights, dbiases


def _group_autocast(
    dtype: torch.dtype,
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    compute: torch.dtype | None = None,
) -> tuple[Any, ...]:
    return cast(x, dtype), weights, biases, autocast_compute(dtype, x, compute)


def _activation_forward(
    x: Tensor,
    up: Tensor | None,
    kind: str,
    weight: Tensor,
    bias: Tensor | None = None,
    compute: torch.dtype | None = None,
) -> Tensor:
    hidden = gated(x, up, kind)
    return product(hidden, weight, bias, resolve(hidden, compute))


def _activation_fake(
    x: Tensor,
    up: Tensor | None,
    kind: str,
    weight: Tensor,
    bias: Tensor | None = None,
    compute: torch.dtype | None = None,
) -> Tensor:
    check_kind(kind)
    dtype = resolve(x, compute) if up is None or compute else torch.promote_types(x.dtype, up.dtype)
    return x.new_empty([*x.shape[:-1], weight.shape[0]], dtype=dtype)


def _activation_save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, up, ctx.kind, weight, bias, _ = inputs
    ctx.compute = output.dtype
    ctx.set_materialize_grads(False)
    need_x, need_up = needs(ctx, 2)
    copies = shadow.claim([weight], ctx.compute) if need_x or need_up else [None]
    ctx.save_for_backward(x, up, weight, bias, *copies)


def _activation_backward(ctx: Any, dy: Tensor | None) -> tuple[Any, ...]:
    if dy is None:
        return (None,) * 6
    x, up, weight, bias, copy = ctx.saved_tensors
    need_x, need_up, _, need_weight, need_bias = needs(ctx, 5)
    dx = dup = dweight = dbias = hidden = None
    if need_x or need_up:
        rows = input_gradient([dy], shadow.saved([weight], [copy]), ctx.compute)
        if rows is not None:
            dhidden = rows.view(x.shape)
            if up is None:
                dx = activation_backward(dhidden.to(x.dtype), x, ctx.kind, own_dy=True)
            else:
                dx, dup, hidden = gated_backward(dhidden, x, up, ctx.kind, need_weight, own_dy=True)
    if need_weight:
        if hidden is None:
            hidden = gated(x, up, ctx.kind)
        hidden = hidden.to(ctx.compute)
        dweight = weight_gradient(dy, hidden.reshape(-1, hidden.shape[-1]), weight)
    if need_bias and bias is not None:
        dbias = bias_gradient(dy, bias)
    return dx if need_x else None, dup if need_up else None, None, dweight, dbias, None


def _activation_autocast(
    dtype: torch.dtype,
    x: Tensor,
    up: Tensor | None,
    kind: str,
    weight: Tensor,
    bias: Tensor | None = None,
    compute: torch.dtype | None = None,
) -> tuple[Any, ...]:
    return x, up, kind, weight, bias, autocast_compute(dtype, x, compute)


operator(
    "linear_and_preactivation",
    "(Tensor x, Tensor weight, Tensor? bias, str kind, ScalarType? compute) -> Tensor[]",
    forward=_pair_forward,
    fake=_pair_fake,
    save=_pair_save,
    backward=_pair_backward,
)
operator(
    "linear",
    "(Tensor x, Tensor weight, Tensor? bias=None, str kind='identity', ScalarType? compute=None) -> Tensor",
    forward=_forward,
    fake=_fake,
    autocast=_autocast,
)
# The derivative of silu or gelu needs the value before it, which `linear` does not return: with gradients on,
# the call becomes the operator above, which returns both.
_LIBRARY = torch.library.Library("hasten", "FRAGMENT")
_LIBRARY.impl("linear", _linear_autograd, "Autograd")
operator(
    "linear_group",
    "(Tensor x, Tensor[] weights, Tensor[] biases, ScalarType? compute=None) -> Tensor[]",
    forward=_group_forward,
    fake=_group_fake,
    save=_group_save,
    backward=_group_backward,
    autocast=_group_autocast,
)
operator(
    "activation_linear",
    "(Tensor x, Tensor? up, str kind, Tensor weight, Tensor? bias=None, ScalarType? compute=None) -> Tensor",
    forward=_activation_forward,
    fake=_activation_fake,
    save=_activation_save,
    backward=_activation_backward,
    autocast=_activation_autocast,
)

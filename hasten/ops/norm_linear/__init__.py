"""A norm and the projections of its result. The normalised value is rebuilt in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ConfigError, nearest
from hasten.ops import shadow
from hasten.ops.layer_norm.kernel import layer_norm_backward, layer_norm_forward, layer_norm_rebuild
from hasten.ops.linear import (
    autocast_compute,
    biased_first,
    check_projections,
    group_parameter_gradients,
    in_order,
)
from hasten.ops.linear.kernel import input_gradient, products
from hasten.ops.registry import operator
from hasten.ops.rms_norm import check_norm
from hasten.ops.rms_norm.cpu import Summands
from hasten.ops.rms_norm.kernel import (
    output_dtype,
    rms_norm_backward,
    rms_norm_forward,
    rms_norm_rebuild,
    split_sum_gradient,
)

__all__ = ["norm_linear"]

_STATISTICS = {"rms": 1, "layer": 2}


def norm_linear(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] = (),
    *,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None = None,
    eps: float,
    residual: Tensor | None = None,
    offset: float = 0.0,
    round_first: bool = True,
    compute: torch.dtype | None = None,
) -> list[Tensor]:
    """h = x (+ residual), then norm(h) W_i^T + b_i for each projection.

    Args:
        x: [..., K]. residual: broadcasts with x, or None.
        weights: each [M_i, K]. biases: none, or one [M_i] or None for each weight.
        norm: "rms" or "layer". norm_weight, norm_bias: [K] or None (no bias for "rms").
        offset, round_first: of the RMS norm, see `hasten.ops.rms_norm.rms_norm`.
        compute: dtype of the products and of the results; None is the dtype that the norm gives.

    Returns:
        [h] if a residual is given, then one [..., M_i] for each weight.

    Raises:
        ShapeError: sizes do not fit.
        ConfigError: the norm does not exist, or "rms" is given a bias.
    """
    if norm not in _STATISTICS:
        raise ConfigError(f"norm_linear: norm {norm!r} does not exist; {nearest(norm, _STATISTICS)}")
    if norm == "rms" and norm_bias is not None:
        raise ConfigError(
            'norm_linear: norm "rms" takes no norm_bias; use norm "layer" or leave the bias out'
        )
    check_norm("norm_linear", x, residual=residual, norm_weight=norm_weight, norm_bias=norm_bias)
    check_projections("norm_linear", x, weights, biases)
    order = biased_first(weights, biases)
    outputs = torch.ops.hasten.norm_linear(
        x,
        residual,
        norm,
        norm_weight,
        norm_bias,
        eps,
        offset,
        round_first,
        *in_order(weights, biases, order),
        compute,
    )
    first = int(residual is not None)
    return outputs[:first] + [outputs[first + order.index(i)] for i in range(len(order))]


@dataclass(frozen=True)
class _Norm:
    """The norm's constants; parameters and statistics are passed with each call."""

    kind: str
    eps: float
    offset: float
    round_first: bool

    def dtype(self, h_dtype: torch.dtype, weight: Tensor | None) -> torch.dtype:
        return output_dtype(h_dtype, weight, self.round_first) if self.kind == "rms" else h_dtype

    def forward(
        self,
        x: Tensor,
        residual: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        compute: torch.dtype | None,
    ) -> tuple[Tensor, Tensor, list[Tensor]]:
        """(norm(h) in the dtype `compute`, h = x (+ residual), statistics)."""
        if self.kind == "rms":
            n, h, rstd = rms_norm_forward(
                x, residual, weight, self.eps, self.offset, self.round_first, compute
            )
            return n, h, [rstd]
        n, h, *stats = layer_norm_forward(x, residual, weight, bias, self.eps, None, compute)
        return n, h, stats

    def rebuild(
        self,
        h: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        stats: list[Tensor],
        compute: torch.dtype,
    ) -> Tensor:
        if self.kind == "rms":
            return rms_norm_rebuild(h, stats[0], weight, self.offset, self.round_first, compute)
        return layer_norm_rebuild(h, stats[0], stats[1], weight, bias, self.eps, compute)

    def backward(
        self,
        dn: Tensor,
        h: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        stats: list[Tensor],
        dh: Tensor | None,
        summands: Summands,
        need: Sequence[bool],
        need_parameters: Sequence[bool],
    ) -> tuple[list[Tensor | None], Tensor | None, Tensor | None]:
        if self.kind == "rms":
            gradients, dweight = rms_norm_backward(
                dn, h, stats[0], weight, self.offset, dh, summands, need, need_parameters[0]
            )
            return gradients, dweight, None
        mean, rstd = stats
        return layer_norm_backward(dn, h, mean, rstd, weight, bias, dh, summands, need, need_parameters)


def _forward(
    x: Tensor,
    residual: Tensor | None,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    weights: list[Tensor],
    biases: list[Tensor],
    compute: torch.dtype | None = None,
) -> list[Tensor]:
    constants = _Norm(norm, eps, offset, round_first)
    n, h, stats = constants.forward(x, residual, norm_weight, norm_bias, compute)
    ys = products(n, weights, biases, n.dtype)
    return ([] if residual is None else [h]) + ys + stats


def _fake(
    x: Tensor,
    residual: Tensor | None,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    weights: list[Tensor],
    biases: list[Tensor],
    compute: torch.dtype | None = None,
) -> list[Tensor]:
    shape, dtype = x.shape, x.dtype
    outputs = []
    if residual is not None:
        shape, dtype = torch.broadcast_shapes(shape, residual.shape), torch.result_type(x, residual)
        outputs.append(x.new_empty(shape, dtype=dtype))
    if compute is None:
        compute = _Norm(norm, eps, offset, round_first).dtype(dtype, norm_weight)
    outputs += [x.new_empty([*shape[:-1], weight.shape[0]], dtype=compute) for weight in weights]
    wide = torch.promote_types(dtype, torch.float32)
    return outputs + [x.new_empty([*shape[:-1], 1], dtype=wide) for _ in range(_STATISTICS[norm])]


def _save(ctx: Any, inputs: Sequence[Any], output: list[Tensor]) -> None:
    x, residual, norm, weight, bias, eps, offset, round_first, weights, biases, compute = inputs
    ctx.norm = _Norm(norm, eps, offset, round_first)
    stats = output[-_STATISTICS[norm] :]
    h = x if residual is None else output[0]
    ctx.summands = [(t.shape, t.dtype) for t in (x, residual) if t is not None]
    ctx.compute = ctx.norm.dtype(h.dtype, weight) if compute is None else compute
    ctx.count = len(weights)
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*stats)
    wanted = any(ctx.needs_input_grad[index] for index in (0, 1, 3, 4))
    copies = shadow.claim(weights, ctx.compute) if wanted else [None] * len(weights)
    ctx.save_for_backward(h, weight, bias, *stats, *copies, *weights, *biases)


def _backward(ctx: Any, grads: list[Tensor | None]) -> tuple[Any, ...]:
    h, weight, bias, *rest = ctx.saved_tensors
    count = _STATISTICS[ctx.norm.kind]
    stats, rest = rest[:count], rest[count:]
    copies, weights, biases = rest[: ctx.count], rest[ctx.count : 2 * ctx.count], rest[2 * ctx.count :]
    has_residual = len(ctx.summands) == 2
    dh = grads[0] if has_residual else None
    dys = grads[int(has_residual) : int(has_residual) + ctx.count]
    need = ctx.needs_input_grad
    need_weights, need_biases = need[8], need[9]
    dweight = dbias = None
    n_NK = None
    if any(need_weights) and any(dy is not None for dy in dys):
        n_NK = ctx.norm.rebuild(h.contiguous(), weight, bias, stats, ctx.compute).view(-1, h.shape[-1])
    dweights, dbiases = group_parameter_gradients(dys, n_NK, weights, biases, need_weights, need_biases)
    del n_NK
    need_summands = need[: len(ctx.summands)]
    need_parameters = need[3:5]
    dn_NK = None
    if any((*need_summands, *need_parameters)):
        dn_NK = input_gradient(dys, shadow.saved(weights, copies), ctx.compute)
    if dn_NK is not None:
        arguments = (h, weight, bias, stats, dh, ctx.summands, need_summands, need_parameters)
        (dx, *dresidual), dweight, dbias = ctx.norm.backward(dn_NK.view(h.shape), *arguments)
    else:
        dx, *dresidual = split_sum_gradient(dh, ctx.summands, need_summands)
    gradients = (dx, dresidual[0] if dresidual else None, None, dweight, dbias, None, None, None)
    return (*gradients, dweights, dbiases, None)[: len(need)]


def _autocast(
    dtype: torch.dtype,
    x: Tensor,
    residual: Tensor | None,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    offset: float,
    round_first: bool,
    weights: list[Tensor],
    biases: list[Tensor],
    compute: torch.dtype | None = None,
) -> tuple[Any, ...]:
    constants = (norm, norm_weight, norm_bias, eps, offset, round_first)
    return x, residual, *constants, weights, biases, autocast_compute(dtype, x, compute)


operator(
    "norm_linear",
    "(Tensor x, Tensor? residual, str norm, Tensor? norm_weight, Tensor? norm_bias, float eps, float offset, "
    "bool round_first, Tensor[] weights, Tensor[] biases, ScalarType? compute=None) -> Tensor[]",
    forward=_forward,
    fake=_fake,
    save=_save,
    backward=_backward,
    autocast=_autocast,
)

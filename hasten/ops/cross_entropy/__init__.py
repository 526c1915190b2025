"""The output head with cross-entropy. The logits of all tokens never exist at once.

The gradients are made in the forward pass, while a chunk's logits are there, and only scaled in the backward
pass. What is kept between the two is the gradient of x and of the weight instead of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ConfigError, ShapeError, nearest
from hasten.ops.cross_entropy import kernel
from hasten.ops.linear import autocast_compute, check_projections, resolve
from hasten.ops.registry import cast, operator

__all__ = ["linear_cross_entropy"]


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    reduction: str = "mean",
) -> Tensor:
    """Cross-entropy of softcap(logit_scale * (x W^T + b)) with the labels, without the full logits.

    Args:
        x: [..., K]. weight: [V, K]. bias: [V] or None.
        labels: [...], integers from 0 to V - 1, or `ignore_index`.
        token_weight: [...] weight of each token, a constant (it gets no gradient); None is 1.
        label_smoothing: as in `torch.nn.functional.cross_entropy`.
        z_loss: adds z_loss * logsumexp(logits)^2 to each token's loss (Chowdhery et al., 2022, section 5).
        softcap: 0 for none, else logits become softcap * tanh(logits / softcap).
        reduction: "sum" of weight * loss, or "mean", the sum divided by the weight of the tokens that are not
            ignored. As in torch the mean is NaN if there are none, with gradients of zero.

    Returns:
        The loss, a scalar in float32 (float64 for float64 inputs). It has no second derivative.

    Raises:
        ShapeError: sizes do not fit.
        ConfigError: the reduction does not exist.
        InputError: a label is out of range.
    """
    if reduction not in ("mean", "sum"):
        allowed = nearest(reduction, ("mean", "sum"))
        raise ConfigError(f"linear_cross_entropy: reduction {reduction!r} does not exist; {allowed}")
    check_projections("linear_cross_entropy", x, [weight], [] if bias is None else [bias])
    for key, tensor in (("labels", labels), ("token_weight", token_weight)):
        if tensor is not None and tensor.shape != x.shape[:-1]:
            needed = list(x.shape[:-1])
            raise ShapeError(f"linear_cross_entropy: {key} is {list(tensor.shape)}; needs {needed}, as x")
    labels = labels.reshape(-1)
    if token_weight is not None:
        token_weight = token_weight.detach().reshape(-1)
    total = None
    if reduction == "mean":
        # Dividing the weights, not the sum, leaves the gradients as they are to be: no pass to scale them.
        wide = torch.promote_types(x.dtype, torch.float32)
        one = torch.ones((), dtype=wide, device=x.device)
        w = one if token_weight is None else token_weight.to(wide)
        w = torch.where(labels != ignore_index, w, 0.0)
        total = w.sum()
        token_weight = w / total
    grad = torch.is_grad_enabled()
    loss_sum, *_ = torch.ops.hasten.linear_cross_entropy(
        x.reshape(-1, x.shape[-1]),
        weight,
        bias,
        labels,
        token_weight,
        ignore_index,
        label_smoothing,
        z_loss,
        logit_scale,
        softcap,
        grad and x.requires_grad,
        grad and (weight.requires_grad or (bias is not None and bias.requires_grad)),
    )
    return loss_sum if total is None else torch.where(total != 0, loss_sum, float("nan"))


def _forward(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    token_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    softcap: float,
    need_x: bool,
    need_weight: bool,
    compute: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    loss = kernel.Loss(label_smoothing, z_loss, logit_scale, softcap)
    dtype = resolve(x, compute)
    return kernel.linear_cross_entropy(
        x, weight, bias, labels, token_weight, ignore_index, loss, need_x, need_weight, dtype
    )


def _fake(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    token_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    softcap: float,
    need_x: bool,
    need_weight: bool,
    compute: torch.dtype | None = None,
) -> tuple[Tensor, ...]:
    dtype = resolve(x, compute)
    wide = torch.promote_types(dtype, torch.float32)
    dbias = bias.new_empty(bias.shape) if need_weight and bias is not None else x.new_empty(0, dtype=dtype)
    return (
        x.new_empty((), dtype=wide),
        x.new_empty((), dtype=wide),
        x.new_empty((), dtype=wide),
        x.new_empty(x.shape) if need_x else x.new_empty(0, dtype=dtype),
        weight.new_empty(weight.shape) if need_weight else x.new_empty(0, dtype=dtype),
        dbias,
    )


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    _, _, bias, *_ = inputs
    ctx.needs = inputs[10], inputs[11], inputs[11] and bias is not None
    ctx.set_materialize_grads(False)
    ctx.mark_non_differentiable(*output[1:])
    ctx.save_for_backward(*output[3:])


def _backward(ctx: Any, dloss: Tensor | None, *_: Any) -> tuple[Any, ...]:
    if torch.is_grad_enabled():
        raise RuntimeError(
            "linear_cross_entropy has no second derivative; call backward without create_graph"
        )
    wanted = ctx.needs_input_grad[:3]
    for key, want, made in zip(("x", "weight", "bias"), wanted, ctx.needs, strict=True):
        if want and not made:
            flag = "need_x" if key == "x" else "need_weight"
            raise RuntimeError(f"linear_cross_entropy: {key} requires a gradient but {flag} was False")
    count = len(ctx.needs_input_grad)
    if dloss is None:
        return (None,) * count
    # A graph that is kept may be asked again: its buffers stay as they are. Otherwise they are handed over.
    keep = torch._C._autograd._get_current_graph_task_keep_graph()
    gradients = [
        _scaled(gradient, dloss, keep) if want else None
        for gradient, want in zip(ctx.saved_tensors, wanted, strict=True)
    ]
    return (*gradients, *([None] * (count - 3)))


def _scaled(gradient: Tensor, scale: Tensor, keep: bool) -> Tensor:
    # A traced scale has no value to look at: it comes as a subclass of Tensor.
    if keep or type(scale) is not Tensor:
        return gradient * scale.to(gradient.dtype)
    return gradient if float(scale) == 1.0 else gradient.mul_(scale)


def _autocast(
    dtype: torch.dtype,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    labels: Tensor,
    token_weight: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    logit_scale: float,
    softcap: float,
    need_x: bool,
    need_weight: bool,
    compute: torch.dtype | None = None,
) -> tuple[Any, ...]:
    numbers = (ignore_index, label_smoothing, z_loss, logit_scale, softcap, need_x, need_weight)
    compute = autocast_compute(dtype, x, compute)
    return cast(x, dtype), weight, bias, labels, token_weight, *numbers, compute


operator(
    "linear_cross_entropy",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor labels, Tensor? token_weight, int ignore_index, "
    "float label_smoothing, float z_loss, float logit_scale, float softcap, bool need_x, bool need_weight, "
    "ScalarType? compute=None) -> (Tensor loss_sum, Tensor weight_sum, Tensor z_sum, Tensor grad_x, "
    "Tensor grad_weight, Tensor grad_bias)",
    forward=_forward,
    fake=_fake,
    save=_save,
    backward=_backward,
    autocast=_autocast,
)

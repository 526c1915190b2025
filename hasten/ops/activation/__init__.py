"""Activations, plain and gated. Only the inputs are saved; kind(x) is rebuilt in the backward pass."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops.activation.kernel import (
    activate,
    activation_backward,
    check_kind,
    gated,
    gated_backward,
)
from hasten.ops.registry import operator

__all__ = ["activation", "gated_activation"]


def activation(x: Tensor, kind: str) -> Tensor:
    """kind(x), in the shape and dtype of x.

    Args:
        x: any shape, floating.
        kind: silu, gelu (exact), gelu_tanh, gelu_quick (x * sigmoid(1.702 x)), relu, relu2 (relu squared),
            sigmoid, tanh or identity.

    Raises:
        ConfigError: the kind does not exist.
    """
    check_kind(kind)
    return torch.ops.hasten.activation(x, kind)


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """kind(gate) * up; kind(gate) is rounded to the dtype of gate first, as in plain torch.

    Raises:
        ShapeError: the shapes differ.
        ConfigError: the kind does not exist.
    """
    check_kind(kind)
    check_gate("gated_activation", gate, up)
    return torch.ops.hasten.gated_activation(gate, up, kind)


def check_gate(name: str, gate: Tensor, up: Tensor) -> None:
    """Refuses a gate and a factor of different shapes.

    Raises:
        ShapeError: with both shapes.
    """
    if gate.shape != up.shape:
        raise ShapeError(f"{name}: gate is {list(gate.shape)}, up is {list(up.shape)}; they must be the same")


def _forward(x: Tensor, kind: str) -> Tensor:
    y = activate(x, kind)
    return y.clone(memory_format=torch.contiguous_format) if y is x else y.contiguous()


def _fake(x: Tensor, kind: str) -> Tensor:
    check_kind(kind)
    return x.new_empty(x.shape)


def _save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    x, ctx.kind = inputs
    ctx.save_for_backward(x)


def _backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    (x,) = ctx.saved_tensors
    return activation_backward(dy, x, ctx.kind), None


def _gated_forward(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    return gated(gate, up, kind).contiguous()


def _gated_fake(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    check_kind(kind)
    return gate.new_empty(gate.shape, dtype=torch.promote_types(gate.dtype, up.dtype))


def _gated_save(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
    gate, up, ctx.kind = inputs
    ctx.save_for_backward(gate, up)


def _gated_backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
    gate, up = ctx.saved_tensors
    dgate, dup, _ = gated_backward(dy, gate, up, ctx.kind)
    return dgate, dup, None


operator(
    "activation",
    "(Tensor x, str kind) -> Tensor",
    forward=_forward,
    fake=_fake,
    save=_save,
    backward=_backward,
)
operator(
    "gated_activation",
    "(Tensor gate, Tensor up, str kind) -> Tensor",
    forward=_gated_forward,
    fake=_gated_fake,
    save=_gated_save,
    backward=_gated_backward,
)

"""Activations and their derivatives, the gradient rebuilt from the input alone: native where it can run."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from hasten.base.errors import ConfigError, nearest
from hasten.ops.activation import cpu
from hasten.ops.activation.reference import KINDS

_aten = torch.ops.aten


def _gelu_quick_backward(dy: Tensor, x: Tensor) -> Tensor:
    s = torch.sigmoid(1.702 * x)
    return dy * (s + 1.702 * x * s * (1 - s))


_BACKWARD: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda dy, x: _aten.silu_backward(dy, x),
    "gelu": lambda dy, x: _aten.gelu_backward(dy, x),
    "gelu_tanh": lambda dy, x: _aten.gelu_backward(dy, x, approximate="tanh"),
    "gelu_quick": _gelu_quick_backward,
    "relu": lambda dy, x: _aten.threshold_backward(dy, x, 0),
    "relu2": lambda dy, x: dy * x.clamp(min=0) * 2,
    "sigmoid": lambda dy, x: _aten.sigmoid_backward(dy, torch.sigmoid(x)),
    "tanh": lambda dy, x: _aten.tanh_backward(dy, torch.tanh(x)),
    "identity": lambda dy, x: dy,
}

_BACKWARD_INTO: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "silu": lambda dy, x: _aten.silu_backward.grad_input(dy, x, grad_input=dy),
    "gelu": lambda dy, x: _aten.gelu_backward.grad_input(dy, x, grad_input=dy),
    "gelu_tanh": lambda dy, x: _aten.gelu_backward.grad_input(dy, x, approximate="tanh", grad_input=dy),
    "relu": lambda dy, x: _aten.threshold_backward.grad_input(dy, x, 0, grad_input=dy),
}


def check_kind(kind: str) -> None:
    """Refuses an activation that does not exist.

    Raises:
        ConfigError: with the names that do.
    """
    if kind not in KINDS:
        raise ConfigError(f"activation {kind!r} does not exist; {nearest(kind, KINDS)}")


def activate(x: Tensor, kind: str, own_x: bool = False) -> Tensor:
    """kind(x) in the dtype of x; `identity` returns x itself; with `own_x` the memory of x may be used."""
    check_kind(kind)
    return KINDS[kind](x) if cpu.refusal(kind, x) else cpu.forward(x, None, kind, own_x)


def activation_backward(dy: Tensor, x: Tensor, kind: str, own_dy: bool = False) -> Tensor:
    """dL/dx in the dtype of x; with `own_dy` the memory of dy may become the result."""
    if not cpu.refusal(kind, x, dy):
        return cpu.backward(dy, x, kind, own_dy)
    if own_dy and kind in _BACKWARD_INTO and dy.dtype == x.dtype:
        return _BACKWARD_INTO[kind](dy, x)
    return _BACKWARD[kind](dy, x).to(x.dtype)


def gated(gate: Tensor, up: Tensor | None, kind: str) -> Tensor:
    """kind(gate), times up if there is one; may return `gate` itself."""
    if up is not None and not cpu.refusal(kind, gate, up):
        return cpu.forward(gate, up, kind)
    a = activate(gate, kind)
    if up is None:
        return a
    if a is not gate and a.shape == up.shape and torch.promote_types(a.dtype, up.dtype) == a.dtype:
        return a.mul_(up)
    return a * up


def gated_backward(
    dy: Tensor, gate: Tensor, up: Tensor, kind: str, need_product: bool = False, own_dy: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """(dgate, dup, kind(gate) * up if `need_product`), with kind(gate) rebuilt once.

    Fresh memory costs as much as the arithmetic: results are written over values that are no longer needed,
    with `own_dy` also over dy.
    """
    if not cpu.refusal(kind, gate, up, dy):
        return cpu.gated_backward(dy, gate, up, kind, need_product, own_dy)
    a = activate(gate, kind)
    dgate = activation_backward((dy * up).to(gate.dtype), gate, kind, own_dy=True)
    same = a is not gate and a.dtype == up.dtype == dy.dtype and a.shape == dy.shape
    if not need_product:
        return dgate, a.mul_(dy) if same else (dy * a).to(up.dtype), None
    dup = dy.mul_(a) if same and own_dy else (dy * a).to(up.dtype)
    return dgate, dup, a.mul_(up) if same else a * up

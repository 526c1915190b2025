"""What each activation means, in plain torch that autograd can follow."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_quick": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "identity": lambda x: x,
}


def activation(x: Tensor, kind: str) -> Tensor:
    """kind(x), any shape."""
    return KINDS[kind](x)


def gated_activation(gate: Tensor, up: Tensor, kind: str) -> Tensor:
    """kind(gate) * up (Shazeer, 2020); kind(gate) is rounded to its dtype before the product."""
    return KINDS[kind](gate) * up

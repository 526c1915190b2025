"""Importing this defines every `torch.ops.hasten.*`."""

from hasten.ops import (
    activation,
    adamw,
    attention,
    cross_entropy,
    embedding,
    layer_norm,
    linear,
    norm_linear,
    rms_norm,
    rotary,
    routed_linear,
)

__all__ = [
    "activation",
    "adamw",
    "attention",
    "cross_entropy",
    "embedding",
    "layer_norm",
    "linear",
    "norm_linear",
    "rms_norm",
    "rotary",
    "routed_linear",
]

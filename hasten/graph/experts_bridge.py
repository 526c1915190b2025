"""Experts of Hugging Face models, through their own registry: for a graph in which they have a name.

A model's experts module hands its forward to the function that its configuration names. This one says the
same in two `routed_linear` operators with the module's own gate between them, and sorts no tokens: slots keep
a dim of their own, so that a row stays a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hasten.ops.routed_linear import routed_linear

NAME = "hasten"
_SETTING = "_experts_implementation_internal"


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, H], experts of each token and their weights [T, S] -> [T, H]."""
    turned = module.is_transposed
    up = "gate_up_proj" if module.has_gate else "up_proj"

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return routed_linear(x, getattr(module, name), bias, top_k_index, turned)

    inner = product(hidden_states[:, None], up)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = product(inner, "down_proj")
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return (out * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


@contextlib.contextmanager
def experts_by_name(model: nn.Module) -> Iterator[None]:
    """Inside, experts of this model that ask transformers' registry are `routed_linear`s."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, getattr(config, _SETTING)) for config in configs.values() if hasattr(config, _SETTING)]
    try:
        for config, _ in before:
            setattr(config, _SETTING, NAME)
        yield
    finally:
        for config, value in before:
            setattr(config, _SETTING, value)

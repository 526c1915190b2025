"""Experts of Hugging Face models, through their own registry: for a graph in which they have a name.

A model's experts module hands its forward to the function that its configuration names. This one says the
same in two `routed_linear` operators with the module's own gate between them, and sorts no tokens: slots keep
a dim of their own, so that a row stays a row.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import nn

from hasten.ops.routed_linear import routed_linear

NAME = "hasten"
Product = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor, bool], torch.Tensor]
_SETTING = "_experts_implementation_internal"
_PRODUCT: ContextVar[Product] = ContextVar("hasten_experts_product", default=routed_linear)


def experts_forward(
    module: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """hidden_states [T, H], experts of each token and their weights [T, S] -> [T, H]."""
    turned = module.is_transposed
    up = "gate_up_proj" if module.has_gate else "up_proj"

    def product(x: torch.Tensor, name: str) -> torch.Tensor:
        bias = getattr(module, f"{name}_bias") if module.has_bias else None
        return _PRODUCT.get()(x, getattr(module, name), bias, top_k_index, turned)

    inner = product(hidden_states[:, None], up)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = product(inner, "down_proj")
    if module.has_post_expert_norm:
        out = module.post_expert_norm(out)
    return (out * top_k_weights[..., None]).sum(dim=1).to(hidden_states.dtype)


@contextlib.contextmanager
def experts_by_name(model: nn.Module, product: Product = routed_linear) -> Iterator[None]:
    """Inside, products of this model's experts that ask transformers' registry are calls of `product`."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    ALL_EXPERTS_FUNCTIONS.register(NAME, experts_forward)
    configs = {id(m.config): m.config for m in model.modules() if hasattr(m, "config")}
    before = [(config, getattr(config, _SETTING)) for config in configs.values() if hasattr(config, _SETTING)]
    token = _PRODUCT.set(product)
    try:
        for config, _ in before:
            setattr(config, _SETTING, NAME)
        yield
    finally:
        _PRODUCT.reset(token)
        for config, value in before:
            setattr(config, _SETTING, value)


def expert_stacks(model: nn.Module) -> Iterator[tuple[nn.Parameter, bool]]:
    """The weights [E, N, K] of experts that ask the registry, and whether they are stored as [E, K, N]."""
    for module in model.modules():
        if hasattr(module, "_is_expert_parallel") and hasattr(module, "is_transposed"):
            for name in ("gate_up_proj", "up_proj", "down_proj"):
                parameter = module._parameters.get(name)
                if parameter is not None and parameter.dim() == 3:
                    yield parameter, bool(module.is_transposed)

"""A model without its numbers: parameters on the meta device, buffers real."""

from __future__ import annotations

from typing import Any

import torch

from hasten.base.errors import InputError


def meta_model(config: Any, kind: Any) -> Any:
    """A model of `config`, everything on the meta device. `kind`: an `AutoModelFor...` class."""
    with torch.device("meta"):
        return kind.from_config(config)


def fill_buffers(model: Any) -> None:
    """Gives a model on the meta device its real buffers (rotary frequencies, scales of embeddings), in place.

    transformers computes them from the configuration, as it does after loading weights.

    Raises InputError for a buffer that it does not compute, one that a checkpoint would have to hold.
    """
    for parameter in model.parameters():
        parameter._is_hf_initialized = True  # transformers' mark: not to be filled with random numbers
    filled = []
    for prefix, module in model.named_modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            fresh = torch.empty_like(buffer, device="cpu")
            # What is still NaN afterwards was not computed.
            setattr(module, name, fresh.fill_(torch.nan) if fresh.is_floating_point() else fresh.zero_())
            module._is_hf_initialized = False
            filled.append((f"{prefix}.{name}", module, name))
    model.initialize_weights()
    for path, module, name in filled:
        buffer = getattr(module, name)
        if buffer.is_floating_point() and bool(torch.isnan(buffer).any()):
            raise InputError(f"{type(model).__name__} has a buffer {path!r} that only a checkpoint can fill")

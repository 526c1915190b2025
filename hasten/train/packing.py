"""Whether a model keeps the documents of one row apart, found out by asking it."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from hasten.base.errors import ConfigError

PIECE = 4


def accepts(model: nn.Module, name: str) -> bool:
    """Whether the model's own forward (below PEFT's wrapper) has a parameter of this name."""
    return name in inspect.signature(_inner(model).forward).parameters


def keeps_documents_apart(model: nn.Module, vocabulary: int) -> bool:
    """Whether restarting `position_ids` alone stops attention between two documents in one row.

    Two rows of two documents are run that differ in the first document only; masked attention adds exact
    zeros, so the logits of the second document must be equal to the last bit.
    """
    if not accepts(model, "position_ids"):
        return False
    device = next(model.parameters()).device
    ids = torch.arange(3 * PIECE, device=device) % vocabulary
    first, other, second = ids.split(PIECE)
    positions = torch.arange(PIECE, device=device).repeat(2)[None]
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            seen = [
                model(
                    input_ids=torch.cat([start, second])[None], position_ids=positions, use_cache=False
                ).logits[0, PIECE:]
                for start in (first, other)
            ]
    finally:
        model.train(was_training)
    return torch.equal(*seen)


def check_packing(model: nn.Module, vocabulary: int) -> None:
    """Refuses packing where a token would see another document.

    Raises:
        ConfigError: the model does not keep documents apart; says what to set instead.
    """
    if keeps_documents_apart(model, vocabulary):
        return
    name = type(_inner(model)).__name__
    raise ConfigError(
        f"data.packing = true: {name} does not keep the documents of one row apart (position_ids do not "
        "reach its attention mask), so a token would see other documents; set data.packing = false: one "
        "document a row, padded"
    )


def _inner(model: nn.Module) -> nn.Module:
    unwrap = getattr(model, "get_base_model", None)
    return unwrap() if callable(unwrap) else model

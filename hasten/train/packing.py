"""What a model's tokens can see, found out by asking it: later tokens, other documents of the row."""

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


def check_causal(model: nn.Module, vocabulary: int) -> None:
    """Refuses a model whose tokens see those after them: the next token would be read, not predicted.

    Two rows that differ in the last token only are run; all logits before it must be equal, up to the
    rounding of products that a library splits by their contents (mixtures of experts).

    Raises:
        ConfigError: the model is not causal.
    """
    device = next(model.parameters()).device
    ids = torch.arange(PIECE + 1, device=device) % vocabulary
    rows = torch.stack([ids, ids])
    rows[1, -1] = (ids[-1] + 1) % vocabulary
    extra = {"use_cache": False} if accepts(model, "use_cache") else {}
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            seen = [model(input_ids=row[None], **extra).logits[0, :-1].float() for row in rows]
    finally:
        model.train(was_training)
    allowed = 16 * torch.finfo(next(model.parameters()).dtype).eps * float(seen[0].abs().max())
    if float((seen[0] - seen[1]).abs().max()) > allowed:
        raise ConfigError(
            f"{type(_inner(model)).__name__} lets a token see those after it, so there is no next token to "
            "predict; hasten train takes causal language models"
        )


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

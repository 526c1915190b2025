"""Opening models: GGUF files, Hugging Face folders, hub ids, presets; small random ones for tests.

Names are imported on first use: where a model lies is found without torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hasten.models.open import Opened, open_model
    from hasten.models.presets import PRESETS
    from hasten.models.tiny import FAMILIES, MASKED_FAMILIES, tiny_model

__all__ = ["FAMILIES", "MASKED_FAMILIES", "PRESETS", "Opened", "open_model", "tiny_model"]

_HOMES = {
    "FAMILIES": "tiny",
    "MASKED_FAMILIES": "tiny",
    "PRESETS": "presets",
    "Opened": "open",
    "open_model": "open",
    "tiny_model": "tiny",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(importlib.import_module(f"hasten.models.{_HOMES[name]}"), name)
    raise AttributeError(f"module 'hasten.models' has no attribute {name!r}; it has {', '.join(__all__)}")

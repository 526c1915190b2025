"""Opening models: GGUF files, Hugging Face folders, hub ids, presets; small random ones for tests.

Names are imported on first use: where a model lies is found without torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from hasten.base import lazy

if TYPE_CHECKING:
    from hasten.models.open import Opened, open_model
    from hasten.models.presets import PRESETS
    from hasten.models.tiny import FAMILIES, MASKED_FAMILIES, tiny_model

__all__ = ["FAMILIES", "MASKED_FAMILIES", "PRESETS", "Opened", "open_model", "tiny_model"]

_HOMES = {
    "FAMILIES": "hasten.models.tiny",
    "MASKED_FAMILIES": "hasten.models.tiny",
    "PRESETS": "hasten.models.presets",
    "Opened": "hasten.models.open",
    "open_model": "hasten.models.open",
    "tiny_model": "hasten.models.tiny",
}


def __getattr__(name: str) -> Any:
    return lazy.attribute(__name__, name, _HOMES, __all__)

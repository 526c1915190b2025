"""Opening models: GGUF files, Hugging Face folders, hub ids, presets; small random ones for tests."""

from hasten.models.open import Opened, open_model
from hasten.models.presets import PRESETS
from hasten.models.tiny import FAMILIES, MASKED_FAMILIES, tiny_model

__all__ = ["FAMILIES", "MASKED_FAMILIES", "PRESETS", "Opened", "open_model", "tiny_model"]

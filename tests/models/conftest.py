from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_writing import write_gguf

from hasten.models import tiny_model


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny llama with its own output head, as a file and as the model it was written from."""
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = tiny_model("llama", tie_word_embeddings=False).eval()
    write_gguf(path, "llama", model)
    return path, model


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub.constants

    # Read once at import, and another test may have imported it.
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    torch.manual_seed(0)

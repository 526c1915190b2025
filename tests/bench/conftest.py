"""What several tests of the bench work on."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hasten.bench import train
from hasten.bench.report import Limits


@pytest.fixture
def text_folder(tmp_path: Path) -> Path:
    folder = tmp_path / "text"
    folder.mkdir()
    for number in range(6):
        (folder / f"{number}.txt").write_text(f"document {number} says: " + chr(97 + number) * (40 + number))
    return folder


@pytest.fixture
def fast_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands in for the measurement, which `test_bench_limits.py` covers."""
    limits = Limits(
        gemm_flops_per_s=4e11,
        gemm_flops_per_s_by_dtype={"float32": 1e11, "bfloat16": 4e11},
        read_bytes_per_s=1e10,
        threads=1,
    )
    monkeypatch.setattr(train, "measure_limits", lambda bf16, screen: limits)


@pytest.fixture(scope="session")
def tiny_gguf(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A tiny llama in fp32 as a GGUF file, and as the model it was written from."""
    from hasten.models import tiny_model

    source = Path(__file__).parents[1] / "models" / "gguf_writing.py"
    spec = importlib.util.spec_from_file_location("gguf_writing_for_bench", source)
    assert spec is not None
    assert spec.loader is not None
    writing = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(writing)
    path = tmp_path_factory.mktemp("gguf") / "tiny.gguf"
    model = tiny_model("llama", tie_word_embeddings=False).eval()
    writing.write_gguf(path, "llama", model)
    return path, model

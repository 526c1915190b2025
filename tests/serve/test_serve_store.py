"""Programs on disk: what was saved comes back, damage is passed over with a reason, old ones are removed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hasten.base.errors import InputError
from hasten.models import open_model
from hasten.ops.memory import address
from hasten.ops.panels import BFLOAT16, Panels, named
from hasten.ops.panels.reference import unpack
from hasten.serve import store as module
from hasten.serve.quantise import quantise
from hasten.serve.store import Missing, Store, Stored, store_key
from hasten.serve.words import Words, words_of

PROGRAM = {"words": [1, 2, 3], "names": ["a", "é"]}


@pytest.fixture
def content() -> dict[str, Any]:
    torch.manual_seed(0)
    embedding = quantise(torch.randn(37, 40), named("int6g16"))
    return {
        "program": PROGRAM,
        "panels": {
            "embedding": embedding,
            "head": embedding,
            "q": quantise(torch.randn(20, 65), named("int4m")),
            "k": quantise(torch.randn(3, 7), BFLOAT16),
        },
        "tables": {
            "norm": torch.randn(7).numpy(),
            "cos": torch.randn(5, 6).numpy(),
            "ids": np.arange(3, dtype=np.int32),
            "flag": np.array([1, 0, 1], np.uint8),
            "one": np.array(2.5, np.float32),
            "none": np.zeros((0, 4), np.float32),
        },
        "words": Words(
            "{}", "{{ bos_token }}", {"bos_token": "<s>"}, {"bos_token": 1}, [2, 3], {"top_p": 0.9}, 64
        ),
        "note": {"model": "tiny", "formats": "int4"},
    }


def check(found: Stored | Missing, content: dict[str, Any]) -> None:
    assert isinstance(found, Stored), found
    assert found.program == PROGRAM
    assert found.words == content["words"]
    assert found.note == content["note"]
    assert found.panels.keys() == content["panels"].keys()
    for name, panels in content["panels"].items():
        again = found.panels[name]
        assert (again.format, again.N, again.K, again.unit) == (
            panels.format,
            panels.N,
            panels.K,
            panels.unit,
        )
        assert np.array_equal(again.data, panels.data)
        assert torch.equal(unpack(again), unpack(panels))
    assert found.panels["embedding"] is found.panels["head"]
    assert found.tables.keys() == content["tables"].keys()
    for name, table in content["tables"].items():
        assert found.tables[name].dtype == table.dtype
        assert np.array_equal(found.tables[name], table)
        assert found.tables[name].shape == table.shape


@pytest.mark.parametrize("mapped", [False, True])
def test_what_was_saved_comes_back(
    content: dict[str, Any], tmp_path: Path, mapped: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if mapped:
        monkeypatch.setattr(module, "_READ_BYTES", 0)
    store = Store(tmp_path)
    folder = store.save("key", **content)
    assert folder == tmp_path / "serve" / "key"
    check(store.load("key"), content)
    assert not list((tmp_path / "serve").glob(".*"))
    assert str(folder.parent) in str(store)
    # Again over what is there.
    store.save("key", **content)
    check(store.load("key"), content)


def test_weights_are_a_safetensors_file_with_aligned_tensors(content: dict[str, Any], tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    folder = Store(tmp_path).save("key", **content)
    tensors = load_file(folder / "weights.safetensors")
    assert np.array_equal(tensors["panels/q"], content["panels"]["q"].data)
    assert "panels/head" not in tensors
    stored = Store(tmp_path).load("key")
    assert isinstance(stored, Stored)
    for array in [*stored.tables.values(), *(panels.data for panels in stored.panels.values())]:
        assert address(array) % min(64, array.nbytes & -array.nbytes or 64) == 0


def test_no_memory_is_no_damage(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.save("key", **content)

    def full(count: int, **kind: bool) -> np.ndarray:
        raise MemoryError(f"{count} bytes cannot be had")

    monkeypatch.setattr(module, "pages", full)
    with pytest.raises(InputError, match=r"the weights in .*bytes cannot be had"):
        store.load("key")


def test_stored_without_words_or_weights(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save("key", {}, {}, {})
    found = store.load("key")
    assert isinstance(found, Stored)
    assert (found.program, found.panels, found.tables, found.words) == ({}, {}, {}, None)


def test_nothing_stored_has_a_reason(tmp_path: Path) -> None:
    found = Store(tmp_path).load("key")
    assert not found
    assert "nothing stored" in found.reason
    (tmp_path / "serve" / "key").mkdir(parents=True)
    assert "incomplete" in Store(tmp_path).load("key").reason


@pytest.mark.parametrize("name", ["weights.safetensors", "program.json", "words.json", "store.json"])
@pytest.mark.parametrize("damage", ["cut", "bit", "gone", "empty"])
def test_damage_is_passed_over_and_made_again(
    content: dict[str, Any], tmp_path: Path, name: str, damage: str
) -> None:
    store = Store(tmp_path)
    file = store.save("key", **content) / name
    raw = bytearray(file.read_bytes())
    if damage == "gone":
        file.unlink()
    elif damage == "empty":
        file.write_bytes(b"")
    elif damage == "cut":
        file.write_bytes(raw[:-7])
    else:
        # The first byte of what is kept: after the header and its padding in the file of weights.
        place = int.from_bytes(raw[:8], "little") + 8 if name.startswith("weights") else len(raw) // 2
        raw[place] ^= 2
        file.write_bytes(raw)
    found = store.load("key")
    if name == "store.json" and damage == "bit":
        # Half of it is names and numbers: whatever it says, nothing wrong is given out.
        if isinstance(found, Stored):
            check(Stored(**{**vars(found), "note": content["note"]}), content)
        return
    assert not found
    assert str(file.parent) in found.reason
    store.save("key", **content)
    check(store.load("key"), content)


def test_last_used_are_kept(tmp_path: Path) -> None:
    store = Store(tmp_path, keep=2)
    for number, key in enumerate("abc"):
        folder = store.save(key, {}, {}, {})
        os.utime(folder / "store.json", ns=(number, number))
    assert [folder.name for folder, _ in store.listing()] == ["c", "b"]
    store.load("b")
    store.save("d", {}, {}, {})
    assert {folder.name for folder, _ in store.listing()} == {"b", "d"}
    # By bytes: the new one stays, whatever its size.
    small = Store(tmp_path, keep_bytes=10)
    small.save("e", {}, {}, {"t": np.zeros(100, np.float32)})
    assert [folder.name for folder, _ in small.listing()] == ["e"]


def test_leftovers_of_broken_writes_are_removed(tmp_path: Path) -> None:
    store = Store(tmp_path)
    store.save("a", {}, {}, {})
    old, fresh = (tmp_path / "serve" / name for name in (".a.x.tmp", ".a.y.tmp"))
    old.mkdir()
    fresh.mkdir()
    os.utime(old, (1, 1))
    store.prune()
    assert (old.exists(), fresh.exists()) == (False, True)


def test_a_failed_write_leaves_the_old_program(
    content: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(tmp_path)
    store.save("key", **content)

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_write_arrays", full)
    with pytest.raises(InputError, match="No space left"):
        store.save("key", {}, {}, {})
    assert not list((tmp_path / "serve").glob(".*"))
    check(store.load("key"), content)
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        Store(tmp_path / "file")


def test_keys_follow_model_choice_and_code(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [
        store_key("a", {"weights": "int4"}),
        store_key("a", {"weights": "int8"}),
        store_key("b", {"weights": "int4"}),
    ]
    assert len(set(keys)) == 3
    assert store_key("a", {"weights": "int4"}) == keys[0]
    monkeypatch.setattr(module, "_code_version", lambda: "other")
    assert store_key("a", {"weights": "int4"}) != keys[0]


def test_words_of_a_model(small_model_folder: Path) -> None:
    model, tokenizer = open_model(small_model_folder)
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    tokenizer.pad_token = "!"
    model.generation_config.eos_token_id = [2, 5]
    model.generation_config.top_p = 0.5
    words = Words.from_json(words_of(model, tokenizer).to_json())
    text = "def f(x):\n\treturn 'é' # 12"
    assert words.tokenizer().encode(text).ids == tokenizer(text).input_ids
    assert words.tokenizer().decode(tokenizer(text).input_ids) == text
    assert words.chat_template == tokenizer.chat_template
    assert words.special_tokens == {"pad_token": "!"}
    assert words.special_ids == {"pad_token": tokenizer.pad_token_id}
    assert words.eos_token_ids == [2, 5]
    assert words.generation["top_p"] == 0.5
    assert words.context_tokens == model.config.max_position_embeddings
    bare = words_of(model, None)
    with pytest.raises(InputError, match="without a tokenizer"):
        bare.tokenizer()
    with pytest.raises(InputError, match="cannot be read"):
        Words("{").tokenizer()

    class Slow:
        chat_template = None

    with pytest.raises(InputError, match="Slow is not a tokenizer of"):
        words_of(model, Slow())


def test_loading_needs_neither_torch_nor_transformers(
    content: dict[str, Any], small_model_folder: Path, tmp_path: Path
) -> None:
    content["words"] = words_of(*open_model(small_model_folder))
    Store(tmp_path).save("key", **content)
    code = (
        "import sys\n"
        "from hasten.serve.store import Store\n"
        "from hasten.serve.fingerprint import model_fingerprint\n"
        f"stored = Store({str(tmp_path)!r}).load('key')\n"
        "assert stored, stored.reason\n"
        "print(stored.words.tokenizer().encode('ab').ids)\n"
        "assert not {'torch', 'transformers'} & sys.modules.keys()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == open_model(small_model_folder).tokenizer("ab").input_ids


def test_panels_are_written_without_a_copy_of_all(tmp_path: Path, content: dict[str, Any]) -> None:
    """Views of one storage that are different matrices stay different."""
    whole = quantise(torch.randn(32, 32), named("int4"))
    halves = {str(i): Panels(whole.data[i : i + 1], whole.format, 16, 32, whole.unit) for i in range(2)}
    store = Store(tmp_path)
    store.save("key", {}, halves, {})
    found = store.load("key")
    assert isinstance(found, Stored)
    assert all(np.array_equal(found.panels[name].data, halves[name].data) for name in halves)

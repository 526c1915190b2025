"""Checkpoints are whole or refused; a full disk and a crash cost nothing that was there."""

from __future__ import annotations

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hasten.base.errors import CheckpointError, InputError
from hasten.base.screen import Screen
from hasten.train import checkpoint as checkpoints

QUIET = Screen(enabled=False)


def tensors(fill: float) -> dict[str, torch.Tensor]:
    return {
        "model.a": torch.full((3, 4), fill),
        "model.b": torch.full((5,), fill, dtype=torch.bfloat16),
        "optimizer.a.step": torch.tensor(fill),
    }


def save(folder: Path, step: int) -> Path:
    return checkpoints.save(folder, step, tensors(float(step)), {"consumed_rows": step})


def test_round_trip(tmp_path: Path) -> None:
    path = save(tmp_path, 42)
    assert path.name == "step-00000042"
    assert sorted(file.name for file in path.iterdir()) == [
        ".metadata",
        "COMMIT",
        "__0_0.distcp",
        "manifest.json",
        "run.json",
    ]
    found = checkpoints.verify(path)
    assert (found.step, found.record["consumed_rows"]) == (42, 42)
    target = tensors(0.0)
    checkpoints.load(found, target)
    assert all(torch.equal(target[name], value) for name, value in tensors(42.0).items())


def test_load_is_strict_both_ways(tmp_path: Path) -> None:
    found = checkpoints.verify(save(tmp_path, 1))
    target = tensors(0.0)
    target["model.c"] = target.pop("model.a")
    with pytest.raises(CheckpointError, match=r"lacks model\.c; it holds model\.a, which this model"):
        checkpoints.load(found, target)
    with pytest.raises(
        CheckpointError, match=r"model\.a is float32 \[3, 4\], the model's is float32 \[4, 3\]"
    ):
        checkpoints.load(found, tensors(0.0) | {"model.a": torch.zeros(4, 3)})
    with pytest.raises(CheckpointError, match=r"model\.b is bfloat16 \[5\], the model's is float32 \[5\]"):
        checkpoints.load(found, tensors(0.0) | {"model.b": torch.zeros(5)})


def truncate(path: Path) -> None:
    file = path / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-10])


def flip(path: Path) -> None:
    file = path / "__0_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def lose(path: Path) -> None:
    (path / "__0_0.distcp").unlink()


def change_record(path: Path) -> None:
    record = json.loads((path / "run.json").read_text())
    (path / "run.json").write_text(json.dumps(record | {"consumed_rows": 7}))


def change_manifest(path: Path) -> None:
    (path / "manifest.json").write_text((path / "manifest.json").read_text() + " ")


def uncommit(path: Path) -> None:
    (path / "COMMIT").unlink()


DAMAGES = [
    (truncate, "__0_0.distcp has"),
    (flip, "content of __0_0.distcp has changed"),
    (lose, "__0_0.distcp is missing"),
    (change_record, "run.json"),
    (change_manifest, "manifest.json does not fit COMMIT"),
    (uncommit, "COMMIT is missing"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_damage_is_refused_and_the_one_before_used(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], None], message: str
) -> None:
    save(tmp_path, 1)
    second = save(tmp_path, 2)
    damage(second)
    with pytest.raises(CheckpointError) as caught:
        checkpoints.verify(second)
    assert message in str(caught.value)
    found = checkpoints.find(tmp_path, "auto", Screen(enabled=False))
    assert found is not None
    assert found.step == 1
    said = capsys.readouterr().err
    assert message in said
    assert "step-00000001 is used" in said
    assert (tmp_path / "step-00000002.aside").is_dir()


def test_no_good_one_is_an_error_not_a_new_start(tmp_path: Path) -> None:
    truncate(save(tmp_path, 1))
    uncommit(save(tmp_path, 2))
    for _ in range(2):  # and it stays one when the user tries again
        with pytest.raises(CheckpointError, match=r"none of the 2 checkpoints.*COMMIT is missing.*bytes"):
            checkpoints.find(tmp_path, "auto", QUIET)
    assert [step for step, _ in checkpoints.steps_in(tmp_path)] == [1, 2]


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is no checkpoint"):
        checkpoints.find(tmp_path / "run", str(tmp_path), QUIET)


def test_find(tmp_path: Path) -> None:
    assert checkpoints.find(tmp_path, "auto", QUIET) is None
    assert checkpoints.find(tmp_path / "none", "none", QUIET) is None
    first, second = save(tmp_path, 1), save(tmp_path, 20)
    (tmp_path / "step-00000030.tmp").mkdir()
    found = checkpoints.find(tmp_path, "auto", QUIET)
    assert found is not None
    assert found.path == second
    assert not (tmp_path / "step-00000030.tmp").exists()
    with pytest.raises(InputError, match="holds checkpoints up to step-00000020"):
        checkpoints.find(tmp_path, "none", QUIET)
    with pytest.raises(InputError, match=r"no such folder.*step-00000001, step-00000020"):
        checkpoints.find(tmp_path, str(tmp_path / "step-00000002"), QUIET)
    earlier = checkpoints.find(tmp_path, str(first), QUIET)
    assert earlier is not None
    assert earlier.step == 1
    assert [step for step, _ in checkpoints.steps_in(tmp_path)] == [1]
    assert checkpoints.verify(tmp_path / "step-00000020.aside").step == 20


def test_rotate_keeps_the_newest(tmp_path: Path) -> None:
    for step in (1, 2, 3, 100_000_000):
        save(tmp_path, step)
    checkpoints.rotate(tmp_path, 2)
    assert [step for step, _ in checkpoints.steps_in(tmp_path)] == [3, 100_000_000]


def test_full_disk_is_seen_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = save(tmp_path, 1)
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"disk is full: the checkpoint of step 2 needs 1\.05 MB"):
        save(tmp_path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]
    assert checkpoints.verify(first).step == 1


def test_disk_that_fills_up_while_writing(
    small_disk: Callable[[int], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = small_disk(400_000)
    usage = shutil.disk_usage(folder)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**12))
    big = {"model.a": torch.zeros(60_000)}
    first = checkpoints.save(folder, 1, big, {})
    with pytest.raises(CheckpointError, match=r"disk is full: the checkpoint of step 2.*are intact"):
        checkpoints.save(folder, 2, big, {})
    assert [entry.name for entry in folder.iterdir()] == ["step-00000001"]
    assert checkpoints.verify(first).step == 1


@pytest.mark.parametrize("at", ["run.json", "manifest.json", "COMMIT"])
def test_disk_that_fills_up_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str) -> None:
    save(tmp_path, 1)
    original = checkpoints.write_atomically

    def write(path: Path, data: Any) -> None:
        if Path(path).name == at:
            raise OSError(errno.ENOSPC, "No space left on device")
        original(path, data)

    monkeypatch.setattr(checkpoints, "write_atomically", write)
    with pytest.raises(CheckpointError, match="disk is full"):
        save(tmp_path, 2)
    assert [entry.name for entry in tmp_path.iterdir()] == ["step-00000001"]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"step 1 cannot be written.*file"):
        save(tmp_path / "file", 1)

"""Checkpoints: one folder a step, whole or not there.

    <folder>/step-00000042/
        .metadata, __0_0.distcp   tensors, by torch.distributed.checkpoint: `model.<parameter>` and
                                  `optimizer.<parameter>.<state>`; parallel runs reshard this format
        run.json                  step, data position, RNG, settings, versions, last metrics
        manifest.json             size and sha256 of each file above
        COMMIT                    sha256 of manifest.json; written last, after the folder has its final name

Written as `step-00000042.tmp`, synced, renamed, committed. A folder without a COMMIT that fits, or with a
file whose size or hash differs, is refused by name. `.metadata` is a pickle of torch's: the hashes find
damage, not malice, so resume only from checkpoints that you trust.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from hasten.base.errors import CheckpointError, InputError, UserError
from hasten.base.files import sha256_of, sync_folder, write_atomically
from hasten.base.screen import Screen, spell_bytes

FORMAT_VERSION = 1
NAME = re.compile(r"step-(\d{8,})")
# run.json, the manifest, torch's metadata and file headers, over the bytes of the tensors themselves.
OVERHEAD_BYTES = 1 << 20
FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass(frozen=True)
class Checkpoint:
    """One whole checkpoint whose hashes have been compared."""

    path: Path
    step: int
    record: dict[str, Any]


def folder_name(step: int) -> str:
    """42 -> 'step-00000042'."""
    return f"step-{step:08d}"


def save(folder: Path, step: int, tensors: Mapping[str, torch.Tensor], record: Mapping[str, Any]) -> Path:
    """Writes one checkpoint and returns its folder.

    Raises:
        CheckpointError: it could not be written (a full disk says so); nothing of it is left, older ones are
            intact.
    """
    final = folder / folder_name(step)
    temporary = folder / f"{folder_name(step)}.tmp"
    renamed = False
    need_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values()) + OVERHEAD_BYTES
    try:
        folder.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(temporary, ignore_errors=True)
        free_bytes = shutil.disk_usage(folder).free
        if free_bytes < need_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        temporary.mkdir()
        with _single_process():
            writer = dcp.FileSystemWriter(
                temporary, single_file_per_rank=True, sync_files=True, overwrite=False
            )
            dcp.save(
                {name: tensor.detach() for name, tensor in tensors.items()},
                storage_writer=writer,
                no_dist=True,
            )
        write_atomically(
            temporary / "run.json", json.dumps({"format": FORMAT_VERSION, "step": step, **record})
        )
        manifest = {
            "format": FORMAT_VERSION,
            "step": step,
            "files": {
                file.name: {"bytes": file.stat().st_size, "sha256": sha256_of(file)}
                for file in sorted(temporary.iterdir())
            },
        }
        write_atomically(temporary / "manifest.json", json.dumps(manifest, indent=1))
        sync_folder(temporary)
        if final.exists():
            set_aside(final)
        temporary.rename(final)
        renamed = True
        sync_folder(folder)
        write_atomically(final / "COMMIT", sha256_of(final / "manifest.json") + "\n")
    except (OSError, UserError, RuntimeError, CheckpointException) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if renamed:
            shutil.rmtree(final, ignore_errors=True)
        for cause in _causes(error):
            if isinstance(cause, (KeyboardInterrupt, SystemExit)):
                raise cause from None
        if _is_full(error) or (folder.is_dir() and _free_bytes(folder) < OVERHEAD_BYTES):
            raise CheckpointError(
                f"the disk is full: the checkpoint of step {step} needs {spell_bytes(need_bytes)} in "
                f"{folder}, which has {spell_bytes(_free_bytes(folder))} free; older checkpoints are intact"
            ) from error
        if isinstance(error, (OSError, InputError)):
            raise CheckpointError(
                f"the checkpoint of step {step} cannot be written to {folder}: {error}"
            ) from error
        raise
    return final


def verify(path: Path) -> Checkpoint:
    """Reads a checkpoint's record after comparing the size and hash of every file.

    Raises:
        CheckpointError: it is incomplete or damaged; names the file.
    """
    try:
        commit = (path / "COMMIT").read_text(errors="replace").strip()
        raw = (path / "manifest.json").read_bytes()
    except (FileNotFoundError, NotADirectoryError) as error:
        missing = Path(error.filename).name
        raise CheckpointError(f"{path} is not a whole checkpoint: {missing} is missing") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}") from error
    if hashlib.sha256(raw).hexdigest() != commit:
        raise CheckpointError(f"{path} is damaged: manifest.json does not fit COMMIT")
    manifest = json.loads(raw)
    if manifest["format"] != FORMAT_VERSION:
        raise CheckpointError(f"{path} has format {manifest['format']}; this version reads {FORMAT_VERSION}")
    for name, expected in manifest["files"].items():
        file = path / name
        if not file.is_file():
            raise CheckpointError(f"{path} is damaged: {name} is missing")
        if (size := file.stat().st_size) != expected["bytes"]:
            raise CheckpointError(
                f"{path} is damaged: {name} has {size} bytes, written were {expected['bytes']}"
            )
        if sha256_of(file) != expected["sha256"]:
            raise CheckpointError(f"{path} is damaged: the content of {name} has changed")
    record = json.loads((path / "run.json").read_text())
    return Checkpoint(path, int(manifest["step"]), record)


def load(checkpoint: Checkpoint, tensors: Mapping[str, torch.Tensor]) -> None:
    """Copies the checkpoint's tensors into `tensors`, in place.

    Raises:
        CheckpointError: a name is in only one of the two, or a shape or dtype differs; names it.
    """
    stored = stored_tensors(checkpoint)
    missing = sorted(tensors.keys() - stored.keys())
    extra = sorted(stored.keys() - tensors.keys())
    if missing or extra:
        parts = []
        if missing:
            parts.append(f"it lacks {_some(missing)}")
        if extra:
            parts.append(f"it holds {_some(extra)}, which this model does not have")
        raise CheckpointError(f"{checkpoint.path} does not fit the model: {'; '.join(parts)}")
    for name, tensor in tensors.items():
        here = (tuple(tensor.shape), tensor.dtype)
        if stored[name] != here:
            raise CheckpointError(
                f"{checkpoint.path}: {name} is {_spell(*stored[name])}, the model's is {_spell(*here)}"
            )
    with _single_process():
        dcp.load(
            {name: tensor.detach() for name, tensor in tensors.items()},
            storage_reader=dcp.FileSystemReader(checkpoint.path),
            no_dist=True,
        )


def stored_tensors(checkpoint: Checkpoint) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Name, shape and dtype of every tensor in a checkpoint, without reading the tensors."""
    metadata = dcp.FileSystemReader(checkpoint.path).read_metadata()
    return {
        name: (tuple(item.size), item.properties.dtype)
        for name, item in metadata.state_dict_metadata.items()
        if isinstance(item, TensorStorageMetadata)
    }


def steps_in(folder: Path) -> list[tuple[int, Path]]:
    """(step, folder) of everything named like a checkpoint, oldest first; whole or not."""
    if not folder.is_dir():
        return []
    matches = ((NAME.fullmatch(path.name), path) for path in folder.iterdir())
    return sorted((int(match[1]), path) for match, path in matches if match is not None)


def find(folder: Path, resume: str, screen: Screen) -> Checkpoint | None:
    """The checkpoint to start from: the newest good one (`auto`), none (`none`), or the one at a path.

    Leftovers of a crash are removed. Later checkpoints than the one chosen are set aside, not deleted.

    Raises:
        CheckpointError: the one asked for is damaged, or there are some and none is good.
        InputError: `none` with checkpoints in the folder, or a path where there is no checkpoint.
    """
    if folder.is_dir():
        for left in folder.glob("step-*.tmp"):
            shutil.rmtree(left, ignore_errors=True)
    found = steps_in(folder)
    if resume == "none":
        if found:
            raise InputError(
                f"checkpoint.resume = 'none', but {folder} holds checkpoints up to {found[-1][1].name}; "
                "choose another output.folder, remove them, or set resume = 'auto' to continue"
            )
        return None
    if resume != "auto":
        path = Path(resume).expanduser()
        if not path.is_dir():
            names = ", ".join(entry.name for _, entry in found) or "none"
            raise InputError(f"checkpoint.resume = {resume!r}: no such folder; in {folder}: {names}")
        if not any((path / name).is_file() for name in ("COMMIT", "manifest.json", "run.json")):
            raise InputError(f"checkpoint.resume = {resume!r}: that folder is no checkpoint")
        chosen = verify(path)
        if path.resolve().parent == folder.resolve():
            for step, later in found:
                if step > chosen.step:
                    screen.note(f"{later.name} comes after {path.name}: kept as {set_aside(later).name}")
        return chosen
    damaged: list[tuple[Path, CheckpointError]] = []
    for step, path in reversed(found):
        try:
            good = verify(path)
        except CheckpointError as error:
            damaged.append((path, error))
            continue
        if good.step != step:
            raise CheckpointError(f"{path} holds step {good.step}; its name says {step}")
        # Only now: without a good one the names stay, so that a second try does not start anew over them.
        for left, why in damaged:
            screen.warn(f"{why}; it is kept as {set_aside(left).name} and {path.name} is used")
        return good
    if found:
        raise CheckpointError(
            f"none of the {len(found)} checkpoints in {folder} is whole "
            f"({'; '.join(str(error) for _, error in damaged[:3])}); to start again from step 0 choose "
            "another output.folder or remove them"
        )
    return None


def rotate(folder: Path, keep_last: int) -> None:
    """Deletes all but the newest `keep_last` checkpoints; the commit mark first, so none is half deleted."""
    for _, path in steps_in(folder)[:-keep_last]:
        (path / "COMMIT").unlink(missing_ok=True)
        shutil.rmtree(path)


def set_aside(path: Path) -> Path:
    """Renames a checkpoint so that no run takes it, and nothing is lost."""
    number = 0
    while (target := path.with_name(f"{path.name}.aside{number or ''}")).exists():
        number += 1
    path.rename(target)
    return target


@contextmanager
def _single_process() -> Iterator[None]:
    with warnings.catch_warnings():
        # dcp warns that it runs without a process group, which is what is asked of it here.
        warnings.filterwarnings(
            "ignore", message="torch.distributed is (disabled, )?unavailable or uninitialized"
        )
        yield


def _causes(error: BaseException) -> Iterator[BaseException]:
    seen: set[int] = set()
    queue = [error]
    while queue:
        current = queue.pop()
        if id(current) in seen:
            continue
        seen.add(id(current))
        yield current
        queue += [linked for linked in (current.__cause__, current.__context__) if linked is not None]
        if isinstance(current, CheckpointException):
            queue += [failure for failure, _ in current.failures.values()]


def _is_full(error: BaseException) -> bool:
    return any(isinstance(cause, OSError) and cause.errno in FULL for cause in _causes(error))


def _free_bytes(folder: Path) -> int:
    while not folder.exists():
        folder = folder.parent
    return shutil.disk_usage(folder).free


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _spell(shape: tuple[int, ...], dtype: torch.dtype) -> str:
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"

"""Programs and their weights on disk: what was captured and quantised once opens in a fraction of a second.

    CACHE/serve/KEY/program.json         the program, as its owner gave it
                    weights.safetensors  panels and tables, each from an address that its vectors may have
                    words.json           tokenizer and chat template
                    store.json           written last: sizes, checksums, what it was made from

KEY hashes the model's fingerprint, the choice of formats and the version of the code. A folder is written
under a temporary name, synced and renamed. One that is damaged, incomplete or of other code is passed over
with a reason and made again. Opening imports neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import struct
import tempfile
import time
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

import numpy as np

import hasten
from hasten.base.cache import cache_folder
from hasten.base.errors import HastenError, InputError, first_line
from hasten.base.files import make_folder, sync_folder
from hasten.ops.memory import address, pages
from hasten.ops.panels import Panels, describe, restore
from hasten.serve.words import Words

_LAYOUT = 1
_PROGRAM, _WEIGHTS, _WORDS, _MARK = "program.json", "weights.safetensors", "words.json", "store.json"
_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
    "F32": np.dtype(np.float32),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_PAGE_BYTES = 4096
_MAX_HEADER_BYTES = 100_000_000  # the safetensors format's own limit
_ALIGNMENT = 64
# Up to this size weights are read into memory of their own, whose checksums are looked at; above it the file
# is mapped, which takes no time and shares its pages between processes.
_READ_BYTES = 2 << 30
_BLOCK_BYTES = 1 << 22
_THREADS = 4


@dataclass(frozen=True)
class Stored:
    """A program with its weights, read from disk."""

    folder: Path
    program: dict[str, Any]
    panels: dict[str, Panels]
    tables: dict[str, np.ndarray]
    words: Words | None
    note: dict[str, Any]
    """What was given to `save` for people to read: model, formats, errors."""

    def __bool__(self) -> Literal[True]:
        return True


@dataclass(frozen=True)
class Missing:
    """No program to be had from disk; `reason` says why. False where a `Stored` is true."""

    reason: str

    def __bool__(self) -> Literal[False]:
        return False


@cache
def _code_version() -> str:
    """Changes with every change of the package, so that no program of other code is run."""
    digest = hashlib.sha256(f"{hasten.__version__} {_LAYOUT} {version('torch')}".encode())
    root = Path(hasten.__file__).parent
    for file in sorted(root.rglob("*.py")):
        stat = file.stat()
        digest.update(f"{file.relative_to(root)} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def store_key(fingerprint: str, choice: Mapping[str, Any]) -> str:
    """The name of a program's folder: of the model's fingerprint, what was chosen (as JSON) and the code."""
    text = json.dumps([fingerprint, choice, _code_version()], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


class Store:
    """The programs in a cache folder: `keep` of them, `keep_bytes` in all; those used longest ago go first.

    Raises InputError where the cache folder is a file.
    """

    def __init__(
        self, cache_dir: str | Path | None = None, keep: int = 8, keep_bytes: int = 40 << 30
    ) -> None:
        self.folder = cache_folder(cache_dir).value / "serve"
        self.keep, self.keep_bytes = keep, keep_bytes

    def load(self, key: str) -> Stored | Missing:
        """The program of that key, or why there is none. Never an error for what lies on the disk.

        Raises InputError where the system has no memory for its weights.
        """
        folder = self.folder / key
        if not (folder / _MARK).is_file():
            return Missing(
                f"nothing stored in {folder}" if not folder.exists() else f"{folder} is incomplete"
            )
        try:
            stored = _read(folder)
        except MemoryError as error:
            raise InputError(f"the weights in {folder}: {first_line(error)}") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError, HastenError) as error:
            return Missing(f"{folder} is damaged and will be made again ({first_line(error)})")
        _touch(folder)
        return stored

    def save(
        self,
        key: str,
        program: Mapping[str, Any],
        panels: Mapping[str, Panels],
        tables: Mapping[str, np.ndarray],
        words: Words | None = None,
        note: Mapping[str, Any] | None = None,
    ) -> Path:
        """Writes a program and returns its folder; panels or tables that are one object are stored once.

        Raises InputError where the folder cannot be written or the disk is full; then nothing is left of it.
        """
        make_folder(self.folder, f"cannot keep programs in {self.folder}")
        temporary = Path(tempfile.mkdtemp(dir=self.folder, prefix=f".{key}.", suffix=".tmp"))
        try:
            arrays, names = _arrays(panels, tables)
            checksums = _write_arrays(temporary / _WEIGHTS, arrays)
            described = {name: describe(matrix) for name, matrix in panels.items()}
            _write(
                temporary / _PROGRAM, json.dumps({"program": program, "panels": described, "names": names})
            )
            if words is not None:
                _write(temporary / _WORDS, words.to_json())
            files = {file.name: file.stat().st_size for file in temporary.iterdir()}
            texts = {name: _checksum(temporary / name) for name in files if name != _WEIGHTS}
            mark = {"files": files, "texts": texts, "tensors": checksums, "note": dict(note or {})}
            _write(temporary / _MARK, json.dumps(mark))
            sync_folder(temporary)
            self._place(temporary, self.folder / key)
        except OSError as error:
            raise InputError(f"cannot keep a program in {self.folder}: {error.strerror or error}") from error
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
        self.prune(self.folder / key)
        return self.folder / key

    def prune(self, spare: Path | None = None) -> list[Path]:
        """Removes what is over the limits and what broken-off writes left; returns what was removed.

        `spare` stays. A process that has read or mapped a program keeps it.
        """
        removed, total = [], 0
        for count, (folder, size) in enumerate(self.listing(), start=1):
            total += size
            if folder != spare and (count > self.keep or total > self.keep_bytes):
                removed.append(folder)
        hour_ago = time.time() - 3600
        for left in self.folder.glob(".*.tmp"):
            if left.stat().st_mtime < hour_ago:
                removed.append(left)
        for folder in removed:
            shutil.rmtree(folder, ignore_errors=True)
        return removed

    def listing(self) -> list[tuple[Path, int]]:
        """Folders of programs and their bytes, the last used first."""
        found = []
        for mark in self.folder.glob(f"*/{_MARK}"):
            try:
                size = sum(file.stat().st_size for file in mark.parent.iterdir())
                found.append((mark.stat().st_mtime_ns, mark.parent, size))
            except OSError:  # another process removes it
                continue
        return [(folder, size) for _, folder, size in sorted(found, reverse=True)]

    def __str__(self) -> str:
        found = self.listing()
        size = sum(size for _, size in found)
        return (
            f"{len(found)} programs of {size / 1e6:.0f} MB in {self.folder} "
            f"(the last {self.keep} are kept, at most {self.keep_bytes / 1e9:.0f} GB)"
        )

    def _place(self, temporary: Path, target: Path) -> None:
        if target.exists():  # damaged, or made by another process at the same time
            aside = Path(tempfile.mkdtemp(dir=self.folder, prefix=f".{target.name}.", suffix=".tmp"))
            os.replace(target, aside / "old")
            shutil.rmtree(aside, ignore_errors=True)
        try:
            os.rename(temporary, target)
        except OSError:
            if not (target / _MARK).is_file():
                raise
            return  # another process was first; its program is the same
        sync_folder(self.folder)


def _arrays(
    panels: Mapping[str, Panels], tables: Mapping[str, np.ndarray]
) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays to write, each once, and for every name (`panels/...`, `tables/...`) the one that it is."""
    arrays: dict[str, np.ndarray] = {}
    names: dict[str, str] = {}
    first: dict[tuple[int, np.dtype, tuple[int, ...]], str] = {}
    every = [(f"panels/{name}", matrix.data) for name, matrix in panels.items()]
    every += [(f"tables/{name}", np.asarray(table, order="C")) for name, table in tables.items()]
    for name, array in every:
        same = (address(array), array.dtype, array.shape)
        names[name] = first.setdefault(same, name) if array.size else name
        if names[name] == name:
            arrays[name] = array
    return arrays, names


def _write(file: Path, text: str) -> None:
    with open(file, "w", encoding="utf-8") as handle:
        handle.write(text)
        handle.flush()
        os.fsync(handle.fileno())


def _power(size: int) -> int:
    """The largest power of two, up to the alignment, that divides `size`."""
    return min(size & -size, _ALIGNMENT) if size else _ALIGNMENT


def _write_arrays(file: Path, arrays: Mapping[str, np.ndarray]) -> dict[str, int]:
    """Writes a safetensors file, one array after the other; returns their checksums.

    The format allows no gaps, so arrays lie in the order of the power of two that divides their size: each
    begins at a multiple of its own. The data begin on a page.
    """
    order = sorted(arrays, key=lambda name: -_power(arrays[name].nbytes))
    header: dict[str, Any] = {}
    at = 0
    for name in order:
        array = arrays[name]
        end = at + array.nbytes
        header[name] = {
            "dtype": _NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [at, end],
        }
        at = end
    text = json.dumps(header).encode()
    text += b" " * (-(8 + len(text)) % _PAGE_BYTES)
    checksums = {}
    with open(file, "wb") as handle:
        handle.write(struct.pack("<Q", len(text)) + text)
        for name in order:
            raw = arrays[name].reshape(-1).view(np.uint8)
            handle.write(raw.data)
            checksums[name] = zlib.crc32(raw.data)
        handle.flush()
        os.fsync(handle.fileno())
    return checksums


def _checksum(file: Path) -> int:
    return zlib.crc32(file.read_bytes())


def _read(folder: Path) -> Stored:
    """Raises OSError, ValueError, KeyError, TypeError or HastenError for whatever is wrong with it."""
    mark = json.loads((folder / _MARK).read_text(encoding="utf-8"))
    for name, size in mark["files"].items():
        if (folder / name).stat().st_size != size:
            raise ValueError(f"{name} has {(folder / name).stat().st_size} bytes, not {size}")
    for name, checksum in mark["texts"].items():
        if _checksum(folder / name) != checksum:
            raise ValueError(f"{name} is not what was written")
    content = json.loads((folder / _PROGRAM).read_text(encoding="utf-8"))
    arrays = _read_arrays(folder / _WEIGHTS, mark["tensors"])
    names = content["names"]
    held: dict[tuple[str, str], Panels] = {}
    panels = {}
    for name, description in content["panels"].items():
        key = (names[f"panels/{name}"], json.dumps(description))
        # What was one object is one again.
        panels[name] = held.setdefault(key, restore(description, arrays[key[0]]))
    tables = {
        name.removeprefix("tables/"): arrays[stored]
        for name, stored in names.items()
        if name.startswith("tables/")
    }
    words = None
    if _WORDS in mark["files"]:
        words = Words.from_json((folder / _WORDS).read_text(encoding="utf-8"))
    return Stored(folder, content["program"], panels, tables, words, mark["note"])


def _read_arrays(file: Path, checksums: Mapping[str, int]) -> dict[str, np.ndarray]:
    size = file.stat().st_size
    with open(file, "rb") as handle:
        (length,) = struct.unpack("<Q", handle.read(8))
        if length > min(size, _MAX_HEADER_BYTES):
            raise ValueError(f"a header of {length} bytes")
        header = json.loads(handle.read(length))
    begin = 8 + length
    if size <= _READ_BYTES:
        data = pages(size - begin, huge=True)
        places = {name: entry["data_offsets"] for name, entry in header.items()}
        _fill(file, begin, data, places, checksums)
    else:
        # Mapped for this process alone: nothing that is written to it reaches the file.
        data = np.memmap(file, np.uint8, "c").view(np.ndarray)[begin:]
    arrays = {}
    for name, entry in header.items():
        low, high = entry["data_offsets"]
        arrays[name] = data[low:high].view(_DTYPES[entry["dtype"]]).reshape(entry["shape"])
    return arrays


def _fill(
    file: Path, begin: int, data: np.ndarray, places: Mapping[str, Any], checksums: Mapping[str, int]
) -> None:
    """Reads and checks every array, several at a time: reading and summing leave Python's lock."""
    view: memoryview = data.data

    def one(name: str) -> None:
        low, high = places[name]
        total = 0
        with open(file, "rb", buffering=0) as handle:
            handle.seek(begin + low)
            for at in range(low, high, _BLOCK_BYTES):
                piece = view[at : min(at + _BLOCK_BYTES, high)]
                done = 0
                while done < len(piece):
                    count = handle.readinto(piece[done:])
                    if not count:
                        raise ValueError(f"array {name} ends early")
                    done += count
                total = zlib.crc32(piece, total)
        if total != checksums[name]:
            raise ValueError(f"array {name} is not what was written")

    _all(one, places)


def _all(function: Any, items: Iterable[str]) -> None:
    with ThreadPoolExecutor(_THREADS) as pool:
        for _ in pool.map(function, items):
            pass


def _touch(folder: Path) -> None:
    """Marks a program as used now."""
    with contextlib.suppress(OSError):  # a cache that may only be read
        os.utime(folder / _MARK)

"""Fingerprints of model files that cost milliseconds, whatever the size.

Names, sizes, times of change, and samples of the content: its first megabyte and 64 pieces of 4 KiB spread
over the rest. A file that is written anew has another time; one that is copied over with its time kept
differs in the samples unless it was made to deceive.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from hasten.base.errors import InputError

_HEAD_BYTES = 1 << 20
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 12
# What in a model's folder has a say in its weights, its text and its settings.
_SUFFIXES = (".safetensors", ".json", ".model", ".txt", ".jinja", ".bin")


def folder_files(folder: str | Path) -> list[Path]:
    """The files of a Hugging Face folder that its fingerprint covers, by name."""
    return sorted(file for file in Path(folder).iterdir() if file.is_file() and file.suffix in _SUFFIXES)


def model_fingerprint(path: str | Path) -> str:
    """The fingerprint of a GGUF file or of a Hugging Face folder. Imports neither torch nor transformers.

    Raises InputError where nothing is there or it cannot be read.
    """
    path = Path(path)
    if not path.is_dir():
        return files_fingerprint([path])
    try:
        return files_fingerprint(folder_files(path))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def files_fingerprint(files: Iterable[Path]) -> str:
    """64 hexadecimal digits for these files; the folder that they lie in does not count.

    Raises InputError for a file that cannot be read.
    """
    digest = hashlib.sha256()
    for file in files:
        try:
            _add(digest, file)
        except OSError as error:
            raise InputError(f"cannot read {file}: {error.strerror}") from error
    return digest.hexdigest()


def _add(digest: hashlib._Hash, file: Path) -> None:
    with open(file, "rb") as handle:
        stat = file.stat()
        digest.update(f"{file.name}\0{stat.st_size}\0{stat.st_mtime_ns}\0".encode())
        digest.update(handle.read(_HEAD_BYTES))
        rest = stat.st_size - _HEAD_BYTES
        for number in range(_SAMPLES if rest > 0 else 0):
            handle.seek(_HEAD_BYTES + number * max(0, rest - _SAMPLE_BYTES) // max(1, _SAMPLES - 1))
            digest.update(handle.read(_SAMPLE_BYTES))

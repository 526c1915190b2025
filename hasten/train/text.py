"""From files to documents: a folder, one text file, .jsonl, .parquet, or Python's own standard library.

The order of documents depends only on names and contents: files in the order of a hash of their relative path
(so that the first million tokens of a folder are a fair sample of it), rows in file order.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hasten.base.errors import InputError, nearest
from hasten.train.config import DataSection

STANDARD_LIBRARY = "python-stdlib"
ROW_SUFFIXES = (".jsonl", ".parquet")
# Tests and test data of the standard library are left out, as is what pip put beside it.
NOT_SOURCE = frozenset({"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"})


@dataclass(frozen=True)
class Source:
    """The files that a data section names."""

    root: Path
    files: tuple[Path, ...]
    field: str

    @property
    def total_bytes(self) -> int:
        """Bytes in all files."""
        return sum(file.stat().st_size for file in self.files)

    def key(self) -> str:
        """A hash that changes with every change of the files: names, sizes and times of change."""
        digest = hashlib.sha256(self.field.encode())
        for file in self.files:
            stat = file.stat()
            digest.update(f"{_relative(file, self.root)}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode())
        return digest.hexdigest()


@dataclass(frozen=True)
class Document:
    """One text and the bytes that reading it took (for a progress bar)."""

    text: str
    read_bytes: int


def find_source(data: DataSection) -> Source:
    """The files of a data section.

    Raises:
        InputError: the path does not exist, or no file in the folder matches the pattern.
    """
    if data.path == STANDARD_LIBRARY:
        root = Path(sysconfig.get_path("stdlib"))
        found = (file for file in root.rglob("*.py") if not NOT_SOURCE & set(file.relative_to(root).parts))
    else:
        root = Path(data.path).expanduser()
        _check_access(root)
        if root.is_file():
            return Source(root.parent, (root,), data.field)
        if not root.is_dir():
            beside = [entry.name for entry in root.parent.iterdir()] if root.parent.is_dir() else []
            raise InputError(
                f"data.path = {data.path!r}: no such file or folder "
                f"({nearest(root.name, [*beside, STANDARD_LIBRARY])})"
            )
        found = (file for file in _matches(root, data.glob) if file.is_file() and not _hidden(file, root))
    files = tuple(sorted(found, key=lambda file: hashlib.sha256(_relative(file, root).encode()).digest()))
    if not files:
        default = DataSection.model_fields["glob"].default
        which = (
            "there is no file in it" if data.glob == default else f"no file matches data.glob = {data.glob!r}"
        )
        raise InputError(f"data.path = {data.path!r}: {which}")
    return Source(root, files, data.field)


def documents(source: Source) -> Iterator[Document]:
    """Every document that is not empty, in a fixed order. In a folder, files that are not text are left out.

    Raises:
        InputError: a row without the field, a malformed file, a single file that is not text.
    """
    for file in source.files:
        if file.suffix == ".jsonl":
            yield from _json_rows(file, source.field)
        elif file.suffix == ".parquet":
            yield from _parquet_rows(file, source.field)
        else:
            with _reading(file):
                raw = file.read_bytes()
            text = _decoded(raw)
            if text is None:
                if len(source.files) == 1:
                    raise InputError(
                        f"{file} is not UTF-8 text; give .txt, .jsonl, .parquet or a folder of text"
                    )
                continue
            if text.strip():
                yield Document(text, len(raw))


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """The system's refusal to read a file as one message that names it."""
    try:
        yield
    except OSError as error:
        raise InputError(f"{file} cannot be read: {error.strerror or error}") from error


def _check_access(root: Path) -> None:
    try:
        found = root.stat()
        if stat.S_ISDIR(found.st_mode):
            with os.scandir(root):
                pass
    except (FileNotFoundError, NotADirectoryError, ValueError):
        return
    except OSError as error:
        raise InputError(f"data.path = {str(root)!r} cannot be read: {error.strerror}") from error


def _matches(root: Path, pattern: str) -> Iterator[Path]:
    if ".." in Path(pattern).parts or Path(pattern).is_absolute():
        raise InputError(f"data.glob = {pattern!r}: give a pattern inside data.path, for example '**/*.txt'")
    try:
        yield from root.glob(pattern)
    except (ValueError, NotImplementedError) as error:
        raise InputError(f"data.glob = {pattern!r}: {error}; for example '**/*.txt'") from None


def _json_rows(file: Path, field: str) -> Iterator[Document]:
    with _reading(file), file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
                raise InputError(f"{file}, line {number}: not valid JSON ({error})") from None
            if not isinstance(row, dict) or field not in row:
                names = list(row) if isinstance(row, dict) else []
                raise InputError(f"{file}, line {number}: no field {field!r}; {nearest(field, names)}")
            yield from _row(row[field], f"{file}, line {number}", field, len(line))


def _parquet_rows(file: Path, field: str) -> Iterator[Document]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InputError(
            f"{file}: .parquet needs pyarrow; install it with: pip install 'hasten[parquet]'"
        ) from None
    try:
        with _reading(file):
            table = pyarrow.parquet.ParquetFile(file)
        if field not in table.schema_arrow.names:
            raise InputError(f"{file}: no column {field!r}; {nearest(field, table.schema_arrow.names)}")
        number = 0
        for batch in table.iter_batches(batch_size=256, columns=[field]):
            for value in batch.column(0).to_pylist():
                number += 1
                yield from _row(value, f"{file}, row {number}", field, len(str(value)))
    except pyarrow.ArrowException as error:
        raise InputError(f"{file} cannot be read as parquet: {error}") from None


def _row(value: Any, where: str, field: str, read_bytes: int) -> Iterator[Document]:
    if value is None:
        return
    if not isinstance(value, str):
        raise InputError(f"{where}: field {field!r} holds {type(value).__name__}, not text")
    try:
        value.encode()
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair, which is no character; tokenizers refuse it.
        value = value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if value.strip():
        yield Document(value, read_bytes)


def _decoded(raw: bytes) -> str | None:
    if b"\0" in raw[:8192]:
        return None
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        return None


def _relative(file: Path, root: Path) -> str:
    return file.relative_to(root).as_posix()


def _hidden(file: Path, root: Path) -> bool:
    return any(part.startswith(".") or part == "__pycache__" for part in file.relative_to(root).parts)

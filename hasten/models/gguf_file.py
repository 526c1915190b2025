"""Reading a GGUF file: metadata, and tensors dequantised to numpy.

The format (ggml's docs/gguf.md), little-endian, versions 2 and 3:

    magic "GGUF" | version u32 | tensor count u64 | metadata count u64
    metadata: key string | type u32 | value           a string is a u64 length and UTF-8 bytes
    tensors:  name string | dimensions u32 | sizes u64 each, fastest first | type u32 | offset u64
    padding to `general.alignment` (32 unless the metadata says otherwise) | data

Types, block sizes and dequantisation are those of the `gguf` package; its own reader takes 2 s for the
vocabulary of a small model because it makes an array of every string, hence this one. Every length in the
file is checked against the bytes that are left before it is believed.
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hasten.base.errors import InputError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
# type number -> struct code (docs/gguf.md, gguf_metadata_value_type)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_MAX_DIMENSIONS = 4
_DEFAULT_ALIGNMENT = 32


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of the file: `shape` in torch's order, `kind` a `gguf.GGMLQuantizationType` number."""

    name: str
    shape: tuple[int, ...]
    kind: int
    begin: int
    size_bytes: int


class GgufFile:
    """A GGUF file, read-only: `metadata`, `tensors` by name, `read(name)`. The file is mapped, not loaded.

    Raises InputError where the file is missing, is no GGUF file, is cut off, or uses a tensor type that the
    `gguf` package does not know.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            with open(self.path, "rb") as handle:
                size = self.path.stat().st_size
                self._map = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ) if size else None
        except OSError as error:
            raise InputError(f"cannot read {self.path}: {error.strerror}") from error
        self._bytes = np.frombuffer(self._map or b"", np.uint8)
        self._view = self._bytes.data
        self._at = 0
        self.metadata, count = self._read_header()
        self.tensors = self._read_tensors(count)

    @property
    def architecture(self) -> str:
        """`general.architecture`, e.g. `llama`."""
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise InputError(f"{self.path}: the metadata has no general.architecture")
        return name

    def stored(self, name: str) -> NDArray[np.uint8]:
        """The bytes of a tensor as they lie in the file."""
        tensor = self.tensors[name]
        return self._bytes[tensor.begin : tensor.begin + tensor.size_bytes]

    def release(self) -> None:
        """Gives the mapped pages that were read back to the system; what was read from them stays valid.

        They are the file's own pages, but count as memory of the process until then.
        """
        if self._map is not None and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def read(self, name: str) -> NDArray[Any]:
        """A tensor dequantised, in torch's shape: float32, or float16 where the file stores that."""
        import gguf

        tensor = self.tensors[name]
        kind = gguf.GGMLQuantizationType(tensor.kind)
        raw = self.stored(name)
        if kind == gguf.GGMLQuantizationType.F32:
            return raw.view("<f4").reshape(tensor.shape)
        if kind == gguf.GGMLQuantizationType.F16:
            return raw.view("<f2").reshape(tensor.shape)
        rows = raw.reshape(*tensor.shape[:-1], -1)
        try:
            return gguf.quants.dequantize(rows, kind).reshape(tensor.shape)
        except NotImplementedError as error:
            raise InputError(
                f"{self.path}: tensor {name!r} is of type {kind.name}, which cannot be read"
            ) from error

    def _need(self, count: int, what: str) -> int:
        """Moves past `count` bytes and returns where they begin."""
        begin = self._at
        if count > len(self._view) - begin:
            raise InputError(
                f"{self.path} is cut off: {what} at byte {begin} needs {count} bytes, "
                f"{len(self._view) - begin} are left"
            )
        self._at = begin + count
        return begin

    def _scalars(self, code: str, count: int, what: str) -> tuple[Any, ...]:
        form = f"<{count}{code}"
        return struct.unpack_from(form, self._view, self._need(count * struct.calcsize("<" + code), what))

    def _string(self, what: str) -> str:
        (length,) = self._scalars("Q", 1, what)
        begin = self._need(length, what)
        return bytes(self._view[begin : begin + length]).decode("utf-8", errors="replace")

    def _value(self, kind: int, key: str) -> Any:
        if kind in _SCALARS:
            return self._scalars(_SCALARS[kind], 1, key)[0]
        if kind == _STRING:
            return self._string(key)
        if kind == _ARRAY:
            item, count = self._scalars("I", 1, key)[0], self._scalars("Q", 1, key)[0]
            if item in _SCALARS:
                return list(self._scalars(_SCALARS[item], count, key))
            # A string takes eight bytes at least: a count beyond that is damage, not a list to start on.
            if item == _STRING and count <= (len(self._view) - self._at) // 8:
                return [self._string(key) for _ in range(count)]
        raise InputError(f"{self.path}: metadata {key!r} is damaged or of a kind that GGUF does not have")

    def _read_header(self) -> tuple[dict[str, Any], int]:
        if bytes(self._view[:4]) != _MAGIC:
            raise InputError(f"{self.path} is not a GGUF file: it does not begin with 'GGUF'")
        self._at = 4
        (version,) = self._scalars("I", 1, "version")
        if version not in _VERSIONS:
            raise InputError(
                f"{self.path} is GGUF version {version}; allowed: {', '.join(map(str, _VERSIONS))}"
            )
        tensor_count, metadata_count = self._scalars("Q", 2, "counts")
        metadata: dict[str, Any] = {}
        for _ in range(metadata_count):
            key = self._string("metadata key")
            metadata[key] = self._value(self._scalars("I", 1, key)[0], key)
        return metadata, tensor_count

    def _read_tensors(self, count: int) -> dict[str, StoredTensor]:
        import gguf

        table = []
        for _ in range(count):
            name = self._string("tensor name")
            (dimensions,) = self._scalars("I", 1, name)
            if not 0 < dimensions <= _MAX_DIMENSIONS:
                raise InputError(f"{self.path}: tensor {name!r} has {dimensions} dimensions; allowed: 1 to 4")
            shape = tuple(reversed(self._scalars("Q", dimensions, name)))
            kind, offset = self._scalars("I", 1, name)[0], self._scalars("Q", 1, name)[0]
            table.append((name, shape, kind, offset))
        alignment = self.metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment < 1:
            raise InputError(f"{self.path}: general.alignment is {alignment!r}; it must be a positive number")
        data = -(-self._at // alignment) * alignment
        tensors: dict[str, StoredTensor] = {}
        for name, shape, kind, offset in table:
            sizes = gguf.GGML_QUANT_SIZES.get(kind)  # keyed by an IntEnum: its number finds it
            if sizes is None:
                raise InputError(f"{self.path}: tensor {name!r} is of the unknown type {kind}")
            per_block, block_bytes = sizes
            if shape[-1] % per_block:
                raise InputError(
                    f"{self.path}: tensor {name!r} has rows of {shape[-1]}, not a multiple of {per_block}"
                )
            size_bytes = math.prod(shape) // per_block * block_bytes
            self._at = data + offset
            tensors[name] = StoredTensor(
                name, shape, kind, self._need(size_bytes, f"tensor {name!r}"), size_bytes
            )
        return tensors

"""From the blocks of a GGUF file to panels of the same bits, with no dense copy of the matrix.

A block holds 32 weights (Q4_0 to Q8_0) or 256 (the K kinds) of one row; layouts as in ggml's ggml-common.h.
Scales keep their fp16 bits where a block has one fp16 scale. The K kinds have products of an fp16 number and
a small integer, which are rounded to fp16: a change of each scale and minimum by 2^-11 of itself at most.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hasten.base.errors import InputError
from hasten.models.gguf_file import GgufFile
from hasten.ops.panels import GGUF, LANES, Panels
from hasten.ops.panels.reference import pack_codes

Array = NDArray[Any]
# Weights that are decoded at a time: bounds what opening takes beside the panels (about 10 bytes for each).
_CHUNK = 1 << 18
# Products of scales are kept below this power of two, in the upper half of fp16's range, by the unit.
_TOP_EXPONENT = 14


@dataclass(frozen=True)
class Decoded:
    """Rows of blocks as numbers: codes uint8 [N, K], scales and minima fp32 [N, groups]."""

    codes: Array
    scales: Array
    minima: Array | None = None


def kind_name(file: GgufFile, name: str) -> str:
    """The type of a tensor as ggml writes it, e.g. `Q4_K`."""
    import gguf

    return str(gguf.GGMLQuantizationType(file.tensors[name].kind).name)


def stays_packed(file: GgufFile, name: str) -> bool:
    """Whether the tensor's blocks become panels of the same bits."""
    return len(file.tensors[name].shape) == 2 and kind_name(file, name) in GGUF


def gguf_panels(
    file: GgufFile,
    name: str,
    order: Array | None = None,
    rows: tuple[int, int] | None = None,
    columns: tuple[int, int] | None = None,
) -> Panels:
    """A stored matrix in panels of its own bits.

    Args:
        order: for each row of the result (before `rows` is taken) the stored row; None leaves them.
        rows, columns: the part that is wanted. Columns must begin where a group does.

    Raises InputError for a type that has no panels of the same bits and for columns within a group.
    """
    tensor, kind = file.tensors[name], kind_name(file, name)
    if not stays_packed(file, name):
        raise InputError(
            f"{file.path}: tensor {name!r} of type {kind} does not stay packed; "
            f"kinds that do: {', '.join(GGUF)}"
        )
    format, decode = GGUF[kind], _DECODERS[kind]
    wanted = np.arange(tensor.shape[0]) if order is None else order
    wanted = wanted[slice(*rows)] if rows else wanted
    begin, end = columns or (0, tensor.shape[1])
    if begin % format.group:
        raise InputError(f"{file.path}: columns of {name!r} from {begin}; a group has {format.group} weights")
    groups = slice(begin // format.group, -(-end // format.group))
    unit = 2.0 ** _exponent(file, name, kind) if kind in _PRODUCTS else 1.0
    blocks = file.stored(name).reshape(tensor.shape[0], -1)
    N, K = len(wanted), end - begin
    data = torch.empty(-(-N // LANES), format.panel_bytes(K), dtype=torch.uint8)
    step = max(1, _CHUNK // (LANES * tensor.shape[1])) * LANES
    for first in range(0, N, step):
        part = decode(blocks[wanted[first : first + step]])
        codes = torch.from_numpy(np.ascontiguousarray(part.codes[:, begin:end]))
        scales = torch.from_numpy(part.scales[:, groups] / np.float32(unit))
        minima = None if part.minima is None else torch.from_numpy(part.minima[:, groups] / np.float32(unit))
        panels = slice(first // LANES, -(-min(first + step, N) // LANES))
        try:
            pack_codes(codes, scales, minima, format, unit, out=data[panels])
        except ValueError as error:
            raise InputError(f"{file.path}: tensor {name!r} is damaged: {error}") from error
    return Panels(data.numpy(), format, N, K, unit)


def _exponent(file: GgufFile, name: str, kind: str) -> int:
    """The power of two that brings the largest scale or minimum just below the top of fp16's range."""
    blocks = file.stored(name).reshape(-1, _BLOCK_BYTES[kind])
    largest = 0.0
    for offset, factor in _PRODUCTS[kind]:
        numbers = np.abs(_half(blocks[:, offset : offset + 2]))
        # A number that is not finite is found when the scales are packed.
        numbers = numbers[np.isfinite(numbers)]
        largest = max(largest, factor * float(numbers.max(initial=0.0)))
    return int(np.ceil(np.log2(largest))) - _TOP_EXPONENT if largest > 0 else 0


def _half(raw: Array) -> Array:
    """fp16 bytes [..., 2] as fp32 [...]."""
    return np.ascontiguousarray(raw).view("<f2")[..., 0].astype(np.float32)


def _blocks(rows: Array, size: int) -> Array:
    return np.ascontiguousarray(rows).reshape(rows.shape[0], -1, size)


def _nibbles(raw: Array) -> Array:
    """Bytes [..., n] as codes [..., 2 n]: all low halves, then all high ones."""
    return np.concatenate([raw & 15, raw >> 4], axis=-1)


def _high_bits(raw: Array) -> Array:
    """Four bytes as 32 codes of 0 or 16: bit i belongs to value i."""
    return np.unpackbits(raw, axis=-1, bitorder="little") << 4


def _flat(codes: Array) -> Array:
    return codes.reshape(codes.shape[0], -1)


def _q4_0(rows: Array) -> Decoded:
    block = _blocks(rows, 18)
    return Decoded(_flat(_nibbles(block[..., 2:])), _half(block[..., :2]))


def _q4_1(rows: Array) -> Decoded:
    block = _blocks(rows, 20)
    return Decoded(_flat(_nibbles(block[..., 4:])), _half(block[..., :2]), _half(block[..., 2:4]))


def _q5_0(rows: Array) -> Decoded:
    block = _blocks(rows, 22)
    return Decoded(_flat(_nibbles(block[..., 6:]) | _high_bits(block[..., 2:6])), _half(block[..., :2]))


def _q5_1(rows: Array) -> Decoded:
    block = _blocks(rows, 24)
    codes = _nibbles(block[..., 8:]) | _high_bits(block[..., 4:8])
    return Decoded(_flat(codes), _half(block[..., :2]), _half(block[..., 2:4]))


def _q8_0(rows: Array) -> Decoded:
    block = _blocks(rows, 34)
    # int8 q as q + 128.
    return Decoded(_flat(block[..., 2:] ^ 128), _half(block[..., :2]))


def _k_scales(packed: Array) -> tuple[Array, Array]:
    """Twelve bytes as eight 6-bit scales and eight 6-bit minima (ggml: get_scale_min_k4)."""
    scale, minimum, both = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scales = np.concatenate([scale & 63, (both & 15) | ((scale >> 2) & 48)], axis=-1)
    minima = np.concatenate([minimum & 63, (both >> 4) | ((minimum >> 2) & 48)], axis=-1)
    return scales, minima


def _k_numbers(block: Array) -> tuple[Array, Array]:
    scales, minima = _k_scales(block[..., 4:16])
    scale = _half(block[..., :2])[..., None] * scales
    minimum = _half(block[..., 2:4])[..., None] * minima
    return _flat(scale.astype(np.float32)), _flat(-minimum.astype(np.float32))


def _q4_k(rows: Array) -> Decoded:
    block = _blocks(rows, 144)
    codes = _nibbles(block[..., 16:].reshape(*block.shape[:2], 4, 32))
    return Decoded(_flat(codes), *_k_numbers(block))


def _q5_k(rows: Array) -> Decoded:
    block = _blocks(rows, 176)
    low = _nibbles(block[..., 48:].reshape(*block.shape[:2], 4, 32)).reshape(*block.shape[:2], 8, 32)
    # Bit j of byte i belongs to value i of the j-th 32.
    high = block[..., None, 16:48] >> np.arange(8, dtype=np.uint8)[:, None] & 1
    return Decoded(_flat(low | high << 4), *_k_numbers(block))


def _q6_k(rows: Array) -> Decoded:
    block = _blocks(rows, 210)
    shape = block.shape[:2]
    low = _nibbles(block[..., :128].reshape(*shape, 2, 64)).reshape(*shape, 2, 4, 32)
    shifts = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = block[..., 128:192].reshape(*shape, 2, 1, 32) >> shifts & 3
    scales = block[..., 192:208].view(np.int8).astype(np.float32) * _half(block[..., 208:])[..., None]
    return Decoded(_flat(low | high << 4), _flat(scales))


_DECODERS: dict[str, Callable[[Array], Decoded]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_BLOCK_BYTES = {"Q4_K": 144, "Q5_K": 176, "Q6_K": 210}
# Kinds whose scales are products: where the fp16 factors lie in a block, and the largest integer they meet.
_PRODUCTS: dict[str, tuple[tuple[int, float], ...]] = {
    "Q4_K": ((0, 63.0), (2, 63.0)),
    "Q5_K": ((0, 63.0), (2, 63.0)),
    "Q6_K": ((208, 128.0),),
}

"""The meaning of panels in plain torch: packing a matrix, and the matrix that panels stand for.

    value = unit * (scale * q + minimum)          minimum = -zero * scale in symmetric formats

q is an unsigned code, scale and minimum are fp16 numbers of the group, unit is one fp32 number of the matrix.
In rotated formats these are the values of W T / 128 (`rotation.py`).
The native products of this folder are checked against `unpack`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops.panels.formats import BFLOAT16, LANES, PLANES, Format
from hasten.ops.panels.matrix import Panels
from hasten.ops.panels.rotation import rotate

# Panels handled at a time hold about this many weights, so that temporaries stay in the caches.
_CHUNK = 1 << 20
_VECTOR_BYTES = 64
# Bytes that belong to one lane within a vector: four values of k that one instruction multiplies and sums.
_QUAD = 4


def pack(matrix_NK: Tensor, format: Format) -> Panels:
    """A floating-point matrix [N, K] in panels of a dense format, rounded to it.

    Raises ShapeError for what is no matrix and for a quantised format (that needs codes: `pack_codes`).
    """
    _check_matrix(matrix_NK)
    if not format.dense:
        raise ShapeError(
            f"format {format} needs codes and scales: use pack_codes, or quantise the matrix first"
        )
    N, K = matrix_NK.shape
    dtype = torch.bfloat16 if format == BFLOAT16 else torch.float32
    data = torch.empty(-(-N // LANES), format.panel_bytes(K), dtype=torch.uint8)
    groups, group = format.groups(K), format.group
    for begin, end in _chunks(N, K):
        rows_PLK = _padded(matrix_NK[begin * LANES : end * LANES], end - begin, groups * group, dtype)
        # For each k (or pair of k): 16 lanes.
        turned = rows_PLK.view(end - begin, LANES, groups, group).permute(0, 2, 1, 3).contiguous()
        data[begin:end] = turned.view(end - begin, -1).view(torch.uint8)
    return Panels(data.numpy(), format, N, K)


def pack_codes(
    codes_NK: Tensor,
    scales_NG: Tensor,
    minima_NG: Tensor | None,
    format: Format,
    unit: float = 1.0,
    out: Tensor | None = None,
) -> Panels:
    """Codes with their scales in panels of a quantised format.

    Args:
        codes_NK: uint8 [N, K], below 2^bits.
        scales_NG: fp16 or wider [N, groups], divided by `unit`; rounded to fp16.
        minima_NG: likewise, for a format that stores minima; else None.
        out: where the bytes go, a tensor like `Panels.data`; else new memory.

    Raises ShapeError where shapes do not fit the format, ValueError where a scale is not finite in fp16 or a
    code is too large.
    """
    _check_matrix(codes_NK)
    N, K = codes_NK.shape
    groups = format.groups(K)
    if format.dense or codes_NK.dtype != torch.uint8 or (minima_NG is not None) != format.minima:
        raise ShapeError(
            f"{format} cannot be packed from {codes_NK.dtype} codes "
            f"{'with' if minima_NG is not None else 'without'} minima"
        )
    for numbers in (scales_NG, minima_NG):
        if numbers is not None and tuple(numbers.shape) != (N, groups):
            raise ShapeError(
                f"{format} of a matrix [{N}, {K}] has scales [{N}, {groups}], not {list(numbers.shape)}"
            )
    if codes_NK.numel() and int(codes_NK.max()) > format.highest:
        raise ValueError(f"code {int(codes_NK.max())} in {format}; the largest is {format.highest}")
    if not math.isfinite(unit) or unit <= 0:
        raise ValueError(f"unit {unit}: it must be a positive number")
    data = torch.empty(-(-N // LANES), format.panel_bytes(K), dtype=torch.uint8) if out is None else out
    packed = Panels(data.numpy(), format, N, K, float(unit))
    for begin, end in _chunks(N, K):
        rows, count = slice(begin * LANES, end * LANES), end - begin
        parts, column, first = [], 0, 0
        for number, size in format.runs(K):
            these, columns = slice(first, first + number), slice(column, column + number * size)
            codes = _padded(codes_NK[rows, columns], count, number * size, torch.uint8)
            fields = [_halves(scales_NG[rows, these], count)]
            if minima_NG is not None:
                fields.append(_halves(minima_NG[rows, these], count))
            low = 0
            for width in PLANES[format.bits]:
                fields.append(_plane(codes.view(count, LANES, number, size), low, width))
                low += width
            parts.append(torch.cat(fields, dim=2).view(count, -1))
            first, column = these.stop, columns.stop
        data[begin:end] = torch.cat(parts, dim=1)
    return packed


def unpack(panels: Panels, begin: int = 0, end: int | None = None) -> Tensor:
    """The matrix that panels stand for, or its rows `begin` to `end`: fp32 [N, K]."""
    end = panels.N if end is None else end
    if not 0 <= begin <= end <= panels.N:
        raise ShapeError(f"rows {begin} to {end} of a matrix with {panels.N} rows")
    format, K = panels.format, panels.K
    out_NK = torch.empty(end - begin, K)
    for first, last in _chunks(end - begin // LANES * LANES, K):
        first, last = first + begin // LANES, last + begin // LANES
        data = torch.from_numpy(panels.data[first:last])
        rows_NK = (_dense_rows(data, format) if format.dense else _quantised_rows(data, panels))[:, :K]
        rows_NK = rotate(rows_NK) if format.rotated else rows_NK
        low, high = max(begin, first * LANES), min(end, last * LANES)
        if high > low:
            out_NK[low - begin : high - begin] = rows_NK[low - first * LANES : high - first * LANES]
    return out_NK


def linear(x: Tensor, panels: Panels, bias_N: Tensor | None = None) -> Tensor:
    """x W^T + b in fp32: the meaning of the native products. x [..., K], result [..., N]."""
    return torch.nn.functional.linear(x.float(), unpack(panels), None if bias_N is None else bias_N.float())


def _check_matrix(matrix: Tensor) -> None:
    if matrix.dim() != 2:
        raise ShapeError(f"panels hold a matrix [N, K], not a tensor {list(matrix.shape)}")


def _chunks(N: int, K: int) -> list[tuple[int, int]]:
    """Ranges of panels that cover N rows, each of about `_CHUNK` weights."""
    panels = -(-N // LANES)
    step = max(1, _CHUNK // (LANES * max(K, 1)))
    return [(begin, min(begin + step, panels)) for begin in range(0, panels, step)]


def _padded(rows_NK: Tensor, panels: int, K: int, dtype: torch.dtype) -> Tensor:
    """Whole panels [panels, 16, K] of the rows, with zeros where there are none."""
    if tuple(rows_NK.shape) == (panels * LANES, K):
        return rows_NK.to(dtype).contiguous().view(panels, LANES, K)
    whole = torch.zeros(panels * LANES, K, dtype=dtype)
    whole[: rows_NK.shape[0], : rows_NK.shape[1]] = rows_NK
    return whole.view(panels, LANES, K)


def _halves(numbers_NG: Tensor, panels: int) -> Tensor:
    """fp16 numbers of the groups as bytes [panels, groups, 32]: for each group 16 lanes."""
    halves = _padded(numbers_NG, panels, numbers_NG.shape[1], torch.float16)
    if not bool(torch.isfinite(halves).all()):
        raise ValueError("a scale or minimum is not finite in fp16; divide it by a larger unit")
    return halves.permute(0, 2, 1).contiguous().view(torch.uint8).view(panels, -1, 2 * LANES)


def _plane(codes_PLGK: Tensor, low: int, width: int) -> Tensor:
    """Bits low .. low + width - 1 of the codes as bytes [panels, groups, 2 width group].

    A byte holds 8 / width values, 4 apart in k; four bytes of a lane lie together, then come the other lanes.
    """
    panels, lanes, groups, group = codes_PLGK.shape
    per_byte = 8 // width
    bits = (codes_PLGK >> low) & ((1 << width) - 1)
    parts = bits.view(panels, lanes, groups, group // (_QUAD * per_byte), per_byte, _QUAD)
    packed = parts[..., 0, :].clone()
    for place in range(1, per_byte):
        packed |= parts[..., place, :] << (width * place)
    return packed.permute(0, 2, 3, 1, 4).reshape(panels, groups, -1)


def _dense_rows(data: Tensor, format: Format) -> Tensor:
    panels = data.shape[0]
    dtype = torch.bfloat16 if format == BFLOAT16 else torch.float32
    numbers = data.view(dtype).view(panels, -1, LANES, format.group)
    return numbers.permute(0, 2, 1, 3).reshape(panels * LANES, -1).float()


def _quantised_rows(data: Tensor, panels: Panels) -> Tensor:
    """fp32 rows [panels * 16, K padded]."""
    format, count, parts, begin = panels.format, data.shape[0], [], 0
    for groups, size in format.runs(panels.K):
        end = begin + groups * format.bytes_of(size)
        stream, begin = data[:, begin:end].reshape(count, groups, -1), end
        at = 2 * LANES
        scales = _numbers(stream[..., :at])
        if format.minima:
            minima, at = _numbers(stream[..., at : 2 * at]), 2 * at
        else:
            minima = scales * -float(format.zero or 0)
        codes = torch.zeros(count, LANES, groups, size, dtype=torch.uint8)
        low = 0
        for width in PLANES[format.bits]:
            length, per_byte = 2 * width * size, 8 // width
            plane = stream[..., at : at + length].reshape(count, groups, -1, LANES, _QUAD)
            fields = codes.view(count, LANES, groups, -1, per_byte, _QUAD)
            for place in range(per_byte):
                bits = (plane.permute(0, 3, 1, 2, 4) >> (width * place)) & ((1 << width) - 1)
                fields[..., place, :] |= bits << low
            at, low = at + length, low + width
        values = torch.addcmul(minima.unsqueeze(-1), codes.float(), scales.unsqueeze(-1))
        parts.append(values.mul_(panels.unit).view(count * LANES, -1))
    return torch.cat(parts, dim=1) if parts else torch.empty(count * LANES, 0)


def _numbers(halves: Tensor) -> Tensor:
    """fp16 bytes [panels, groups, 32] as fp32 [panels, 16, groups]."""
    return halves.contiguous().view(torch.float16).permute(0, 2, 1).float().contiguous()

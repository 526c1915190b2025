"""Which query rows see which keys, cut into blocks on the host before any score is computed.

Causal order, sliding window, padding and packed documents come to the same thing: each query row of each
batch row sees one interval of keys [start, end). The plan turns these intervals into rectangular blocks of
queries and keys, so that keys that nobody in the block sees are never touched, and only the ragged edge of a
block carries a mask.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hasten.base.errors import ShapeError

Intervals = NDArray[np.int64]
Runs = tuple[tuple[int, int, int, int, int, bool], ...]


@dataclass(frozen=True)
class Block:
    """Query rows [q0, q1) against keys [k0, k1), the union of what the rows see.

    Attributes:
        hidden: bool [q1 - q0, c1 - c0], True where the row does not see the key; None where all rows see all.
        c0, c1: the key columns, counted from k0, that `hidden` covers.
        empty_rows: some row of the block sees no key at all.
        limits: what `limit` has made, by dtype.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    hidden: Tensor | None
    c0: int
    c1: int
    empty_rows: bool
    limits: dict[torch.dtype, Tensor] = field(default_factory=dict, repr=False, compare=False)

    def limit(self, dtype: torch.dtype) -> Tensor:
        """[q1 - q0, c1 - c0]: -inf where hidden, else inf: for a minimum; only if keys are hidden."""
        made = self.limits.get(dtype)
        if made is None:
            assert self.hidden is not None
            made = torch.full(self.hidden.shape, math.inf, dtype=dtype).masked_fill_(self.hidden, -math.inf)
            self.limits[dtype] = made
        return made


@dataclass(frozen=True)
class Segment:
    """Batch rows [b0, b1) that share the same blocks."""

    b0: int
    b1: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True)
class Plan:
    """The blocks of one attention call; `covered` is False when a query row, seeing no key, is in none."""

    segments: tuple[Segment, ...]
    covered: bool


def plan(
    ranges: Tensor | None, batch: int, queries: int, keys: int, causal: bool, window: int, block_rows: int
) -> Plan:
    """The blocks for one call; equal arguments (by value) give the same cached plan.

    Args:
        ranges: integer [B or 1, Sq, 2] (per query row) or [B, 2] (per batch row), keys [start, end); or None.
        batch, queries, keys: B, Sq, Sk.
        causal: query i sees key j only if j <= i + Sk - Sq.
        window: w > 0 limits row i to the w keys up to its own position when causal, and to
            |i + Sk - Sq - j| < w otherwise; 0 is no limit.
        block_rows: query rows in a block at most.
    """
    if ranges is None:
        return _cached_plan(b"", (), batch, queries, keys, causal, window, block_rows)
    values = np.ascontiguousarray(ranges.detach().cpu().numpy(), dtype=np.int64)
    return _cached_plan(values.tobytes(), values.shape, batch, queries, keys, causal, window, block_rows)


@lru_cache(maxsize=32)
def _cached_plan(
    ranges: bytes,
    shape: tuple[int, ...],
    batch: int,
    queries: int,
    keys: int,
    causal: bool,
    window: int,
    block_rows: int,
) -> Plan:
    given = np.frombuffer(ranges, dtype=np.int64).reshape(shape) if shape else None
    intervals = visible_intervals(given, queries, keys, causal, window)
    segments = []
    b0 = 0
    rows = intervals.shape[0]
    for b in range(1, rows + 1):
        if b == rows or not np.array_equal(intervals[b], intervals[b0]):
            segments.append(Segment(b0, b, tuple(_blocks(intervals[b0], block_rows))))
            b0 = b
    if rows == 1 and segments:
        segments = [Segment(0, batch, segments[0].blocks)]
    covered = all(sum(x.q1 - x.q0 for x in segment.blocks) == queries for segment in segments)
    return Plan(tuple(segments), covered and bool(segments))


def runs(
    ranges: Tensor | None, batch: int, queries: int, keys: int, causal: bool, window: int
) -> Runs | None:
    """The calls (batch row, q0, q1, k0, k1, causal) that together cover all visible pairs.

    Each is rows [q0, q1) that all see keys [k0, k1), or with `causal` a square of which row i sees the first
    i - q0 + 1 keys. None where the pairs have other shapes (a window, queries after a cache).
    """
    if ranges is None:
        return _cached_runs(b"", (), batch, queries, keys, causal, window)
    values = np.ascontiguousarray(ranges.detach().cpu().numpy(), dtype=np.int64)
    return _cached_runs(values.tobytes(), values.shape, batch, queries, keys, causal, window)


@lru_cache(maxsize=32)
def _cached_runs(
    ranges: bytes, shape: tuple[int, ...], batch: int, queries: int, keys: int, causal: bool, window: int
) -> Runs | None:
    given = np.frombuffer(ranges, dtype=np.int64).reshape(shape) if shape else None
    intervals = visible_intervals(given, queries, keys, causal, window)
    found: list[tuple[int, int, int, int, bool]] = []
    calls: list[tuple[int, int, int, int, int, bool]] = []
    for b in range(batch):
        if b < intervals.shape[0]:
            found = []
            start, end = intervals[b, :, 0], intervals[b, :, 1]
            grows, stays = np.diff(end) == 1, np.diff(end) == 0
            cut = (np.diff(start) != 0) | ~(stays | grows)
            cut[1:] |= stays[1:] & grows[:-1]
            edges = np.flatnonzero(cut) + 1
            # Many short runs cost more in calls than `blocked` costs in hidden corners.
            if edges.size > queries // 16:
                return None
            for q0, q1 in pairwise((0, *edges.tolist(), queries)):
                k0, first, last = int(start[q0]), int(end[q0]), int(end[q1 - 1])
                if first == last and last > k0 and not grows[q0 : q1 - 1].any():
                    found.append((q0, q1, k0, last, False))
                elif first == k0 + 1 and last - first == q1 - q0 - 1:
                    found.append((q0, q1, k0, last, True))
                elif last > k0:
                    return None
        calls.extend((b, *run) for run in found)
    return tuple(calls)


def visible_intervals(
    ranges: Intervals | None, queries: int, keys: int, causal: bool, window: int
) -> Intervals:
    """The interval of keys that each query row sees, int64 [B or 1, Sq, 2]; arguments as for `plan`."""
    position = np.arange(queries, dtype=np.int64) + (keys - queries)
    start = np.zeros(queries, dtype=np.int64)
    end = np.full(queries, keys, dtype=np.int64)
    if causal:
        end = np.minimum(end, position + 1)
    if window > 0:
        start = np.maximum(start, position - window + 1)
        end = np.minimum(end, position + window)
    intervals = np.stack((start, end), axis=-1)[None]
    if ranges is not None:
        given = ranges[:, None, :] if ranges.ndim == 2 else ranges
        start = np.maximum(intervals[..., 0], given[..., 0])
        end = np.minimum(intervals[..., 1], given[..., 1])
        intervals = np.stack((start, end), axis=-1)
    intervals[intervals[..., 1] <= intervals[..., 0]] = 0
    return intervals


def _blocks(interval: Intervals, block_rows: int) -> list[Block]:
    """Cuts [Sq, 2] where the visible keys jump (a new document, padding), then every `block_rows` rows."""
    queries = interval.shape[0]
    if queries == 0:
        return []
    start, end = interval[:, 0], interval[:, 1]
    seen = end > start
    jump = (np.diff(start) > 1) | (np.diff(end) < 0) | (seen[1:] != seen[:-1])
    edges = [0, *(np.flatnonzero(jump) + 1).tolist(), queries]
    spans: list[tuple[int, int]] = []
    small = False
    for q0, q1 in pairwise(edges):
        if not seen[q0]:
            small = False
            continue
        # Short documents share a block: a call for a few rows costs more than hidden corners of a larger one.
        if small and q1 - spans[-1][0] <= block_rows:
            spans[-1] = (spans[-1][0], q1)
            continue
        small = q1 - q0 < block_rows
        count = -(-(q1 - q0) // block_rows)
        step = -(-(q1 - q0) // count)
        spans.extend((q, min(q + step, q1)) for q in range(q0, q1, step))
    return [_block(interval, q0, q1) for q0, q1 in spans]


def _block(interval: Intervals, q0: int, q1: int) -> Block:
    start, end = interval[q0:q1, 0], interval[q0:q1, 1]
    seen = end > start
    k0, k1 = int(start[seen].min()), int(end[seen].max())
    column = np.arange(k0, k1)
    hidden = (column < start[:, None]) | (column >= end[:, None])
    ragged = np.flatnonzero(hidden.any(axis=0))
    if ragged.size == 0:
        return Block(q0, q1, k0, k1, None, 0, 0, False)
    c0, c1 = int(ragged[0]), int(ragged[-1]) + 1
    return Block(q0, q1, k0, k1, torch.from_numpy(hidden[:, c0:c1].copy()), c0, c1, bool((~seen).any()))


def ranges_from_mask(mask: Tensor) -> Tensor | None:
    """The key interval of each query row of a boolean mask.

    Args:
        mask: bool [B, 1, Sq, Sk], True where the query sees the key.

    Returns:
        int32 [B, Sq, 2] of [start, end), (0, 0) for a row that sees nothing; None when the visible keys of
        some row are not one interval.

    Raises:
        ShapeError: the mask is not a boolean [B, 1, Sq, Sk].
    """
    if mask.dim() != 4 or mask.shape[1] != 1 or mask.dtype != torch.bool:
        raise ShapeError(f"mask must be bool [B, 1, Sq, Sk], got {mask.dtype} {tuple(mask.shape)}")
    batch, _, queries, keys = mask.shape
    if keys == 0 or batch == 0 or queries == 0:
        return torch.zeros(batch, queries, 2, dtype=torch.int32, device=mask.device)
    visible = mask[:, 0].cpu().numpy()
    count = np.count_nonzero(visible, axis=-1)
    first = visible.argmax(axis=-1)
    last = keys - visible[..., ::-1].argmax(axis=-1)
    if not np.array_equal(np.where(count > 0, last - first, 0), count):
        return None
    start = np.where(count > 0, first, 0)
    intervals = np.stack((start, start + count), axis=-1).astype(np.int32)
    return torch.from_numpy(intervals).to(mask.device)

"""How fast this machine reads memory through torch: what generation, token by token, is measured against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import psutil
import torch

REPEATS = 3
READ_BYTES = 1 << 29
"""Several times the last-level cache of any processor of today."""


def read_bytes_per_s(read_bytes: int = READ_BYTES) -> float:
    """Bytes/s of a sum over `read_bytes`, at most an eighth of the free memory; takes a third of a second.

    One-dimensional sums of fp32 run on all threads and are limited by memory alone at this size.
    """
    size_bytes = min(read_bytes, psutil.virtual_memory().available // 8)
    buffer = torch.ones(size_bytes // 4, dtype=torch.float32)
    return buffer.numel() * 4 / median_time(lambda: buffer.sum())


def median_time(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of `repeats` calls after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)

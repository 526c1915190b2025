"""How fast this machine reads memory: what generation, token by token, is measured against."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np
import psutil

from hasten.ops import level
from hasten.ops.memory import address, pages

REPEATS = 3
READ_BYTES = 1 << 29
"""Several times the last-level cache of any processor of today."""


def read_bytes_per_s(read_bytes: int = READ_BYTES) -> float:
    """Bytes/s of reading `read_bytes` once, at most an eighth of the free memory; takes a third of a second.

    Threads read a word of each line, with lines fetched ahead, as the products of generation do; what a
    processor reaches with loads alone is a few percent less. Without native kernels torch's sum is timed.
    """
    size_bytes = min(read_bytes, psutil.virtual_memory().available // 8)
    buffer = pages(size_bytes // 4, np.float32, huge=True)  # as packed weights lie
    # Pages that were only read are one page of zeros.
    buffer[:] = 1
    return buffer.nbytes / median_time(_reading(buffer))


def _reading(buffer: np.ndarray) -> Callable[[], object]:
    if level.refusal():
        import torch

        return torch.from_numpy(buffer).sum
    read, threads = level.doors().read, level.threads()
    return lambda: read(address(buffer), len(buffer), threads)


def median_time(call: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median seconds of `repeats` calls after one that is not counted."""
    call()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        call()
        times.append(time.perf_counter() - begin)
    return statistics.median(times)

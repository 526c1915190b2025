"""Memory that native code reads and writes by its address, as numpy arrays."""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from functools import cache
from typing import Any

import numpy as np

_ALIGNMENT = 64
_MADV_POPULATE_WRITE = 23  # Linux 5.14


def address(array: np.ndarray) -> int:
    """Where the data of an array lie."""
    return int(array.__array_interface__["data"][0])


def aligned(count: int, dtype: Any = np.float32) -> np.ndarray:
    """Zeros [count] at a multiple of 64 bytes, whose pages are taken when they are first written."""
    size = count * np.dtype(dtype).itemsize
    held = np.zeros(size + _ALIGNMENT, np.uint8)
    skip = -address(held) % _ALIGNMENT
    return held[skip : skip + size].view(dtype)


def pages(count: int, dtype: Any = np.uint8, *, huge: bool = False) -> np.ndarray:
    """Zeros [count] from the beginning of a page, taken when they are first written: small pages, unless the
    system always gives huge ones.

    huge: ask for huge ones. They pay for weights, written once and read in every step, and not for a cache: a
    page that the system must put together first, or a hypervisor provide, takes longer than 512 small ones
    that a prompt would have touched (docs/LOG.md, "Pages of the cache").

    Raises:
        MemoryError: the system has no room for it.
    """
    size = count * np.dtype(dtype).itemsize
    try:
        region = mmap.mmap(-1, max(size, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"{size / 1e9:,.1f} GB cannot be had: {error}") from error
    if huge and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a system without them gives small ones, as ever
            region.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(region, dtype, count)


def take_pages(array: np.ndarray) -> None:
    """Has the system provide the pages of an array now, whose numbers stay as they are. Where the system has
    no such call they come when they are written, as ever."""
    begin, end = address(array) & -mmap.PAGESIZE, address(array) + array.nbytes
    _madvise()(begin, end - begin, _MADV_POPULATE_WRITE)


@cache
def _madvise() -> Any:
    call = ctypes.CDLL(None).madvise
    call.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return call

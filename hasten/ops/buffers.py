"""Reuse of large CPU tensors' memory, while something is optimised.

With the native kernels an arena (`_cpu/arena.h`) is registered as torch's CPU allocator. It takes memory from
the system once, keeps what is freed for the next tensor, and holds at most 8 % more than the peak in use, so
that training steps of one shape take no new page. Tensors below 64 KiB, shared memory and arrays from
elsewhere are left to whoever allocated them. Without the native kernels the C library is told to keep freed
blocks (`base/allocator.py`), which reuses as much and holds about 5 % more.

The allocator belongs to the process: users are counted, and the last one to leave switches it off. Tensors
that are alive then stay valid; their memory goes back to the system when they are freed. In a forked child (a
worker of a data loader) it is off until the child calls `enable` itself.

Pages of 2 MiB are a choice: where this was measured (docs/LOG.md) they made the first step dearer and no step
cheaper.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass

import torch

from hasten.base import allocator
from hasten.base.allocator import Status
from hasten.base.facts import detect
from hasten.ops import native

# Of the memory that the process may use: what is free and kept for reuse stays below this share.
_CAP_SHARE = 0.75
# Addresses cost nothing; twice the memory leaves room for blocks that lie apart.
_SPAN_SHARE = 2


@dataclass(frozen=True, slots=True)
class Usage:
    """The arena's counters since it was switched on. `reserved`: in use or kept for reuse."""

    in_use_bytes: int
    in_use_peak_bytes: int
    reserved_bytes: int
    reserved_peak_bytes: int
    hits: int
    """Tensors that needed nothing new from the system."""
    misses: int
    """Tensors that did."""
    fresh_bytes: int
    """Taken from the system, all together."""
    released_bytes: int
    """Given back, all together."""
    tensors: int
    """Blocks handed out now."""

    def __str__(self) -> str:
        return (
            f"{self.in_use_bytes / 1e9:.2f} GB in use and {self.reserved_bytes / 1e9:.2f} GB reserved, peaks "
            f"{self.in_use_peak_bytes / 1e9:.2f} and {self.reserved_peak_bytes / 1e9:.2f} GB; "
            f"{self.hits} tensors reused memory, {self.misses} took new pages"
        )

    def as_dict(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in self.__dataclass_fields__}


class Buffers:
    """The process's buffer reuse with a count of users. The process's own is behind the functions below."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # One entry for each user: its bound on the process's memory, or None.
        self._bounds: list[int | None] = []
        self._refused = ""
        self._huge = False

    def enable(self, bound_bytes: int | None = None, huge_pages: bool = False) -> Status:
        """One more user. Never an error: where buffers cannot be reused, the status says why.

        Args:
            bound_bytes: resident memory of the process that kept blocks must not lead past; the smallest
                bound of all users holds.
            huge_pages: ask the system for pages of 2 MiB, from now on in this process.
        """
        if not _has_arena():
            return allocator.enable()
        with self._lock:
            self._bounds.append(bound_bytes)
            self._huge |= huge_pages
            self._install()
            return self._status()

    def disable(self, bound_bytes: int | None = None) -> Status:
        """One user less, with the bound that it gave; does nothing where there is no such user."""
        if not _has_arena():
            return allocator.disable()
        with self._lock:
            if bound_bytes in self._bounds:
                self._bounds.remove(bound_bytes)
                if self._bounds:
                    self._install()
                else:
                    torch.ops.hasten_cpu.buffers_disable()
            return self._status()

    def status(self) -> Status:
        """What is on now, or why nothing is."""
        if not _has_arena():
            return allocator.status()
        with self._lock:
            return self._status()

    def usage(self) -> Usage | None:
        """The arena's counters; None where there is no arena."""
        if not _has_arena():
            return None
        return Usage(*torch.ops.hasten_cpu.buffers_usage())

    def _install(self) -> None:
        limit = detect().memory_limit_bytes.value
        bound = min((b for b in self._bounds if b is not None), default=0)
        self._refused = torch.ops.hasten_cpu.buffers_enable(
            _SPAN_SHARE * limit, int(_CAP_SHARE * limit), bound, self._huge
        )

    def _status(self) -> Status:
        users = len(self._bounds)
        if not users:
            return Status(False, "no optimised model uses it")
        if self._refused:
            return Status(False, self._refused, users)
        pages = ", pages of 2 MiB are asked for" if self._huge else ""
        return Status(True, f"large tensors come from an arena{pages}", users)


# torch has one CPU allocator for the whole process, so its count of users is one as well.
_BUFFERS = Buffers()


def enable(bound_bytes: int | None = None, huge_pages: bool = False) -> Status:
    """One more user of the process's buffer reuse; see `Buffers.enable`."""
    return _BUFFERS.enable(bound_bytes, huge_pages)


def disable(bound_bytes: int | None = None) -> Status:
    """One user less; see `Buffers.disable`."""
    return _BUFFERS.disable(bound_bytes)


def status() -> Status:
    """What is on in this process now, or why nothing is."""
    return _BUFFERS.status()


def usage() -> Usage | None:
    """The arena's counters; None where there is no arena."""
    return _BUFFERS.usage()


def refusal() -> str:
    """Why buffers cannot be reused here; empty where they can."""
    return "" if _has_arena() else allocator.refusal()


def way() -> str:
    """How buffers are reused here, in words."""
    if _has_arena():
        return "an arena registered as torch's CPU allocator, at most 8 % above the peak in use"
    return f"the C library keeps freed blocks, about 5 % above the peak in use ({native.state().reason})"


def _has_arena() -> bool:
    return native.state().level is not None and sys.platform == "linux"

"""Reuse of large buffers: tells the C library to keep freed blocks instead of returning them to the system.

glibc serves a block above its mmap threshold (at most 32 MiB when it adapts) by `mmap` and returns it on
`free`, and it gives the top of the heap back as soon as more than twice that is free. A training step frees
and asks for the same blocks over and over, so that every step pays for hundreds of thousands of page faults
and for the kernel to zero each page. Here both thresholds are raised, so the pages stay with the process.

The settings belong to the process, not to a model: users are counted, and the last one to leave switches them
off. glibc has no call to read its thresholds, and an explicit one stops it from adapting them for good. What
`disable` restores is therefore where a process that has freed large tensors had adapted to: 32 MiB for mmap
and twice that for trimming (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX), not the 128 KiB of a fresh process.

Used where the native kernels were not built, and by the bench's `eager-bf16-malloc`; otherwise large tensors
come from an arena of our own (`ops/buffers.py`).

Only the main thread's arena grows without bound: a training loop in another thread has arenas of 64 MiB, and
its larger blocks are mapped and returned as before. 2 MiB pages for the kept heap were tried and left out:
see docs/LOG.md.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

_MIB = 1 << 20
# malloc.h; the values are part of glibc's ABI.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NAMES = {_M_TRIM_THRESHOLD: "trim_threshold", _M_MMAP_THRESHOLD: "mmap_threshold"}
# The largest that mallopt's int takes; for trimming, -1 means never (man mallopt).
_REUSE_BYTES = {_M_MMAP_THRESHOLD: 2**31 - 1, _M_TRIM_THRESHOLD: -1}
_ADAPTED_BYTES = {_M_MMAP_THRESHOLD: 32 * _MIB, _M_TRIM_THRESHOLD: 64 * _MIB}
_VARIABLES = ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_MAX_")
_TUNABLES = ("mmap_threshold", "trim_threshold", "top_pad", "mmap_max")


@dataclass(frozen=True, slots=True)
class Status:
    """Whether buffers are kept for reuse, and why. `users`: how many `enable` calls are open."""

    on: bool
    reason: str
    users: int = 0
    settings_bytes: Mapping[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{'on' if self.on else 'off'}: {self.reason}"


class _DlInfo(ctypes.Structure):
    _fields_: ClassVar = [
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    ]


class BufferReuse:
    """The C library's thresholds, with a count of users. The process's own is behind the functions below."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users = 0
        self._on = False

    def enable(self) -> Status:
        """One more user; raises the thresholds for the first. Never an error: where it cannot, the status
        says why.
        """
        with self._lock:
            self._users += 1
            if not self._on and not refusal():
                self._on = _set(_REUSE_BYTES)
            return self._status()

    def disable(self) -> Status:
        """One user less; the last one lowers the thresholds and returns free memory to the system.

        Does nothing where no user is left.
        """
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._on and self._users == 0:
                _set(_ADAPTED_BYTES)
                _trim()
                self._on = False
            return self._status()

    def status(self) -> Status:
        """What is set now, or why nothing is."""
        with self._lock:
            return self._status()

    def _status(self) -> Status:
        if self._on:
            kept = {_NAMES[option]: value for option, value in _REUSE_BYTES.items()}
            return Status(True, "glibc keeps freed blocks for reuse", self._users, kept)
        if reason := refusal():
            return Status(False, reason, self._users)
        reason = "no optimised model uses it" if self._users == 0 else "glibc refused the settings"
        return Status(False, reason, self._users)


# The C library has one set of thresholds for the whole process, so their count of users is one as well.
_BUFFERS = BufferReuse()


def enable() -> Status:
    """One more user of the process's buffer reuse; see `BufferReuse.enable`."""
    return _BUFFERS.enable()


def disable() -> Status:
    """One user less; see `BufferReuse.disable`."""
    return _BUFFERS.disable()


def status() -> Status:
    """What is set in this process now, or why nothing is."""
    return _BUFFERS.status()


def give_back() -> None:
    """Returns freed memory to the system, unless it is kept for reuse or the C library is another."""
    if not _BUFFERS.status().on and not refusal():
        _trim()


def refusal(environ: Mapping[str, str] | None = None) -> str:
    """Why the thresholds are left alone here; empty where they can be set."""
    environ = os.environ if environ is None else environ
    try:
        library = os.confstr("CS_GNU_LIBC_VERSION") or ""
    except (AttributeError, ValueError, OSError):
        library = ""
    if not library.startswith("glibc"):
        return "the C library is not glibc; its allocator has no such settings"
    provider = _provider_of_malloc()
    if "libc.so" not in provider and "libc-" not in provider:
        return f"malloc comes from {provider}, which keeps buffers by its own rules"
    for name in _VARIABLES:
        if environ.get(name):
            return f"{name} is set, and the user's own setting is kept"
    tunables = environ.get("GLIBC_TUNABLES", "")
    for name in _TUNABLES:
        if f"glibc.malloc.{name}=" in tunables:
            return f"GLIBC_TUNABLES sets {name}, and the user's own setting is kept"
    return ""


def _provider_of_malloc() -> str:
    """The file name of the library whose `malloc` this process calls."""
    process = ctypes.CDLL(None)
    info = _DlInfo()
    if not process.dladdr(ctypes.cast(process.malloc, ctypes.c_void_p), ctypes.byref(info)) or not info.file:
        return "an unknown library"
    return os.path.basename(info.file.decode(errors="replace"))


def _set(options_bytes: Mapping[int, int]) -> bool:
    """mallopt for each option; True if glibc took them all."""
    mallopt = ctypes.CDLL(None).mallopt
    return [mallopt(option, value) for option, value in options_bytes.items()] == [1] * len(options_bytes)


def _trim() -> None:
    ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))

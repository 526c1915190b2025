"""Reuse of large buffers: tells the C library to keep freed blocks instead of returning them to the system.

glibc serves a block above its mmap threshold (at most 32 MiB when it adapts) by `mmap` and returns it on
`free`, and it gives the top of the heap back as soon as more than twice that is free. A training step frees
and asks for the same blocks over and over, so that every step pays for hundreds of thousands of page faults
and for the kernel to zero each page. Here both thresholds are raised, so the pages stay with the process.

The kernel fills a 2 MiB page in one fault and the processor keeps 512 times fewer addresses for it. Where it
gives such pages on request, address space for the heap to grow into (half of the memory that the process may
use) is set aside and advised; address space that is never touched holds no memory.

The settings belong to the process, not to a model: users are counted, and the last one to leave switches them
off. glibc has no call to read its thresholds, and an explicit one stops it from adapting them for good. What
`disable` restores is therefore where a process that has freed large tensors had adapted to: 32 MiB for mmap
and twice that for trimming (malloc/malloc.c, DEFAULT_MMAP_THRESHOLD_MAX), not the 128 KiB of a fresh process.

Only the main arena grows without bound: threads that torch did not start keep arenas of 64 MiB, where larger
blocks are mapped and returned as before.
"""

from __future__ import annotations

import ctypes
import os
import resource
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

from hasten.base.facts import detect

_MIB = 1 << 20
# malloc.h; the values are part of glibc's ABI.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_NAMES = {_M_TRIM_THRESHOLD: "trim_threshold", _M_MMAP_THRESHOLD: "mmap_threshold"}
# The largest that mallopt's int takes; for trimming, -1 means never (man mallopt).
_REUSE_BYTES = {_M_MMAP_THRESHOLD: 2**31 - 1, _M_TRIM_THRESHOLD: -1}
_ADAPTED_BYTES = {_M_MMAP_THRESHOLD: 32 * _MIB, _M_TRIM_THRESHOLD: 64 * _MIB}
_MADV_HUGEPAGE = 14  # asm-generic/mman-common.h
_HUGE_PAGE_BYTES = 2 * _MIB
_PIECE_BYTES = 1000 * _MIB
_RESERVE_SHARE = 0.5
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
        self._huge_bytes = 0

    def enable(self) -> Status:
        """One more user; raises the thresholds for the first. Never an error: where it cannot, the status
        says why.
        """
        with self._lock:
            self._users += 1
            if not self._on and not refusal():
                self._on = _set(_REUSE_BYTES)
                self._huge_bytes = _advise_heap() if self._on and not huge_page_refusal() else 0
            return self._status()

    def disable(self) -> Status:
        """One user less; the last one lowers the thresholds and returns free memory to the system.

        Does nothing where no user is left.
        """
        with self._lock:
            self._users = max(0, self._users - 1)
            if self._on and self._users == 0:
                _set(_ADAPTED_BYTES)
                ctypes.CDLL(None).malloc_trim(ctypes.c_size_t(0))
                self._on = False
            return self._status()

    def status(self) -> Status:
        """What is set now, or why nothing is."""
        with self._lock:
            return self._status()

    def _status(self) -> Status:
        if self._on:
            kept = {_NAMES[option]: value for option, value in _REUSE_BYTES.items()}
            kept["huge_page_heap"] = self._huge_bytes
            pages = (
                f"2 MiB pages for {self._huge_bytes / 1e9:.1f} GB of heap"
                if self._huge_bytes
                else "4 KiB pages"
            )
            return Status(True, f"glibc keeps freed blocks for reuse, {pages}", self._users, kept)
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


def huge_page_refusal(root: Path = Path("/")) -> str:
    """Why the heap is not advised to use 2 MiB pages; empty where it can be. `root`: where `proc` and `sys`
    lie.
    """
    try:
        mode = (root / "sys/kernel/mm/transparent_hugepage/enabled").read_text()
        overcommit = (root / "proc/sys/vm/overcommit_memory").read_text().strip()
    except OSError:
        return "this system has no transparent huge pages"
    if "[madvise]" not in mode:
        return f"the kernel's setting is {mode.strip()}, so advice changes nothing"
    if overcommit == "2":
        return "vm.overcommit_memory = 2 counts address space that is set aside as memory"
    if any(
        resource.getrlimit(limit)[0] != resource.RLIM_INFINITY
        for limit in (resource.RLIMIT_AS, resource.RLIMIT_DATA)
    ):
        return "this process's address space is limited (ulimit -v or -d)"
    return ""


def _advise_heap() -> int:
    """Grows the heap's address space and advises all of it to use huge pages; returns its bytes."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.malloc.restype, libc.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
    libc.free.restype, libc.free.argtypes = None, [ctypes.c_void_p]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    pieces = int(detect().memory_limit_bytes.value * _RESERVE_SHARE) // _PIECE_BYTES
    blocks = [libc.malloc(_PIECE_BYTES) for _ in range(pieces)]
    for block in reversed(blocks):
        libc.free(block)
    begin, end = _heap()
    begin = -(-begin // _HUGE_PAGE_BYTES) * _HUGE_PAGE_BYTES
    end = end // _HUGE_PAGE_BYTES * _HUGE_PAGE_BYTES
    if end <= begin or libc.madvise(begin, end - begin, _MADV_HUGEPAGE) != 0:
        return 0
    return end - begin


def _heap() -> tuple[int, int]:
    """First and last address of the main heap; (0, 0) if there is none yet."""
    with open("/proc/self/maps") as maps:
        for line in maps:
            if line.rstrip().endswith("[heap]"):
                begin, _, end = line.split()[0].partition("-")
                return int(begin, 16), int(end, 16)
    return 0, 0


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

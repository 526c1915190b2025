"""Resident memory of a process, now and at its peak. Imports no torch."""

from __future__ import annotations

import resource
import sys
from pathlib import Path


def peak_resident_bytes(pid: int | None = None) -> int:
    """High-water mark of the resident memory of this process, or on Linux of process `pid`.

    On Linux from VmHWM: `ru_maxrss` there starts at what the parent had when it forked.
    """
    value = _status("VmHWM", pid)
    if value is not None:
        return value
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def resident_bytes() -> int:
    """Resident memory of this process now."""
    import psutil

    return int(psutil.Process().memory_info().rss)


def _status(field: str, pid: int | None) -> int | None:
    file = Path(f"/proc/{pid or 'self'}/status")
    try:
        lines = file.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    return None

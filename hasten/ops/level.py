"""Which level's kernels this process runs, and what of them needs no torch: programs and sampling.

Chosen once, at import: the highest level that the processor and the system have, or the one that
`HASTEN_ISA` names (`base/facts.py`). Where there is none, `state().reason` says why: operators run their
torch bodies, and models their own forward pass. `HASTEN_NATIVE=0` switches the kernels off. Nothing here
imports torch, but for a level with AMX, whose product is torch's.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import logging
import os
import sys
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from hasten.base.errors import ConfigError
from hasten.base.facts import ISA_LEVELS, Facts, detect

FOLDER = Path(__file__).parent / "_cpu"
_OFF = ContextVar("hasten_native_off", default=False)
# The bits of XCR0 that a level's registers need (Intel SDM, volume 1, 13.1): SSE and AVX; the masks and the
# upper halves of AVX-512; the tiles.
REGISTERS = {"generic": 0, "avx2": 0x6, "avx512": 0xE6, "amx": 0x600E6}
_ANSWERS = {1: RuntimeError, 2: IndexError, 3: MemoryError}
LAYOUT = 1
"""Of what is handed to serving.so as words; the same number stands in _cpu/serving.h."""
_LENDING = threading.Lock()


@dataclass(frozen=True)
class State:
    """`level` of the loaded library, or None with the reason; `bf16` and `amx`: how bf16 is multiplied;
    `vnni`: whether bytes are, four at a time. `l2_bytes`: of the second-level cache.
    """

    level: str | None
    reason: str
    bf16: bool = False
    amx: bool = False
    vnni: bool = False
    l2_bytes: int = 1 << 20

    @property
    def library(self) -> Path:
        """The level's kernels."""
        return FOLDER / f"kernels_{self.level}.so"

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Doors:
    """The functions of serving.so; those that may fail raise RuntimeError, IndexError or MemoryError.

    Raises OSError where the library does not load, or was built from other code.
    """

    def __init__(self, library: Path) -> None:
        self._library = ctypes.CDLL(str(library))
        layout = getattr(self._library, "hasten_layout", None)
        if layout is None or layout() != LAYOUT:
            raise OSError("it was built from other code")
        self._library.hasten_error.restype = ctypes.c_char_p
        for name in ("hasten_launches", "hasten_saved_registers"):
            getattr(self._library, name).restype = ctypes.c_int64
        # Words for whom addresses and sizes are the same, as in the structures that they point to.
        word = ctypes.c_int64
        self.load = self._door("hasten_load", ctypes.c_char_p, ctypes.c_bool, word, ctypes.c_bool)
        self.lend = self._door("hasten_lend", *[word] * 2)
        self.program_run = self._door("hasten_program_run", *[word] * 2)
        self.program_run_greedy = self._door("hasten_program_run_greedy", *[word] * 6)
        self.argmax = self._door("hasten_argmax", *[word] * 7)
        self.sample = self._door("hasten_sample", *[word] * 12)
        self.read = self._door("hasten_read", *[word] * 3)

    def launches(self) -> int:
        return int(self._library.hasten_launches())

    def saved_registers(self) -> int:
        return int(self._library.hasten_saved_registers())

    def _door(self, name: str, *types: Any) -> Any:
        door, error = getattr(self._library, name), self._library.hasten_error
        door.argtypes, door.restype = types, ctypes.c_int32

        def call(*words: Any) -> None:
            answer = door(*words)
            if answer:
                raise _ANSWERS[answer](error().decode(errors="replace"))

        return call


def _load() -> tuple[State, Doors | None]:
    if os.environ.get("HASTEN_NATIVE", "1") == "0":
        return State(None, "HASTEN_NATIVE=0"), None
    facts = detect()
    serving = FOLDER / "serving.so"
    if not serving.exists():
        return _not_built(serving), None
    _load_openmp()
    try:
        doors = Doors(serving)
    except OSError as error:
        return State(None, f"{serving.name} does not load, install hasten again: {error}"), None
    level = saved_level(facts, doors.saved_registers())
    bf16 = level in ("avx512", "amx") and "avx512_bf16" in facts.flags.value
    vnni = level in ("avx512", "amx") and "avx512_vnni" in facts.flags.value
    how = "AMX" if level == "amx" else "pairs of bf16" if bf16 else "bf16 widened to fp32"
    sizes = [c.size_bytes for c in facts.caches.value if c.level == 2]
    reason = f"kernels_{level}.so, {how}"
    state = State(level, reason, bf16, level == "amx", vnni, *sizes[:1])
    if not state.library.exists():
        return _not_built(state.library), None
    doors.load(str(state.library).encode(), bf16, state.l2_bytes, vnni)
    return state, doors


def _load_openmp() -> None:
    """torch's own OpenMP, by its file: a process that imports torch later shall not have two.

    Wheels for Linux have it under this name. Where there is none, serving.so brings the system's, as
    binding.so does.
    """
    # ValueError: a module that stands for torch in tests, without a spec.
    with contextlib.suppress(OSError, ValueError):
        found = importlib.util.find_spec("torch")
        if found is not None and found.origin is not None:
            ctypes.CDLL(str(Path(found.origin).parent / "lib" / "libgomp.so.1"))


def _not_built(library: Path) -> State:
    return State(None, f"{library.name} was not built: install a C++ compiler and install hasten again")


def saved_level(facts: Facts, registers: int) -> str:
    """The level in force, or the highest below it whose registers the system saves.

    Linux hides most of what it does not save from /proc/cpuinfo, not all: a virtual machine may show AVX-512
    and not save its registers.

    Raises:
        ConfigError: the environment forces a level whose registers are not saved.
    """
    wanted = facts.isa.value
    saved = [level for level in ISA_LEVELS if REGISTERS[level] & ~registers == 0]
    if wanted in saved:
        return wanted
    if facts.isa.source == "HASTEN_ISA":
        raise ConfigError(
            f"HASTEN_ISA asks for {wanted!r}, but the system does not save its registers "
            f"(XCR0 is {registers:#x}); allowed: {', '.join(saved)}"
        )
    return next(level for level in reversed(ISA_LEVELS[: ISA_LEVELS.index(wanted)]) if level in saved)


_STATE, _DOORS = _load()


def state() -> State:
    """What is loaded."""
    return _STATE


def doors() -> Doors:
    """What runs programs and samples.

    Raises RuntimeError where no kernels are loaded.
    """
    if _DOORS is None:
        raise RuntimeError(f"no native kernels: {_STATE.reason}")
    return _DOORS


def lend_product() -> None:
    """Gives programs torch's product for AMX, where the level has it, and imports torch for that; without
    torch's operators pairs of bf16 do the work."""
    if _DOORS is None or not _STATE.amx:
        return
    with _LENDING:
        from hasten.ops import native

        if native.state().level is None:
            logging.getLogger(__name__).warning("programs run without AMX: %s", native.state().reason)
            return
        _DOORS.lend(*native.brgemm())


def launches() -> int:
    """How often `doors()` have run kernels in this process."""
    return 0 if _DOORS is None else _DOORS.launches()


def refusal() -> str:
    """Why no kernel can be used here; empty if one can."""
    return _STATE.reason if _STATE.level is None else "switched off here" if _OFF.get() else ""


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """The torch bodies run inside, in this thread: to compare and to time them."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)


def threads() -> int:
    """Threads that a step takes: torch's number where torch is loaded, else `OMP_NUM_THREADS`, else the
    physical cores that affinity, cpuset and quota leave to this process."""
    torch: Any = sys.modules.get("torch")
    counted = getattr(torch, "get_num_threads", None)  # none while another thread imports it
    return int(counted()) if counted is not None else _own_threads()


@cache
def _own_threads() -> int:
    given = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    return int(given) if given.isdecimal() and int(given) > 0 else detect().physical_cores.value

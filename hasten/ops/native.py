"""The native kernels: which level's library is loaded, or why none is.

Chosen once, when the operators are imported: the highest level that the processor and the system have, or the
one that `HASTEN_ISA` names (`base/facts.py`). Where there is none, the torch bodies run and `state().reason`
says why. `HASTEN_NATIVE=0` switches the kernels off.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from hasten.base.errors import ConfigError
from hasten.base.facts import ISA_LEVELS, Facts, detect

_FOLDER = Path(__file__).parent / "_cpu"
_OFF = ContextVar("hasten_native_off", default=False)
# The bits of XCR0 that a level's registers need (Intel SDM, volume 1, 13.1): SSE and AVX; the masks and the
# upper halves of AVX-512; the tiles.
REGISTERS = {"generic": 0, "avx2": 0x6, "avx512": 0xE6, "amx": 0x600E6}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class State:
    """`level` of the loaded library, or None with the reason; `bf16` and `amx`: how bf16 is multiplied;
    `vnni`: whether bytes are, four at a time.
    """

    level: str | None
    reason: str
    bf16: bool = False
    amx: bool = False
    vnni: bool = False

    def as_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


def _load() -> State:
    if os.environ.get("HASTEN_NATIVE", "1") == "0":
        return State(None, "HASTEN_NATIVE=0")
    facts = detect()
    binding = _FOLDER / "binding.so"
    if not binding.exists():
        return _not_built(binding)
    try:
        torch.ops.load_library(str(binding))
    except OSError as error:  # built against another torch
        return State(None, f"{binding.name} does not load, install hasten again: {error}")
    level = saved_level(facts, torch.ops.hasten_cpu.saved_registers())
    library = _FOLDER / f"kernels_{level}.so"
    if not library.exists():
        return _not_built(library)
    bf16 = level in ("avx512", "amx") and "avx512_bf16" in facts.flags.value
    vnni = level in ("avx512", "amx") and "avx512_vnni" in facts.flags.value
    torch.ops.hasten_cpu.load(str(library), bf16, level == "amx", _second_level_bytes(facts), vnni)
    how = "AMX" if level == "amx" else "pairs of bf16" if bf16 else "bf16 widened to fp32"
    return State(level, f"{library.name}, {how}", bf16, level == "amx", vnni)


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


def _second_level_bytes(facts: Facts) -> int:
    sizes = [c.size_bytes for c in facts.caches.value if c.level == 2]
    return sizes[0] if sizes else 1 << 20


_STATE = _load()


def state() -> State:
    """What is loaded."""
    return _STATE


def launches() -> int:
    """How often a kernel has run in this process, all kernels together; a difference tells who answered."""
    return 0 if _STATE.level is None else int(torch.ops.hasten_cpu.launches())


def build_hash() -> str:
    """Of the loaded libraries; empty without."""
    if _STATE.level is None:
        return ""
    names = ("binding.so", f"kernels_{_STATE.level}.so")
    return hashlib.sha256(b"".join((_FOLDER / name).read_bytes() for name in names)).hexdigest()[:16]


def refusal(*tensors: torch.Tensor | None) -> str:
    """Why no kernel can take these tensors; empty if one can."""
    if _STATE.level is None:
        return _STATE.reason
    if _OFF.get():
        return "switched off here"
    for tensor in tensors:
        if tensor is None:
            continue
        if type(tensor) not in _PLAIN:  # one that stands for others, as a tracer's fake tensors do
            return f"a {type(tensor).__name__}"
        if tensor.device.type != "cpu":
            return f"a tensor on {tensor.device}"
        if tensor.dtype not in DTYPES:
            return f"no kernel for {tensor.dtype}"
    return ""


@contextlib.contextmanager
def switched_off() -> Iterator[None]:
    """The torch bodies run inside, in this thread: to compare and to time them."""
    token = _OFF.set(True)
    try:
        yield
    finally:
        _OFF.reset(token)

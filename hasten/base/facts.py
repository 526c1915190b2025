"""What this machine is: processor, instruction levels, cores, memory, caches; each with its source.

Nothing here computes on tensors and torch is imported only by `accelerators`. Every number says where it was
read, so that `hasten doctor` can print it and a report on another machine can be checked.

Instruction levels: `generic < avx2 < avx512 < amx`. A level counts as available when the processor has every
flag of it and the operating system saves its registers. Linux clears a flag in `/proc/cpuinfo` when XCR0 does
not hold the register set; AMX tiles are asked for per process on top (Documentation/arch/x86/xstate.rst in
the kernel).
"""

from __future__ import annotations

import ctypes
import importlib.util
import math
import os
import platform
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from hasten.base.errors import ConfigError, nearest

T = TypeVar("T")

ISA_LEVELS: tuple[str, ...] = ("generic", "avx2", "avx512", "amx")
ISA_FLAGS: dict[str, tuple[str, ...]] = {
    "generic": (),
    "avx2": ("avx2", "fma", "f16c"),
    "avx512": ("avx512f", "avx512bw", "avx512dq", "avx512vl"),
    "amx": ("amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"),
}
_X86 = ("x86_64", "amd64", "i686", "i386")
_ARM = ("aarch64", "arm64")
# Any one of these: products of bf16 pairs summed in fp32 by one instruction.
_BF16_FLAGS = ("amx_bf16", "avx512_bf16", "avx10_2", "svebf16", "bf16")

# arch/x86/include/uapi/asm/prctl.h and the number of arch_prctl in the x86-64 system call table.
_SYS_ARCH_PRCTL = 158
_ARCH_GET_XCOMP_SUPP = 0x1021
_XFEATURE_XTILEDATA = 18
# cgroup v1 writes "no limit" as the largest page-aligned signed 64-bit number.
_CGROUP_V1_UNLIMITED = 1 << 60


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value and where it comes from, in words that a report can print."""

    value: T
    source: str

    def __str__(self) -> str:
        return f"{self.value} ({self.source})"


@dataclass(frozen=True, slots=True)
class Cache:
    """One cache that core 0 sees: `level` 1..4, `kind` Data, Instruction or Unified, `size_bytes`, sharing
    cores.
    """

    level: int
    kind: str
    size_bytes: int
    shared_by: str


@dataclass(frozen=True, slots=True)
class Facts:
    """This machine. `isa` is the level in force, `isa_available` the highest the machine has.

    `cores`: how many this process may keep busy (affinity and cgroup quota); `physical_cores`: the same where
    hardware threads that share a core's units count once. `memory_bytes`: what is installed;
    `memory_limit_bytes`: what this process may use (the cgroup limit where one is lower).
    """

    processor: Fact[str]
    architecture: Fact[str]
    cores: Fact[int]
    physical_cores: Fact[int]
    memory_bytes: Fact[int]
    memory_limit_bytes: Fact[int]
    caches: Fact[tuple[Cache, ...]]
    flags: Fact[frozenset[str]]
    isa_available: Fact[str]
    isa: Fact[str]
    bf16_in_hardware: Fact[bool]

    def default_dtype(self) -> Fact[str]:
        """`bf16` where the processor multiplies bf16 in hardware, else `fp32`; the source is the reason."""
        return Fact("bf16" if self.bf16_in_hardware.value else "fp32", self.bf16_in_hardware.source)

    def isa_reason(self, level: str) -> str:
        """Why `level` runs here, or does not, in one line."""
        if level not in ISA_LEVELS:
            raise ConfigError(f"unknown instruction level {level!r}; {nearest(level, ISA_LEVELS)}")
        if ISA_LEVELS.index(level) > ISA_LEVELS.index(self.isa_available.value):
            missing = [
                flag for below in _up_to(level) for flag in ISA_FLAGS[below] if flag not in self.flags.value
            ]
            if missing:
                return f"no: the processor lacks {', '.join(missing)}"
            return f"no: {self.isa_available.source}"
        if ISA_LEVELS.index(level) > ISA_LEVELS.index(self.isa.value):
            return f"available, not used: {self.isa.source}"
        return "in force" if level == self.isa.value else "available, a higher level is in force"


def detect(
    overrides: Mapping[str, Any] | None = None,
    environ: Mapping[str, str] | None = None,
    root: Path = Path("/"),
) -> Facts:
    """Reads the machine.

    Args:
        overrides: values that replace what was detected, by field name of `Facts`, e.g.
            `{"isa": "avx2", "bf16_in_hardware": False, "cores": 1}`.
        environ: the environment to read `HASTEN_ISA` from; the process's own when None.
        root: where `proc` and `sys` lie; another folder in tests.

    Raises:
        ConfigError: for an unknown override, an unknown level, or a level that the processor does not have.
    """
    environ = os.environ if environ is None else environ
    overrides = dict(overrides or {})
    cpuinfo = _read(root / "proc/cpuinfo")
    architecture = _architecture(cpuinfo, root)
    flags = _flags(cpuinfo, root)
    available = _isa_available(architecture.value, flags, root)
    physical, cores = _memory(root), _cores(root)
    facts = Facts(
        processor=_processor(cpuinfo),
        architecture=architecture,
        cores=cores,
        physical_cores=_physical_cores(root, cores),
        memory_bytes=physical,
        memory_limit_bytes=_memory_limit(root, physical),
        caches=_caches(root),
        flags=flags,
        isa_available=available,
        isa=_isa_in_force(available, overrides.pop("isa", None), environ.get("HASTEN_ISA")),
        bf16_in_hardware=_bf16(flags),
    )
    for name, value in overrides.items():
        if name not in Facts.__slots__ or name == "flags":
            raise ConfigError(
                f"hardware override {name!r} is unknown; {nearest(name, set(Facts.__slots__) - {'flags'})}"
            )
        facts = replace(facts, **{name: Fact(value, "argument hardware")})
    return facts


def accelerators() -> dict[str, Fact[str]]:
    """Which of `gpu` and `npu` torch can use here, and how that was asked. Imports torch."""
    import torch

    if torch.cuda.is_available():
        gpu = Fact(torch.cuda.get_device_name(0), "torch.cuda.is_available()")
    else:
        built = torch.version.cuda or torch.version.hip
        gpu = Fact(
            "none",
            f"torch.cuda.is_available() is False; torch is built {f'for {built}' if built else 'for CPU'}",
        )
    if importlib.util.find_spec("torch_npu") is None:
        npu = Fact("none", "package torch_npu is not installed")
    else:
        npu = Fact("torch_npu installed", "importlib: torch_npu found; not used yet")
    return {"gpu": gpu, "npu": npu}


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _field(text: str, *names: str) -> str:
    for name in names:
        if match := re.search(rf"^{re.escape(name)}\s*:\s*(.+)$", text, re.MULTILINE):
            return match[1].strip()
    return ""


def _processor(cpuinfo: str) -> Fact[str]:
    if name := _field(cpuinfo, "model name", "Hardware", "Model"):
        return Fact(name, "/proc/cpuinfo")
    if part := _field(cpuinfo, "CPU part"):
        return Fact(f"implementer {_field(cpuinfo, 'CPU implementer')} part {part}", "/proc/cpuinfo")
    return Fact(platform.processor() or platform.machine() or "unknown", "platform.processor()")


def _architecture(cpuinfo: str, root: Path) -> Fact[str]:
    if root == Path("/"):
        return Fact(platform.machine().lower(), "platform.machine()")
    return Fact("aarch64" if _field(cpuinfo, "Features") else "x86_64", "cpuinfo of the given root")


def _flags(cpuinfo: str, root: Path) -> Fact[frozenset[str]]:
    if text := _field(cpuinfo, "flags", "Features"):
        return Fact(frozenset(text.split()), "/proc/cpuinfo")
    if root == Path("/") and platform.system() == "Darwin":
        return Fact(frozenset(_darwin_flags()), "sysctl hw.optional")
    return Fact(frozenset(), f"unknown: {platform.system()} has no /proc/cpuinfo")


def _darwin_flags() -> list[str]:
    libc = ctypes.CDLL(None)
    found = []
    for key, flag in (
        ("hw.optional.arm.FEAT_BF16", "bf16"),
        ("hw.optional.avx2_0", "avx2"),
        ("hw.optional.fma", "fma"),
    ):
        value, size = ctypes.c_int(0), ctypes.c_size_t(4)
        status = libc.sysctlbyname(key.encode(), ctypes.byref(value), ctypes.byref(size), None, 0)
        if status == 0 and value.value:
            found.append(flag)
    return found


def _up_to(level: str) -> tuple[str, ...]:
    return ISA_LEVELS[: ISA_LEVELS.index(level) + 1]


def _isa_available(architecture: str, flags: Fact[frozenset[str]], root: Path) -> Fact[str]:
    if architecture not in _X86:
        return Fact("generic", f"{architecture}: the levels above generic are x86's")
    for level in reversed(ISA_LEVELS):
        needed = {flag for below in _up_to(level) for flag in ISA_FLAGS[below]}
        if not needed <= flags.value:
            continue
        if level == "amx" and (refusal := _amx_refusal(root)):
            return Fact("avx512", f"the processor has AMX, but {refusal}")
        source = (
            f"flags {', '.join(ISA_FLAGS[level])} in {flags.source}" if level != "generic" else flags.source
        )
        return Fact(level, source)
    return Fact("generic", flags.source)


def _amx_refusal(root: Path) -> str:
    """Empty if the kernel grants AMX tiles to a process that asks; else why not. Asks nothing, changes
    nothing.
    """
    if root != Path("/"):
        return ""
    granted = ctypes.c_uint64(0)
    status = ctypes.CDLL(None, use_errno=True).syscall(
        _SYS_ARCH_PRCTL, _ARCH_GET_XCOMP_SUPP, ctypes.byref(granted)
    )
    if status != 0:
        return f"this kernel ({platform.release()}) cannot grant its tiles: Linux 5.16 or newer is needed"
    if not granted.value >> _XFEATURE_XTILEDATA & 1:
        return "the kernel does not save its tile registers (arch_prctl ARCH_GET_XCOMP_SUPP)"
    return ""


def _isa_in_force(available: Fact[str], argument: Any, variable: str | None) -> Fact[str]:
    wanted, source = (argument, "argument hardware") if argument is not None else (variable, "HASTEN_ISA")
    if not wanted:
        return Fact(available.value, f"highest available: {available.source}")
    level = str(wanted).lower()
    if level not in ISA_LEVELS:
        raise ConfigError(f"{source}: unknown instruction level {wanted!r}; {nearest(level, ISA_LEVELS)}")
    if ISA_LEVELS.index(level) > ISA_LEVELS.index(available.value):
        raise ConfigError(
            f"{source} asks for {level!r}, but this machine has {available.value!r} at most "
            f"({available.source}); "
            f"allowed: {', '.join(_up_to(available.value))}"
        )
    return Fact(level, source)


def _bf16(flags: Fact[frozenset[str]]) -> Fact[bool]:
    for flag in _BF16_FLAGS:
        if flag in flags.value:
            return Fact(True, f"flag {flag} in {flags.source}")
    return Fact(False, f"none of {', '.join(_BF16_FLAGS)} in {flags.source}: bf16 products would be emulated")


def _cgroups(root: Path, controller: str) -> list[Path]:
    """The folders of this process's cgroup and its parents that may hold limits of `controller`, innermost
    first.
    """
    folders: list[Path] = []
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, _, rest = line.partition(":")
        names, _, path = rest.partition(":")
        if names and controller not in names.split(","):
            continue
        base = root / "sys/fs/cgroup" / (controller if names else "")
        parts = [part for part in path.split("/") if part]
        folders += [base.joinpath(*parts[:n]) for n in range(len(parts), -1, -1)]
    return folders


def _allowed() -> Fact[Set[int]]:
    """The processors, by number, that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return Fact(os.sched_getaffinity(0), "sched_getaffinity")
    return Fact(set(range(os.cpu_count() or 1)), "os.cpu_count()")


def _cores(root: Path) -> Fact[int]:
    cpus = _allowed()
    cores, source = len(cpus.value), cpus.source
    for folder in _cgroups(root, "cpu"):
        quota, period, name = "max", "100000", "cpu.max"
        if text := _read(folder / "cpu.max").split():
            quota, period = text[0], text[1] if len(text) > 1 else period
        elif text_v1 := _read(folder / "cpu.cfs_quota_us").strip():
            quota, period, name = (
                text_v1,
                _read(folder / "cpu.cfs_period_us").strip() or period,
                "cpu.cfs_quota_us",
            )
        if quota.isdigit() and int(quota) > 0 and int(period) > 0:
            allowed = max(1, math.ceil(int(quota) / int(period)))
            if allowed < cores:
                cores, source = allowed, f"cgroup {name} {quota}/{period}"
    return Fact(cores, source)


def _physical_cores(root: Path, cores: Fact[int]) -> Fact[int]:
    folder = root / "sys/devices/system/cpu"
    files = [folder / f"cpu{cpu}/topology/thread_siblings_list" for cpu in _allowed().value]
    siblings = [_read(file).strip() for file in files]
    found = len(set(siblings))
    return Fact(found, f"{folder}/*/topology") if all(siblings) and found < cores.value else cores


def _memory(root: Path) -> Fact[int]:
    if match := re.search(r"^MemTotal:\s*(\d+) kB", _read(root / "proc/meminfo"), re.MULTILINE):
        return Fact(int(match[1]) * 1024, "/proc/meminfo MemTotal")
    import psutil

    return Fact(int(psutil.virtual_memory().total), "psutil.virtual_memory()")


def _memory_limit(root: Path, physical: Fact[int]) -> Fact[int]:
    limit = physical
    for folder in _cgroups(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = _read(folder / name).strip()
            if text.isdigit() and 0 < int(text) < min(limit.value, _CGROUP_V1_UNLIMITED):
                limit = Fact(int(text), f"cgroup {name}")
    return limit


def _caches(root: Path) -> Fact[tuple[Cache, ...]]:
    found = []
    for folder in sorted((root / "sys/devices/system/cpu/cpu0/cache").glob("index*")):
        size = re.fullmatch(r"(\d+)([KMG]?)", _read(folder / "size").strip())
        level = _read(folder / "level").strip()
        if size and level.isdigit():
            scale = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}[size[2]]
            sharing = _read(folder / "shared_cpu_list").strip()
            found.append(Cache(int(level), _read(folder / "type").strip(), int(size[1]) * scale, sharing))
    return Fact(
        tuple(found), "/sys/devices/system/cpu/cpu0/cache" if found else "unknown: no cache folder in /sys"
    )

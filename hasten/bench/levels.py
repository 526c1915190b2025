"""The same bench at several instruction levels, with torch limited as hasten is.

`HASTEN_ISA` limits hasten's kernels, `ATEN_CPU_CAPABILITY` torch's own, `ONEDNN_MAX_CPU_ISA` the matrix
products that torch takes from oneDNN (its developer guide, "CPU dispatcher control"). Each contender's
process gets all three. A level below AVX-512 has no products of bf16, so the bf16 contenders run in fp32
there, as they would on a processor of that level.
"""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hasten.base.errors import ConfigError, nearest
from hasten.base.facts import ISA_LEVELS, Facts
from hasten.bench.report import BenchReport, Frozen

ENVIRONMENT: dict[str, dict[str, str]] = {
    "generic": {"ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "avx2": {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"},
    "avx512": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"},
    "amx": {"ATEN_CPU_CAPABILITY": "avx512", "ONEDNN_MAX_CPU_ISA": "DEFAULT"},
}
_WITH_BF16 = ("avx512", "amx")


class LevelsReport(Frozen):
    """One report of `hasten bench train` for each level, in the order they ran."""

    schema_name: Literal["hasten.bench.levels/1"] = Field(default="hasten.bench.levels/1", alias="schema")
    environment: dict[str, dict[str, str]]
    """By level: what limited hasten and torch."""
    reports: dict[str, BenchReport]


def environment(level: str) -> dict[str, str]:
    """The variables that limit hasten, torch and oneDNN to `level`."""
    return {"HASTEN_ISA": level, **ENVIRONMENT[level]}


def parse_levels(text: str, facts: Facts) -> tuple[str, ...]:
    """`"avx2,avx512"` as a tuple in the given order.

    Raises:
        ConfigError: an unknown or repeated level, or one that this machine does not have.
    """
    names = tuple(name.strip().lower() for name in text.split(",") if name.strip())
    highest = ISA_LEVELS.index(facts.isa_available.value)
    allowed = ISA_LEVELS[: highest + 1]
    for name in names:
        if name not in allowed:
            above = name in ISA_LEVELS
            why = facts.isa_reason(name) if above else "unknown"
            raise ConfigError(f"level {name!r}: {why}; {nearest(name, allowed)}")
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"levels = {text!r}: name each level once; allowed: {', '.join(allowed)}")
    return names


def has_bf16(level: str | None, facts: Facts) -> tuple[bool, str]:
    """Whether the bf16 contenders run in bf16 at a level (None: the machine's own), and why not."""
    if not facts.bf16_in_hardware.value:
        return False, "this processor has no bf16 in hardware"
    if level is not None and level not in _WITH_BF16:
        return False, f"level {level} has no bf16"
    return True, facts.bf16_in_hardware.source

"""Formats of weight matrices in panels, as data: how many bits, which groups, how many bytes.

A matrix [N, K] lies in panels of 16 rows, one stream of bytes for each panel (docs/design/003-serving.md).
Names: `float32`, `bfloat16`, and `intB[gG][m][r]` for B bits in groups of G (32 unless given) with one scale
a group and, with `m`, one minimum a group; without it zero is the middle code, 2^(B-1). With `r` the matrix
is rotated before it is rounded, in groups of 128 (`rotation.py`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from hasten.base.errors import ConfigError, nearest

LANES = 16
GROUPS = (16, 32, 64, 128)
PLANES: dict[int, tuple[int, ...]] = {3: (2, 1), 4: (4,), 5: (4, 1), 6: (4, 2), 8: (8,)}
"""Bits of a code -> widths of its planes, lowest bits first."""

_DENSE = {"float32": (0, 32, 1), "bfloat16": (1, 16, 2)}
_CODES = {"float32": 0, "bfloat16": 1, "quantised": 2, "rotated": 3}
_HALF_BYTES = 2
_NAME = re.compile(r"int(\d)(?:g(\d+))?(m?)(r?)")
_USUAL_GROUP = 32
ROTATED_GROUP = 128


@dataclass(frozen=True)
class Format:
    """How the weights of one matrix are stored.

    `kind`: "float32", "bfloat16", "quantised" or "rotated". `bits`: of one weight (32, 16, or 3, 4, 5, 6, 8).
    `group`: weights of a row that share a scale; for the dense kinds the multiple that K is padded to (1, 2).
    `zero`: the code that means zero, or None where a minimum is stored for each group (and for dense kinds).

    Raises ConfigError for a combination that has no layout.
    """

    kind: str
    bits: int
    group: int
    zero: int | None = None

    def __post_init__(self) -> None:
        if self.kind in _DENSE:
            if (self.bits, self.group) != _DENSE[self.kind][1:] or self.zero is not None:
                bits, group = _DENSE[self.kind][1:]
                raise ConfigError(
                    f"format {self.kind}: bits {self.bits}, group {self.group}, zero {self.zero}; "
                    f"it has bits {bits}, group {group} and no zero"
                )
            return
        if self.kind not in _CODES:
            raise ConfigError(f"format kind {self.kind!r}; {nearest(self.kind, _CODES)}")
        if self.bits not in PLANES:
            raise ConfigError(f"weights of {self.bits} bits; allowed: {', '.join(map(str, PLANES))}")
        if self.group not in GROUPS:
            raise ConfigError(f"groups of {self.group} weights; allowed: {', '.join(map(str, GROUPS))}")
        if self.rotated and self.group != ROTATED_GROUP:
            raise ConfigError(f"rotated groups of {self.group} weights; allowed: {ROTATED_GROUP}")
        # A vector of the 1-bit plane holds 32 values of each row.
        if 1 in PLANES[self.bits] and self.group < _USUAL_GROUP:
            raise ConfigError(f"{self.bits} bits in groups of {self.group}; allowed: groups of 32, 64, 128")
        if self.zero is not None and not 0 <= self.zero < 1 << self.bits:
            raise ConfigError(f"zero code {self.zero} for {self.bits} bits; allowed: 0 to {2**self.bits - 1}")

    @property
    def dense(self) -> bool:
        """Whether weights are stored as floating-point numbers."""
        return self.kind in _DENSE

    @property
    def rotated(self) -> bool:
        """Whether the codes are those of the rotated matrix."""
        return self.kind == "rotated"

    @property
    def code(self) -> int:
        """The number that native code knows the kind by: 0 float32, 1 bfloat16, 2 quantised, 3 rotated."""
        return _CODES[self.kind]

    @property
    def minima(self) -> bool:
        """Whether each group stores a minimum."""
        return not self.dense and self.zero is None

    @property
    def highest(self) -> int:
        """The largest code of a quantised weight."""
        return (1 << self.bits) - 1

    @property
    def group_bytes(self) -> int:
        """Bytes that 16 rows of one whole group take."""
        return self.bytes_of(self.group)

    @property
    def bytes_per_weight(self) -> float:
        """Scales and minima included, padding not."""
        return self.group_bytes / (LANES * self.group)

    def groups(self, K: int) -> int:
        """Groups that a row of K weights takes."""
        return -(-K // self.group)

    def runs(self, K: int) -> list[tuple[int, int]]:
        """How many groups of how many weights are stored for a row of K: whole ones, then the last one, which
        is padded to a block of 32 weights, not to a group."""
        whole, rest = divmod(K, self.group)
        last = min(self.group, -(-rest // _USUAL_GROUP) * _USUAL_GROUP)
        if last == self.group:
            whole, last = whole + 1, 0
        return [run for run in ((whole, self.group), (1, last)) if all(run)]

    def panel_bytes(self, K: int) -> int:
        """Bytes of one panel: 16 rows of K weights, K padded to a block."""
        return sum(count * self.bytes_of(size) for count, size in self.runs(K))

    def bytes_of(self, weights: int) -> int:
        """Bytes that 16 rows of a group of so many weights take."""
        codes = LANES * weights * self.bits // 8
        if self.dense:
            return codes
        return LANES * _HALF_BYTES * (2 if self.minima else 1) + codes

    def matrix_bytes(self, N: int, K: int) -> int:
        """Bytes of a matrix [N, K], both padded."""
        return -(-N // LANES) * self.panel_bytes(K)

    @property
    def name(self) -> str:
        """The shortest name that `named` reads back; a zero other than the middle code follows as `zZ`."""
        if self.dense:
            return self.kind
        group = "" if self.rotated or self.group == _USUAL_GROUP else f"g{self.group}"
        odd = "" if self.minima or self.zero == 1 << self.bits - 1 else f"z{self.zero}"
        return f"int{self.bits}{group}{'m' if self.minima else odd}{'r' if self.rotated else ''}"

    def __str__(self) -> str:
        return self.name


FLOAT32 = Format("float32", 32, 1)
BFLOAT16 = Format("bfloat16", 16, 2)


def quantised(bits: int, group: int = _USUAL_GROUP, minima: bool = False) -> Format:
    """A quantised format, symmetric about the middle code unless `minima`."""
    return Format("quantised", bits, group, None if minima else 1 << bits - 1)


def rotated(bits: int, minima: bool = False) -> Format:
    """A quantised format of the rotated matrix."""
    return replace(quantised(bits, ROTATED_GROUP, minima), kind="rotated")


GGUF: dict[str, Format] = {
    "Q4_0": quantised(4),
    "Q4_1": quantised(4, minima=True),
    "Q5_0": quantised(5),
    "Q5_1": quantised(5, minima=True),
    "Q8_0": quantised(8),
    "Q4_K": quantised(4, minima=True),
    "Q5_K": quantised(5, minima=True),
    "Q6_K": quantised(6, group=16),
}
"""GGUF types whose blocks become panels of the same bits -> the format of those panels."""


def named(name: str) -> Format:
    """The format called `name`: float32, bfloat16, int4, int4m, int3g64, int4r, ..., or a GGUF type: Q4_K.

    Raises ConfigError for a name that is none.
    """
    if name == "float32":
        return FLOAT32
    if name == "bfloat16":
        return BFLOAT16
    if name.upper() in GGUF:
        return GGUF[name.upper()]
    found = _NAME.fullmatch(name)
    if found is None:
        usual = [*_DENSE, *(f"int{bits}" for bits in PLANES), *GGUF]
        raise ConfigError(
            f"weight format {name!r}; {nearest(name, usual)}; groups, minima, rotated: int4g64, int4m, int4r"
        )
    bits, group, minima, turned = found.groups()
    usual_group = ROTATED_GROUP if turned else _USUAL_GROUP
    format = quantised(int(bits), int(group or usual_group), bool(minima))
    return replace(format, kind="rotated") if turned else format

"""How threads share a program's work, where they must meet, and where rows lie until then.

A step is run in one of three ways (`WAYS`), by how many rows it has:

`few`: everybody makes rows ready for products itself, so `prepare` is empty. A root that only norms, rotary
embeddings, sums and other work along rows write, every thread has whole, in rows of its own: that is cheaper
than meeting.

`many`: work along rows is shared by rows, products by panels of the matrix.

`own`: each thread takes rows of its own through everything but experts and what is selected, and reads all
weights. Few rows leave a core's cache for another core's, but keys and values do: the program orders the
rows of a step by the tiles that threads are dealt in attention. Only where products are in integers, whose
rows can be prepared and multiplied apart.

Barriers. What a thread wrote by rows it may read by rows without meeting the others; every other reading or
overwriting of what was written since the last barrier needs one.

Arena. A root's row lives from the instruction that writes it first to the barrier behind the last that reads
it. Roots are placed largest first at the lowest offset that no overlapping life uses. Where threads have rows
of their own, a row that only its own thread touches lives no longer than it is read, without a barrier; its
place is then for such roots of one width alone. So what lies there is the same row of each and the same
thread's, and no line goes from core to core.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

from hasten.serve.program import Instruction, Root

WAYS = ("few", "many", "own")
"""In the order of `Way` in ops/program/cpu.h."""

LANES = 16
_ROW_OPS = {
    "embed", "norm", "prepare", "rotary", "store", "binary", "unary", "gated", "select", "where", "reduce",
    "softmax", "places", "gather", "scatter",
}  # fmt: skip
_EACH_OPS = _ROW_OPS - {"embed", "prepare", "store", "select"}


class Share(IntEnum):
    """Who does what of an instruction; the codes of `Share` in ops/program/cpu.h."""

    PARTS = 0
    """A run of its units: rows, panels of a matrix, heads of a sequence."""

    EACH = 1
    """Every thread all of it, into memory of its own."""

    ROWS = 2
    """The rows that are the thread's own."""


@dataclass(frozen=True)
class Arrangement:
    """One way of running a program: who does what of each instruction, and whether all threads meet before
    it."""

    shares: list[Share]
    meets: list[bool]
    private: set[int]
    """Roots of which every thread has rows of its own."""
    kept: set[int] | None
    """Where threads have rows of their own: the roots that nobody touches but the thread whose row it is."""


def with_prepare(instructions: Sequence[Instruction], formats: Sequence[Any]) -> list[Instruction]:
    """A `prepare` before each product whose rows are not ready in the form that its matrix needs."""
    found: list[Instruction] = []
    ready: Any = None
    for one in instructions:
        if one.op == "linear":
            form = formats[one.matrix].kind
            wanted = (one.a, one.selected, form)
            if wanted != ready:
                found.append(replace(one, op="prepare", dst=None, c=None))
                ready = wanted
        elif ready is not None and one.dst is not None and one.dst.index == ready[0].index:
            ready = None
        found.append(one)
    return found


def arrange(instructions: Sequence[Instruction], logits: int, way: str) -> Arrangement:
    """One of `WAYS` to run a program; `logits` is the root that all of it is for."""
    private = _private_roots(instructions, logits, way)
    shares = [_share(one, private, way) for one in instructions]
    kept = _kept_roots(instructions, shares) if way == "own" else None
    return Arrangement(shares, _meets(instructions, shares, private, way), private, kept)


def _kept_roots(instructions: Sequence[Instruction], shares: Sequence[Share]) -> set[int]:
    touched = [
        (ref.index, share)
        for one, share in zip(instructions, shares, strict=True)
        for ref in (*one.reads(), one.dst)
        if ref is not None and ref.kind == "root"
    ]
    return {root for root, _ in touched} - {root for root, share in touched if share is not Share.ROWS}


def _private_roots(instructions: Sequence[Instruction], logits: int, way: str) -> set[int]:
    """Those that are written only by what every thread may do for itself."""
    if way != "few":
        return set()
    written: dict[int, bool] = {}
    for one in instructions:
        if one.dst is not None:
            fits = one.op in _EACH_OPS and not one.selected
            written[one.dst.index] = fits and written.get(one.dst.index, True)
    return {root for root, fits in written.items() if fits and root != logits}


def _share(one: Instruction, private: set[int], way: str) -> Share:
    if one.dst is not None and one.dst.index in private:
        return Share.EACH
    if way == "own" and not one.selected and (one.op in _ROW_OPS or one.op == "linear"):
        return Share.ROWS
    return Share.PARTS


def _meets(
    instructions: Sequence[Instruction], shares: Sequence[Share], private: set[int], way: str
) -> list[bool]:
    # What was written and read since the last barrier: by rows, and whose, or None.
    written: dict[Any, Any] = {}
    read: dict[Any, Any] = {}
    found = []
    for one, share in zip(instructions, shares, strict=True):
        if way == "few" and one.op == "prepare":
            found.append(False)
            continue
        reads, writes = _names(one, way, private)
        # A selected row is another thread's than the row it comes from.
        by_rows = share is Share.ROWS or (share is Share.PARTS and one.op in _ROW_OPS and one.op != "select")
        rows = (share, one.selected) if by_rows else None
        needed = any(rows is None or written[r] != rows for r in reads if r in written) or any(
            rows is None or was[w] != rows for w in writes for was in (written, read) if w in was
        )
        if needed:
            written, read = {}, {}
        found.append(needed)
        for place, names in ((written, writes), (read, reads)):
            for name in names:
                place[name] = rows if place.get(name, rows) == rows else None
    return found


def _names(one: Instruction, way: str, private: set[int]) -> tuple[list[Any], list[Any]]:
    """What an instruction reads and writes of what threads share."""
    reads: list[Any] = [("root", ref.index) for ref in one.reads() if ref.kind == "root"]
    writes: list[Any] = [("root", one.dst.index)] if one.dst is not None else []
    if one.op == "store":
        writes.append(("cache", one.ints[0]))
    if one.op in ("attend", "merge"):
        reads.append(("cache", one.ints[0]))
        (writes if one.op == "attend" else reads).append(("partial", 0))
    if one.op == "prepare":
        writes.append(("prepared", 0))
    if one.op == "linear" and way != "few":
        reads.append(("prepared", 0))
    own = {("root", root) for root in private}
    return [name for name in reads if name not in own], [name for name in writes if name not in own]


def plan_arena(
    instructions: Sequence[Instruction],
    roots: Sequence[Root],
    chosen: set[int],
    meets: Sequence[bool],
    kept: set[int] | None = None,
) -> tuple[dict[int, int], tuple[int, int]]:
    """Offsets in floats a row of the chosen roots, and the floats a row of the two arenas: all rows, selected
    rows.

    meets: whether all threads that share the arena meet before an instruction. Until they do, one may still
    read what another has done with, so a life lasts until then.
    kept: of `Arrangement`; a place is then for roots of one width that are kept, or that are not.
    """

    def kind(root: int) -> Any:
        return None if kept is None else (roots[root].width, root in kept)

    life: dict[int, tuple[int, int]] = {}
    for i, one in enumerate(instructions):
        for ref in (*one.reads(), *([one.dst] if one.dst is not None else [])):
            if ref.kind == "root" and ref.index in chosen:
                first, _ = life.get(ref.index, (i, i))
                life[ref.index] = (first, i)
    for index, (first, last) in life.items():
        if kept is not None and index in kept:
            continue
        after = (i for i in range(last + 1, len(instructions)) if meets[i])
        life[index] = (first, next(after, len(instructions)) - 1)
    offsets: dict[int, int] = {}
    ends = [0, 0]
    for index in sorted(life, key=lambda r: (-roots[r].width, life[r])):
        first, last = life[index]
        width = -(-roots[index].width // LANES) * LANES
        taken = sorted(
            (offsets[other], offsets[other] + -(-roots[other].width // LANES) * LANES)
            for other in offsets
            if roots[other].selected == roots[index].selected
            and ((life[other][0] <= last and first <= life[other][1]) or kind(other) != kind(index))
        )
        at = 0
        for start, end in taken:
            if at + width <= start:
                break
            at = max(at, end)
        offsets[index] = at
        side = int(roots[index].selected)
        ends[side] = max(ends[side], at + width)
    return offsets, (ends[0], ends[1])

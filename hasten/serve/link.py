"""A program with addresses: barriers, a planned arena, and the words that `hasten_cpu::program_run` reads.

Barriers. Threads share an instruction's work by rows, by panels of a matrix, or by heads. What a thread wrote
by rows it may read by rows without meeting the others; every other reading or overwriting of what was written
since the last barrier needs one. In a step of few rows each thread makes rows ready for a product itself, so
`prepare` is empty there and needs none.

Arena. A root's row lives from the instruction that writes it first to the barrier behind the last that reads
it. Roots are placed largest first at the lowest offset that no overlapping life uses.
"""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hasten.base.errors import InputError, first_line
from hasten.ops.panels import Panels
from hasten.serve.fuse import fuse
from hasten.serve.program import OPCODES, Instruction, Program, Ref, Root

BLOCK_TOKENS = 32
FEW_ROWS = 8
TILE_ROWS = 96
"""Queries of a KV head that attention takes over its keys together: what is kept of them fits a core."""
CACHES = ("float32", "bfloat16", "int8")
"""What keys and values can be stored as; the places are the codes of `Cache` in cpu.h."""

_LANES = 16
_ROW_OPS = {
    "embed", "norm", "prepare", "rotary", "store", "binary", "unary", "gated", "select", "where", "reduce",
    "softmax", "places", "gather", "scatter",
}  # fmt: skip


@dataclass(frozen=True)
class CacheSettings:
    """dtype: one of `CACHES`; blocks: of each group of layers with one window, in the order of
    `Program.windows()`."""

    dtype: str
    blocks: tuple[int, ...]


class Linked:
    """Keeps every tensor that the words point to."""

    def __init__(
        self,
        program: Program,
        panels: Sequence[Panels],
        cache: CacheSettings,
        step_tokens: int,
        step_logits: int,
    ) -> None:
        """panels: one for each matrix of the program, in order."""
        formats = [p.format for p in panels]
        self.program = fuse(program, lambda a, b: formats[a].kind == formats[b].kind)
        self.panels, self.vectors, self.tables = list(panels), list(program.vectors), list(program.tables)
        self.step_tokens, self.step_logits = step_tokens, step_logits
        instructions = with_prepare(self.program.instructions, formats)
        self.ordered = instructions
        self.few, self.many = barriers(instructions, True), barriers(instructions, False)
        meets = [a and b for a, b in zip(self.few, self.many, strict=True)]
        offsets, widths = plan_arena(instructions, program.roots, program.logits, meets)
        self.arena_bytes = 4 * (widths[0] * step_tokens + widths[1] * step_logits)
        self.arena = _aligned(widths[0] * step_tokens + widths[1] * step_logits)
        self.logits = _aligned(step_logits * program.vocab_size).view(step_logits, program.vocab_size)
        self._bases = {}
        selected_from = self.arena.data_ptr() + 4 * widths[0] * step_tokens
        for index, root in enumerate(program.roots):
            if index == program.logits:
                self._bases[index] = self.logits.data_ptr()
            elif index in offsets:
                start = selected_from if root.selected else self.arena.data_ptr()
                rows = step_logits if root.selected else step_tokens
                self._bases[index] = start + 4 * offsets[index] * rows
        self.matrices = self._matrix_words()
        self.cache_settings = cache
        self.cache, self.layers = self._cache(cache)
        self.instructions = torch.from_numpy(
            np.stack([self._words(one, i) for i, one in enumerate(instructions)])
        )
        widest = max((use.K for use in program.matrices), default=1)
        self.prepared = _aligned(step_tokens * (widest + 64) + 1024)
        heads = max((one.n0 // one.ints[2] for one in instructions if one.op == "attend"), default=1)
        self.sizes = [CACHES.index(cache.dtype), FEW_ROWS, max(1, TILE_ROWS // heads)]

    def _matrix_words(self) -> Tensor:
        kind = np.dtype(
            [("data", "<u8"), ("panel_bytes", "<i8"), ("format", "<i4"), ("bits", "<i4"), ("group", "<i4"),
             ("zero", "<i4"), ("unit", "<f4"), ("_", "<i4"), ("N", "<i8"), ("K", "<i8"), ("bias", "<u8")]
        )  # fmt: skip
        words = np.zeros(max(1, len(self.panels)), kind)
        for i, (panels, use) in enumerate(zip(self.panels, self.program.matrices, strict=True)):
            form = panels.format
            bias = self.vectors[use.bias].data_ptr() if use.bias >= 0 else 0
            words[i] = (
                panels.data.data_ptr(), form.panel_bytes(panels.K), form.code, form.bits, form.group,
                -1 if form.zero is None else form.zero, panels.unit, 0, panels.N, panels.K, bias,
            )  # fmt: skip
        return torch.from_numpy(words.view(np.uint8).copy())

    def _cache(self, settings: CacheSettings) -> tuple[list[Tensor], Tensor]:
        """A pool for each group, and a layer's first block, strides and sizes.

        The layers of a block lie side by side, so that a sequence's blocks fill whole pages and not a part of
        one for every layer.
        """
        windows = self.program.windows()
        per_unit = 1 if settings.dtype == "float32" else 2
        layers, taken = [], [0] * len(windows)
        for layer in self.program.layers:
            group = windows.index(layer.window_tokens)
            units, padded = -(-layer.key_size // per_unit), -(-layer.value_size // _LANES) * _LANES
            head = units * BLOCK_TOKENS + BLOCK_TOKENS // per_unit * padded
            if settings.dtype == "int8":
                head = head // 2 + 2 * BLOCK_TOKENS
            layers.append(
                (taken[group], (layer.heads, layer.key_size, layer.value_size, units, padded, group, head))
            )
            taken[group] += layer.heads * head
        pools = [_pool(blocks * block) for blocks, block in zip(settings.blocks, taken, strict=True)]
        words = [(pools[s[5]].data_ptr() + 4 * at, taken[s[5]], *s) for at, s in layers]
        return pools, torch.tensor(words, dtype=torch.int64)

    def cache_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.cache)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """One block of every layer of a group, onto another."""
        blocks = self.cache[group].view(self.cache_settings.blocks[group], -1)
        blocks[target] = blocks[source]

    def _operand(self, ref: Ref | None) -> list[int]:
        if ref is None:
            return [0, 0, 0, 0, 2]
        if ref.kind == "root":
            base, stride, by = self._bases[ref.index], self.program.roots[ref.index].width, 0
        elif ref.kind == "table":
            table = self.tables[ref.index]
            base, stride, by = table.data_ptr(), table.shape[1], 1
        else:
            base, stride, by = self.vectors[ref.index].data_ptr(), 0, 2
        return [base + 4 * ref.offset, stride, ref.s0, ref.s1, by]

    def _words(self, one: Instruction, place: int) -> Any:
        operands = [word for ref in (one.dst, one.a, one.b, one.c, None) for word in self._operand(ref)]
        meets = (int(self.few[place]), int(self.many[place]))
        head = [OPCODES.index(one.op), *meets, int(one.selected), one.n0, one.n1]
        words = [*head, *operands, one.matrix, one.up, *one.ints, *[0] * (8 - len(one.ints))]
        floats = np.array([*one.floats, *[0.0] * (4 - len(one.floats))], np.float64)
        return np.concatenate([np.array(words, np.int64), floats.view(np.int64)])


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


def barriers(instructions: Sequence[Instruction], few: bool) -> list[bool]:
    """Whether one stands before each instruction, in a step of few rows or of many."""
    written: dict[Any, bool] = {}  # what was written since the last barrier; whether by rows
    read: dict[Any, bool] = {}
    found = []
    for one in instructions:
        if few and one.op == "prepare":
            found.append(False)
            continue
        by_rows = one.op in _ROW_OPS
        reads: list[Any] = [("root", ref.index) for ref in one.reads() if ref.kind == "root"]
        writes: list[Any] = [("root", one.dst.index)] if one.dst is not None else []
        if one.op == "store":
            writes.append(("cache", one.ints[0]))
        if one.op in ("attend", "merge"):
            reads.append(("cache", one.ints[0]))
            (writes if one.op == "attend" else reads).append("partial")
        if one.op == "prepare":
            writes.append("prepared")
        if one.op == "linear" and not few:
            reads.append("prepared")
        # A selected row is another thread's than the row it comes from.
        by_rows = by_rows and one.op != "select"
        needed = any(not (by_rows and written[r]) for r in reads if r in written) or any(
            not (by_rows and before[w]) for w in writes for before in (written, read) if w in before
        )
        if needed:
            written, read = {}, {}
        found.append(needed)
        for place, names in ((written, writes), (read, reads)):
            for name in names:
                place[name] = by_rows and place.get(name, True)
    return found


def plan_arena(
    instructions: Sequence[Instruction], roots: Sequence[Root], logits: int, meets: Sequence[bool]
) -> tuple[dict[int, int], tuple[int, int]]:
    """Offsets in floats a row by root, and the floats a row of the two arenas: all rows, selected rows.

    meets: whether all threads meet before an instruction. Until they do, one may still read what another
    has done with, so a life lasts until then.
    """
    life: dict[int, tuple[int, int]] = {}
    for i, one in enumerate(instructions):
        for ref in (*one.reads(), *([one.dst] if one.dst is not None else [])):
            if ref.kind == "root" and ref.index != logits:
                first, _ = life.get(ref.index, (i, i))
                life[ref.index] = (first, i)
    for index, (first, last) in life.items():
        after = (i for i in range(last + 1, len(instructions)) if meets[i])
        life[index] = (first, next(after, len(instructions)) - 1)
    offsets: dict[int, int] = {}
    ends = [0, 0]
    for index in sorted(life, key=lambda r: (-roots[r].width, life[r])):
        first, last = life[index]
        width = -(-roots[index].width // _LANES) * _LANES
        taken = sorted(
            (offsets[other], offsets[other] + -(-roots[other].width // _LANES) * _LANES)
            for other in offsets
            if roots[other].selected == roots[index].selected
            and life[other][0] <= last
            and first <= life[other][1]
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


def _aligned(floats: int) -> Tensor:
    """Zeros at a multiple of 64 bytes, whose pages are taken when they are first written."""
    held = torch.from_numpy(np.zeros(floats + _LANES, np.float32))
    skip = -(held.data_ptr() // 4) % _LANES
    return held[skip : skip + floats]


def _pool(floats: int) -> Tensor:
    """Zeros whose pages are taken when they are first written: small ones, unless the system always gives
    huge ones. A huge page that the system must first put together, or a hypervisor provide, takes longer than
    the 512 small ones that a prompt would have touched (docs/LOG.md, 2026-11-30).

    Raises:
        InputError: the system has no room for it.
    """
    try:
        region = mmap.mmap(-1, max(4 * floats, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise InputError(
            f"{4 * floats / 1e9:,.1f} GB for keys and values cannot be had: {first_line(error)}; give the "
            "cache less memory (--cache-gib), or a shorter context"
        ) from error
    return torch.frombuffer(region, dtype=torch.float32, count=floats)

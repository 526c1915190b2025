"""A program with addresses: the arena, the pool of keys and values, and the words that
`hasten_cpu::program_run` reads. `sharing.py` says how threads share the work, and plans the arena."""

from __future__ import annotations

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hasten.base.errors import InputError, first_line
from hasten.ops.panels import Panels
from hasten.serve.fuse import fuse
from hasten.serve.program import OPCODES, Instruction, Program, Ref
from hasten.serve.sharing import LANES, WAYS, Arrangement, arrange, plan_arena, with_prepare

BLOCK_TOKENS = 32
FEW_ROWS = 8
TILE_ROWS = 96
"""Queries of a KV head that attention takes over its keys together: what is kept of them fits a core."""
CACHES = ("float32", "bfloat16", "int8")
"""What keys and values can be stored as; the places are the codes of `Cache` in cpu.h."""


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
        self.ordered = with_prepare(self.program.instructions, formats)
        self.logits = _aligned(step_logits * program.vocab_size).view(step_logits, program.vocab_size)
        self.matrices = self._matrix_words()
        self.cache_settings = cache
        self.cache, self.layers = self._cache(cache)
        self._places = {way: self._place(arrange(self.ordered, program.logits, way), way) for way in WAYS}
        self.arena = _aligned(max(place.floats for place in self._places.values()))
        self._ways: dict[int, list[Tensor]] = {}
        self._own: dict[int, Tensor] = {}
        self.ways(torch.get_num_threads())
        widest = max((use.K for use in program.matrices), default=1)
        # Rows of a blocked product are padded to 32.
        self.prepared = _aligned(-(-step_tokens // 32) * 32 * (widest + 64))
        self.prepared_row = 4 * (widest + 64)
        heads = max((one.n0 // one.ints[2] for one in self.ordered if one.op == "attend"), default=1)
        self.sizes = [CACHES.index(cache.dtype), FEW_ROWS, max(1, TILE_ROWS // heads), self.prepared_row]

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
            units, padded = -(-layer.key_size // per_unit), -(-layer.value_size // LANES) * LANES
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

    def _place(self, arrangement: Arrangement, way: str) -> _Place:
        """Where roots lie in the arena, and in what each thread has for itself."""
        program, instructions = self.program, self.ordered
        rows = min(FEW_ROWS, self.step_tokens) if way == "few" else self.step_tokens
        selected = min(rows, self.step_logits)
        shared = set(range(len(program.roots))) - {program.logits} - arrangement.private
        offsets, widths = plan_arena(instructions, program.roots, shared, arrangement.meets)
        at = {
            root: 4
            * (offset * selected + widths[0] * rows if program.roots[root].selected else offset * rows)
            for root, offset in offsets.items()
        }
        mine, own = plan_arena(instructions, program.roots, arrangement.private, [True] * len(instructions))
        return _Place(
            arrangement,
            at,
            {root: 4 * offset * rows for root, offset in mine.items()},
            widths[0] * rows + widths[1] * selected,
            own[0] * rows,
        )

    def ways(self, threads: int) -> list[Tensor]:
        """The instructions of each of `WAYS`, [threads, n, 45] words of 64 bits, or [1, n, 45] where no
        thread has memory of its own."""
        if threads not in self._ways:
            most = max(place.own_floats for place in self._places.values())
            own = self._own[threads] = _aligned(threads * most)
            found = []
            for way, place in self._places.items():
                tables = [
                    self._table(place, own.data_ptr() + 4 * most * thread)
                    for thread in range(threads if way == "few" else 1)
                ]
                found.append(torch.from_numpy(np.stack(tables)))
            self._ways[threads] = found
        return self._ways[threads]

    def _table(self, place: _Place, own: int) -> Any:
        bases = {self.program.logits: self.logits.data_ptr()}
        bases |= {root: self.arena.data_ptr() + at for root, at in place.shared.items()}
        bases |= {root: own + at for root, at in place.own.items()}
        to_do = zip(self.ordered, place.arrangement.shares, place.arrangement.meets, strict=True)
        return np.stack([self._words(one, (int(meet), share), bases) for one, share, meet in to_do])

    def _operand(self, ref: Ref | None, bases: dict[int, int]) -> list[int]:
        if ref is None:
            return [0, 0, 0, 0, 2]
        if ref.kind == "root":
            base, stride, by = bases[ref.index], self.program.roots[ref.index].width, 0
        elif ref.kind == "table":
            table = self.tables[ref.index]
            base, stride, by = table.data_ptr(), table.shape[1], 1
        else:
            base, stride, by = self.vectors[ref.index].data_ptr(), 0, 2
        return [base + 4 * ref.offset, stride, ref.s0, ref.s1, by]

    def _words(self, one: Instruction, how: tuple[int, int], bases: dict[int, int]) -> Any:
        operands = [
            word for ref in (one.dst, one.a, one.b, one.c, None) for word in self._operand(ref, bases)
        ]
        head = [OPCODES.index(one.op), *how, int(one.selected), one.n0, one.n1]
        words = [*head, *operands, one.matrix, one.up, *one.ints, *[0] * (8 - len(one.ints))]
        floats = np.array([*one.floats, *[0.0] * (4 - len(one.floats))], np.float64)
        return np.concatenate([np.array(words, np.int64), floats.view(np.int64)])


@dataclass(frozen=True)
class _Place:
    """Bytes of each root from the beginning of the arena, or of what a thread has for itself."""

    arrangement: Arrangement
    shared: dict[int, int]
    own: dict[int, int]
    floats: int
    own_floats: int


def _aligned(floats: int) -> Tensor:
    """Zeros at a multiple of 64 bytes, whose pages are taken when they are first written."""
    held = torch.from_numpy(np.zeros(floats + LANES, np.float32))
    skip = -(held.data_ptr() // 4) % LANES
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

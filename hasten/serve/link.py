"""A program with addresses: the arena, the pool of keys and values, and the words that native code reads
(ops/program/serving.cpp). `sharing.py` says how threads share the work, and plans the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.base.errors import InputError, ShapeError, first_line
from hasten.ops.level import lend_product, threads
from hasten.ops.memory import address, aligned, pages, take_pages
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
    """Keeps every array that the words point to."""

    def __init__(
        self,
        program: Program,
        panels: Sequence[Panels],
        cache: CacheSettings,
        step_tokens: int,
        step_logits: int,
    ) -> None:
        """panels: one for each matrix of the program, in order.

        Raises:
            ShapeError: a vector or table is not contiguous float32.
            InputError: no memory for keys and values.
        """
        lend_product()
        for array in (*program.vectors, *program.tables):
            if array.dtype != np.float32 or not array.flags.c_contiguous:
                raise ShapeError(
                    f"vectors and tables of a program are contiguous float32; got {array.dtype} "
                    f"{list(array.shape)}"
                )
        formats = [p.format for p in panels]
        self.program = fuse(program, lambda a, b: formats[a].kind == formats[b].kind)
        self.panels, self.vectors, self.tables = list(panels), list(program.vectors), list(program.tables)
        self.step_tokens, self.step_logits = step_tokens, step_logits
        self.ordered = with_prepare(self.program.instructions, formats)
        self.logits = aligned(step_logits * program.vocab_size).reshape(step_logits, program.vocab_size)
        self.matrices = self._matrix_words()
        self.cache_settings = cache
        self.cache, self.layers = self._cache(cache)
        self._places = {way: self._place(arrange(self.ordered, program.logits, way), way) for way in WAYS}
        self.arena = aligned(max(place.floats for place in self._places.values()))
        widest = max((use.K for use in program.matrices), default=1)
        # Rows of a blocked product are padded to 32.
        self.prepared = aligned(-(-step_tokens // 32) * 32 * (widest + 64))
        heads = max((one.n0 // one.ints[2] for one in self.ordered if one.op == "attend"), default=1)
        self._sizes = [4 * (widest + 64), CACHES.index(cache.dtype), FEW_ROWS, max(1, TILE_ROWS // heads)]
        self._words_of: dict[int, np.ndarray] = {}
        self._kept: list[np.ndarray] = []
        self.words(threads())

    def _matrix_words(self) -> np.ndarray:
        kind = np.dtype(
            [("data", "<u8"), ("panel_bytes", "<i8"), ("format", "<i4"), ("bits", "<i4"), ("group", "<i4"),
             ("zero", "<i4"), ("unit", "<f4"), ("_", "<i4"), ("N", "<i8"), ("K", "<i8"), ("bias", "<u8")]
        )  # fmt: skip
        words = np.zeros(max(1, len(self.panels)), kind)
        for i, (panels, use) in enumerate(zip(self.panels, self.program.matrices, strict=True)):
            form = panels.format
            bias = address(self.vectors[use.bias]) if use.bias >= 0 else 0
            words[i] = (
                address(panels.data), form.panel_bytes(panels.K), form.code, form.bits, form.group,
                -1 if form.zero is None else form.zero, panels.unit, 0, panels.N, panels.K, bias,
            )  # fmt: skip
        return words

    def _cache(self, settings: CacheSettings) -> tuple[list[np.ndarray], np.ndarray]:
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
        words = [(address(pools[s[5]]) + 4 * at, taken[s[5]], *s) for at, s in layers]
        return pools, np.array(words, np.int64)

    def cache_bytes(self) -> int:
        return sum(pool.nbytes for pool in self.cache)

    def copy_block(self, group: int, source: int, target: int) -> None:
        """One block of every layer of a group, onto another."""
        blocks = self._blocks(group)
        blocks[target] = blocks[source]

    def touch_block(self, group: int, block: int) -> None:
        """Takes the pages of a block, so that they are there when it is written."""
        take_pages(self._blocks(group)[block])

    def _blocks(self, group: int) -> np.ndarray:
        return self.cache[group].reshape(self.cache_settings.blocks[group], -1)

    def _place(self, arrangement: Arrangement, way: str) -> _Place:
        """Where roots lie in the arena, and in what each thread has for itself."""
        program, instructions = self.program, self.ordered
        rows = min(FEW_ROWS, self.step_tokens) if way == "few" else self.step_tokens
        selected = min(rows, self.step_logits)
        shared = set(range(len(program.roots))) - {program.logits} - arrangement.private
        offsets, widths = plan_arena(instructions, program.roots, shared, arrangement.meets, arrangement.kept)
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

    def words(self, threads: int) -> np.ndarray:
        """int64 [13]: `Linked` of ops/program/serving.cpp, for steps that so many threads run together."""
        if threads not in self._words_of:
            ways = [self._way(way, threads) for way in self._places]
            given = [*ways, len(self.ordered), address(self.matrices), address(self.layers)]
            given += [address(self.prepared), *self._sizes, address(self.logits), self.logits.shape[1]]
            self._words_of[threads] = np.array(given, np.int64)
        return self._words_of[threads]

    def _way(self, way: str, threads: int) -> int:
        """Where the instructions of one of `WAYS` lie: [threads, n, 45] words of 64 bits, or [1, n, 45] where
        no thread has memory of its own."""
        place = self._places[way]
        own = aligned(threads * place.own_floats)
        tables = [
            self._table(place, address(own) + 4 * place.own_floats * thread)
            for thread in range(threads if way == "few" else 1)
        ]
        self._kept += own, np.stack(tables)
        return address(self._kept[-1])

    def _table(self, place: _Place, own: int) -> Any:
        bases = {self.program.logits: address(self.logits)}
        bases |= {root: address(self.arena) + at for root, at in place.shared.items()}
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
            base, stride, by = address(table), table.shape[1], 1
        else:
            base, stride, by = address(self.vectors[ref.index]), 0, 2
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


def _pool(floats: int) -> np.ndarray:
    """Zeros for keys and values.

    Raises:
        InputError: the system has no room for it.
    """
    try:
        return pages(floats, np.float32)
    except MemoryError as error:
        raise InputError(
            f"keys and values: {first_line(error)}; give the cache less memory (--cache-gib), or a shorter "
            "context"
        ) from error

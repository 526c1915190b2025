"""Runs a linked program: one native call a step, or a run of greedy steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from hasten.base.errors import ShapeError
from hasten.ops.level import doors, threads
from hasten.ops.memory import address
from hasten.serve.link import Linked
from hasten.serve.runner import BLOCK_TOKENS, Group, Step


class NativeRunner:
    """The `Runner` of a program; see `hasten.serve.runner`."""

    def __init__(self, linked: Linked) -> None:
        self._linked = linked
        program = linked.program
        self.vocab_size, self.context_tokens = program.vocab_size, program.context_tokens
        self.step_tokens, self.step_logits = linked.step_tokens, linked.step_logits
        self.groups = tuple(
            Group(window or None, blocks)
            for window, blocks in zip(program.windows(), linked.cache_settings.blocks, strict=True)
        )
        self._doors = doors()
        self._times: np.ndarray | None = None

    def run(self, step: Step) -> np.ndarray:
        """fp32 logits [wanted rows, vocab], valid until the next call.

        Raises:
            ShapeError: more rows than `step_tokens`, or more logits than `step_logits`.
        """
        self._check(step)
        linked, given = self._words(step)
        self._doors.program_run(linked, address(given.words))
        return self._linked.logits[: len(step.wanted)]

    def run_greedy(self, step: Step, count: int, interrupt: np.ndarray | None = None) -> np.ndarray:
        """See `GreedyRunner`.

        Raises:
            ShapeError: as `run`; or a sequence has several rows, or one whose logits are not wanted, or the
                steps go beyond its blocks or the context.
        """
        self._check(step)
        stop = np.zeros(1, np.int32) if interrupt is None else interrupt
        if stop.dtype != np.int32 or not stop.size:
            raise ShapeError(f"interrupt is int32 [1]; got {stop.dtype} {list(stop.shape)}")
        sequences = len(step.starts) - 1
        if not len(step.tokens) == len(step.wanted) == sequences:
            raise ShapeError(
                f"{len(step.tokens)} rows of {sequences} sequences, {len(step.wanted)} of them wanted: a run "
                "of greedy steps takes one row a sequence, all of them wanted"
            )
        most = min(self.context_tokens, *(BLOCK_TOKENS * table.shape[1] for table in step.tables))
        if int(step.positions.max()) + count > most:
            raise ShapeError(
                f"{count} steps from position {step.positions.max()} on: there is room for {most} positions"
            )
        chosen, done = np.empty((count, sequences), np.int64), np.zeros(1, np.int64)
        linked, given = self._words(step)
        self._doors.program_run_greedy(
            linked, address(given.words), count, address(chosen), address(stop), address(done)
        )
        return chosen[: int(done[0])]

    def _check(self, step: Step) -> None:
        rows, wanted = len(step.tokens), len(step.wanted)
        if rows > self.step_tokens or wanted > self.step_logits:
            raise ShapeError(
                f"a step of {rows} rows and {wanted} rows of logits; this runner takes "
                f"{self.step_tokens} and {self.step_logits}"
            )
        sequences = len(step.starts) - 1
        arrays = (step.tokens, step.positions, step.starts, step.wanted, *step.tables)
        if any(array.dtype != np.int32 or not array.flags.c_contiguous for array in arrays):
            raise ShapeError("the arrays of a step are contiguous int32")
        if len(step.positions) != rows or len(step.tables) != len(self.groups):
            raise ShapeError(
                f"{rows} tokens, {len(step.positions)} positions and {len(step.tables)} tables of blocks; "
                f"this runner takes as many positions as tokens, and {len(self.groups)} tables"
            )
        if any(table.ndim != 2 or len(table) < sequences for table in step.tables):
            raise ShapeError(f"tables of blocks are [{sequences} sequences, blocks]")

    def _words(self, step: Step) -> tuple[int, _Given]:
        count = threads()
        return address(self._linked.words(count)), _Given(step, count, self._times)

    @contextlib.contextmanager
    def timed(self) -> Iterator[dict[str, float]]:
        """Seconds by operation of all steps inside, filled when it ends; waiting for threads included."""
        instructions = self._linked.ordered
        found: dict[str, float] = {}
        self._times = np.zeros(len(instructions))
        try:
            yield found
        finally:
            for one, seconds in zip(instructions, self._times.tolist(), strict=True):
                found[one.op] = found.get(one.op, 0.0) + seconds
            self._times = None

    def touch(self, group: int, block: int) -> None:
        """See `TouchingRunner`."""
        self._linked.touch_block(group, block)

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) of a group, in order."""
        for source, target in pairs:
            self._linked.copy_block(group, source, target)


class _Given:
    """A step as native code reads it (`Given` of ops/program/serving.cpp), with what the words point to."""

    def __init__(self, step: Step, count: int, times: np.ndarray | None) -> None:
        self._step, self._times = step, times
        self._tables = np.array([address(table) for table in step.tables], np.int64)
        self._widths = np.array([table.shape[1] for table in step.tables], np.int64)
        arrays = (step.tokens, step.positions, step.starts, step.wanted, self._tables, self._widths)
        self.words = np.array(
            [
                count,
                len(step.tokens),
                len(step.starts) - 1,
                len(step.wanted),
                *(address(array) for array in arrays),
                0 if times is None else address(times),
            ],
            np.int64,
        )

"""Runs a linked program: one native call a step, or a run of greedy steps."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from hasten.base.errors import ShapeError
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
        self._run = torch.ops.hasten_cpu.program_run
        self._run_greedy = torch.ops.hasten_cpu.program_run_greedy
        self._times: torch.Tensor | None = None

    def run(self, step: Step) -> np.ndarray:
        """fp32 logits [wanted rows, vocab], valid until the next call.

        Raises:
            ShapeError: more rows than `step_tokens`, or more logits than `step_logits`.
        """
        linked, wanted = self._linked, len(step.wanted)
        self._check(step)
        self._run(*self._given(step), len(step.tokens), len(step.starts) - 1, wanted, self._times)
        return linked.logits[:wanted].numpy()

    def run_greedy(self, step: Step, count: int, interrupt: np.ndarray | None = None) -> np.ndarray:
        """See `GreedyRunner`.

        Raises:
            ShapeError: as `run`; or a sequence has several rows, or one whose logits are not wanted, or the
                steps go beyond its blocks or the context.
        """
        self._check(step)
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
        chosen = torch.empty(count, sequences, dtype=torch.int64)
        stop = torch.from_numpy(np.zeros(1, np.int32) if interrupt is None else interrupt)
        done = self._run_greedy(*self._given(step), self._linked.logits, chosen, stop, self._times)
        return chosen[:done].numpy()

    def _check(self, step: Step) -> None:
        wanted = len(step.wanted)
        if len(step.tokens) > self.step_tokens or wanted > self.step_logits:
            raise ShapeError(
                f"a step of {len(step.tokens)} rows and {wanted} rows of logits; this runner takes "
                f"{self.step_tokens} and {self.step_logits}"
            )

    def _given(self, step: Step) -> tuple[Any, ...]:
        linked = self._linked
        ways = linked.ways(torch.get_num_threads())
        arrays = (torch.from_numpy(array) for array in (step.tokens, step.positions, step.starts))
        tables = [torch.from_numpy(table) for table in step.tables]
        return (
            ways, linked.matrices, linked.layers, linked.prepared, linked.sizes, *arrays, tables,
            torch.from_numpy(step.wanted),
        )  # fmt: skip

    @contextlib.contextmanager
    def timed(self) -> Iterator[dict[str, float]]:
        """Seconds by operation of all steps inside, filled when it ends; waiting for threads included."""
        instructions = self._linked.ordered
        found: dict[str, float] = {}
        self._times = torch.zeros(len(instructions), dtype=torch.float64)
        try:
            yield found
        finally:
            for one, seconds in zip(instructions, self._times.tolist(), strict=True):
                found[one.op] = found.get(one.op, 0.0) + seconds
            self._times = None

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target) of a group, in order."""
        for source, target in pairs:
            self._linked.copy_block(group, source, target)

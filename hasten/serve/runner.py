"""What the engine asks of whatever runs the model: rows of tokens in, logits out, over a paged cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

BLOCK_TOKENS = 32


@dataclass(frozen=True)
class Group:
    """Layers that share one kind of block table, and the size of their pool.

    `window_tokens` W: a row at position p sees positions max(0, p - W + 1) .. p; None: all of 0 .. p.
    `blocks`: blocks of 32 tokens in the pool, numbered from 0.
    """

    window_tokens: int | None
    blocks: int


@dataclass
class Step:
    """Rows of one call; T rows, S sequences, L rows whose logits are wanted. All arrays are int32,
    contiguous.

    They are views of buffers that the next step writes again: a runner that keeps one keeps a copy.
    """

    tokens: np.ndarray
    """[T]"""

    positions: np.ndarray
    """[T]: place of the row's token in its sequence, from 0."""

    starts: np.ndarray
    """[S + 1]: rows starts[s] .. starts[s + 1] belong to sequence s; none is empty."""

    tables: tuple[np.ndarray, ...]
    """For each group [S, blocks]: the block of positions 32 i .. 32 i + 31, or -1 where it has none."""

    wanted: np.ndarray
    """[L]: rows whose logits are wanted, rising; may be empty."""


class Runner(Protocol):
    """Runs steps. One thread calls it, one call at a time."""

    @property
    def vocab_size(self) -> int:
        """Columns of the logits."""
        ...

    @property
    def context_tokens(self) -> int:
        """Longest sequence."""
        ...

    @property
    def step_tokens(self) -> int:
        """Most rows of one step."""
        ...

    @property
    def step_logits(self) -> int:
        """Most rows of one step whose logits are wanted."""
        ...

    @property
    def groups(self) -> tuple[Group, ...]:
        """Kinds of block tables; every layer of the model with a cache is in one."""
        ...

    def run(self, step: Step) -> np.ndarray:
        """Writes the keys and values of all rows to their blocks, then attends; a row at position p sees its
        own sequence up to p.

        Returns: fp32 logits [L, vocab_size], valid until the next call.
        """
        ...

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """For each (source, target) copies the whole block, in order, before it returns."""
        ...


@runtime_checkable
class TouchingRunner(Runner, Protocol):
    """One whose cache takes its memory from the system when it is first written, which takes a while."""

    def touch(self, group: int, block: int) -> None:
        """Takes the memory of a block that holds nothing yet."""
        ...


@runtime_checkable
class GreedyRunner(Runner, Protocol):
    """One that can run several steps in a call, where each next token is that with the largest logit."""

    def run_greedy(self, step: Step, count: int, interrupt: np.ndarray | None = None) -> np.ndarray:
        """`count` steps one after another; `step` is the first: one row a sequence, all wanted, and blocks
        for `count` positions. Where another thread writes to `interrupt`, int32 [1] and 0 before, the step
        that runs is the last.

        Returns: int64 [steps, sequences], the tokens chosen; ties go to the lowest. The steps end early where
        a row gives no token: a negative number then stands in its place (`hasten.ops.sampling`). An error in
        one of them loses the tokens of those before it.
        """
        ...

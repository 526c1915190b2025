"""Which rows the next step runs.

Sequences run in the order of their arrival. Each step takes the row of every decoding sequence, then rows of
prompts (a prompt is cut into pieces that fit) up to the runner's limit, then admits those that wait while
there is room. A decoding sequence that needs a block when none is free takes one from the youngest: that one
loses all its blocks and waits again, first in line, and computes its tokens anew, which changes none of them.

Where all that run decode, want the token with the largest logit and nobody waits, several steps are planned
as one run, of at most 20 ms.

Someone always advances: the oldest decoding sequence can take blocks from all younger ones; where nobody
decodes, the oldest prompt takes them from younger prompts; and one sequence alone fits into the cache.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import numpy as np

from hasten.serve.blocks import BlockManager
from hasten.serve.runner import GreedyRunner, Runner, Step
from hasten.serve.sequence import Sequence, State, blocks_of
from hasten.serve.speculate import RowCost

_MOST_STEPS = 8
# Longest run of steps between two looks at what was asked for meanwhile: nobody sees so short a time.
_RUN_S = 0.02


class Entry:
    """Rows of one sequence in a step: its tokens from `computed` on, then the drafted ones.

    `complete`: the rows reach its last token, whose logits and those of the draft are wanted.
    """

    __slots__ = ("complete", "draft", "logits", "rows", "sequence")

    def __init__(self, sequence: Sequence, rows: int, draft: list[int], complete: bool, logits: int):
        """`logits`: of how many rows, the last ones, they are wanted."""
        self.sequence = sequence
        self.rows = rows
        self.draft = draft
        self.complete = complete
        self.logits = logits


class Plan:
    """The entries of a step, and the step itself, whose logits come in the order of the entries."""

    __slots__ = ("count", "decode_only", "entries", "step")

    def __init__(self, entries: list[Entry], decode_only: bool, step: Step, count: int = 1):
        """`count`: how many steps can run one after another, without a look at what they give."""
        self.entries = entries
        self.count = count
        self.decode_only = decode_only
        self.step = step


class Scheduler:
    """Waiting and running sequences; owned by the engine's thread."""

    def __init__(
        self,
        runner: Runner,
        blocks: BlockManager,
        max_sequences: int,
        prefill_tokens: int | None = None,
        draft_tokens: int = 0,
    ):
        """`max_sequences`: most that run together. `prefill_tokens`: most rows of prompts in a step in which
        others decode, which bounds the time between their tokens; None: as many as fit. `draft_tokens`:
        longest draft."""
        self.blocks = blocks
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.started: list[Sequence] = []
        """Those that run for the first time since the last plan."""

        self.row_cost = RowCost()
        self.row_share: float | None = None
        self.preemptions = 0
        self.max_sequences = min(max_sequences, runner.step_tokens, runner.step_logits)
        self._step_tokens = runner.step_tokens
        self._step_logits = runner.step_logits
        self._mixed_tokens = runner.step_tokens if prefill_tokens is None else max(1, prefill_tokens)
        self._draft_tokens = draft_tokens
        self._runs_ahead = isinstance(runner, GreedyRunner)
        self._pace: tuple[int, float] | None = None
        """Rows and seconds of the last step in which all sequences decoded."""

        self._refused_at = -1
        self._logits_left = runner.step_logits
        groups = len(blocks.groups)
        self._tokens = np.zeros(self._step_tokens, np.int32)
        self._positions = np.zeros(self._step_tokens, np.int32)
        self._starts = np.zeros(self.max_sequences + 1, np.int32)
        self._wanted = np.zeros(self._step_logits, np.int32)
        self._tables = [np.zeros(self.max_sequences * blocks.most_blocks, np.int32) for _ in range(groups)]
        self._numbers = np.arange(blocks.context_tokens, dtype=np.int32)

    # Coming and going

    def add(self, sequence: Sequence) -> None:
        """A new sequence waits behind all others."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """A sequence is over, whatever its state; its blocks are free."""
        if sequence.state is State.QUEUED:
            self.waiting.remove(sequence)
        elif sequence.state is not State.FINISHED:
            self.running.remove(sequence)
            self.blocks.release(sequence)
        sequence.state = State.FINISHED

    def fork(self, parent: Sequence) -> list[Sequence]:
        """The prompt of `parent` is computed: its followers begin to run, on its blocks."""
        followers, parent.followers = parent.followers, []
        for child in followers:
            self.blocks.fork(parent, child)
            child.cached_tokens = parent.cached_tokens
            child.prompt_logprobs = parent.prompt_logprobs
            child.started_s = parent.started_s
            child.state = parent.state
            insort(self.running, child, key=_arrival)
        return followers

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.blocks.release(sequence)
        sequence.state = State.QUEUED
        self.preemptions += 1
        # It is older than all that never ran, but others may have been preempted before.
        place = 0
        while place < len(self.waiting) and self.waiting[place].arrival < sequence.arrival:
            place += 1
        self.waiting.insert(place, sequence)

    # Planning

    def plan(self, now_s: float) -> Plan | None:
        """The next step, or None when nothing waits or runs. `now_s` is noted for those that begin."""
        entries: list[Entry] = []
        self.started.clear()
        self._logits_left = self._step_logits
        self._plan_decodes(entries)
        decodes = len(entries)
        budget = self._step_tokens - sum(entry.rows for entry in entries)
        if decodes:
            budget = min(budget, self._mixed_tokens)
        budget = self._plan_prompts(entries, budget)
        self._admit(entries, budget, now_s)
        if not entries:
            return None
        count = self._run_length(entries) if len(entries) == decodes else 1
        return Plan(entries, len(entries) == decodes, self._step(entries, count), count)

    def _run_length(self, entries: list[Entry]) -> int:
        """How many steps of these entries, which all decode, can run before anybody looks at their tokens.

        More than one only where nobody waits and each token depends on its logits alone. Takes the blocks.
        """
        if not self._runs_ahead or self.waiting or self._pace is None or self._draft_tokens:
            return 1
        rows, seconds = self._pace
        if len(entries) > rows:
            return 1  # how long so many take is not known yet
        count = min(_MOST_STEPS, int(_RUN_S / seconds))
        if count < 2 or self.blocks.least_available <= len(entries):
            return 1
        for entry in entries:
            sequence = entry.sequence
            if not sequence.sampler.plain:
                return 1
            count = min(count, self._draft_limit(sequence) + 1)
        for entry in entries:
            first = entry.sequence.computed
            count = min(count, self.blocks.grow(entry.sequence, first + count) - first)
        return count

    def note_decode(self, rows: int, seconds: float) -> None:
        """What one step in which all sequences decoded took."""
        self.row_cost.add(rows, seconds)
        self._pace = rows, seconds

    def forget_pace(self) -> None:
        """The next step runs alone."""
        self._pace = None

    def _plan_decodes(self, entries: list[Entry]) -> None:
        decoding = [sequence for sequence in self.running if sequence.state is State.DECODE]
        # Drafts share the rows that are left when each running sequence has one; where blocks are short there
        # are none, since nobody should lose blocks to a guess.
        spare = 0
        if self._draft_tokens and decoding and self.blocks.least_available > len(decoding):
            spare = min(self._step_tokens, self._step_logits) - len(self.running)
            self.row_share = self.row_cost.share(len(decoding))
        for sequence in decoding:
            if sequence.state is not State.DECODE:
                continue  # lost its blocks to an older one
            draft: list[int] = []
            if spare > 0 and sequence.lookup is not None:
                most = min(spare, self._draft_limit(sequence))
                if most > 0:
                    draft = sequence.lookup.draft(sequence.tokens, most, self.row_share)
            first = sequence.computed
            end = self.blocks.grow(sequence, first + 1 + len(draft))
            while end == first:
                victim = self.running[-1]
                self._preempt(victim)
                if victim is sequence:
                    break
                end = self.blocks.grow(sequence, first + 1 + len(draft))
            if end == first:
                continue
            del draft[end - first - 1 :]
            entries.append(Entry(sequence, 1 + len(draft), draft, True, 1 + len(draft)))
            spare -= len(draft)
            self._logits_left -= 1 + len(draft)

    def _draft_limit(self, sequence: Sequence) -> int:
        # The last token of an answer has nothing to be drafted after it.
        left = sequence.params.max_tokens
        most = self.blocks.context_tokens - len(sequence.tokens) - 1
        if left is not None:
            most = min(most, left - sequence.completion_tokens - 1)
        return most

    def _plan_prompts(self, entries: list[Entry], budget: int) -> int:
        """Rows of prompts that run already. Returns: what is left of the budget."""
        decodes = bool(entries)
        for sequence in list(self.running):
            if budget <= 0:
                break
            if sequence.state is State.PREFILL:
                budget -= self._plan_prompt(entries, sequence, budget, may_preempt=not decodes)
        return budget

    def _plan_prompt(self, entries: list[Entry], sequence: Sequence, budget: int, may_preempt: bool) -> int:
        first = sequence.computed
        end = first + min(sequence.remaining, budget)
        # Of a prompt that is scored every row's logits are read, but for those read before a preemption.
        scored = sequence.scored
        unread = first if scored is None else max(first, scored)
        if scored is not None:
            end = min(end, unread + self._logits_left)
        elif end == len(sequence.tokens) and self._logits_left == 0:
            end -= 1  # drafts have taken the logits; its last row comes in the next step
        reached = self.blocks.grow(sequence, end)
        while reached == first < end and may_preempt and self.running[-1] is not sequence:
            self._preempt(self.running[-1])
            reached = self.blocks.grow(sequence, end)
        if reached > first:
            complete = reached == len(sequence.tokens)
            logits = int(complete) if scored is None else max(0, reached - unread)
            self._logits_left -= logits
            entries.append(Entry(sequence, reached - first, [], complete, logits))
        return reached - first

    def _admit(self, entries: list[Entry], budget: int, now_s: float) -> None:
        """Sequences that wait begin to run, in order, while there are rows and blocks for them."""
        running = len(self.running) + sum(len(sequence.followers) for sequence in self.running)
        while self.waiting and budget > 0:
            sequence = self.waiting[0]
            if running + 1 + len(sequence.followers) > self.max_sequences:
                break
            if self.running and self._refused_at == self.blocks.changes:
                break
            self.blocks.start(sequence)
            if self.running and not self._has_room(sequence):
                self.blocks.release(sequence)
                self._refused_at = self.blocks.changes
                break
            self.waiting.popleft()
            sequence.state = State.PREFILL
            insort(self.running, sequence, key=_arrival)
            running += 1 + len(sequence.followers)
            if sequence.started_s is None:
                sequence.started_s = now_s
                sequence.cached_tokens = sequence.computed
                self.blocks.count_query(sequence)
                self.started.append(sequence)
            budget -= self._plan_prompt(entries, sequence, budget, may_preempt=False)

    def _has_room(self, sequence: Sequence) -> bool:
        """Whether all running prompts and this one can be computed, and each that runs can get one block
        more."""
        lacks = self.blocks.lacking(sequence)
        for other in self.running:
            if other.state is State.PREFILL:
                lacks = [
                    mine + theirs for mine, theirs in zip(lacks, self.blocks.lacking(other), strict=True)
                ]
        spare = len(self.running)
        return all(
            lack + spare <= pool.available for lack, pool in zip(lacks, self.blocks.pools, strict=True)
        )

    def _step(self, entries: list[Entry], count: int) -> Step:
        """Writes the entries to the arrays of a step, with blocks for `count` steps."""
        tokens, positions, starts, wanted = self._tokens, self._positions, self._starts, self._wanted
        width = max(blocks_of(entry.sequence.computed + entry.rows + count - 1) for entry in entries)
        size = len(entries)
        tables = [flat[: size * width].reshape(size, width) for flat in self._tables]
        row = logits = 0
        for place, entry in enumerate(entries):
            sequence = entry.sequence
            first = sequence.computed
            end = row + entry.rows
            starts[place] = row
            if entry.rows == 1:
                tokens[row] = sequence.tokens[first]
                positions[row] = first
            else:
                tokens[row:end] = sequence.tokens[first : first + entry.rows] + entry.draft
                positions[row:end] = self._numbers[first : first + entry.rows]
            for number in range(end - entry.logits, end):
                wanted[logits] = number
                logits += 1
            for table, into in zip(sequence.tables, tables, strict=True):
                into[place] = table.blocks[:width]
            row = end
        starts[size] = row
        return Step(tokens[:row], positions[:row], starts[: size + 1], tuple(tables), wanted[:logits])


def _arrival(sequence: Sequence) -> tuple[int, int]:
    return sequence.arrival

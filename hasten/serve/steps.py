"""What the engine's thread does: plan a step, run it, choose tokens, give them out.

Nothing here knows of threads; one thread calls everything.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from collections.abc import Sequence as Items
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from hasten.base.errors import HastenError, first_line
from hasten.serve.blocks import BlockManager
from hasten.serve.observe import Observer
from hasten.serve.runner import Runner, TouchingRunner
from hasten.serve.scheduler import Entry, Plan, Scheduler
from hasten.serve.sequence import Sequence, State, blocks_of
from hasten.serve.speculate import PromptLookup
from hasten.serve.stream import Delta, FinishReason, Stream, Usage

if TYPE_CHECKING:
    from hasten.serve.runner import GreedyRunner
    from hasten.serve.sampling import Sampled

_LOG = logging.getLogger(__name__)
# So many failed steps one after another mean that the runner cannot go on.
_MOST_FAILURES = 3


class Job:
    """One request: its stream and its choices."""

    __slots__ = ("open", "sequences", "stream")

    def __init__(self, stream: Stream, sequences: list[Sequence]):
        self.stream = stream
        self.sequences = sequences
        self.open = len(sequences)
        """Choices that are not finished."""


class _Turn:
    """One sequence whose next tokens are being chosen: from logits row `row` on, while the draft holds."""

    __slots__ = ("draft", "row", "sampled", "sequence")

    def __init__(self, sequence: Sequence, row: int, draft: list[int]):
        self.sequence = sequence
        self.row = row
        self.draft = draft
        self.sampled: list[Sampled] = []


class Steps:
    """Requests that wait and run, and the work on them, step by step."""

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        sampling: Any,
        observer: Observer,
        draft_tokens: int,
        leave_queue: Callable[[], None],
    ):
        """`leave_queue` is called once for each job, when it begins to run or ends before that."""
        self.jobs: dict[Stream, Job] = {}
        self.finished: Counter[str] = Counter()
        self.prompt_tokens = self.generated_tokens = self.drafted_tokens = self.accepted_tokens = 0
        self.steps = self.step_rows = 0
        self.runner_s = self.busy_s = 0.0
        self.interrupt = np.zeros(1, np.int32)
        """Anything but 0: a run of steps ends with the one that runs. Other threads write it."""

        self._runner = runner
        self._scheduler = scheduler
        self._blocks: BlockManager = scheduler.blocks
        self._sampling = sampling
        self._observer = observer
        self._draft_tokens = draft_tokens
        self._leave_queue = leave_queue
        self._failures = 0
        self._touching = runner if isinstance(runner, TouchingRunner) else None
        self._ahead = blocks_of(runner.step_tokens)

    def add(self, job: Job) -> None:
        """A job waits behind all others."""
        self.jobs[job.stream] = job
        self._scheduler.add(job.sequences[0])

    def end(self, stream: Stream, reason: FinishReason, error: str | None = None) -> None:
        """Ends all choices of a stream, in whatever state; nothing happens if they have ended."""
        job = self.jobs.get(stream)
        if job is not None:
            for sequence in job.sequences:
                if sequence.state is not State.FINISHED:
                    self._end(sequence, reason, error)

    def end_all(self, reason: FinishReason, error: str) -> None:
        """Ends every stream."""
        for stream in list(self.jobs):
            self.end(stream, reason, error)

    def touch_next(self) -> bool:
        """Takes the memory of one block that the next prompt may write, while nobody waits for anything: a
        prompt that meets new memory takes 2 % longer (docs/LOG.md, 2026-11-30). Whether there was one to
        take, out of as many as a step can fill."""
        if self._touching is None:
            return False
        for group, pool in enumerate(self._blocks.pools):
            block = pool.next_untouched(self._ahead)
            if block >= 0:
                self._touching.touch(group, block)
                return True
        return False

    def step(self) -> None:
        """Runs one step, if there is one.

        Raises:
            Exception: what the runner raised, at the third failure in a row; or a fault of the engine itself.
        """
        begin_s = perf_counter()
        plan = self._scheduler.plan(begin_s)
        for sequence in self._scheduler.started:
            self._leave_queue()
            self.prompt_tokens += sequence.prompt_length
            self._observer.started(begin_s - sequence.submitted_s)
        if plan is None:
            if self.jobs:
                raise RuntimeError(
                    f"no sequence can run: {self._scheduler.running}, {self._scheduler.waiting}"
                )
            return
        run_s = perf_counter()
        rows, count = len(plan.step.tokens), 1
        try:
            if plan.count > 1:
                # Planned for a GreedyRunner alone; to ask it again would take 11 us.
                greedy = cast("GreedyRunner", self._runner)
                chosen = greedy.run_greedy(plan.step, plan.count, self.interrupt)
                count = len(chosen)
            else:
                logits = self._runner.run(plan.step)
        except Exception as error:
            self._fail(plan, error)
            if self._failures >= _MOST_FAILURES:
                raise
            return
        self._failures = 0
        now_s = perf_counter()
        self.runner_s += now_s - run_s
        self.steps += count
        self.step_rows += count * rows
        if plan.decode_only:
            self._scheduler.note_decode(rows, (now_s - run_s) / count)
        if plan.count > 1:
            turns = self._chosen(plan.entries, chosen)
        else:
            turns = self._turns(plan.entries, logits)
            self._choose(turns, logits)
        for turn in turns:
            if turn.sampled:
                self._emit(turn, now_s)
        duration_s = perf_counter() - begin_s
        self.busy_s += duration_s
        for _ in range(count):
            self._observer.step(rows, len(plan.entries), duration_s / count)

    def _chosen(self, entries: Items[Entry], chosen: np.ndarray) -> list[_Turn]:
        """The turns of sequences whose tokens the runner has chosen, [steps, sequences]."""
        turns = []
        for entry, tokens in zip(entries, chosen.T.tolist(), strict=True):
            turn = _Turn(entry.sequence, 0, [])
            turns.append(turn)
            if tokens[-1] < 0:
                # The run ended here: one step alone, whose logits are looked at, says why.
                self._scheduler.forget_pace()
                del tokens[-1]
            for token in tokens:
                entry.sequence.sampler.accept(token)
                turn.sampled.append(self._sampling.Sampled(token))
        return turns

    def _turns(self, entries: Items[Entry], logits: np.ndarray) -> list[_Turn]:
        """Notes what the step has computed. Returns: the sequences that get tokens from it."""
        turns = []
        row = 0
        for entry in entries:
            sequence = entry.sequence
            # Of a draft only what is kept counts, which is known later.
            self._blocks.advance(sequence, sequence.computed + entry.rows - len(entry.draft))
            next_row = row + entry.logits
            first = next_row - (1 + len(entry.draft)) * entry.complete
            alive = first == row or self._score(sequence, logits[row:first])
            if entry.complete and alive:
                turns.append(_Turn(sequence, first, entry.draft))
                for follower in self._scheduler.fork(sequence):
                    turns.append(_Turn(follower, first, []))
            row = next_row
        return turns

    def _score(self, sequence: Sequence, logits: np.ndarray) -> bool:
        """Notes the log-probabilities of the prompt's next tokens; False if that ended the sequence."""
        scores = sequence.prompt_logprobs
        assert scores is not None  # only then were these logits wanted
        begin = len(scores) + 1
        tokens = sequence.tokens[begin : begin + len(logits)]
        try:
            scores += self._sampling.score(logits, tokens, sequence.params.prompt_logprobs)
        except HastenError as error:
            self._end(sequence, "error", first_line(error))
            return False
        return True

    def _choose(self, turns: list[_Turn], logits: np.ndarray) -> None:
        """Chooses the next token of each turn; where it is the drafted one, also the token after it, and so
        on.

        Each token is chosen from the same logits and by the same state as without drafts.
        """
        active = turns
        while active:
            rows = [turn.row + len(turn.sampled) for turn in active]
            again = []
            for turn, sampled in zip(active, self._sample(logits, rows, active), strict=True):
                sequence = turn.sequence
                if isinstance(sampled, Exception):
                    turn.sampled = []
                    self._end(sequence, "error", first_line(sampled))
                    continue
                try:
                    sequence.sampler.accept(sampled.token)
                except HastenError as error:
                    turn.sampled = []
                    self._end(sequence, "error", first_line(error))
                    continue
                place = len(turn.sampled)
                turn.sampled.append(sampled)
                if (
                    place < len(turn.draft)
                    and sampled.token == turn.draft[place]
                    and sampled.token not in sequence.stop_tokens
                    and not sequence.grammar_finished
                ):
                    again.append(turn)
            active = again

    def _sample(self, logits: np.ndarray, rows: list[int], turns: list[_Turn]) -> Items[Sampled | Exception]:
        """One sample for each row. If that fails, row by row, so that only those at fault fail."""
        samplers = [turn.sequence.sampler for turn in turns]
        try:
            return self._sampling.sample(logits, rows, samplers)
        except Exception:
            results: list[Sampled | Exception] = []
            for row, sampler in zip(rows, samplers, strict=True):
                try:
                    results += self._sampling.sample(logits, [row], [sampler])
                except Exception as error:
                    results.append(error)
            return results

    def _emit(self, turn: _Turn, now_s: float) -> None:
        """Appends the chosen tokens, gives out their text, and ends the sequence if one of them does."""
        sequence = turn.sequence
        params, output = sequence.params, sequence.text
        context = self._blocks.context_tokens
        before = sequence.completion_tokens
        text = ""
        reason: FinishReason | None = None
        for sampled in turn.sampled:
            sequence.tokens.append(sampled.token)
            sequence.completion_tokens += 1
            may_stop = sequence.completion_tokens > params.min_tokens
            if may_stop and sampled.token in sequence.stop_tokens:
                reason = "stop"
                text += output.flush()
                break
            piece, found = output.push(sampled.token, may_stop)
            text += piece
            if found:
                reason = "stop"
                break
            if sequence.grammar_finished and sampled is turn.sampled[-1]:
                reason = "stop"
                text += output.flush()
                break
            if sequence.completion_tokens == params.max_tokens or len(sequence.tokens) >= context:
                reason = "length"
                text += output.flush()
                break
        count = sequence.completion_tokens - before
        if turn.draft:
            self._judge(turn)
        self._blocks.advance(sequence, len(sequence.tokens) - 1)
        self.generated_tokens += count
        if sequence.first_token_s is None:
            sequence.first_token_s = now_s
            self._observer.first_token(now_s - sequence.submitted_s)
            if count > 1:
                self._observer.tokens(0.0, count - 1)
        else:
            self._observer.tokens(now_s - sequence.last_token_s, count)
        sequence.last_token_s = now_s
        scores = sequence.prompt_logprobs if before == 0 else None
        sampled_tokens = turn.sampled[:count]
        delta = Delta(
            text,
            tuple([sampled.token for sampled in sampled_tokens]),
            None if params.logprobs is None else tuple(sampled_tokens),
            reason,
            None,
            sequence.index,
            prompt_logprobs=None if scores is None else tuple(scores),
        )
        if reason is None:
            self._decode(sequence)
            sequence.stream.push(delta)
        else:
            self._scheduler.remove(sequence)
            self._close(sequence, delta)

    def _decode(self, sequence: Sequence) -> None:
        if sequence.state is not State.DECODE:
            sequence.state = State.DECODE
            if self._draft_tokens and sequence.lookup is None:
                sequence.lookup = PromptLookup(sequence.tokens, self._draft_tokens)

    def _judge(self, turn: _Turn) -> None:
        sequence, drafted = turn.sequence, len(turn.draft)
        accepted = sum(
            sampled.token == token for sampled, token in zip(turn.sampled, turn.draft, strict=False)
        )
        sequence.drafted_tokens += drafted
        sequence.accepted_tokens += accepted
        self.drafted_tokens += drafted
        self.accepted_tokens += accepted
        if sequence.lookup is not None:
            sequence.lookup.judge(len(sequence.tokens), drafted, accepted, self._scheduler.row_share)

    # Ends

    def _end(self, sequence: Sequence, reason: FinishReason, error: str | None = None) -> None:
        """Ends a choice between steps, and those that wait for its prompt with it."""
        followers, sequence.followers = sequence.followers, []
        self._scheduler.remove(sequence)
        for ended in (sequence, *followers):
            ended.state = State.FINISHED
            self._close(ended, Delta("", (), None, reason, None, ended.index, error))

    def _close(self, sequence: Sequence, delta: Delta) -> None:
        """Gives out the last delta of a choice, whose blocks are free already."""
        reason = delta.finish_reason
        assert reason is not None  # it is the last
        job = self.jobs[sequence.stream]
        job.open -= 1
        now_s = perf_counter()
        self.finished[reason] += 1
        if job.open == 0:
            del self.jobs[sequence.stream]
            delta = delta._replace(usage=_usage(job, now_s))
            if job.sequences[0].started_s is None:
                self._leave_queue()
        total_s = now_s - sequence.submitted_s
        self._observer.finished(reason, total_s, sequence.prompt_length, sequence.completion_tokens)
        sequence.stream.push(delta)

    def _fail(self, plan: Plan, error: Exception) -> None:
        """The runner failed: the sequences of this step end, the others go on."""
        _LOG.error("a step of the model failed", exc_info=error)
        for entry in plan.entries:
            self._end(entry.sequence, "error", f"the model failed: {first_line(error)}")
        self._failures += 1


def _usage(job: Job, now_s: float) -> Usage:
    first = job.sequences[0]
    submitted_s = first.submitted_s
    started_s = now_s if first.started_s is None else first.started_s
    firsts = [sequence.first_token_s for sequence in job.sequences if sequence.first_token_s is not None]
    return Usage(
        prompt_tokens=first.prompt_length,
        completion_tokens=sum(sequence.completion_tokens for sequence in job.sequences),
        cached_tokens=first.cached_tokens,
        queue_s=started_s - submitted_s,
        first_token_s=min(firsts, default=now_s) - submitted_s,
        total_s=now_s - submitted_s,
        drafted_tokens=sum(sequence.drafted_tokens for sequence in job.sequences),
        accepted_tokens=sum(sequence.accepted_tokens for sequence in job.sequences),
    )

"""The engine: takes requests from any thread, runs steps in a thread of its own, gives out text as it
comes.
"""

from __future__ import annotations

import importlib
import logging
import threading
from collections import deque
from collections.abc import Sequence as Items
from dataclasses import dataclass
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any

from hasten.base.errors import ConfigError, ContextError, EngineStopped, InputError, QueueFull, first_line
from hasten.serve.blocks import BlockManager
from hasten.serve.observe import EngineStats, Observer
from hasten.serve.runner import Runner
from hasten.serve.scheduler import Scheduler
from hasten.serve.sequence import Sequence, State
from hasten.serve.steps import Job, Steps
from hasten.serve.stream import Completion, Delta, Request, Stream, Usage
from hasten.serve.text import Detokenizer, TextOutput

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from hasten.serve.sampling import SamplingParams

__all__ = [
    "Completion",
    "Delta",
    "Engine",
    "EngineSettings",
    "EngineStats",
    "Observer",
    "Request",
    "Stream",
    "Usage",
]

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineSettings:
    """How the engine shares the runner among requests."""

    max_sequences: int = 64
    """Most choices that run together; never more than the runner's step_logits and step_tokens."""

    max_queue: int = 256
    """Most requests that wait; more are refused with QueueFull."""

    prefill_tokens: int | None = None
    """Most rows of prompts in a step in which other sequences decode, which bounds the time between their
    tokens; None: as many as the runner takes."""

    prefix_cache: bool = True
    """Whether prompts take over what earlier ones with the same beginning computed."""

    draft_tokens: int = 0
    """Longest draft of prompt lookup; 0: no drafts."""

    eos_tokens: tuple[int, ...] = ()
    """Tokens with which the model ends an answer."""

    def __post_init__(self) -> None:
        for name, least in {
            "max_sequences": 1,
            "max_queue": 1,
            "prefill_tokens": 1,
            "draft_tokens": 0,
        }.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} = {value}: must be at least {least}")


class Engine:
    """Continuous batching over a runner; one thread runs the steps, and sleeps when there is nothing to
    do."""

    def __init__(
        self,
        runner: Runner,
        tokenizer: Tokenizer | None = None,
        settings: EngineSettings | None = None,
        observer: Observer | None = None,
        sampling: Any = None,
    ):
        """`tokenizer` None: prompts are tokens and deltas have no text. `sampling`: what has SamplingParams,
        Sampler, Sampled, sample and score; `hasten.serve.sampling` unless given.

        Raises:
            ConfigError: the runner's cache is too small for one sequence.
        """
        self.runner = runner
        self.tokenizer = tokenizer
        self.settings = settings = settings or EngineSettings()
        self._sampling = sampling or importlib.import_module("hasten.serve.sampling")
        self._blocks = BlockManager(
            runner.groups, runner.context_tokens, runner.copy_blocks, settings.prefix_cache
        )
        self._scheduler = Scheduler(
            runner, self._blocks, settings.max_sequences, settings.prefill_tokens, settings.draft_tokens
        )
        self._steps = Steps(
            runner,
            self._scheduler,
            self._sampling,
            observer or Observer(),
            settings.draft_tokens,
            self._leave_queue,
        )

        # What follows is shared with other threads, under the condition's lock.
        self._changed = threading.Condition()
        self._submitted: deque[Job] = deque()
        self._cancelled: deque[Stream] = deque()
        self._arrivals = 0
        self._queued = 0
        self._stopped: str | None = None
        self._abort_at_s: float | None = None
        self._thread = threading.Thread(target=self._main, name="hasten-engine", daemon=True)
        self._thread.start()

    # For any thread

    @property
    def context_tokens(self) -> int:
        """Longest sequence, prompt and answer together."""
        return self._blocks.context_tokens

    def submit(self, request: Request) -> Stream:
        """Puts a request into the queue.

        Raises:
            InputError: the prompt is empty, or has tokens that the model does not know.
            ContextError: the prompt leaves no room for an answer.
            ConfigError: more choices than can run together.
            QueueFull: too many requests wait.
            EngineStopped: the engine was stopped, or cannot go on.
        """
        self._refuse()
        params = request.params if request.params is not None else self._sampling.SamplingParams()
        tokens = self._prompt(request, params)
        stream = Stream(request, params.n, len(tokens), self._cancel)
        now = perf_counter()
        sequences = [self._sequence(stream, index, tokens, params, now) for index in range(params.n)]
        sequences[0].followers = sequences[1:]
        with self._changed:
            self._refuse()
            self._arrivals += 1
            for sequence in sequences:
                sequence.arrival = (self._arrivals, sequence.index)
            self._submitted.append(Job(stream, sequences))
            self._queued += 1
            self._notify()
        return stream

    def _refuse(self) -> None:
        if self._stopped is not None:
            raise EngineStopped(f"the engine takes no requests: {self._stopped}")
        if self._queued >= self.settings.max_queue:
            raise QueueFull(
                f"{self._queued} requests wait already (max_queue = {self.settings.max_queue}): try again "
                "later"
            )

    def _prompt(self, request: Request, params: SamplingParams) -> list[int]:
        """The request's tokens, checked."""
        if request.prompt is None:
            tokens = [int(token) for token in request.prompt_tokens]
        elif self.tokenizer is None:
            raise InputError("the prompt is text, but this engine has no tokenizer: give prompt_tokens")
        else:
            tokens = self.tokenizer.encode(request.prompt, add_special_tokens=request.add_special_tokens).ids
        if not tokens:
            raise InputError("the prompt has no tokens: give at least one")
        most = self._blocks.context_tokens
        if len(tokens) >= most:
            raise ContextError(
                f"the prompt has {len(tokens)} tokens, but the context is {most} tokens, of which at least "
                f"one is for the answer: shorten the prompt to at most {most - 1} tokens"
            )
        if min(tokens) < 0 or max(tokens) >= self.runner.vocab_size:
            wrong = next(token for token in tokens if not 0 <= token < self.runner.vocab_size)
            raise InputError(f"prompt token {wrong}: the model knows 0 to {self.runner.vocab_size - 1}")
        if params.n > self._scheduler.max_sequences:
            raise ConfigError(
                f"n = {params.n}: at most {self._scheduler.max_sequences} choices can run together"
            )
        return tokens

    def _sequence(
        self, stream: Stream, index: int, tokens: Items[int], params: SamplingParams, now_s: float
    ) -> Sequence:
        eos = self.settings.eos_tokens
        sampler = self._sampling.Sampler(params, tokens, self.runner.vocab_size, eos=eos, choice=index)
        detokenizer = None
        if self.tokenizer is not None:
            detokenizer = Detokenizer(self.tokenizer, tokens, stream.request.skip_special_tokens)
        text = TextOutput(detokenizer, params.stop)
        sequence = Sequence(stream, index, tokens, params, sampler, text, stream.request.salt)
        sequence.stop_tokens = frozenset((*(() if params.ignore_eos else eos), *params.stop_tokens))
        sequence.submitted_s = now_s
        return sequence

    def _cancel(self, stream: Stream) -> None:
        if self._thread.is_alive():
            with self._changed:
                self._cancelled.append(stream)
                self._notify()

    def _notify(self) -> None:
        """Wakes the engine's thread, or ends the run of steps that it is in; under the condition's lock."""
        self._steps.interrupt[0] = 1
        self._changed.notify()

    def stop(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, finishes what it has within `drain_s` seconds, ends the rest with an error,
        and returns when the thread has ended."""
        with self._changed:
            if self._stopped is None:
                self._stopped = "it was stopped"
            self._abort_at_s = perf_counter() + drain_s
            self._notify()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def stats(self) -> EngineStats:
        """A snapshot; cheap enough for every request."""
        pools = self._blocks.usage()
        return EngineStats(
            running=len(self._scheduler.running),
            waiting=len(self._submitted) + len(self._scheduler.waiting),
            pools=pools,
            cache_usage=max(pool.held / pool.blocks for pool in pools),
            prefix_query_tokens=self._blocks.query_tokens,
            prefix_hit_tokens=self._blocks.hit_tokens,
            prompt_tokens=self._steps.prompt_tokens,
            generated_tokens=self._steps.generated_tokens,
            drafted_tokens=self._steps.drafted_tokens,
            accepted_tokens=self._steps.accepted_tokens,
            preemptions=self._scheduler.preemptions,
            steps=self._steps.steps,
            step_rows=self._steps.step_rows,
            runner_s=self._steps.runner_s,
            busy_s=self._steps.busy_s,
            finished=dict(self._steps.finished),
            stopped=self._stopped,
        )

    # The engine's thread

    def _main(self) -> None:
        try:
            while self._take():
                self._steps.step()
        except Exception as error:
            # Nothing that is known about blocks can be trusted now.
            _LOG.exception("the engine stops")
            self._break(error)

    def _take(self) -> bool:
        """Sleeps until there is something to do, then takes in what other threads asked for.

        Returns: whether the engine goes on.
        """
        with self._changed:
            while not (self._steps.jobs or self._submitted or self._cancelled or self._stopped is not None):
                if not self._idle():
                    self._changed.wait()
            submitted, cancelled = list(self._submitted), list(self._cancelled)
            self._submitted.clear()
            self._cancelled.clear()
            self._steps.interrupt[0] = 0
            stopped, abort_at_s = self._stopped is not None, self._abort_at_s
        for job in submitted:
            self._steps.add(job)
        for stream in cancelled:
            self._steps.end(stream, "cancelled")
        if not stopped:
            return True
        if abort_at_s is not None and perf_counter() >= abort_at_s:
            self._steps.end_all("error", "the engine was stopped before the answer was complete")
        return bool(self._steps.jobs)

    def _idle(self) -> bool:
        """Does a little of what is useful later; whether there was something. Others may come meanwhile."""
        self._changed.release()
        try:
            return self._steps.touch_next()
        finally:
            self._changed.acquire()

    def _leave_queue(self) -> None:
        with self._changed:
            self._queued -= 1

    def _break(self, error: Exception) -> None:
        """The engine cannot go on: every request ends, and new ones are told why."""
        with self._changed:
            self._stopped = f"it cannot go on after an error ({first_line(error)})"
            jobs = [*self._steps.jobs.values(), *self._submitted]
            self._submitted.clear()
            self._queued = 0
        self._steps.jobs.clear()
        for job in jobs:
            for sequence in job.sequences:
                if sequence.state is not State.FINISHED:
                    sequence.state = State.FINISHED
                    message = f"the engine stopped: {first_line(error)}"
                    job.stream.push(Delta("", (), None, "error", None, sequence.index, message))

"""What a caller gives to the engine and gets back: requests, and streams of pieces of their answers."""

from __future__ import annotations

import asyncio
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NamedTuple

from hasten.base.errors import ServeError

if TYPE_CHECKING:
    from hasten.serve.sampling import Sampled, SamplingParams

FinishReason = Literal["stop", "length", "cancelled", "error"]
"""`stop`: the model ended, or a stop token or stop string came; `length`: max_tokens or the context is used
up; `cancelled`: the caller gave up; `error`: see the delta's `error`."""


@dataclass(frozen=True)
class Request:
    """One prompt, as tokens or as text, and how to go on from it."""

    prompt_tokens: Sequence[int] = ()

    prompt: str | None = None
    """Text that the engine's tokenizer encodes; instead of `prompt_tokens`."""

    params: SamplingParams | None = None
    """None: the defaults of SamplingParams."""

    add_special_tokens: bool = True
    """Whether encoding `prompt` adds the tokenizer's own first tokens (a chat template has written them)."""

    skip_special_tokens: bool = True
    """Whether special tokens are left out of the text."""

    salt: str = ""
    """Cached prefixes are shared only between requests of the same salt."""

    request_id: str = ""


class Usage(NamedTuple):
    """What a request took. Tokens include the one that ended a choice; seconds count from submission."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    queue_s: float
    first_token_s: float
    total_s: float
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class Delta(NamedTuple):
    """The next piece of one choice.

    `text` may be empty while a character or a possible stop string is incomplete; the tokens are there all
    the same, so text can come with later tokens than its own. `logprobs` has an entry for each token when the
    request asks for them. `usage` comes once, with the last delta of the stream."""

    text: str
    tokens: tuple[int, ...] = ()
    logprobs: tuple[Sampled, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None
    index: int = 0  # type: ignore[assignment]  # hides tuple.index, which nobody needs here
    """Which of the request's choices."""

    error: str | None = None
    prompt_logprobs: tuple[Sampled, ...] | None = None
    """With a choice's first tokens, where it is asked for: of the prompt's tokens behind the first."""


@dataclass
class Completion:
    """All deltas of one choice, joined."""

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    logprobs: list[Sampled] = field(default_factory=list)
    prompt_logprobs: tuple[Sampled, ...] | None = None
    finish_reason: FinishReason | None = None
    usage: Usage | None = None

    def add(self, delta: Delta) -> None:
        """Appends the next delta of this choice."""
        self.text += delta.text
        self.tokens += delta.tokens
        self.logprobs += delta.logprobs or ()
        if delta.prompt_logprobs is not None:
            self.prompt_logprobs = delta.prompt_logprobs
        self.finish_reason = delta.finish_reason
        self.usage = delta.usage


class Stream:
    """The answer to one request: iterate over it, or `async for`, by one consumer; ends after the last
    choice.

    Leaving it as a context manager cancels what is not finished.
    """

    def __init__(self, request: Request, choices: int, prompt_tokens: int, cancel: Callable[[Stream], None]):
        self.request = request
        self.choices = choices
        self.prompt_tokens = prompt_tokens
        self._cancel = cancel
        self._deltas: queue.SimpleQueue[Delta] = queue.SimpleQueue()
        self._waiter: tuple[asyncio.AbstractEventLoop, asyncio.Future[None]] | None = None
        self._open = choices

    @property
    def finished(self) -> bool:
        """Whether the consumer has taken the last delta of every choice."""
        return self._open == 0

    def cancel(self) -> None:
        """Gives up: blocks are free before the next step; choices still open end with `cancelled`. Any
        thread."""
        self._cancel(self)

    def push(self, delta: Delta) -> None:
        """Called by the engine's thread.

        The consumer registers its waiter before it looks again at the queue, and the queue is filled here
        before the waiter is looked at, so one of the two always sees the other."""
        self._deltas.put(delta)
        waiter, self._waiter = self._waiter, None
        if waiter is not None:
            loop, future = waiter
            try:
                loop.call_soon_threadsafe(_wake, future)
            except RuntimeError:  # the loop is closed: nobody will ever read this
                self.cancel()

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Delta:
        if self.finished:
            raise StopIteration
        return self._taken(self._deltas.get())

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        if self.finished:
            raise StopAsyncIteration
        while True:
            try:
                return self._taken(self._deltas.get_nowait())
            except queue.Empty:
                pass
            loop = asyncio.get_running_loop()
            future: asyncio.Future[None] = loop.create_future()
            self._waiter = (loop, future)
            if self._deltas.empty():
                await future
            self._waiter = None

    def _taken(self, delta: Delta) -> Delta:
        if delta.finish_reason is not None:
            self._open -= 1
        return delta

    def collect(self) -> list[Completion]:
        """Waits for all choices.

        Raises:
            ServeError: a choice ended with an error.
        """
        completions = [Completion(index) for index in range(self.choices)]
        with self:
            for delta in self:
                _add(completions, delta)
        return completions

    async def acollect(self) -> list[Completion]:
        """The same as `collect`, for a coroutine."""
        completions = [Completion(index) for index in range(self.choices)]
        with self:
            async for delta in self:
                _add(completions, delta)
        return completions

    def __enter__(self) -> Stream:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self.finished:
            self.cancel()


def _add(completions: list[Completion], delta: Delta) -> None:
    if delta.error is not None:
        raise ServeError(delta.error)
    completions[delta.index].add(delta)


def _wake(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)

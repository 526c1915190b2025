"""What can be seen of a running engine: a snapshot of counts, and calls at each event."""

from __future__ import annotations

from dataclasses import dataclass

from hasten.serve.blocks import PoolUsage
from hasten.serve.stream import FinishReason


@dataclass(frozen=True)
class EngineStats:
    """A snapshot. Counts and tokens since the start, except `running`, `waiting`, `pools` and
    `cache_usage`."""

    running: int
    waiting: int
    """Choices and requests, respectively."""

    pools: tuple[PoolUsage, ...]
    cache_usage: float
    """Share of the fullest group's blocks that sequences hold."""

    prefix_query_tokens: int
    prefix_hit_tokens: int
    prompt_tokens: int
    generated_tokens: int
    drafted_tokens: int
    accepted_tokens: int
    preemptions: int
    steps: int
    step_rows: int
    runner_s: float
    """Seconds inside the runner."""

    busy_s: float
    """Seconds inside steps, the runner's included."""

    finished: dict[str, int]
    """Choices by the reason of their end."""

    stopped: str | None
    """Why no requests are taken; None while they are."""


class Observer:
    """Called from the engine's thread; a subclass fills the metrics it keeps. All times are in seconds.

    What a method raises stops the engine.
    """

    def started(self, queue_s: float) -> None:
        """A request began to run after `queue_s` of waiting."""

    def first_token(self, since_submitted_s: float) -> None:
        """A choice has its first token."""

    def tokens(self, since_last_s: float, count: int) -> None:
        """A choice has `count` further tokens, more than one where a draft was kept or several
        steps ran in one call."""

    def finished(
        self, reason: FinishReason, total_s: float, prompt_tokens: int, completion_tokens: int
    ) -> None:
        """A choice ended."""

    def step(self, rows: int, sequences: int, duration_s: float) -> None:
        """A step ended; of several that ran in one call each is told, with the mean duration."""

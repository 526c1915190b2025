"""The report of `hasten bench serve`: `docs/formats/report.md` describes it."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from hasten.bench.report import Frozen, Interruption, Limits

SCHEMA = "hasten.bench.serve/1"


class Workload(Frozen):
    """What every server is asked."""

    model: str
    file: str | None
    data: str
    prompt_tokens: int
    new_tokens: int
    """At most; hasten is told to ignore end tokens."""
    concurrency: list[int]
    requests_per_client: int


class Level(Frozen):
    """One level of concurrency; seconds."""

    requests: int
    failures: int
    wall_s: float
    tokens: int
    """Of all answers."""
    tokens_per_s: float
    """Of all answers together, prompts included in the time."""
    first_token_p50_s: float
    first_token_p95_s: float
    inter_token_p50_s: float
    """Between two pieces of an answer that carry text."""
    inter_token_p95_s: float


class Contender(Frozen):
    """One server."""

    description: str
    command: list[str]
    ready_s: float
    """From the start of its process until it lists its models."""
    peak_rss_bytes: int
    exit_code: int
    """After SIGTERM."""
    levels: dict[str, Level]
    """By number of clients."""
    compared: int
    """Answers given while several clients asked, that were asked for again one at a time."""
    different: int
    """Of them, those whose text was another."""
    errors: list[str]
    """The first few failures."""


class Ratio(Frozen):
    """A server against another at one level; null where it gave wrong answers or failed."""

    tokens_per_s: float | None
    first_token_p50: float | None
    """Seconds over the base's."""
    inter_token_p50: float | None


class ServeReport(Frozen):
    """The whole report."""

    schema_name: Literal["hasten.bench.serve/1"] = Field(default="hasten.bench.serve/1", alias="schema")
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    workload: Workload
    limits: Limits
    contenders: dict[str, Contender]
    failed: dict[str, str]
    skipped: dict[str, str]
    interrupted: Interruption | None
    ratios: dict[str, dict[str, dict[str, Ratio]]]
    """`ratios[contender][base][clients]`"""
    agree: bool
    """No request failed and no answer was another when asked for alone, at any server."""

"""The report of `hasten bench generate`: `docs/formats/report.md` describes it.

Everything that is printed is computed from this object, so a report on disk is the whole measurement.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from hasten.bench.report import Frozen, Interruption, Limits, ModelSize, read

SCHEMA = "hasten.bench.generate/1"


class Workload(Frozen):
    """What every contender does: greedy answers of `new_tokens` tokens, end tokens ignored."""

    model: str
    file: str | None
    """The GGUF file that the model is read from; null for others."""
    size: ModelSize
    data: str
    prompt_tokens: int = Field(ge=1)
    new_tokens: int = Field(ge=2)
    repeats: int = Field(ge=1)
    """Warm prompts of each process, after the cold one."""
    rounds: int = Field(ge=1)
    streams: list[int]
    """How many prompts are answered together; 1 is what the other numbers are."""
    cache_values: int
    """Keys and values that one decode step reads, half of the answer being there."""
    prefill_flops: float
    """Of one prompt: 2 * parameters in products * tokens, the head for one token, and attention."""


class Run(Frozen):
    """One prompt alone."""

    first_token_s: float = Field(gt=0)
    decode_s: float = Field(gt=0)
    """From the first token of the answer to the last."""


class Streams(Frozen):
    """Several prompts together."""

    streams: int = Field(ge=2)
    first_token_s: float
    """Median over the streams."""
    last_first_token_s: float
    """Of the stream that waited longest."""
    decode_tokens_per_s: float | None
    """Of all streams, while all of them decode; null where they never did."""
    total_s: float
    tokens_per_s: float
    """All tokens of all streams over `total_s`, prefill included."""
    peak_rss_bytes: int


class Round(Frozen):
    """One process of one contender."""

    open_s: float
    start_to_first_token_s: float
    """From the start of the process to the first token of the cold prompt, imports and opening included."""
    runs: list[Run] = Field(min_length=2)
    """The cold prompt, then the warm ones."""
    streams: list[Streams]
    peak_rss_bytes: int
    """High-water mark of the process before the streams."""
    tokens: list[list[int]]
    """Of every prompt: cold, warm, then those of the streams."""
    logprobs: list[float]
    """Natural logarithms of the probabilities of the cold answer's tokens."""
    held_weight_bytes: int | None = None
    """Of all weights as the contender holds them; null where it does not say."""
    note: str | None = None
    limits: Limits | None = None
    """The better of what the machine could do just before and just behind; null in older reports."""
    where: dict[str, dict[str, float]] | None = None
    """Seconds by operation of `prefill` (a prompt) and of `decode` (a token); null where not asked for, or
    where the contender cannot tell."""


class Contender(Frozen):
    """One contender over all its rounds; medians."""

    description: str
    weights: str
    """`float32`, `bfloat16`, `int8`, `int4` or `stored` (the file's own kinds)."""
    note: str | None = None
    open_s: float
    first_token_s: float
    """Of a warm prompt."""
    prefill_tokens_per_s: float
    """`prompt_tokens` over `first_token_s`."""
    decode_tokens_per_s: float
    """One stream, after the first token."""
    start_to_first_token_s: float
    """Of the rounds but the first, which may fill a cache on disk; of the only one otherwise."""
    first_start_to_first_token_s: float
    """Of the first round."""
    peak_rss_bytes: int
    weight_bytes: int
    """What one decode step reads of the weights."""
    cache_bytes: int
    """What one decode step reads of keys and values, half of the answer being there."""
    bound_tokens_per_s: float
    """The measured read bandwidth over the two; of each round that of its own limits, where it has any."""
    share_of_bound: float
    """Tokens per second over it, in each round; above 1 where the caches of the processor hold a part."""
    prefill_flops_per_s: float
    prefill_share_of_limit: float
    """Over the measured matrix-product peak, in each round."""
    repeatable: bool
    """Every round gave the same tokens."""
    text: str | None
    """The answer to the cold prompt."""
    streams: dict[str, Streams]
    """By number of streams; medians of each number."""
    streams_gain: dict[str, float | None]
    """By number of streams: its `decode_tokens_per_s` over that of one stream."""
    tokens: list[list[int]]
    """Of the first round."""
    where: dict[str, dict[str, float]] | None = None
    """Of the first round."""
    rounds: list[Round]


class Agreement(Frozen):
    """What plain PyTorch in fp32 says of a contender's tokens, given the same tokens before each."""

    contender: str
    judged_tokens: int
    regret_mean: float
    """Logarithm of the probability of the best token minus that of the token chosen; 0 for the judge."""
    regret_largest: float
    bound_regret: float
    """For the mean."""
    logprob_difference_mean: float | None
    """Of the absolute differences between the contender's own log-probabilities and the judge's; null where
    it gave none."""
    bound_logprob: float | None
    """Null where the weights are not those of the judge."""
    reason: str
    base: str | None
    """The first plain contender."""
    first_divergence: int | None
    """The first token of the cold answer that differs from the base's; null: none does."""
    agree: bool


class Ratio(Frozen):
    """A contender against a base. Speeds above 1 are better, the others below 1; null where one of the two
    does not agree with the judge.
    """

    prefill: float | None
    decode: float | None
    first_token: float | None
    """Seconds over the base's."""
    start_to_first_token: float | None
    peak_memory: float
    streams: dict[str, float | None]
    """By number of streams: `decode_tokens_per_s` over the base's."""


class Longest(Frozen):
    """The longest context of a contender within a budget of memory."""

    tokens: int
    """Prompt and answer together."""
    peak_rss_bytes: int
    limited_by: Literal["memory", "model"]
    """`model`: its longest context fits."""
    probes: dict[str, int]
    """Peak memory by tokens, of every process that was tried."""


class LongestContext(Frozen):
    """See `hasten.bench.generation.context`."""

    budget_bytes: int
    budget_of: str
    """What the budget is: the peak memory of this contender at `budget_tokens`."""
    budget_tokens: int
    resolution_tokens: int
    contenders: dict[str, Longest]
    ratios: dict[str, float]
    """Tokens over `budget_tokens`."""


class GenerateReport(Frozen):
    """The whole report. `extra="forbid"`: a reader of another version fails loudly."""

    schema_name: Literal["hasten.bench.generate/1"] = Field(default="hasten.bench.generate/1", alias="schema")
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
    ratios: dict[str, dict[str, Ratio]]
    agree: bool | None
    """Every contender agrees with the judge; null where the judge did not finish."""
    agreement: list[Agreement]
    longest_context: LongestContext | None
    """Null unless it was asked for."""


def load(path: Path) -> GenerateReport:
    """Reads and checks a report of `hasten bench generate`; raises as `hasten.bench.report.read`."""
    return read(GenerateReport, path, SCHEMA, "generate")

"""The contenders by name, what one process is told to do, and what it asks of an engine.

Imports nothing heavy: a contender's own imports are part of the time to its first token.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import NamedTuple, Protocol


class Kind(NamedTuple):
    """How a contender differs from the others; everything else is the same for all."""

    description: str
    engine: str
    """`eager` or `compile` (both transformers), `llama.cpp` or `hasten`."""
    weights: str
    """As `hasten generate --weights` has them; `stored`: as the file has them, 4 bits where it has floats."""
    draft_tokens: int = 0
    """Most tokens that are guessed from the prompt at a time."""
    cache: str = "bfloat16"
    """Of keys and values, for hasten's engine."""


CONTENDERS: dict[str, Kind] = {
    "eager-fp32": Kind("transformers generate with weights in fp32", "eager", "float32"),
    "eager-bf16": Kind("transformers generate with weights in bf16, as a user finds it", "eager", "bfloat16"),
    "compile-bf16": Kind(
        "transformers generate with a static cache and compiled steps", "compile", "bfloat16"
    ),
    "llama.cpp": Kind("llama.cpp through llama-cpp-python, the file's own weights", "llama.cpp", "stored"),
    "hasten-fp32": Kind("hasten's engine with weights in fp32", "hasten", "float32"),
    "hasten-bf16": Kind("hasten's engine with weights in bf16", "hasten", "bfloat16"),
    "hasten-int8": Kind("hasten's engine with weights in 8 bits", "hasten", "int8"),
    "hasten": Kind(
        "hasten's engine with the file's own weights, or 4 bits of a float model", "hasten", "stored"
    ),
    "hasten-cache8": Kind("hasten, with keys and values in 8 bits", "hasten", "stored", cache="int8"),
    "hasten-int4": Kind("hasten, 4.0 bits a weight that learnt from the original", "hasten", "int4:200"),
    "hasten-int4-cache8": Kind(
        "hasten-int4, with keys and values in 8 bits", "hasten", "int4:200", cache="int8"
    ),
    "hasten-draft": Kind("hasten, guessing tokens from the prompt", "hasten", "stored", draft_tokens=8),
}

DEFAULT = ("eager-bf16", "llama.cpp", "hasten-bf16", "hasten")
REST = "engine, sampling, text"
"""What no operation of the program accounts for."""
BASES = ("eager-bf16", "eager-fp32", "llama.cpp")
"""What ratios are taken against."""


@dataclass(frozen=True)
class Spec:
    """One run of one contender, as JSON from the bench to the process."""

    contender: str
    model: str
    """What `hasten.models.open_model` takes."""

    gguf: str | None
    """The model's file where it is a GGUF file."""

    weights: str
    """What the contender makes of them, as `Kind.weights`."""

    prompts: list[list[int]]
    """Tokens; the first is timed from the start of the process, the others warm. No two begin alike, so
    that a cache of prefixes helps nobody."""

    streams: list[list[list[int]]]
    """Groups of prompts, each group run together after the single ones; all of one length."""

    new_tokens: int
    threads: int
    context_tokens: int
    """Longest prompt and its answer."""

    started_at: float
    """`time.time()` just before the process was started."""

    where: bool = False
    """Also where the time goes, after everything else."""

    def dump(self) -> str:
        """As JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls, text: str) -> Spec:
        """From `dump`."""
        return cls(**json.loads(text))


@dataclass
class Answer:
    """What one prompt got."""

    tokens: list[int] = field(default_factory=list)
    at_s: list[float] = field(default_factory=list)
    """`time.perf_counter()` when each token was there."""
    logprobs: list[float] = field(default_factory=list)
    """Natural logarithm of each token's probability; empty unless asked for."""


@dataclass
class About:
    """What an engine says of itself; None where it does not."""

    weight_bytes: int | None = None
    """Of all weights as it holds them."""
    note: str | None = None
    """What a reader must know, e.g. that the model is not run the way the name says."""


class Engine(Protocol):
    """An open contender."""

    about: About

    def prepare(self, prompts: list[list[int]], new_tokens: int) -> None:
        """Whatever is needed once before so many prompts are answered together; it is not timed."""
        ...

    def answer(self, prompts: list[list[int]], new_tokens: int, logprobs: bool) -> list[Answer]:
        """Answers to prompts of one length, all together.

        `logprobs` is asked for the cold prompt alone, whose decoding is not timed.
        """
        ...

    def where(self, prompt: list[int], new_tokens: int) -> dict[str, dict[str, float]] | None:
        """Seconds by operation of `prefill` (the prompt) and `decode` (one token), `REST` for what is none;
        None where the engine cannot tell."""
        ...

    def close(self) -> None:
        """Ends its threads."""
        ...

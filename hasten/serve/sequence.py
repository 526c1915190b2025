"""One choice of one request: its tokens, where their keys and values lie, and how far it is."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence as Items
from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.serve.runner import BLOCK_TOKENS

if TYPE_CHECKING:
    from hasten.serve.sampling import Sampled, Sampler, SamplingParams
    from hasten.serve.speculate import PromptLookup
    from hasten.serve.stream import Stream
    from hasten.serve.text import TextOutput


class State(Enum):
    """QUEUED -> PREFILL -> DECODE -> FINISHED; preemption leads back to QUEUED."""

    QUEUED = "queued"
    PREFILL = "prefill"
    DECODE = "decode"
    FINISHED = "finished"


class BlockTable:
    """The blocks of one sequence in one group: entries first .. end - 1 of `blocks`, all others are -1."""

    __slots__ = ("blocks", "end", "first", "published")

    def __init__(self, most_blocks: int):
        self.blocks = np.full(most_blocks, -1, np.int32)
        self.first = 0
        self.end = 0
        self.published = 0
        """Entries before this one have been offered to the prefix cache."""

    def clear(self) -> None:
        """Forgets all blocks, which the pool has taken back."""
        self.blocks[self.first : self.end] = -1
        self.first = self.end = self.published = 0


class Sequence:
    """State of one choice. Only the engine's thread touches it after it was submitted.

    Keys and values of tokens[:computed] are in the cache. Prefill is computing more than one token or the
    first; a decoding sequence has len(tokens) == computed + 1. Both are the same work: rows computed ..
    len(tokens) - 1, the last of which gives the next token."""

    __slots__ = (
        "accepted_tokens",
        "arrival",
        "cached_tokens",
        "completion_tokens",
        "computed",
        "drafted_tokens",
        "error",
        "finish_reason",
        "first_token_s",
        "followers",
        "index",
        "keys",
        "last_token_s",
        "lookup",
        "params",
        "prompt_length",
        "prompt_logprobs",
        "salt",
        "sampler",
        "started_s",
        "state",
        "stop_tokens",
        "stream",
        "submitted_s",
        "tables",
        "text",
        "tokens",
    )

    def __init__(
        self,
        stream: Stream,
        index: int,
        prompt_tokens: Items[int],
        params: SamplingParams,
        sampler: Sampler,
        text: TextOutput,
        salt: str = "",
    ):
        self.stream = stream
        self.index = index
        self.tokens: list[int] = list(prompt_tokens)
        self.prompt_length = len(self.tokens)
        self.params = params
        self.sampler = sampler
        self.text = text
        # Longer than the key of a block, so that no salt passes for one.
        self.salt = hashlib.blake2b(salt.encode(), digest_size=32).digest() if salt else b""
        self.lookup: PromptLookup | None = None
        self.stop_tokens: frozenset[int] = frozenset()
        self.followers: list[Sequence] = []
        """Further choices of the same request, which start when this one's prompt is computed."""

        self.arrival: tuple[int, int] = (0, index)
        self.state = State.QUEUED
        self.computed = 0
        self.tables: list[BlockTable] = []
        self.keys: list[bytes] = []
        """Keys of the whole blocks of `tokens` in the prefix cache, as far as they are known."""

        self.prompt_logprobs: list[Sampled] | None = None if params.prompt_logprobs is None else []
        """Of the tokens behind the first, as far as their rows have run; None: not asked for."""

        self.completion_tokens = 0
        self.cached_tokens = 0
        self.drafted_tokens = 0
        self.accepted_tokens = 0
        self.finish_reason: Any = None
        self.error: str | None = None
        self.submitted_s = 0.0
        self.started_s: float | None = None
        self.first_token_s: float | None = None
        self.last_token_s = 0.0

    def __repr__(self) -> str:
        return (
            f"Sequence({self.arrival}, {self.state.value}, {self.computed} of {len(self.tokens)} tokens "
            f"computed, prompt {self.prompt_length})"
        )

    @property
    def grammar_finished(self) -> bool:
        """Whether the request's grammar lets nothing more follow."""
        matcher = self.sampler.matcher
        return matcher is not None and matcher.finished

    @property
    def scored(self) -> int | None:
        """Rows of the prompt whose logits have been read; None where no more are wanted."""
        scores = self.prompt_logprobs
        return None if scores is None or len(scores) >= self.prompt_length - 1 else len(scores)

    @property
    def remaining(self) -> int:
        """Tokens whose keys and values are not in the cache yet."""
        return len(self.tokens) - self.computed


def blocks_of(tokens: int) -> int:
    """Blocks that hold so many tokens."""
    return -(-tokens // BLOCK_TOKENS)

"""A small deterministic language model in numpy over a paged cache, and a stand-in for the sampling module.

The fake model stores tokens and positions where the block tables say, and computes logits from what it reads
back through them: a wrong table, a block that was given away too early, a wrong position or a slot that was
not written changes its logits or raises.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from hasten.serve.runner import BLOCK_TOKENS, Group, Step

VOCAB = 23


def logits_of(seen: Sequence[Sequence[int]], position: int, vocab: int = VOCAB) -> np.ndarray:
    """fp32 [vocab] from the tokens that each group sees, the row's own last.

    A hash of all of it decides; in two of three cases the model repeats what followed the last token before,
    which is what makes drafts from the sequence itself succeed now and then."""
    state = position * 1_000_003
    for tokens in seen:
        for token in tokens:
            state = (state * 6_364_136_223_846_793_005 + token + 1_442_695_040_888_963_407) & (2**64 - 1)
    state ^= state >> 29
    logits = np.random.Generator(np.random.PCG64(state)).random(vocab, dtype=np.float32)
    tokens = list(seen[0])
    if state % 3:
        for place in range(len(tokens) - 2, -1, -1):
            if tokens[place] == tokens[-1]:
                logits[tokens[place + 1]] += 1
                break
    return logits


def visible(tokens: Sequence[int], windows: Sequence[int | None]) -> list[Sequence[int]]:
    """For each group the tokens that a row at the end of `tokens` sees."""
    return [tokens if window is None else tokens[-window:] for window in windows]


def alone(
    prompt: Sequence[int], count: int, windows: Sequence[int | None], stops: Sequence[int] = ()
) -> list[int]:
    """What the model says greedily after the prompt, without any cache."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + count:
        tokens.append(int(np.argmax(logits_of(visible(tokens, windows), len(tokens) - 1))))
        if tokens[-1] in stops:
            break
    return tokens[len(prompt) :]


class FakeRunner:
    """Runner over numpy memory. Checks every step against the contract."""

    def __init__(
        self,
        groups: Sequence[Group] = (Group(None, 64),),
        context_tokens: int = 512,
        step_tokens: int = 64,
        step_logits: int = 16,
        vocab_size: int = VOCAB,
    ):
        self.groups = tuple(groups)
        self.context_tokens = context_tokens
        self.step_tokens = step_tokens
        self.step_logits = step_logits
        self.vocab_size = vocab_size
        self.memory = [np.full((group.blocks, BLOCK_TOKENS, 2), -1, np.int64) for group in self.groups]
        self.steps = 0
        self.rows: list[int] = []
        self.copies = 0
        self.failures: dict[int, Exception] = {}
        """Steps, counted from 0, that raise."""

    def run(self, step: Step) -> np.ndarray:
        number, self.steps = self.steps, self.steps + 1
        if number in self.failures:
            raise self.failures[number]
        self._check(step)
        self.rows.append(len(step.tokens))
        sequences = len(step.starts) - 1
        owner = np.repeat(np.arange(sequences), np.diff(step.starts))
        written = [set() for _ in self.groups]
        for row, (token, position) in enumerate(zip(step.tokens, step.positions, strict=True)):
            for group, table in enumerate(step.tables):
                block = table[owner[row], position // BLOCK_TOKENS]
                assert 0 <= block < self.groups[group].blocks
                slot = (int(block), int(position % BLOCK_TOKENS))
                assert slot not in written[group], "two rows write the same slot"
                written[group].add(slot)
                self.memory[group][slot] = token, position
        logits = np.empty((len(step.wanted), self.vocab_size), np.float32)
        for place, row in enumerate(step.wanted):
            position = int(step.positions[row])
            seen = [
                self._read(group, step.tables[group][owner[row]], position)
                for group in range(len(self.groups))
            ]
            logits[place] = logits_of(seen, position, self.vocab_size)
        return logits

    def _read(self, group: int, table: np.ndarray, position: int) -> list[int]:
        window = self.groups[group].window_tokens
        first = 0 if window is None else max(0, position - window + 1)
        tokens = []
        for place in range(first, position + 1):
            block = table[place // BLOCK_TOKENS]
            assert block >= 0, f"position {place} has no block"
            token, stored = self.memory[group][block, place % BLOCK_TOKENS]
            assert stored == place, f"position {place} reads what was stored for position {stored}"
            tokens.append(int(token))
        return tokens

    def _check(self, step: Step) -> None:
        rows = len(step.tokens)
        assert 0 < rows <= self.step_tokens
        assert len(step.wanted) <= self.step_logits
        assert len(step.positions) == rows
        assert step.starts[0] == 0
        assert step.starts[-1] == rows
        assert (np.diff(step.starts) > 0).all()
        assert (np.diff(step.wanted) > 0).all()
        assert len(step.tables) == len(self.groups)
        for array in (step.tokens, step.positions, step.starts, step.wanted, *step.tables):
            assert array.dtype == np.int32
            assert array.flags.c_contiguous
        assert (step.positions < self.context_tokens).all()

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        for source, target in pairs:
            self.memory[group][target] = self.memory[group][source]
            self.copies += 1


class HeldRunner(FakeRunner):
    """Runs nothing while `let` is clear, so that a test can submit several requests for one step."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self.let = threading.Event()
        self.let.set()

    def run(self, step: Step) -> np.ndarray:
        assert self.let.wait(100)
        return super().run(step)


class InstantRunner(FakeRunner):
    """Costs nothing: for measuring the engine itself. Always says the same."""

    def __init__(self, **options: Any):
        super().__init__(**options)
        self._logits = np.zeros((self.step_logits, self.vocab_size), np.float32)
        self._logits[:, 1] = 1

    def run(self, step: Step) -> np.ndarray:
        self.steps += 1
        return self._logits[: len(step.wanted)]


class Sampled(NamedTuple):
    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True)
class SamplingParams:
    """The fields that the engine reads."""

    max_tokens: int | None = None
    temperature: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: Any = None
    n: int = 1


@dataclass
class Sampler:
    """Greedy, or a draw from a hash of seed and place."""

    params: SamplingParams
    prompt_tokens: Sequence[int]
    vocab_size: int
    matcher: Any = None
    eos: Sequence[int] = ()
    choice: int = 0
    accepted: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.params.grammar is not None:
            self.matcher = self.params.grammar.matcher()

    def accept(self, token: int) -> None:
        if self.matcher is not None:
            self.matcher.accept(token)
        self.accepted.append(token)

    def choose(self, logits: np.ndarray) -> Sampled:
        if np.isnan(logits).any():
            raise ValueError("logits are not numbers")
        place = len(self.accepted)
        if self.params.temperature > 0:
            noise = np.random.default_rng((self.params.seed or 0, self.choice, place))
            logits = logits + noise.random(len(logits), dtype=np.float32) * self.params.temperature
        token = int(np.argmax(logits))
        return Sampled(token, -float(place))


class FakeSampling:
    """What the engine uses of `hasten.serve.sampling`."""

    SamplingParams = SamplingParams
    Sampler = Sampler

    @staticmethod
    def sample(logits: np.ndarray, rows: Sequence[int], samplers: Sequence[Sampler]) -> list[Sampled]:
        return [sampler.choose(logits[row]) for row, sampler in zip(rows, samplers, strict=True)]


def alone_sampled(
    prompt: Sequence[int], params: SamplingParams, windows: Sequence[int | None], most: int, choice: int = 0
) -> list[int]:
    """What one choice says after the prompt when nothing else runs."""
    sampler = Sampler(params, prompt, VOCAB, choice=choice)
    tokens = list(prompt)
    while len(tokens) < len(prompt) + most:
        token = sampler.choose(logits_of(visible(tokens, windows), len(tokens) - 1)).token
        sampler.accept(token)
        tokens.append(token)
        if token in params.stop_tokens and len(tokens) - len(prompt) > params.min_tokens:
            break
    return tokens[len(prompt) :]

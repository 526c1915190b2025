"""How a request wants its tokens drawn, and the drawing: one native call for all rows of a step.

The order of masks, penalties and cuts is stated in `hasten/ops/sampling/reference.py`. Log-probabilities are
of the model's own distribution, before temperature, penalties and masks, as in OpenAI's API.

A token depends on its logits, the request's seed and how many tokens the answer has so far: on nothing else,
so a seeded request gives the same tokens in every batch, after preemption, and at every number of threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from hasten.base.errors import ConfigError, GrammarError, SamplingError
from hasten.ops import sampling as ops
from hasten.ops.sampling import Column, Lists, Rule
from hasten.ops.sampling.reference import COLDEST

if TYPE_CHECKING:
    from hasten.serve.grammar import Grammar, Matcher

MOST_LOGPROBS = 256
"""The kernel lists no more."""

# Plain integers index faster than members of an enumeration.
_ROW, _POSITION, _BIAS, _MASK = (int(c) for c in (Column.ROW, Column.POSITION, Column.BIAS, Column.MASK))
_HISTORY, _HISTORY_SIZE = int(Column.HISTORY), int(Column.HISTORY_SIZE)
_NEXT_CHOICE = 0xD1342543DE82EF95
_REASONS = {
    ops.NOT_FINITE: "a logit is NaN or +infinity: a weight or an activation of the model has overflowed",
    ops.NONE_LEFT: "no token is left: all logits, or all that masks and biases leave, are -infinity",
}


@dataclass(frozen=True)
class SamplingParams:
    """What a request asks for. Lists are taken as tuples; nothing can be changed afterwards.

    Attributes:
        max_tokens: of the answer, at least 1; None: as many as the context holds.
        temperature: 0 to 100; below 1e-5 the most likely token is taken, at ties the lowest.
        top_k: keep the k most likely; 0 or -1: all.
        top_p: keep the most likely that together have this probability, 0 to 1; 1: all.
        min_p: keep those at least this share as likely as the most likely, 0 to 1; 0: all.
        repetition_penalty: 0.01 to 100, of tokens in prompt or answer: divides positive logits and multiplies
            negative ones; 1: none.
        presence_penalty, frequency_penalty: -2 to 2, of tokens in the answer: taken off their logits once,
            and once for each time; 0: none.
        seed: any integer, taken modulo 2^64; None: another one each time.
        stop: strings that end the answer, for the engine.
        stop_tokens: tokens that end the answer, for the engine.
        ignore_eos: the answer goes on behind the model's own end, for the engine.
        min_tokens: before so many no token that ends the answer is drawn: neither the model's own ends,
            unless ignored, nor `stop_tokens`. A grammar that allows nothing else goes first.
        logprobs: how many of the most likely tokens to list with each token, 0 to 256; 0: the token's own
            log-probability alone; None: nothing.
        logit_bias: what is added to the logits of tokens, -100 to 100.
        grammar: compiled by `hasten.serve.grammar.Grammars`.
        n: how many answers, for the engine.

    Raises:
        ConfigError: a value is out of range; the message has the nearest that is not.
    """

    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    grammar: Grammar | None = None
    n: int = 1

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _integer("max_tokens", self.max_tokens, 1)
        _real("temperature", self.temperature, 0, 100)
        _integer("top_k", self.top_k, -1)
        _real("top_p", self.top_p, 0, 1)
        _real("min_p", self.min_p, 0, 1)
        _real("repetition_penalty", self.repetition_penalty, 0.01, 100)
        _real("presence_penalty", self.presence_penalty, -2, 2)
        _real("frequency_penalty", self.frequency_penalty, -2, 2)
        if self.seed is not None:
            _integer("seed", self.seed)
        _integer("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ConfigError(
                f"min_tokens = {self.min_tokens}: allowed is at most max_tokens; "
                f"the nearest is {self.max_tokens}"
            )
        if self.logprobs is not None:
            _integer("logprobs", self.logprobs, 0, MOST_LOGPROBS)
        _integer("n", self.n, 1)
        if not isinstance(self.ignore_eos, bool):
            raise ConfigError(f"ignore_eos = {self.ignore_eos!r}: allowed are True and False")
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        for text in stop:
            if not isinstance(text, str) or not text:
                raise ConfigError(f"stop has {text!r}: allowed are strings that are not empty")
        stop_tokens = tuple(self.stop_tokens)
        for token in stop_tokens:
            _integer("a token of stop_tokens", token, 0)
        for token, bias in self.logit_bias.items():
            _integer("a token of logit_bias", token, 0)
            _real(f"logit_bias of token {token}", bias, -100, 100)
        # A frozen dataclass has no other way to keep what was given in one form.
        object.__setattr__(self, "stop", stop)
        object.__setattr__(self, "stop_tokens", stop_tokens)
        object.__setattr__(self, "top_k", max(0, self.top_k))
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is taken."""
        return self.temperature < COLDEST


class Sampled(NamedTuple):
    """A drawn token. `logprob`, and `top` by falling log-probability, as `SamplingParams.logprobs` asks."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Sampler:
    """What the next token of one answer depends on besides the logits.

    Attributes:
        params, seed: the seed is drawn here where the request has none.
        output: the tokens accepted so far.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt_tokens: Sequence[int] | np.ndarray,
        vocab_size: int,
        matcher: Matcher | None = None,
        *,
        eos: Sequence[int] = (),
        choice: int = 0,
    ) -> None:
        """`matcher`: of `params.grammar`, which makes one if it is not given; `eos`: tokens that end an
        answer; `choice`: which of n answers, each with random numbers of its own.

        Raises:
            ConfigError: a token of `logit_bias` is not in the vocabulary.
        """
        self.params = params
        self.vocab_size = vocab_size
        self.output: list[int] = []
        self.matcher = matcher
        if matcher is None and params.grammar is not None:
            self.matcher = params.grammar.matcher()
        self._first_seed = int.from_bytes(os.urandom(8)) if params.seed is None else params.seed
        self.seed = _seed_of(self._first_seed, choice)
        self._ends = frozenset(() if params.ignore_eos else eos) | frozenset(params.stop_tokens)
        self._ends = frozenset(token for token in self._ends if token < vocab_size)
        self._bias = _bias(params.logit_bias, frozenset(), vocab_size)
        self._early_bias = _bias(
            params.logit_bias, self._ends if params.min_tokens else frozenset(), vocab_size
        )
        penal = params.presence_penalty or params.frequency_penalty
        self._history: _History | None = None
        if params.repetition_penalty != 1:
            self._history = _History(prompt_tokens, vocab_size)
        elif penal:
            self._history = _History((), vocab_size)
        self._words = ops.numbers(
            Rule(
                seed=self.seed,
                temperature=params.temperature,
                top_k=params.top_k,
                top_p=params.top_p,
                min_p=params.min_p,
                repetition_penalty=params.repetition_penalty,
                presence_penalty=params.presence_penalty,
                frequency_penalty=params.frequency_penalty,
                top=params.logprobs,
            )
        )
        self._plain = params.greedy and params.logprobs is None and not params.logit_bias
        self._plain = self._plain and self._history is None and self.matcher is None

    @property
    def position(self) -> int:
        """How many tokens are accepted: the counter of the random numbers."""
        return len(self.output)

    @property
    def plain(self) -> bool:
        """Whether the next token is that with the largest logit, and nothing but it is wanted."""
        return self._plain and not self._early

    @property
    def stateless(self) -> bool:
        """Whether tokens depend on logits, seed and position alone, now and later: then rows for positions
        ahead can be drawn before those between are known."""
        return self._history is None and self.matcher is None and not self._early

    @property
    def _early(self) -> bool:
        return bool(self._ends) and len(self.output) < self.params.min_tokens

    def accept(self, token: int) -> None:
        """Appends a token to the answer.

        Raises:
            GrammarError: the grammar does not allow it.
        """
        if self.matcher is not None:
            self.matcher.accept(token)
        self.output.append(token)
        if self._history is not None:
            self._history.add(token)

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back.

        Raises:
            ConfigError: there are not so many.
        """
        if not 0 <= count <= len(self.output):
            raise ConfigError(f"rollback of {count} tokens: allowed are 0 to {len(self.output)}")
        if not count:
            return
        if self.matcher is not None:
            self.matcher.rollback(count)
        if self._history is not None:
            for token in self.output[-count:]:
                self._history.remove(token)
        del self.output[-count:]

    def fork(self, choice: int | None = None) -> Sampler:
        """A sampler in the same state that goes its own way; `choice`: with that answer's random numbers."""
        other = Sampler.__new__(Sampler)
        other.__dict__.update(self.__dict__)
        other.output = list(self.output)
        other._words = self._words.copy()
        if choice is not None:
            other.seed = _seed_of(self._first_seed, choice)
            other._words[Column.SEED] = ops.signed(other.seed)
        if self._history is not None:
            other._history = self._history.copy()
        if self.matcher is not None:
            other.matcher = self.matcher.fork()
        return other

    def fill(self, words: np.ndarray, row: int, ahead: int, lists: Lists) -> None:
        """Writes a row of the table, and adds what it names to the lists."""
        words[:] = self._words
        words[_ROW] = row
        words[_POSITION] = len(self.output) + ahead
        history = self._history
        if history is not None:
            words[_HISTORY], words[_HISTORY_SIZE] = len(lists.histories), history.size
            lists.histories.append(history.tensor)
        mask = None if self.matcher is None else self.matcher.mask()
        bias = self._bias
        if self._early:
            if mask is None:
                bias = self._early_bias
            else:
                mask = _without(mask, self._ends)
        if bias is not None:
            words[_BIAS] = len(lists.bias_ids)
            lists.bias_ids.append(bias[0])
            lists.bias_values.append(bias[1])
        if mask is not None:
            words[_MASK] = len(lists.masks)
            lists.masks.append(torch.from_numpy(mask))


def sample(
    logits: np.ndarray | torch.Tensor,
    rows: Sequence[int],
    samplers: Sequence[Sampler],
    ahead: Sequence[int] | None = None,
) -> list[Sampled]:
    """Draws a token for each row; the samplers' states do not change.

    Args:
        logits: float32 [L, V], contiguous.
        rows: which of the L rows each sampler draws from.
        samplers: one for each of `rows`; one may come again.
        ahead: how many tokens each row lies ahead of its sampler's state, for drafts; above 0 only for
            samplers that are `stateless`. None: all 0.

    Raises:
        SamplingError: rows give no token; it names them. The others can be drawn again without them.
        ShapeError: the logits are not float32 [L, V].
    """
    x = logits if isinstance(logits, torch.Tensor) else torch.from_numpy(logits)
    for sampler in samplers:
        if not sampler.plain:
            break
    else:
        tokens = ops.argmax(x, rows).tolist()
        if tokens and min(tokens) < 0:
            raise _failure(tokens, rows)
        return [Sampled(token) for token in tokens]
    if ahead is not None:
        for sampler, distance in zip(samplers, ahead, strict=True):
            if distance and not sampler.stateless:
                raise ConfigError(
                    f"ahead = {distance}: allowed is 0 for a sampler with penalties, grammar or min_tokens"
                )
    table = np.empty((len(samplers), len(Column)), np.int64)
    lists = Lists([], [], [], [])
    failed: list[int] = []
    reasons: list[str] = []
    for i, (row, sampler) in enumerate(zip(rows, samplers, strict=True)):
        try:
            sampler.fill(table[i], row, ahead[i] if ahead is not None else 0, lists)
        except GrammarError as error:
            failed.append(i)
            reasons.append(f"row {row} of the logits: {error}")
    if failed:
        raise SamplingError(tuple(failed), tuple(reasons))
    drawn = ops.sample(x, torch.from_numpy(table), lists)
    tokens = drawn.tokens.tolist()
    if tokens and min(tokens) < 0:
        raise _failure(tokens, rows)
    if not drawn.logprobs.shape[1]:
        return [Sampled(token) for token in tokens]
    logprobs, listed = drawn.logprobs.tolist(), drawn.top_tokens.tolist()
    return [
        _with_logprobs(token, sampler.params.logprobs, logprobs[i], listed[i])
        for i, (token, sampler) in enumerate(zip(tokens, samplers, strict=True))
    ]


def _with_logprobs(token: int, wanted: int | None, logprobs: list[float], listed: list[int]) -> Sampled:
    if wanted is None:
        return Sampled(token)
    pairs = zip(listed[:wanted], logprobs[1 : 1 + wanted], strict=True)
    return Sampled(token, logprobs[0], tuple((other, value) for other, value in pairs if other >= 0))


def _failure(tokens: Sequence[int], rows: Sequence[int]) -> SamplingError:
    failed = tuple(i for i, token in enumerate(tokens) if token < 0)
    return SamplingError(failed, tuple(f"row {rows[i]} of the logits: {_REASONS[tokens[i]]}" for i in failed))


class _History:
    """The tokens seen: pairs of token and count in the answer; -1 for one that was taken back."""

    def __init__(self, prompt_tokens: Sequence[int] | np.ndarray, vocab_size: int) -> None:
        seen = np.unique(np.asarray(prompt_tokens, np.int32))
        seen = seen[(seen >= 0) & (seen < vocab_size)]
        self.size = self._prompt = len(seen)
        self._pairs = np.zeros((self.size + 64, 2), np.int32)
        self._pairs[: self.size, 0] = seen
        self._places = {token: place for place, token in enumerate(seen.tolist())}
        self.tensor = torch.from_numpy(self._pairs)

    def add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            if self.size == len(self._pairs):
                self._grow(2 * self.size)
            place = self._places[token] = self.size
            self._pairs[place] = token, 1
            self.size += 1
            return
        self._pairs[place, 1] = max(0, self._pairs[place, 1]) + 1

    def remove(self, token: int) -> None:
        place = self._places[token]
        count = int(self._pairs[place, 1]) - 1
        self._pairs[place, 1] = count if count or place < self._prompt else -1

    def copy(self) -> _History:
        other = _History.__new__(_History)
        other.__dict__.update(self.__dict__)
        other._places = dict(self._places)
        other._grow(len(self._pairs))
        return other

    def _grow(self, size: int) -> None:
        pairs = np.zeros((size, 2), np.int32)
        pairs[: self.size] = self._pairs[: self.size]
        self._pairs, self.tensor = pairs, torch.from_numpy(pairs)


def _bias(
    given: Mapping[int, float], forbidden: frozenset[int], vocab_size: int
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Tokens and what is added to their logits."""
    outside = [token for token in given if token >= vocab_size]
    if outside:
        raise ConfigError(
            f"logit_bias has token {outside[0]}: allowed are 0 to {vocab_size - 1}; "
            f"the nearest is {vocab_size - 1}"
        )
    joined = dict(given) | dict.fromkeys(forbidden, -math.inf)
    if not joined:
        return None
    return torch.tensor(list(joined), dtype=torch.int32), torch.tensor(
        list(joined.values()), dtype=torch.float32
    )


def _without(mask: np.ndarray, tokens: frozenset[int]) -> np.ndarray:
    """The mask without tokens, unless none were left."""
    less = mask.copy()
    bits = less.view(np.uint32)
    for token in tokens:
        bits[token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)
    return less if less.any() else mask


def _seed_of(seed: int, choice: int) -> int:
    return (seed + choice * _NEXT_CHOICE) & (2**64 - 1)


def _integer(name: str, value: int, low: int | None = None, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ConfigError(f"{name} = {value!r}: allowed is an integer{_range(low, high)}")
    _inside(name, value, low, high)


def _real(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    if not number or math.isnan(value):
        raise ConfigError(f"{name} = {value!r}: allowed is a number{_range(low, high)}")
    _inside(name, value, low, high)


def _inside(name: str, value: float, low: float | None, high: float | None) -> None:
    below, above = low is not None and value < low, high is not None and value > high
    if below or above:
        raise ConfigError(
            f"{name} = {value}: allowed is{_range(low, high)}; the nearest is {low if below else high}"
        )


def _range(low: float | None, high: float | None) -> str:
    if low is None:
        return ""
    return f" of at least {low}" if high is None else f" from {low} to {high}"

"""The state of each answer, and the drawing of tokens: one native call for all rows of a step.

The order of masks, penalties and cuts is stated in `hasten/ops/sampling/reference.py`. Log-probabilities are
of the model's own distribution, before temperature, penalties and masks, as in OpenAI's API.

A token depends on its logits, the request's seed and how many tokens the answer has so far: on nothing else,
so a seeded request gives the same tokens in every batch, after preemption, and at every number of threads.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from hasten.base.errors import ConfigError, GrammarError, SamplingError
from hasten.ops import sampling as ops
from hasten.ops.sampling import Column, Lists, Rule
from hasten.ops.sampling.rule import Shaping
from hasten.serve.params import SamplingParams

if TYPE_CHECKING:
    from hasten.serve.grammar import Matcher

__all__ = ["Sampled", "Sampler", "SamplingParams", "sample", "score"]

# Plain integers index faster than members of an enumeration.
_ROW, _POSITION, _BIAS, _MASK = (int(c) for c in (Column.ROW, Column.POSITION, Column.BIAS, Column.MASK))
_HISTORY, _HISTORY_SIZE = int(Column.HISTORY), int(Column.HISTORY_SIZE)
_NEXT_CHOICE = 0xD1342543DE82EF95
_REASONS = {
    ops.NOT_FINITE: "a logit is NaN or +infinity: a weight or an activation of the model has overflowed",
    ops.NONE_LEFT: "no token is left: all logits, or all that masks and biases leave, are -infinity",
}


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
                top=params.logprobs,
                **{one.name: getattr(params, one.name) for one in fields(Shaping)},
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
            lists.histories.append(history.pairs)
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
            lists.masks.append(mask)


def sample(
    logits: np.ndarray,
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
    for sampler in samplers:
        if not sampler.plain:
            break
    else:
        tokens = ops.argmax(logits, rows).tolist()
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
    drawn = ops.sample(logits, table, lists)
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


def score(logits: np.ndarray, tokens: Sequence[int], top: int) -> list[Sampled]:
    """Log-probabilities of given tokens: `tokens[i]` by row i of float32 logits [L, V], and of the `top` most
    likely ones.

    Raises:
        SamplingError: a row has NaN or +infinity, or nothing but -infinity; it names them.
    """
    rows = range(len(tokens))
    highest = logits.max(axis=1)
    wrong = np.flatnonzero(~np.isfinite(highest)).tolist()
    if wrong:
        raise _failure([ops.NOT_FINITE if i in wrong else 0 for i in rows], rows)
    found = []
    for logit, most, token in zip(logits, highest, tokens, strict=True):
        with np.errstate(over="ignore"):  # of the lowest from the highest number: -infinity, as it should be
            row = logit - (most + np.log(np.exp(logit - most).sum(dtype=np.float64))).astype(np.float32)
        best = np.argpartition(-row, min(top, len(row) - 1))[:top]
        best = best[np.lexsort((best, -row[best]))]
        pairs = zip(best.tolist(), row[best].tolist(), strict=True)
        found.append(Sampled(token, float(row[token]), tuple(pairs)))
    return found


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
        self.pairs = np.zeros((self.size + 64, 2), np.int32)
        self.pairs[: self.size, 0] = seen
        self._places = {token: place for place, token in enumerate(seen.tolist())}

    def add(self, token: int) -> None:
        place = self._places.get(token)
        if place is None:
            if self.size == len(self.pairs):
                self._grow(2 * self.size)
            place = self._places[token] = self.size
            self.pairs[place] = token, 1
            self.size += 1
            return
        self.pairs[place, 1] = max(0, self.pairs[place, 1]) + 1

    def remove(self, token: int) -> None:
        place = self._places[token]
        count = int(self.pairs[place, 1]) - 1
        self.pairs[place, 1] = count if count or place < self._prompt else -1

    def copy(self) -> _History:
        other = _History.__new__(_History)
        other.__dict__.update(self.__dict__)
        other._places = dict(self._places)
        other._grow(len(self.pairs))
        return other

    def _grow(self, size: int) -> None:
        pairs = np.zeros((size, 2), np.int32)
        pairs[: self.size] = self.pairs[: self.size]
        self.pairs = pairs


def _bias(
    given: Mapping[int, float], forbidden: frozenset[int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray] | None:
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
    return np.array(list(joined), np.int32), np.array(list(joined.values()), np.float32)


def _without(mask: np.ndarray, tokens: frozenset[int]) -> np.ndarray:
    """The mask without tokens, unless none were left."""
    less = mask.copy()
    bits = less.view(np.uint32)
    for token in tokens:
        bits[token // 32] &= np.uint32(~(1 << (token % 32)) & 0xFFFFFFFF)
    return less if less.any() else mask


def _seed_of(seed: int, choice: int) -> int:
    return (seed + choice * _NEXT_CHOICE) & (2**64 - 1)

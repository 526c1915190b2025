"""How a request wants its tokens drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from hasten.base.errors import ConfigError
from hasten.ops.sampling.rule import COLDEST, Shaping

if TYPE_CHECKING:
    from hasten.serve.grammar import Grammar

MOST_LOGPROBS = 256
"""The kernel lists no more."""


@dataclass(frozen=True)
class SamplingParams(Shaping):
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
        prompt_logprobs: the same for the tokens of the prompt but the first, 0 to 256; None: nothing. Their
            keys and values are computed anew, whatever the prefix cache has.
        logit_bias: what is added to the logits of tokens, -100 to 100.
        grammar: compiled by `hasten.serve.grammar.Grammars`.
        n: how many answers, for the engine.

    Raises:
        ConfigError: a value is out of range; the message has the nearest that is not.
    """

    max_tokens: int | None = None
    _: KW_ONLY
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_tokens: tuple[int, ...] = ()
    ignore_eos: bool = False
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
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
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _integer(name, getattr(self, name), 0, MOST_LOGPROBS)
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


def _integer(name: str, value: int, low: int | None = None, high: int | None = None) -> None:
    number = isinstance(value, (int, np.integer)) and not isinstance(value, bool)
    _inside(name, value, "integers", low, high, number)


def _real(name: str, value: float, low: float, high: float) -> None:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    _inside(name, value, "numbers", low, high, number and not math.isnan(value))


def _inside(name: str, value: float, kind: str, low: float | None, high: float | None, number: bool) -> None:
    allowed = f"allowed are {kind}"
    if low is not None:
        allowed += f" of at least {low}" if high is None else f" from {low} to {high}"
    if not number:
        raise ConfigError(f"{name} = {value!r}: {allowed}")
    below, above = low is not None and value < low, high is not None and value > high
    if below or above:
        raise ConfigError(f"{name} = {value}: {allowed}; the nearest is {low if below else high}")

"""Sampling parameters, the state of a sampler, and the one call that draws for all rows."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.base.errors import ConfigError, SamplingError
from hasten.ops import native, sampling
from hasten.ops.sampling import Lists, Rule, reference
from hasten.serve.sampling import Sampled, Sampler, SamplingParams, sample, score

V = 120
GREEDY = SamplingParams(temperature=0.0)


def logits_of(rows: int, seed: int = 0, vocab: int = V) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal((rows, vocab)).astype(np.float32) * 3


def rule_of(sampler: Sampler) -> Rule:
    """What the sampler asks of the next row."""
    words, lists = np.zeros(len(sampling.Column), np.int64), Lists([], [], [], [])
    sampler.fill(words, 0, 0, lists)
    return sampling.rule(words, lists)


def tokens_of(sampled: list[Sampled]) -> list[int]:
    return [one.token for one in sampled]


# Parameters.


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_tokens": 0}, "max_tokens = 0: allowed are integers of at least 1; the nearest is 1"),
        ({"max_tokens": 1.5}, "max_tokens = 1.5: allowed are integers of at least 1"),
        ({"temperature": -0.1}, "temperature = -0.1: allowed are numbers from 0 to 100; the nearest is 0"),
        ({"temperature": 101}, "temperature = 101: allowed are numbers from 0 to 100; the nearest is 100"),
        ({"temperature": math.nan}, "temperature = nan: allowed are numbers from 0 to 100"),
        ({"temperature": "warm"}, "temperature = 'warm': allowed are numbers from 0 to 100"),
        ({"temperature": True}, "temperature = True: allowed are numbers"),
        ({"top_k": -2}, "top_k = -2: allowed are integers of at least -1; the nearest is -1"),
        ({"top_p": 1.1}, "top_p = 1.1: allowed are numbers from 0 to 1; the nearest is 1"),
        ({"min_p": -1}, "min_p = -1: allowed are numbers from 0 to 1; the nearest is 0"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty = 0: allowed are numbers from 0.01 to 100; the nearest is 0.01",
        ),
        (
            {"presence_penalty": 2.5},
            "presence_penalty = 2.5: allowed are numbers from -2 to 2; the nearest is 2",
        ),
        (
            {"frequency_penalty": -3},
            "frequency_penalty = -3: allowed are numbers from -2 to 2; the nearest is -2",
        ),
        ({"seed": 0.5}, "seed = 0.5: allowed are integers"),
        ({"stop": ("",)}, "stop has '': allowed are strings that are not empty"),
        (
            {"stop_tokens": (-1,)},
            "a token of stop_tokens = -1: allowed are integers of at least 0; the nearest is 0",
        ),
        ({"min_tokens": -1}, "min_tokens = -1: allowed are integers of at least 0"),
        (
            {"min_tokens": 9, "max_tokens": 8},
            "min_tokens = 9: allowed is at most max_tokens; the nearest is 8",
        ),
        ({"logprobs": 257}, "logprobs = 257: allowed are integers from 0 to 256; the nearest is 256"),
        (
            {"logit_bias": {3: 101}},
            "logit_bias of token 3 = 101: allowed are numbers from -100 to 100; the nearest is 100",
        ),
        ({"logit_bias": {-3: 1}}, "a token of logit_bias = -3: allowed are integers of at least 0"),
        ({"ignore_eos": 1}, "ignore_eos = 1: allowed are True and False"),
        ({"n": 0}, "n = 0: allowed are integers of at least 1"),
    ],
    ids=str,
)
def test_parameters_out_of_range(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        SamplingParams(**options)
    assert str(raised.value).startswith(message)


def test_parameters_are_kept_in_one_form() -> None:
    bias = {3: 1.0}
    params = SamplingParams(stop="end", stop_tokens=[1, 2], top_k=-1, logit_bias=bias)  # type: ignore[arg-type]
    bias[4] = 2.0
    assert (params.stop, params.stop_tokens, params.top_k) == (("end",), (1, 2), 0)
    assert params.logit_bias == {3: 1.0}
    with pytest.raises(AttributeError):
        params.top_k = 3  # type: ignore[misc]


def test_a_bias_of_a_token_outside_the_vocabulary() -> None:
    with pytest.raises(
        ConfigError, match="logit_bias has token 120: allowed are 0 to 119; the nearest is 119"
    ):
        Sampler(SamplingParams(logit_bias={120: 1.0}), [1], V)


# One call for all rows.


@pytest.mark.skipif(native.state().level is None, reason="no kernels")
@pytest.mark.parametrize(
    "params",
    [
        [GREEDY] * 4,
        [
            GREEDY,
            SamplingParams(seed=1),
            SamplingParams(seed=2, top_k=3, logprobs=2),
            SamplingParams(seed=3, top_p=0.5),
        ],
    ],
    ids=["greedy", "mixed"],
)
def test_one_native_call(params: list[SamplingParams]) -> None:
    logits = logits_of(6)
    rows = [5, 0, 3, 3]
    samplers = [Sampler(one, [1, 2], V) for one in params]
    before = native.launches()
    together = sample(logits, rows, samplers)
    assert native.launches() == before + 1
    for row, sampler, one in zip(rows, samplers, together, strict=True):
        assert sample(logits, [row], [sampler]) == [one]
        assert one.token == reference.sample(torch.from_numpy(logits[row]), rule_of(sampler)).token
        assert (one.logprob is None) == (sampler.params.logprobs is None)
        assert len(one.top) == (sampler.params.logprobs or 0)


def test_greedy_takes_the_lowest_of_equals() -> None:
    logits = np.zeros((2, V), np.float32)
    logits[1, [7, 9]] = 1
    samplers = [Sampler(GREEDY, [1], V) for _ in range(2)]
    assert sample(logits, [0, 1], samplers) == [Sampled(0), Sampled(7)]


def test_nothing_to_draw() -> None:
    assert sample(logits_of(2), [], []) == []


def test_without_kernels() -> None:
    logits = logits_of(2)
    samplers = [Sampler(SamplingParams(seed=s, top_p=0.8, repetition_penalty=1.3), [4, 5], V) for s in (1, 2)]
    expected = sample(logits, [0, 1], samplers)
    with native.switched_off():
        assert sample(logits, [0, 1], samplers) == expected


@pytest.mark.parametrize("params", [GREEDY, SamplingParams(seed=1)], ids=["greedy", "drawn"])
def test_rows_that_give_no_token_are_named(params: SamplingParams) -> None:
    logits = logits_of(4)
    logits[1, 3] = np.nan
    logits[3] = -np.inf
    samplers = [Sampler(params, [1], V) for _ in range(4)]
    with pytest.raises(SamplingError) as raised:
        sample(logits, [3, 2, 1, 0], samplers)
    assert raised.value.failed == (0, 2)
    assert "row 3 of the logits: no token is left" in raised.value.reasons[0]
    assert "row 1 of the logits: a logit is NaN or +infinity" in str(raised.value)
    rest = sample(logits, [2, 0], [samplers[1], samplers[3]])
    assert len(rest) == 2


def test_logprobs_are_of_the_model() -> None:
    logits = logits_of(1)
    params = SamplingParams(seed=1, temperature=3.0, top_k=40, logprobs=4, logit_bias={5: 50.0})
    (drawn,) = sample(logits, [0], [Sampler(params, [1], V)])
    truth = torch.from_numpy(logits[0]).double().log_softmax(0)
    assert drawn.token == 5
    assert drawn.logprob == pytest.approx(float(truth[5]), abs=1e-5)
    values, tokens = truth.topk(4)
    assert [token for token, _ in drawn.top] == tokens.tolist()
    assert [value for _, value in drawn.top] == pytest.approx(values.tolist(), abs=1e-5)


# Seeds and positions.


def run(params: SamplingParams, steps: int, choice: int = 0) -> list[int]:
    sampler = Sampler(params, [1], V, choice=choice)
    for step in range(steps):
        (drawn,) = sample(logits_of(1, step), [0], [sampler])
        sampler.accept(drawn.token)
    return sampler.output


def test_seeds() -> None:
    hot = {"temperature": 5.0}
    first = run(SamplingParams(seed=11, **hot), 20)
    assert first == run(SamplingParams(seed=11, **hot), 20)
    assert first == run(SamplingParams(seed=11 - 2**64, **hot), 20)
    others = [run(SamplingParams(seed=12, **hot), 20), run(SamplingParams(seed=11, **hot), 20, choice=1)]
    others += [run(SamplingParams(**hot), 20) for _ in range(3)]
    assert len({tuple(one) for one in [first, *others]}) == 6


def test_taken_back_tokens_are_drawn_again() -> None:
    sampler = Sampler(SamplingParams(seed=3, temperature=4.0, frequency_penalty=0.5), [1], V)
    logits = logits_of(8)

    def go_on(steps: int) -> list[int]:
        drawn = []
        for row in range(sampler.position, sampler.position + steps):
            (one,) = sample(logits, [row], [sampler])
            sampler.accept(one.token)
            drawn.append(one.token)
        return drawn

    tokens = go_on(8)
    sampler.rollback(5)
    assert sampler.output == tokens[:3]
    assert go_on(5) == tokens[3:]
    with pytest.raises(ConfigError, match="rollback of 9 tokens: allowed are 0 to 8"):
        sampler.rollback(9)


def test_rows_ahead_are_those_of_later_positions() -> None:
    logits = logits_of(6)
    params = SamplingParams(seed=5, temperature=4.0)
    sampler = Sampler(params, [1], V)
    together = tokens_of(sample(logits, range(6), [sampler] * 6, ahead=range(6)))
    one_by_one = []
    for row in range(6):
        (drawn,) = sample(logits, [row], [sampler])
        sampler.accept(drawn.token)
        one_by_one.append(drawn.token)
    assert together == one_by_one
    looking_back = Sampler(SamplingParams(seed=5, frequency_penalty=1.0), [1], V)
    assert not looking_back.stateless
    with pytest.raises(ConfigError, match="ahead = 1: allowed is 0"):
        sample(logits, [0], [looking_back], ahead=[1])


# Penalties count what was accepted.


@given(
    prompt=st.lists(st.integers(0, 9), max_size=6),
    steps=st.lists(st.one_of(st.integers(0, 9), st.integers(-3, -1)), max_size=120),
    repetition=st.sampled_from([1.0, 1.5]),
    split=st.integers(0, 120),
)
@settings(max_examples=60, deadline=None)
def test_counts(prompt: list[int], steps: list[int], repetition: float, split: int) -> None:
    """Tokens accepted, taken back (negative steps) and forked on the way give the counts of what is left."""
    params = SamplingParams(
        seed=1, repetition_penalty=repetition, presence_penalty=0.5, frequency_penalty=0.25
    )
    sampler = Sampler(params, prompt, V)
    forked = None
    output: list[int] = []
    for number, step in enumerate(steps):
        if number == split:
            forked, at_split = sampler.fork(), list(output)
        if step >= 0:
            sampler.accept(step)
            output.append(step)
        else:
            back = min(-step, len(output))
            sampler.rollback(back)
            output = output[: len(output) - back]
    check_history(sampler, prompt, output, repetition)
    if forked is not None:
        check_history(forked, prompt, at_split, repetition)
        forked.accept(3)
        check_history(sampler, prompt, output, repetition)


def check_history(sampler: Sampler, prompt: list[int], output: list[int], repetition: float) -> None:
    assert sampler.output == output
    rule = rule_of(sampler)
    assert (rule.position, rule.repetition_penalty) == (len(output), repetition)
    assert rule.history is not None
    found = {token: count for token, count in rule.history.tolist() if count >= 0}
    of_prompt = dict.fromkeys(prompt, 0) if repetition != 1 else {}
    assert found == of_prompt | Counter(output)


def test_a_history_grows() -> None:
    sampler = Sampler(SamplingParams(frequency_penalty=1.0, seed=1), [1], 1000)
    forked = sampler.fork()
    for token in range(300):
        sampler.accept(token)
        sampler.accept(token)
    assert rule_of(sampler).history.tolist() == [[token, 2] for token in range(300)]  # type: ignore[union-attr]
    assert len(rule_of(forked).history) == 0  # type: ignore[arg-type]


# The end of an answer.


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_no_end_before_min_tokens(temperature: float) -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, [4, 6]] = 60, 50  # ends, far above all others
    params = SamplingParams(
        temperature=temperature, seed=1, min_tokens=3, stop_tokens=(6,), logit_bias={4: 1.0}
    )
    sampler = Sampler(params, [1], V, eos=[4])
    drawn = []
    for _ in range(5):
        assert sampler.plain is False
        (one,) = sample(logits, [0], [sampler])
        sampler.accept(one.token)
        drawn.append(one.token)
    assert not set(drawn[:3]) & {4, 6}
    assert drawn[3:] == [4, 4]
    sampler.rollback(3)
    (again,) = sample(logits, [0], [sampler])
    assert again.token == drawn[2]


def test_ends_that_are_ignored_may_be_drawn() -> None:
    logits = np.zeros((1, V), np.float32)
    logits[0, 4] = 60
    params = SamplingParams(temperature=0.0, min_tokens=3, ignore_eos=True)
    sampler = Sampler(params, [1], V, eos=[4])
    assert sampler.plain
    assert sample(logits, [0], [sampler]) == [Sampled(4)]


class FakeMatcher:
    """Allows one token after another."""

    def __init__(self, tokens: list[int], at: int = 0) -> None:
        self.tokens, self.at = tokens, at

    def mask(self) -> np.ndarray:
        words = np.zeros((V + 31) // 32, np.uint32)
        token = self.tokens[self.at]
        words[token // 32] = 1 << (token % 32)
        return words.view(np.int32)

    def accept(self, token: int) -> None:
        assert token == self.tokens[self.at]
        self.at += 1

    def rollback(self, count: int) -> None:
        self.at -= count

    def fork(self) -> FakeMatcher:
        return FakeMatcher(self.tokens, self.at)


@pytest.mark.parametrize(
    "params", [GREEDY, SamplingParams(seed=1, top_k=5, min_tokens=3)], ids=["greedy", "drawn"]
)
def test_a_grammar_leads(params: SamplingParams) -> None:
    """Also to an end before min_tokens, where it allows nothing else."""
    tokens = [31, 119, 32, 0, 64]
    sampler = Sampler(params, [1], V, matcher=FakeMatcher(tokens), eos=[119])  # type: ignore[arg-type]
    for row in range(3):
        (drawn,) = sample(logits_of(5), [row], [sampler])
        sampler.accept(drawn.token)
    other = sampler.fork()
    sampler.rollback(2)
    for expected, one in ((tokens[1], sampler), (tokens[3], other)):
        assert tokens_of(sample(logits_of(5), [0], [one])) == [expected]


# Given tokens.


@pytest.mark.parametrize("top", [0, 1, 5, 40, 41])
@pytest.mark.parametrize("kind", ["normal", "equal", "far apart", "forbidden"])
def test_scores_are_those_of_torch(top: int, kind: str) -> None:
    logits = np.random.default_rng(1).normal(size=(3, 40)).astype(np.float32)
    if kind == "equal":
        logits[:] = np.round(logits)
    elif kind == "far apart":
        logits[:, 3], logits[:, 5] = 3e38, -3e38
    elif kind == "forbidden":
        logits[:, ::2] = -np.inf
    truth = torch.from_numpy(logits).double().log_softmax(-1).float()
    tokens = [1, 3, 5]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = score(logits, tokens, top)
    for row, (one, token) in enumerate(zip(found, tokens, strict=True)):
        assert one.token == token
        assert one.logprob == pytest.approx(float(truth[row, token]), rel=1e-5, abs=1e-5)
        values = truth[row].topk(min(top, 40)).values.tolist()
        assert [value for _, value in one.top] == pytest.approx(values, rel=1e-5, abs=1e-5)
        assert [float(truth[row, other]) for other, _ in one.top] == pytest.approx(values, rel=1e-5, abs=1e-5)
        assert len({other for other, _ in one.top}) == len(values)
        order = sorted(one.top, key=lambda pair: (-pair[1], pair[0]))
        assert list(one.top) == order


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scores_of_rows_that_give_none_name_them(value: float) -> None:
    logits = np.zeros((3, 40), np.float32)
    logits[1, 7] = value
    with pytest.raises(SamplingError, match="row 1 of the logits: a logit is NaN"):
        score(logits, [0, 0, 0], 2)

"""Sampling: the tokens and what they are drawn from, against the float64 reference and transformers."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops import native, sampling
from hasten.ops.cases import Case, check_forward, select
from hasten.ops.sampling import NONE_LEFT, NOT_FINITE, Column, Lists, Rule, argmax, reference, sample, table
from hasten.ops.sampling.cases import CASES

INF = math.inf
SIZES = (1, 2, 63, 64, 65, 513, 4099)


@pytest.fixture
def kernels() -> None:
    if native.state().level is None:
        pytest.skip(native.state().reason)


class Drawn(NamedTuple):
    """`Samples` as tensors."""

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    probabilities: Tensor


def draw(logits: Tensor, *rules: Rule, probabilities: bool = True) -> Drawn:
    """One row of logits for each rule, or one for all."""
    rows = logits.reshape(-1, logits.shape[-1])
    words, lists = table(rules)
    if len(rows) == 1:
        words[:, Column.ROW] = 0
    found = sample(rows.numpy(), words, lists, probabilities)
    return Drawn(*(torch.from_numpy(getattr(found, name)) for name in Drawn._fields))


def logits_of(V: int, seed: int = 0, spread: float = 3.0) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)) * spread


@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_cases(case: Case, dtype: torch.dtype, kernels: None) -> None:
    check_forward(case, dtype)


@pytest.mark.parametrize("name", ["ties", "all-of-them", "one-token"])
def test_cases_without_kernels(name: str) -> None:
    with native.switched_off():
        check_forward(next(case for case in CASES if case.name == name), torch.float32)


# The largest.


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("V", SIZES)
def test_argmax_is_that_of_numpy(V: int) -> None:
    logits = torch.stack([logits_of(V), logits_of(V, 1).round(), torch.zeros(V), -logits_of(V).abs()])
    logits[2, V // 2 :] = -0.0
    logits[3, : V // 2] = -INF
    rows = [3, 0, 2, 1, 1]
    assert argmax(logits.numpy(), rows).tolist() == logits.numpy()[rows].argmax(1).tolist()


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("V", [1, 5, 64, 131])
@pytest.mark.parametrize("bad", [math.nan, -math.nan, INF])
def test_a_number_that_is_not_finite_is_found_everywhere(V: int, bad: float) -> None:
    logits = torch.zeros(V, V)
    logits[range(V), range(V)] = bad
    assert argmax(logits.numpy(), range(V)).tolist() == [NOT_FINITE] * V
    assert draw(logits, *[Rule(top_k=3)] * V, probabilities=False).tokens.tolist() == [NOT_FINITE] * V


@pytest.mark.usefixtures("body")
def test_rows_without_a_token() -> None:
    logits = torch.full((3, 70), -INF)
    logits[1, 69] = -1e30
    assert argmax(logits.numpy(), [0, 1, 2]).tolist() == [NONE_LEFT, 69, NONE_LEFT]
    empty = np.zeros(3, np.int32)
    for rule in (Rule(), Rule(temperature=0.0), Rule(top_k=2, top_p=0.5, min_p=0.1)):
        assert draw(logits, rule, rule, rule).tokens.tolist() == [NONE_LEFT, 69, NONE_LEFT]
        masked = replace(rule, mask=empty)
        assert draw(torch.zeros(70), masked).tokens.tolist() == [NONE_LEFT]


# Which tokens are kept.


def is_ambiguous(logits: Tensor, rule: Rule) -> bool:
    """Whether rounding may decide: the nucleus ends within 3e-7 of `top_p`."""
    if rule.top_p >= 1:
        return False
    y = reference.processed(logits.double(), rule)
    order = reference.falling(y)
    p = torch.softmax(y[order][: rule.top_k or len(y)] / rule.temperature, 0).cumsum(0)
    return bool(((p - rule.top_p).abs() < 3e-7).any())


def check_kept(logits: Tensor, rule: Rule) -> bool:
    """Kept tokens and the drawn one; False if rounding may decide."""
    if is_ambiguous(logits, rule):
        return False
    truth = reference.sample(logits, rule)
    drawn = draw(logits, rule)
    found = drawn.probabilities[0].double()
    # A weight of about e^-87 and less may count as none: no draw can find it.
    wanted = truth.probabilities
    assert not bool(((found > 0) & (wanted == 0)).any()), rule
    assert not bool(((found == 0) & (wanted > 1e-36)).any()), rule
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-7)
    assert drawn.tokens.tolist() == [truth.token], rule
    return True


@pytest.mark.parametrize("V", SIZES)
@pytest.mark.parametrize("spread", [0.1, 3.0])
def test_kept_tokens(V: int, spread: float, kernels: None) -> None:
    grid = product((0.3, 1.0, 2.5), (0, 1, 5, 40, 1500), (1.0, 0.999, 0.9, 0.3, 1e-4), (0.0, 0.01, 0.5, 1.0))
    checked = 0
    for number, (temperature, top_k, top_p, min_p) in enumerate(grid):
        rule = Rule(number, 7, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        checked += check_kept(logits_of(V, number, spread), rule)
    assert checked > 280


@pytest.mark.parametrize(
    "options", [{"top_p": 0.9503}, {"top_k": 700}, {"top_k": 50, "top_p": 0.9}, {"min_p": 1e-4}]
)
def test_kept_tokens_of_a_large_vocabulary(options: dict[str, Any], kernels: None) -> None:
    for seed, spread in enumerate((0.01, 1.0, 8.0)):
        assert check_kept(logits_of(50257, seed, spread), Rule(seed, 1, **options))


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("V", [5, 300, 5000])
def test_equal_logits_are_kept_from_the_lowest_token(V: int) -> None:
    logits = torch.zeros(V)
    k = V // 2 + 1
    for rule in (Rule(top_k=k), Rule(top_p=(k - 0.5) / V)):
        kept = draw(logits, rule).probabilities[0]
        assert kept.nonzero().flatten().tolist() == list(range(k))
        torch.testing.assert_close(kept[:k], torch.full((k,), 1 / k), rtol=1e-6, atol=0)
    steps = torch.arange(V) % 3  # three values, many of each
    kept = draw(steps.float(), Rule(top_k=k)).probabilities[0]
    expected = reference.falling(steps.double())[:k].sort().values
    assert torch.equal(kept.nonzero().flatten(), expected)


EXTREMES = {
    "lowest number": [torch.finfo(torch.float32).min, 1.0, 0.5, torch.finfo(torch.float32).min],
    "far apart": [-1e30, 1e30, 0.0, 1e30],
    "both ends": [torch.finfo(torch.float32).min, torch.finfo(torch.float32).max, 0.0, 1.0],
    "minus infinity": [-INF, 2.0, -INF, 1.9],
    "subnormal": [1e-44, 0.0, -1e-44, 3e-45],
    "negative zero": [-0.0, 0.0, -0.0, 0.0],
}


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("repeats", [1, 500])
def test_extreme_logits(name: str, repeats: int) -> None:
    logits = torch.tensor(EXTREMES[name]).repeat(repeats)
    options = (
        {},
        {"top_k": 3},
        {"top_p": 0.6003},
        {"min_p": 0.3},
        {"temperature": 1e-5},
        {"temperature": 100.0},
    )
    for number, one in enumerate(options):
        rule = Rule(seed=number, **one)
        truth, drawn = reference.sample(logits, rule), draw(logits, rule)
        assert torch.equal(drawn.probabilities[0] > 0, truth.probabilities > 2e-38)
        assert drawn.tokens.tolist() == [truth.token]


@pytest.mark.usefixtures("body")
def test_the_ends_of_the_ranges() -> None:
    logits = logits_of(1000)
    best = int(logits.argmax())
    for options in (
        {"top_p": 0.0},
        {"min_p": 1.0},
        {"top_k": 1},
        {"temperature": 0.0},
        {"temperature": 9e-6},
    ):
        for seed in range(20):
            assert draw(logits, Rule(seed, **options)).tokens.tolist() == [best]
    everything = draw(logits, Rule(top_k=5000, top_p=1.0, min_p=0.0)).probabilities[0]
    torch.testing.assert_close(everything, logits.softmax(0), rtol=1e-5, atol=1e-9)


# The draw.


def bound(degrees: int) -> float:
    """Chi-square with so many degrees of freedom is above this once in 10^4 (Wilson and Hilferty 1931)."""
    ninth = 2 / (9 * degrees)
    return degrees * (1 - ninth + 3.719 * math.sqrt(ninth)) ** 3


def chi_square(tokens: Tensor, probabilities: Tensor) -> float:
    expected = probabilities * len(tokens)
    counts = torch.bincount(tokens, minlength=len(probabilities)).double()
    few = expected < 5  # together, as the test needs
    observed = torch.cat([counts[~few], counts[few].sum().reshape(1)])
    wanted = torch.cat([expected[~few], expected[few].sum().reshape(1)])
    inside = wanted > 0
    assert not bool(counts[probabilities == 0].any())
    return float(((observed - wanted).square() / wanted)[inside].sum()) / bound(max(1, int(inside.sum()) - 1))


@pytest.mark.parametrize("by", ["position", "seed"])
@pytest.mark.parametrize(
    "options", [{}, {"top_k": 12, "temperature": 1.4}, {"top_p": 0.9}, {"min_p": 0.05}], ids=str
)
def test_frequencies(by: str, options: dict[str, Any], kernels: None) -> None:
    logits = logits_of(60, 3, 1.0)
    draws = 20_000
    rules = [Rule(**{by: number}, **options) for number in range(draws)]
    tokens = draw(logits, *rules, probabilities=False).tokens
    truth = reference.probabilities(logits.double(), Rule(**options))
    assert chi_square(tokens, truth) < 1
    wrong = truth.roll(1)
    wrong[truth == 0] = 0  # the test can fail
    assert chi_square(tokens[truth[tokens] > 0], wrong.clamp(min=1e-6)) > 1


def test_random_numbers() -> None:
    """Even on [0, 1), and neighbours in seed and position are not alike."""
    side = 200
    u = np.array([[reference.uniform(seed, position) for position in range(side)] for seed in range(side)])
    assert u.min() >= 0
    assert u.max() < 1
    counts = torch.from_numpy(np.histogram(u, bins=50, range=(0, 1))[0])
    cells = torch.repeat_interleave(torch.arange(50), counts)
    assert chi_square(cells, torch.full((50,), 1 / 50, dtype=torch.float64)) < 1
    for ahead, behind in ((u[1:], u[:-1]), (u[:, 1:], u[:, :-1]), (u[1:, 1:], u[:-1, :-1])):
        assert abs(np.corrcoef(ahead.ravel(), behind.ravel())[0, 1]) < 4 / side
    assert len({reference.uniform(seed, 0) for seed in (0, 2**63, 2**64 - 1, -2)}) == 4
    assert reference.uniform(-1, 5) == reference.uniform(2**64 - 1, 5)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63, 2**64 - 1, 123456789012345678])
def test_the_kernel_draws_the_same_numbers(seed: int, kernels: None) -> None:
    logits = torch.zeros(4096)
    positions = [0, 1, 2, 1000, 2**40]
    tokens = draw(logits, *[Rule(seed, p) for p in positions], probabilities=False).tokens
    assert tokens.tolist() == [int(reference.uniform(seed, p) * 4096) for p in positions]


def test_a_row_does_not_depend_on_batch_or_threads(kernels: None) -> None:
    logits = torch.stack([logits_of(2051, seed) for seed in range(12)])
    rules = [
        Rule(
            seed,
            3 * seed,
            temperature=0.5 + seed / 8,
            top_k=(0, 9, 900)[seed % 3],
            top_p=(1.0, 0.8)[seed % 2],
            top=seed % 4,
        )
        for seed in range(12)
    ]
    alone = [draw(row, rule) for row, rule in zip(logits, rules, strict=True)]
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        together = draw(logits, *rules)
        backwards = draw(logits.flip(0).contiguous(), *rules[::-1])
        for i, one in enumerate(alone):
            for batch, place in ((together, i), (backwards, 11 - i)):
                assert batch.tokens[place] == one.tokens[0]
                assert torch.equal(batch.probabilities[place], one.probabilities[0])
                wanted = 1 + (rules[i].top or 0)
                assert torch.equal(batch.logprobs[place, :wanted], one.logprobs[0, :wanted])


def test_the_logits_are_not_changed(kernels: None) -> None:
    logits = logits_of(300)
    before = logits.clone()
    history = np.array([[5, 1], [7, 0]], np.int32)
    draw(logits, Rule(repetition_penalty=2.0, history=history, mask=np.full(10, -1, np.int32)))
    assert torch.equal(logits, before)


# Penalties, biases and masks.


@pytest.mark.usefixtures("body")
def test_against_the_processors_of_transformers() -> None:
    from transformers.generation import logits_process as hf

    logits = logits_of(1000, 5)
    prompt, output = [3, 3, 17, 900], [17, 40, 40, 999]
    bias = {5: 4.0, 17: -3.0, 999: 2.5}
    processors = [
        hf.SequenceBiasLogitsProcessor({(token,): value for token, value in bias.items()}),
        hf.RepetitionPenaltyLogitsProcessor(1.7),
        hf.TemperatureLogitsWarper(0.8),
        hf.TopKLogitsWarper(60),
        hf.TopPLogitsWarper(0.9),
        hf.MinPLogitsWarper(0.03),
    ]
    scores = logits[None]
    for processor in processors:
        scores = processor(torch.tensor([prompt + output]), scores)
    seen = {token: output.count(token) for token in prompt + output}
    rule = Rule(
        temperature=0.8,
        top_k=60,
        top_p=0.9,
        min_p=0.03,
        repetition_penalty=1.7,
        history=np.array(list(seen.items()), np.int32),
        bias=(np.array(list(bias), np.int32), np.array(list(bias.values()), np.float32)),
    )
    assert not is_ambiguous(logits, rule)
    found, expected = draw(logits, rule).probabilities[0], scores[0].softmax(0)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, rtol=2e-5, atol=1e-8)


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize(("presence", "frequency"), [(0.6, 0.0), (0.0, 0.7), (-1.0, 0.3)])
def test_presence_and_frequency(presence: float, frequency: float) -> None:
    """mu[j] - c[j] frequency - (c[j] > 0) presence, c over the output alone: OpenAI's formula."""
    logits = logits_of(200, 6)
    history = np.array([[3, 0], [17, 1], [40, 5], [199, 2], [60, -1]], np.int32)
    expected = logits.clone()
    for token, count in ((17, 1), (40, 5), (199, 2)):
        expected[token] -= count * frequency + presence
    rule = Rule(presence_penalty=presence, frequency_penalty=frequency, history=history)
    torch.testing.assert_close(draw(logits, rule).probabilities[0], expected.softmax(0), rtol=2e-5, atol=1e-8)


@pytest.mark.usefixtures("body")
def test_repetition_penalty_leaves_tokens_that_were_taken_back() -> None:
    logits = torch.tensor([2.0, 2.0, -2.0, -2.0])
    history = np.array([[0, 0], [1, -1], [2, 3], [3, -1]], np.int32)
    found = draw(logits, Rule(repetition_penalty=2.0, history=history)).probabilities[0]
    torch.testing.assert_close(found, torch.tensor([1.0, 2.0, -4.0, -2.0]).softmax(0), rtol=1e-6, atol=0)


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("V", [1, 31, 32, 33, 100, 1027])
def test_mask(V: int) -> None:
    allowed = sorted({0, V // 3, V // 2, V - 1})
    mask = np.zeros((V + 31) // 32, np.uint32)
    for token in allowed:
        mask[token // 32] |= np.uint32(1 << (token % 32))
    # Bits behind the vocabulary say nothing.
    if V % 32:
        mask[-1] |= np.uint32(0xFFFFFFFF << (V % 32) & 0xFFFFFFFF)
    rule = Rule(mask=mask.view(np.int32))
    for extra in ({}, {"top_k": 3}, {"top_p": 0.99}, {"temperature": 0.0}):
        found = draw(logits_of(V), replace(rule, **extra)).probabilities[0].nonzero().flatten().tolist()
        assert set(found) <= set(allowed)
        if not extra:
            assert found == allowed


@pytest.mark.usefixtures("body")
def test_bias_of_minus_infinity_forbids() -> None:
    logits = logits_of(100)
    best = logits.topk(3).indices
    bias = best[:2].to(torch.int32).numpy(), np.array([-INF, -100.0], np.float32)
    assert draw(logits, Rule(temperature=0.0, bias=bias)).tokens.tolist() == [int(best[2])]


# Log-probabilities.


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize("V", [3, 64, 1000])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_logprobs_are_of_the_logits_as_given(V: int, temperature: float) -> None:
    logits = logits_of(V, 8)
    rule = Rule(temperature=temperature, top=5, bias=(np.array([1], np.int32), np.array([50.0], np.float32)))
    drawn = draw(logits, rule)
    truth = logits.double().log_softmax(0)
    assert drawn.tokens.tolist() == [1]
    order = reference.falling(logits)[:5]
    expected = torch.cat([truth[1:2], truth[order]])
    n = len(order)
    torch.testing.assert_close(drawn.logprobs[0, : 1 + n].double(), expected, rtol=1e-6, atol=1e-6)
    assert drawn.top_tokens[0].tolist() == order.tolist() + [-1] * (5 - n)
    assert drawn.logprobs[0, 1 + n :].tolist() == [-INF] * (5 - n)


@pytest.mark.usefixtures("body")
def test_each_row_has_the_logprobs_that_it_asks_for() -> None:
    logits = torch.stack([logits_of(500, seed) for seed in range(4)])
    tops = (None, 0, 20, 3)
    drawn = draw(logits, *[Rule(seed=9, top=top) for top in tops])
    assert drawn.logprobs.shape == (4, 21)
    truth = logits.double().log_softmax(1)
    for row, top in enumerate(tops):
        if top is None:
            continue
        values, tokens = truth[row].topk(top)
        assert drawn.top_tokens[row, :top].tolist() == tokens.tolist()
        expected = torch.cat([truth[row, drawn.tokens[row]].reshape(1), values])
        torch.testing.assert_close(drawn.logprobs[row, : 1 + top].double(), expected, rtol=1e-6, atol=1e-6)
    assert draw(logits, *[Rule()] * 4).logprobs.shape == (4, 0)


@pytest.mark.usefixtures("body")
def test_the_most_likely_among_equals_and_infinities() -> None:
    logits = torch.full((3000,), -INF)
    logits[[5, 70, 200, 2999]] = torch.tensor([1.0, 2.0, 1.0, 1.0])
    drawn = draw(logits, Rule(top=6))
    assert drawn.top_tokens[0].tolist() == [70, 5, 200, 2999, -1, -1]
    assert drawn.logprobs[0, 5:].tolist() == [-INF, -INF]
    equal = draw(torch.ones(3000), Rule(top=256))
    assert equal.top_tokens[0].tolist() == list(range(256))


# What is refused.


@pytest.mark.usefixtures("body")
@pytest.mark.parametrize(
    "logits",
    [torch.zeros(3), torch.zeros(2, 3, dtype=torch.float16), torch.zeros(3, 2).t(), torch.zeros(2, 0)],
    ids=["one dimension", "float16", "transposed", "no token"],
)
def test_logits_of_another_form(logits: Tensor) -> None:
    with pytest.raises(ShapeError, match="contiguous float32 logits"):
        argmax(logits.numpy(), [0])
    with pytest.raises(ShapeError, match="contiguous float32 logits"):
        sample(logits.numpy(), *table([Rule()]))


@pytest.mark.usefixtures("body")
def test_rows_outside() -> None:
    for row in (-1, 2):
        with pytest.raises(IndexError, match=f"row {row} of 2"):
            argmax(np.zeros((2, 3), np.float32), [0, row])
        words, lists = table([Rule()])
        words[0, Column.ROW] = row
        with pytest.raises(IndexError, match=f"row {row} of 2"):
            sample(np.zeros((2, 3), np.float32), words, lists)


def pairs(*rows: tuple[int, int]) -> np.ndarray:
    return np.array(rows, np.int32)


def bias_of(tokens: list[int], values: list[float], dtype: type = np.float32) -> Any:
    return np.array(tokens, np.int32), np.array(values, dtype)


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Rule(history=pairs((40, 1))), r"a token in a history is outside \[0, 40\)"),
        (Rule(history=pairs((-1, 1))), r"a token in a history is outside"),
        (Rule(history=pairs((1, 1)).astype(np.int64)), "a history is contiguous int32"),
        (Rule(bias=bias_of([40, 1], [0, 0])), "a token in a bias is outside"),
        (Rule(bias=bias_of([1, 1], [0, 0, 0])), r"a bias is contiguous float32 \[2\]; got float32 \[3\]"),
        (Rule(bias=bias_of([1, 1], [0, 0], np.float64)), "a bias is contiguous float32"),
        (Rule(mask=np.zeros(1, np.int32)), r"a mask is contiguous int32 \[2\]; got int32 \[1\]"),
        (Rule(mask=np.zeros(4, np.int32)[::2]), "a mask is contiguous int32"),
        (Rule(top=257), "most likely 257 tokens are wanted of at most 256"),
    ],
)
def test_lists_of_another_form(rule: Rule, message: str, kernels: None) -> None:
    with pytest.raises((IndexError, RuntimeError, ShapeError), match=message):
        draw(torch.zeros(40), rule)


def test_tables_of_another_form(kernels: None) -> None:
    words, lists = table([Rule(history=pairs((1, 1)))])
    logits = np.zeros((1, 40), np.float32)
    with pytest.raises(ShapeError, match=r"the table is contiguous int64 \[1, 15\]; got int64 \[1, 14\]"):
        sample(logits, words[:, :-1].copy(), lists)
    with pytest.raises(IndexError, match="names a list that is not given"):
        sample(logits, words, Lists([], [], [], []))
    words[0, Column.HISTORY_SIZE] = 2
    with pytest.raises(RuntimeError, match="a history of 2 pairs in 2 numbers"):
        sample(logits, words, lists)


@pytest.mark.usefixtures("body")
def test_no_rows() -> None:
    assert argmax(np.zeros((2, 3), np.float32), []).shape == (0,)
    assert sample(np.zeros((2, 3), np.float32), *table([])).tokens.shape == (0,)


def test_a_rule_survives_the_table() -> None:
    rule = Rule(
        seed=2**63 + 5, position=9, temperature=0.3, top_k=4, top_p=0.5, min_p=0.1, repetition_penalty=1.1,
        presence_penalty=-0.2, frequency_penalty=0.7, history=pairs((1, 2)),
        bias=bias_of([3], [0.5]), mask=np.array([7], np.int32), top=2,
    )  # fmt: skip
    words, lists = table([Rule(), rule])
    found = sampling.rule(words[1], lists)
    assert replace(found, seed=rule.seed, history=None, bias=None, mask=None) == replace(
        rule, history=None, bias=None, mask=None
    )
    assert found.seed % 2**64 == rule.seed
    assert found.history is not None
    assert np.array_equal(found.history, rule.history)
    assert found.bias is not None
    assert np.array_equal(found.bias[1], rule.bias[1])
    assert sampling.rule(words[0], lists) == Rule()

"""Medians, agreement, ratios and the share of the limit, on numbers made by hand."""

from __future__ import annotations

import pytest

from hasten.base.errors import ConfigError
from hasten.bench import compare
from hasten.bench.contenders import CONTENDERS, DEFAULT, parse
from hasten.bench.report import Contender, Limits, ModelSize, Round

LIMITS = Limits(
    gemm_flops_per_s=4e9,
    gemm_flops_per_s_by_dtype={"float32": 1e9, "bfloat16": 4e9},
    read_bytes_per_s=1e9,
    threads=2,
)


def _round(
    losses: list[float], step_s: float = 1.0, peak_bytes: int = 1000, first_forward_s: float = 4.0
) -> Round:
    return Round(
        open_s=0.1,
        first_forward_s=first_forward_s,
        first_step_s=9.0,
        steps_s=[9.0, *[step_s] * (len(losses) - 1)],
        losses=losses,
        peak_rss_bytes=peak_bytes,
        rss_open_bytes=500,
        peak_rss_first_step_bytes=900,
    )


def _contender(name: str, losses: list[float], step_s: float = 1.0, peak_bytes: int = 1000) -> Contender:
    rounds = [_round(losses, step_s, peak_bytes)]
    return compare.summarise(CONTENDERS[name], True, rounds, tokens=100, flops=1e9, limits=LIMITS)


def test_the_median_leaves_out_the_first_step_and_pools_the_rounds():
    rounds = [_round([2.0, 1.9, 1.8], 1.0), _round([2.0, 1.9, 1.8], 3.0)]
    got = compare.summarise(CONTENDERS["hasten"], True, rounds, tokens=100, flops=1e9, limits=LIMITS)
    assert got.step_s == 2.0
    assert got.tokens_per_s == 50.0
    assert got.share_of_limit == pytest.approx(1e9 / 2.0 / 4e9)
    assert got.repeatable


def test_opening_is_a_median_and_the_first_forward_is_cold():
    rounds = [
        _round([2.0, 1.9], first_forward_s=seconds).model_copy(update={"open_s": open_s})
        for seconds, open_s in ((7.0, 9.0), (3.0, 5.0), (3.0, 4.0))
    ]
    got = compare.summarise(CONTENDERS["hasten"], True, rounds, tokens=100, flops=1e9, limits=LIMITS)
    assert (got.open_s, got.first_forward_s) == (5.0, 7.0)
    base = compare.summarise(CONTENDERS["eager-bf16"], True, [_round([2.0, 1.9])], 100, 1e9, LIMITS)
    contenders = {"eager-bf16": base, "hasten": got}
    ratio = compare.ratios(contenders, compare.agreements(contenders, 1024))["hasten"]["eager-bf16"]
    assert ratio.first_forward_extra_s == 3.0


def test_rounds_with_other_losses_are_not_repeatable():
    rounds = [_round([2.0, 1.9]), _round([2.0, 1.8999999])]
    got = compare.summarise(CONTENDERS["hasten"], True, rounds, tokens=100, flops=1e9, limits=LIMITS)
    assert not got.repeatable


def test_without_bf16_hardware_the_entry_says_fp32_and_why():
    got = compare.summarise(CONTENDERS["hasten"], False, [_round([2.0, 1.9])], 100, 1e9, LIMITS)
    assert got.dtype == "float32"
    assert "no bf16 in hardware" in (got.note or "")
    assert got.share_of_limit == pytest.approx(1.0)


def test_equal_losses_agree_and_give_both_ratios():
    contenders = {
        "eager-bf16": _contender("eager-bf16", [2.0, 1.9], 2.0, 1000),
        "eager-bf16-malloc": _contender("eager-bf16-malloc", [2.0, 1.9], 1.5, 1100),
        "hasten": _contender("hasten", [2.0, 1.9001], 1.0, 800),
    }
    agreed = compare.agreements(contenders, 1024)
    assert [(entry.contender, entry.base, entry.agree) for entry in agreed] == [
        ("eager-bf16-malloc", "eager-bf16", True),
        ("hasten", "eager-bf16", True),
    ]
    got = compare.ratios(contenders, agreed)["hasten"]
    assert got["eager-bf16"].speed == pytest.approx(2.0)
    assert got["eager-bf16-malloc"].speed == pytest.approx(1.5)
    assert got["eager-bf16"].peak_memory == pytest.approx(0.8)


@pytest.mark.parametrize(("hasten_off", "agree"), [(0.0, True), (3e-5, False), (-3e-5, False)])
def test_what_the_base_rounds_off_is_not_held_against_the_contender(hasten_off: float, agree: bool):
    """The base's own rounding is corrected; the contender's losses are taken as they are."""
    true = [3.0, 2.5, 2.0]
    base = _contender("eager-fp32", [loss - 4e-5 for loss in true])
    ours = _contender("hasten-fp32", [loss * (1 + hasten_off) for loss in true])
    found = {"eager-fp32": base, "hasten-fp32": ours}
    assert not compare.agreements(found, 1024)[0].agree
    found["eager-fp32"] = base.model_copy(update={"loss_rounding": -4e-5})
    (entry,) = compare.agreements(found, 1024)
    assert (entry.agree, entry.base_rounding) == (agree, -4e-5)


@pytest.mark.parametrize(
    ("losses", "why"),
    [
        ([2.01, 1.9, 1.8, 1.7], "the first step starts from equal weights"),
        ([2.0, 1.9, 1.8, 1.75], "one later step is off by 3 %"),
        ([2.0, 1.914, 1.813, 1.712], "every later step is off by 0.7 % to the same side"),
    ],
)
def test_no_speed_up_where_losses_differ(losses: list[float], why: str):
    contenders = {
        "eager-bf16": _contender("eager-bf16", [2.0, 1.9, 1.8, 1.7], 2.0),
        "hasten": _contender("hasten", losses, 1.0),
    }
    agreed = compare.agreements(contenders, 1024)
    assert not agreed[0].agree, why
    assert compare.ratios(contenders, agreed)["hasten"]["eager-bf16"].speed is None


def test_fp32_is_held_to_one_part_in_a_hundred_thousand():
    base = _contender("eager-fp32", [2.0, 1.9])
    near = {"eager-fp32": base, "hasten-fp32": _contender("hasten-fp32", [2.0, 1.90001])}
    far = {"eager-fp32": base, "hasten-fp32": _contender("hasten-fp32", [2.0, 1.90003])}
    assert compare.agreements(near, 64)[0].agree
    assert not compare.agreements(far, 64)[0].agree


def test_few_tokens_widen_the_bound_of_bf16_and_never_that_of_fp32():
    assert compare.bound("bfloat16", 1024) == compare.bound("bfloat16", 4096)
    assert compare.bound("bfloat16", 256).first == 2 * compare.bound("bfloat16", 1024).first
    assert compare.bound("float32", 1) == compare.bound("float32", 4096)


def test_flops_of_a_step_by_hand():
    size = ModelSize(parameters=300, product_parameters=200, attention_width=8, sees_documents=True)
    assert compare.flops_per_step(size, tokens=10, visible_keys=50.0) == 6 * 200 * 10 + 12 * 50 * 8


def test_contenders_are_parsed_in_order():
    assert parse(None) == DEFAULT
    assert parse("hasten, eager-bf16") == ("hasten", "eager-bf16")


@pytest.mark.parametrize(
    ("names", "message"),
    [("hastn", "did you mean 'hasten'"), ("", "name at least one"), ("hasten,hasten", "2 times")],
)
def test_contenders_that_do_not_exist_are_refused(names: str, message: str):
    with pytest.raises(ConfigError, match=message):
        parse(names)

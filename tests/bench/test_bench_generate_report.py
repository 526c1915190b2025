"""The report of generation: its numbers, its form on disk, how it is shown, and the search for a context."""

from __future__ import annotations

import io
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel
from rich.console import Console

from hasten.base.errors import InputError
from hasten.bench.generation import compare, report, table
from hasten.bench.generation.context import longest_context
from hasten.bench.generation.judge import Scored
from hasten.bench.generation.names import CONTENDERS
from hasten.bench.report import Limits, ModelSize, save
from hasten.bench.serving import report as serving

FORMAT = Path(__file__).parents[2] / "docs/formats/report.md"
LIMITS = Limits(
    gemm_flops_per_s=4e11,
    gemm_flops_per_s_by_dtype={"float32": 1e11, "bfloat16": 4e11},
    read_bytes_per_s=2e10,
    threads=2,
)
GOOD = Scored([-0.5] * 4, [-0.5] * 4)


def _round(first_s: float, decode_s: float, start_s: float = 9.0, peak: int = 10**9) -> report.Round:
    return report.Round(
        open_s=5.0,
        start_to_first_token_s=start_s,
        runs=[
            report.Run(first_token_s=99.0, decode_s=99.0),
            report.Run(first_token_s=first_s, decode_s=decode_s),
        ],
        streams=[
            report.Streams(
                streams=8,
                first_token_s=1.0,
                last_first_token_s=2.0,
                decode_tokens_per_s=16 / decode_s,
                total_s=3.0,
                tokens_per_s=100.0,
                peak_rss_bytes=peak,
            )
        ],
        peak_rss_bytes=peak,
        tokens=[[1, 2, 3, 4]] * 2,
        logprobs=[-0.5] * 4,
    )


def _contender(name: str, *rounds: report.Round) -> report.Contender:
    kind = CONTENDERS[name]
    sizes = compare.Sizes(512, 4, 1e10, 80_000_000, 20_000_000)
    return compare.summarise(kind, kind.weights, None, rounds, sizes, LIMITS, "text")


@pytest.fixture
def example() -> report.GenerateReport:
    contenders = {
        "eager-bf16": _contender("eager-bf16", _round(0.25, 0.15)),
        "llama.cpp": _contender("llama.cpp", _round(3.0, 0.06)),
        "hasten": _contender("hasten", _round(0.1, 0.015, 3.0, 4 * 10**8)),
    }
    agreed = compare.agreements(contenders, {name: [GOOD] for name in contenders})
    return report.GenerateReport(
        date="2026-01-01T00:00:00+00:00",
        command="hasten bench generate",
        machine={"processor": "Example 1"},
        versions={"python": "3.11"},
        workload=report.Workload(
            model="smollm2-135m",
            file="/models/a.gguf",
            size=ModelSize(
                parameters=134_515_008,
                product_parameters=134_479_872,
                attention_width=17_280,
                sees_documents=True,
            ),
            data="python-stdlib",
            prompt_tokens=512,
            new_tokens=4,
            repeats=1,
            rounds=1,
            streams=[1, 8],
            cache_values=10**7,
            prefill_flops=1e10,
        ),
        limits=LIMITS,
        contenders=contenders,
        failed={},
        skipped={},
        interrupted=None,
        ratios=compare.ratios(contenders, agreed),
        agree=True,
        agreement=agreed,
        longest_context=report.LongestContext(
            budget_bytes=10**9,
            budget_of="eager-bf16",
            budget_tokens=512,
            resolution_tokens=64,
            contenders={
                "hasten": report.Longest(
                    tokens=8192, peak_rss_bytes=9 * 10**8, limited_by="model", probes={"8192": 9 * 10**8}
                )
            },
            ratios={"hasten": 16.0},
        ),
    )


def test_a_round_is_held_to_the_limits_of_its_own_time():
    """Memory is twice as fast in one round, and the rate follows it: the share is the same in all."""
    slow, fast = LIMITS, LIMITS.model_copy(update={"read_bytes_per_s": 2 * LIMITS.read_bytes_per_s})
    rounds = [
        _round(0.2, seconds).model_copy(update={"limits": limits})
        for seconds, limits in ((0.03, slow), (0.015, fast), (0.03, slow))
    ]
    got = _contender("hasten", *rounds)
    assert got.share_of_bound == pytest.approx(100 / 200)
    assert got.bound_tokens_per_s == pytest.approx(2e10 / 1e8)


def test_medians_rates_and_shares():
    got = _contender(
        "hasten", _round(0.1, 0.02, 9.0), _round(0.2, 0.03, 3.0, 3 * 10**9), _round(0.4, 0.06, 4.0)
    )
    assert got.first_token_s == 0.2
    assert got.prefill_tokens_per_s == pytest.approx(512 / 0.2)
    assert got.decode_tokens_per_s == pytest.approx(3 / 0.03)
    assert got.bound_tokens_per_s == pytest.approx(2e10 / 1e8)
    assert got.share_of_bound == pytest.approx(100 / 200)
    assert got.prefill_share_of_limit == pytest.approx(1e10 / 0.2 / 4e11)
    # The first round may have filled a cache on disk.
    assert (got.first_start_to_first_token_s, got.start_to_first_token_s) == (9.0, 3.5)
    assert got.peak_rss_bytes == 10**9
    assert got.streams["8"].decode_tokens_per_s == pytest.approx(16 / 0.03)
    assert got.streams_gain["8"] == pytest.approx(16 / 3)
    assert got.repeatable


def test_ratios_against_every_base(example: report.GenerateReport):
    assert list(example.ratios) == ["llama.cpp", "hasten"]
    ratio = example.ratios["hasten"]["llama.cpp"]
    assert ratio.decode == pytest.approx(4.0)
    assert ratio.prefill == pytest.approx(30.0)
    assert ratio.first_token == pytest.approx(1 / 30)
    assert ratio.start_to_first_token == pytest.approx(1 / 3)
    assert ratio.peak_memory == pytest.approx(0.4)
    assert ratio.streams == {"8": pytest.approx(4.0)}


@pytest.mark.parametrize(
    ("name", "scored", "own", "agree"),
    [
        ("hasten-bf16", [GOOD], [-0.5] * 4, True),
        # Over four tokens the bounds are four times those of 64.
        ("hasten-bf16", [Scored([-0.5, -0.6, -0.5, -0.5], [-0.5] * 4)], [-0.5] * 4, False),
        ("hasten-bf16", [GOOD], [-0.5, -1.2, -0.5, -0.5], False),
        ("hasten-bf16", [GOOD, Scored([-2.0] * 4, [-0.5] * 4)], [-0.5] * 4, False),
        ("hasten-int8", [Scored([-0.5, -0.6, -0.5, -0.5], [-0.5] * 4)], [-0.9] * 4, True),
        ("hasten-int8", [Scored([-0.7] * 4, [-0.5] * 4)], [-0.7] * 4, False),
        ("hasten", [Scored([-0.5, -0.51, -0.5, -0.5], [-0.5] * 4)], [-0.69] * 4, True),
        ("hasten", [GOOD], [-0.71] * 4, False),
        ("hasten-fp32", [Scored([-0.51] * 4, [-0.5] * 4)], [-0.51] * 4, False),
    ],
)
def test_the_bound_depends_on_the_weights(name: str, scored: list[Scored], own: list[float], agree: bool):
    measured = _round(0.1, 0.1).model_copy(update={"logprobs": own})
    contenders = {"eager-bf16": _contender("eager-bf16", _round(0.1, 0.1)), name: _contender(name, measured)}
    agreed = compare.agreements(contenders, {"eager-bf16": [GOOD], name: scored})
    assert [entry.agree for entry in agreed] == [True, agree]
    ratio = compare.ratios(contenders, agreed)[name]["eager-bf16"]
    assert (ratio.decode is not None) is agree
    assert ratio.peak_memory == 1.0


def test_bounds_follow_the_format():
    regrets = [compare.bound(weights, 64).regret for weights in ("float32", "bfloat16", "int4")]
    assert regrets == sorted(regrets)
    assert math.exp(compare.bound("int4", 1000).regret) == pytest.approx(1.05)


def test_bounds_are_wider_over_few_tokens():
    few, many = compare.bound("stored", 16), compare.bound("stored", 64)
    assert (few.regret, few.logprob) == (2 * many.regret, 2 * many.logprob)
    assert compare.bound("int8", 16).logprob is None


def test_where_answers_part_is_said():
    other = _round(0.1, 0.1).model_copy(update={"tokens": [[1, 2, 9, 4]] * 2})
    contenders = {
        "eager-bf16": _contender("eager-bf16", _round(0.1, 0.1)),
        "hasten": _contender("hasten", other),
    }
    agreed = compare.agreements(contenders, {name: [GOOD] for name in contenders})
    assert [(entry.base, entry.first_divergence) for entry in agreed] == [(None, None), ("eager-bf16", 2)]


def test_what_is_written_is_what_is_read(example: report.GenerateReport, tmp_path: Path):
    path = tmp_path / "report.json"
    save(example, path)
    assert report.load(path) == example
    path.write_text(path.read_text().replace("generate/1", "generate/2"))
    with pytest.raises(InputError, match=r"not a report of schema hasten\.bench\.generate/1: schema"):
        report.load(path)
    with pytest.raises(InputError, match="hasten bench generate --json"):
        report.load(tmp_path / "none.json")


def test_every_field_is_documented():
    text = FORMAT.read_text()
    for module in (report, serving):
        models = [
            value
            for value in vars(module).values()
            if isinstance(value, type)
            and issubclass(value, BaseModel)
            and value.__module__ == module.__name__
        ]
        assert len(models) > 4
        for model in models:
            for name, field in model.model_fields.items():
                assert f"`{field.alias or name}`" in text, f"{module.__name__}: {model.__name__}.{name}"


def test_tables_fit_into_80_columns(example: report.GenerateReport):
    console = Console(width=80, file=io.StringIO(), force_terminal=False)
    console.print(table.render(example))
    text = console.file.getvalue()
    assert "…" not in text
    assert "all that the model is made for" in text.replace("\n", " ")


def test_markdown_has_the_numbers(example: report.GenerateReport):
    text = table.markdown(example)
    assert "| `hasten` | 5,120 | 200.0 | 100% | 100 ms | 3.0 s | 0.40 GB | 80 MB |" in text
    assert (
        "hasten against llama.cpp: decode 4.00x, 4.00x with 8 streams, prefill 30.00x, 0.33x the time from "
        "start to first token, 0.40x the peak memory" in text
    )
    assert "parts from eager-bf16's never" in text


def test_the_markdown_is_printed_from_a_file(example: report.GenerateReport, tmp_path: Path, capsys):
    save(example, tmp_path / "a.json")
    assert table.main([str(tmp_path / "a.json")]) == 0
    assert "| `hasten` |" in capsys.readouterr().out
    assert table.main([]) == 2
    assert "usage" in capsys.readouterr().err


@given(
    fixed=st.integers(0, 3000),
    slope=st.integers(1, 20),
    model_tokens=st.integers(100, 20_000),
    budget=st.integers(0, 40_000),
)
def test_the_longest_context_is_the_longest_that_fits(fixed: int, slope: int, model_tokens: int, budget: int):
    def probe(name: str, tokens: int) -> int:
        assert 0 < tokens <= model_tokens
        return budget if name == "plain" else fixed + slope * tokens

    got = longest_context(
        ["plain", "other"], "plain", model_tokens, probe, budget_tokens=100, resolution_tokens=8
    )
    found = got.contenders["other"]
    assert list(got.contenders) == ["other"]
    assert got.budget_bytes == budget
    assert got.ratios == {"other": found.tokens / 100}
    if found.tokens:
        assert fixed + slope * found.tokens == found.peak_rss_bytes <= budget
    if found.limited_by == "model":
        assert found.tokens == model_tokens
    else:
        assert fixed + slope * (found.tokens + 8) > budget
    assert len(found.probes) < 25


def test_limits_are_the_better_of_two_measurements() -> None:
    def limits(fp32: float, bf16: float, read: float) -> Limits:
        rates = {"float32": fp32, "bfloat16": bf16}
        return Limits(
            gemm_flops_per_s=bf16, gemm_flops_per_s_by_dtype=rates, read_bytes_per_s=read, threads=2
        )

    first, second = limits(2.0, 9.0, 40.0), limits(3.0, 8.0, 80.0)
    found = first.better(second)
    assert found == second.better(first)
    assert found.gemm_flops_per_s_by_dtype == {"float32": 3.0, "bfloat16": 9.0}
    assert (found.gemm_flops_per_s, found.read_bytes_per_s) == (9.0, 80.0)

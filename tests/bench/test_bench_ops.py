"""`hasten bench ops`: which cases it takes, and that no ratio stands beside a wrong result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from hasten.base.errors import ConfigError
from hasten.bench import ops
from hasten.bench.report import Limits
from hasten.ops.cases import Case
from hasten.train.screen import Screen

LIMITS = Limits(
    gemm_flops_per_s=1e11, gemm_flops_per_s_by_dtype={"float32": 1e11}, read_bytes_per_s=1e10, threads=1
)


def _make(generator: torch.Generator, dtype: torch.dtype):
    return (torch.randn(8, 16, generator=generator, dtype=dtype),), {}


def _case(op=torch.sin, **changes) -> Case:
    settings = {"grads": (0,), "dtypes": (torch.float32,), "flops": lambda: 128.0} | changes
    return Case("sine", settings.pop("name", "small"), _make, op, torch.sin, **settings)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops.train, "measure_limits", lambda bf16, screen: LIMITS)

    def run(case: Case) -> ops.OpsReport:
        monkeypatch.setattr(ops, "all_cases", lambda: {"sine": [case]})
        return ops.bench_ops("sine", None, 0.001, Screen(enabled=False))

    return run


def test_a_right_operator_gets_times_and_a_ratio(measured):
    got = measured(_case())
    forward, both = got.rows
    assert (forward.what, both.what) == ("forward", "forward+backward")
    assert got.agree
    assert forward.ratio == pytest.approx(forward.torch_s / forward.hasten_s)
    assert forward.bytes_per_s == pytest.approx(2 * 8 * 16 * 4 / forward.hasten_s)
    assert forward.flops_per_s == pytest.approx(128 / forward.hasten_s)
    assert forward.share_of_limit == pytest.approx(1024 / 1e10 / forward.hasten_s)
    assert both.ratio is not None


def test_a_wrong_operator_gets_no_ratio(measured):
    got = measured(_case(op=lambda x: torch.sin(x) + 1e-3))
    assert not got.agree
    assert got.rows[0].ratio is None
    assert "output 0" in (got.rows[0].error or "")
    # Its gradient is right, and that is said as well.
    assert got.rows[1].ratio is not None


def test_benchmark_sizes_come_first_else_the_largest():
    small, large = _case(), _case(name="large", benchmark=True)
    assert ops.choose({"sine": [small, large]}, None, None) == [large]
    assert ops.choose({"sine": [small]}, "sine", None) == [small]
    assert ops.choose({"sine": [small, large]}, "sine", "small") == [small]


@pytest.mark.parametrize(("op", "case"), [("sin", None), ("sine", "smal")])
def test_unknown_names_are_refused_with_the_nearest(op: str, case: str | None):
    with pytest.raises(ConfigError, match=r"did you mean 'sm?[ia]"):
        ops.choose({"sine": [_case()]}, op, case)


def test_every_field_is_documented():
    text = (Path(__file__).parents[2] / "docs/formats/report.md").read_text()
    for model in (ops.OpRow, ops.OpsReport):
        for name in model.model_fields.keys() - {"schema_name"}:
            assert f"`{name}`" in text, name


def test_interleaved_calls_take_turns():
    calls: list[str] = []
    first, second = ops.interleaved(lambda: calls.append("a"), lambda: calls.append("b"), 0.0)
    assert calls == ["a", "b"] * (1 + ops.MIN_PAIRS)
    assert first >= 0
    assert second >= 0


def test_a_real_operator(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(ops.train, "measure_limits", lambda bf16, screen: LIMITS)
    cases = ops.all_cases()["rms_norm"]
    small = min(cases, key=ops._input_numbers)
    got = ops.bench_ops("rms_norm", small.name, 0.0, Screen(enabled=False))
    assert got.agree, [row.error for row in got.rows]
    assert {row.op for row in got.rows} == {"rms_norm"}
    assert ops.dump(got).startswith('{\n  "schema": "hasten.bench.ops/1"')

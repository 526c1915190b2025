"""`hasten bench ops`: which cases it takes, and that no ratio stands beside a wrong result."""

from __future__ import annotations

import io
import json
import os
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from hasten.base.errors import ConfigError
from hasten.base.screen import Screen
from hasten.bench import ops
from hasten.bench.command import bench
from hasten.bench.report import Limits, dump
from hasten.ops import native
from hasten.ops.cases import Case

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
    assert {row.level for row in got.rows} == {"torch"}
    assert (forward.direction, both.direction) == ("forward", "forward+backward")
    assert got.agree
    assert forward.ratio == pytest.approx(forward.torch_s / forward.time_s)
    assert forward.bytes_per_s == pytest.approx(2 * 8 * 16 * 4 / forward.time_s)
    assert forward.flops_per_s == pytest.approx(128 / forward.time_s)
    assert forward.share_of_limit == pytest.approx(1024 / 1e10 / forward.time_s)
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
    assert ops.choose({"sine": [small, large]}, None, None, every=True) == [small, large]


@pytest.mark.parametrize(("op", "case"), [("sin", None), ("sine", "smal")])
def test_unknown_names_are_refused_with_the_nearest(op: str, case: str | None):
    with pytest.raises(ConfigError, match=r"did you mean 'sm?[ia]"):
        ops.choose({"sine": [_case()]}, op, case)


def test_every_field_is_documented():
    text = (Path(__file__).parents[2] / "docs/formats/report.md").read_text()
    for model in (ops.OpRow, ops.OpsReport):
        for name in model.model_fields.keys() - {"schema_name"}:
            assert f"`{name}`" in text, name


def test_the_level_is_that_of_the_kernel_that_ran():
    case = next(case for case in ops.all_cases()["attention"] if case.grads and not case.benchmark)
    args, kwargs = case.inputs(torch.float32)
    both = ops._forward_backward(case, case.op, torch.float32)
    for call in (lambda: case.op(*args, **kwargs), both):
        assert ops.level_of(call) == (native.state().level or "torch")
        with native.switched_off():
            assert ops.level_of(call) == "torch"
    assert ops.level_of(lambda: torch.sin(args[0])) == "torch"


@pytest.mark.parametrize(
    "op", ["linear", "linear_group", "activation_linear", "norm_linear", "linear_cross_entropy"]
)
def test_operations_of_products_are_those_that_torch_counts(op: str):
    counted = 0
    for case in ops.all_cases()[op]:
        if case.benchmark or "ignore" in case.name or torch.float32 not in case.dtypes:
            continue
        args, kwargs = case.inputs(torch.float32)
        with FlopCounterMode(display=False) as counter, torch.no_grad():
            case.yardstick(*args, **kwargs)
        assert case.flops() == counter.get_total_flops(), case
        counted += case.flops() > 0
    assert counted >= 4


def test_an_embedding_reads_the_rows_it_names_and_not_its_table():
    case = next(case for case in ops.all_cases()["embedding"] if case.name == "many-repeats")
    # 511 ids of 8 bytes, 3 rows of 16 numbers, 511 rows of 16 numbers written.
    assert case.bytes(torch.float32) == 511 * 8 + 3 * 16 * 4 + 511 * 16 * 4


def test_the_table_fits_into_80_columns_and_names_every_row(measured):
    got = measured(_case(name="1024x1536"))
    console = Console(width=80, file=io.StringIO())
    console.print(ops.render(got))
    text = console.file.getvalue()
    for word in ("sine 1024x1536", "  fp32 ", "  fp32 + backward", " torch "):
        assert word in text
    assert "…" not in text


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_the_rows_before_it(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    def killed(x: torch.Tensor) -> torch.Tensor:
        os.kill(os.getpid(), number)
        return torch.sin(x)

    monkeypatch.setattr(ops.train, "measure_limits", lambda bf16, screen: LIMITS)
    good, bad = _case(name="good", benchmark=True), _case(op=killed, name="bad", benchmark=True)
    path = tmp_path / "ops.json"
    monkeypatch.setattr(ops, "all_cases", lambda: {"sine": [good, bad]})
    done = CliRunner().invoke(bench, ["ops", "--seconds", "0", "--json", str(path)])
    assert done.exit_code == 128 + number, done.output
    written = json.loads(path.read_text())
    assert [row["case"] for row in written["rows"]] == ["good", "good"]
    assert written["interrupted"] == {"signal": number.name, "during": "sine/bad float32"}
    assert "CUT SHORT" in done.stdout
    path.unlink()
    monkeypatch.setattr(ops, "all_cases", lambda: {"sine": [bad]})
    done = CliRunner().invoke(bench, ["ops", "--seconds", "0", "--json", str(path)])
    assert done.exit_code == 128 + number, done.output
    assert "stopped before anything was measured" in done.stderr
    assert not path.exists()


def test_interleaved_calls_take_turns():
    calls: list[str] = []
    first, second = ops.interleaved([lambda: calls.append("a"), lambda: calls.append("b")], 0.0)
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
    assert dump(got).startswith('{\n  "schema": "hasten.bench.ops/2"')

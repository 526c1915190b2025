"""A measured step takes the place of computed prices, and other shapes and layouts are scaled from it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from hasten.__main__ import app
from hasten.base.errors import ConfigError, InputError
from hasten.plan.cluster import Cluster, overridden, preset
from hasten.plan.cost import Costs
from hasten.plan.estimate import estimate
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import ModelShape
from hasten.plan.replay import FORMAT, KINDS, Profile, kind_of, load, replayed, trace_seconds

SHAPE = ModelShape(layers=8, hidden=2048, heads=16, kv_heads=16, inner=8192, vocabulary=32000)
JOB = Job(batch=8, sequence=2048)
LAYOUT = Layout(micro_batch=2, accumulation=4)
# What operators are called in eager torch, in our own rewritten models and on an accelerator.
NAMES = {
    "matmul": (
        "aten::mm",
        "aten::addmm_",
        "aten::bmm",
        "aten::linear",
        "sm90_xmma_gemm_bf16f32_tn_n_tilesize128x128",
        "void cutlass::Kernel2<cutlass_80_wmma_tensorop_bf16>",
        "hasten_cpu::panels_product",
    ),
    "attention": (
        "hasten_cpu::attention_backward",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
        "void flash::flash_fwd_kernel<...>",
        "aten::_softmax",
    ),
    "elementwise": (
        "hasten_cpu::norm",
        "hasten_cpu::cross_entropy_",
        "aten::_log_softmax",
        "aten::copy_",
        "void at::native::vectorized_elementwise_kernel<4>",
    ),
    "optimizer": ("hasten_cpu::adamw_", "Optimizer.step#AdamW.step", "multi_tensor_apply_kernel"),
    "host": ("GeneratedBackwardFor_hasten_norm_linear_default", "hasten::norm_linear", "aten::empty"),
    "collective": ("ncclDevKernel_AllReduce_Sum_bf16_RING_LL", "c10d::allgather_"),
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, some in NAMES.items() for name in some])
def test_operators_are_sorted_by_name(kind: str, name: str) -> None:
    assert kind_of(name) == kind


def _node(nodes: int = 1) -> Cluster:
    return preset("dgx-a100-80g", nodes)


def _true_device(factors: dict[str, float], launch_s: float) -> Cluster:
    """A machine that is unlike the planner's constants in a known way."""
    return overridden(_node(), {"device": {"replayed": factors, "overrides": {"launch_s": launch_s}}})


def _profile_of(cluster: Cluster, layout: Layout = LAYOUT, job: Job = JOB) -> Profile:
    """What a profiler would see on that machine: seconds by kind, summed over the step."""
    costs = Costs(SHAPE, cluster, layout, job)
    seconds = dict.fromkeys(KINDS, 0.0)
    for backward in (False, True):
        piece = costs.layer(0, backward)
        for kind in KINDS[:3]:
            seconds[kind] += SHAPE.layers * layout.accumulation * piece.parts[kind]
        again = costs.recomputed(0) if backward else None
        for kind in KINDS[:3]:
            if again is not None:
                seconds[kind] += SHAPE.layers * layout.accumulation * again.parts.get(kind, 0.0)
    ends = {**cluster.device.replayed}
    only = overridden(cluster, {"device": {"replayed": {**ends, "elementwise": 0.0}}})
    for backward in (False, True):
        product = Costs(SHAPE, only, layout, job).head(backward).parts["head"]
        seconds["matmul"] += layout.accumulation * product
        seconds["elementwise"] += layout.accumulation * (costs.head(backward).parts["head"] - product)
        seconds["elementwise"] += layout.accumulation * costs.embedding(backward).parts["embedding"]
    count, _ = costs.parameters(list(range(SHAPE.layers)), True, True)
    seconds["elementwise"] += layout.accumulation * costs.accumulate(count)
    seconds["optimizer"] = costs.optimizer(count)
    return Profile(
        format=FORMAT,
        device=cluster.device.name,
        model=SHAPE,
        layout=layout,
        job=job,
        step_s=estimate(SHAPE, cluster, layout, job).step_s.value,
        operators_s={
            "aten::mm": seconds["matmul"],
            "flash_fwd_kernel": 0.3 * seconds["attention"],
            "flash_bwd_kernel": 0.7 * seconds["attention"],
            "aten::add": seconds["elementwise"],
            "aten::_fused_adamw_": seconds["optimizer"],
            "ncclDevKernel_AllReduce": 5.0,
        },
    )


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_machine_is_found_again_from_one_step(recompute: str) -> None:
    truth = {"matmul": 1.4, "attention": 0.7, "elementwise": 2.5, "optimizer": 1.2}
    real = _true_device(truth, 1e-4)
    profiled = LAYOUT.model_copy(update={"recompute": recompute})
    found = replayed(_node(), _profile_of(real, profiled))
    for kind, factor in truth.items():
        assert found.device.replayed[kind] == pytest.approx(factor, rel=1e-3)
    again = estimate(SHAPE, found, profiled, JOB)
    assert again.step_s.value == pytest.approx(estimate(SHAPE, real, profiled, JOB).step_s.value, rel=1e-3)
    assert again.confidence == "replayed"
    assert any("matmul x 1.4" in note for note in again.notes)
    # Another shape, length and layout are right too: the factors belong to the device.
    other = SHAPE.model_copy(update={"layers": 4, "hidden": 4096, "heads": 32, "kv_heads": 32})
    wide, job = Layout(tp=4, micro_batch=1, accumulation=4), Job(batch=4, sequence=4096)
    mine, its = (estimate(other, which, wide, job).step_s.value for which in (found, real))
    plain = estimate(other, _node(), wide, job).step_s.value
    assert mine == pytest.approx(its, rel=0.02)
    assert abs(plain / its - 1) > 0.1


@pytest.mark.parametrize("times", [0.8, 1.25])
def test_where_the_host_was_measured_the_rest_is_spread_over_operators(times: float) -> None:
    known = overridden(_node(), {"device": {"overrides": {"launch_s": 2e-5}}})
    good = _profile_of(known)
    found = replayed(known, good.model_copy(update={"step_s": times * good.step_s}))
    assert found.device.overrides == known.device.overrides
    for factor in found.device.replayed.values():
        assert factor == pytest.approx(times, rel=0.05)
    assert estimate(SHAPE, found, LAYOUT, JOB).step_s.value == pytest.approx(times * good.step_s, rel=1e-3)
    # Beyond a factor of two it cannot be the operators.
    far = replayed(known, good.model_copy(update={"step_s": 5 * good.step_s}))
    assert far.device.replayed["matmul"] == pytest.approx(1.0, rel=1e-3)
    assert far.device.overrides["launch_s"] > known.device.overrides["launch_s"]


def test_an_unreplayed_estimate_is_as_it_was() -> None:
    assert estimate(SHAPE, _node(), LAYOUT, JOB).confidence == "calibrated"
    assert _node().device.replayed == {}


def test_a_profile_of_something_else_is_refused() -> None:
    good = _profile_of(_true_device({}, 1e-5))
    for changes, said in (
        ({"device": "TPU v4"}, "TPU v4"),
        ({"layout": Layout(pp=2, accumulation=8)}, "pp = 2"),
    ):
        with pytest.raises(ConfigError, match=said):
            replayed(_node(), good.model_copy(update=changes))
    with pytest.raises(InputError, match="something else"):
        replayed(_node(), good.model_copy(update={"operators_s": {"aten::mm": 1e4}}))
    with pytest.raises(InputError, match="no operator of a known kind"):
        replayed(_node(), good.model_copy(update={"operators_s": {"aten::empty": 1.0}}))


def test_a_step_shorter_than_its_operators_leaves_nothing_to_the_host() -> None:
    good = _profile_of(_true_device({}, 1e-5))
    found = replayed(_node(), good.model_copy(update={"step_s": good.step_s / 2}))
    assert found.device.overrides["launch_s"] == 0.0


def _event(name: str, ts: float, dur: float, **more: Any) -> dict[str, Any]:
    return {"ph": "X", "cat": "cpu_op", "name": name, "ts": ts, "dur": dur, "pid": 1, "tid": 1, **more}


def test_a_trace_gives_each_operator_its_own_time(tmp_path: Path) -> None:
    events = [
        _event("aten::linear", 0, 100),
        _event("aten::addmm", 10, 80),
        _event("aten::copy_", 20, 5),
        _event("aten::addmm", 200, 10),
        _event("aten::add", 200, 30, tid=2),
        {"ph": "i", "name": "marker", "ts": 3},
    ]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    found = trace_seconds(path)
    expected = {"aten::linear": 20e-6, "aten::addmm": 85e-6, "aten::copy_": 5e-6, "aten::add": 30e-6}
    assert found == pytest.approx(expected)
    kernels = [_event("gemm", 0, 7, cat="kernel"), _event("gemm", 9, 7, cat="kernel")]
    path.write_text(json.dumps({"traceEvents": events + kernels}))
    assert trace_seconds(path) == pytest.approx({"gemm": 14e-6})


def test_a_trace_stands_in_for_operators(tmp_path: Path) -> None:
    good = _profile_of(_true_device({"matmul": 1.5}, 1e-5))
    events, at = [], 0.0
    for name, seconds in good.operators_s.items():
        events.append(_event(name, at, 2e6 * seconds))
        at += 2e6 * seconds
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    values = json.loads(good.model_dump_json(exclude={"operators_s"}))
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**values, "trace": "trace.json", "steps": 2}))
    assert load(file).operators_s == pytest.approx(good.operators_s)
    assert replayed(_node(), load(file)).device.replayed["matmul"] == pytest.approx(1.5, rel=1e-3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "hasten-profile/9"}, "format"),
        ({"steps_s": 1}, "steps_s"),
        ({"step_s": 0}, "step_s"),
        ({"operators_s": {}}, "operators_s, or the name of a trace"),
        ({"operators_s": {}, "trace": "absent.json"}, "absent.json"),
    ],
)
def test_a_damaged_profile_is_one_message(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    values = json.loads(_profile_of(_true_device({}, 1e-5)).model_dump_json())
    file = tmp_path / "profile.json"
    file.write_text(json.dumps({**values, **change}))
    with pytest.raises(InputError, match=said):
        load(file)
    file.write_text("{")
    with pytest.raises(InputError, match="JSON"):
        load(file)


def test_the_command_says_that_it_replays(tmp_path: Path) -> None:
    file = tmp_path / "profile.json"
    file.write_text(_profile_of(_true_device({"matmul": 2.0}, 1e-5)).model_dump_json())
    arguments = ["plan", "llama2-7b", "--cluster", "dgx-a100-80g", "--batch", "64", "--seq", "2048", "--json"]
    plain = json.loads(CliRunner().invoke(app, arguments).stdout)["best"]
    got = json.loads(CliRunner().invoke(app, [*arguments, "--profile", str(file)]).stdout)["best"]
    assert (plain["confidence"], got["confidence"]) == ("calibrated", "replayed")
    assert got["step_s"]["value"] > plain["step_s"]["value"]
    assert any("matmul x 2" in note for note in got["notes"])

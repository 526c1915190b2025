"""The whole estimate: its parts, its errors, and figures of papers."""

from __future__ import annotations

import pytest

from hasten.base.errors import ConfigError, InputError
from hasten.plan.cluster import Cluster, load, overridden, preset
from hasten.plan.efficiency import Clock, Constants, constants
from hasten.plan.estimate import estimate
from hasten.plan.flops import training_flops
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import ModelShape
from hasten.plan.model import preset as model_preset

GPT3 = model_preset("gpt3-175b")
MEGATRON = {"attention": "materialised", "dropout": True, "overlap_gradients": False, "precision": "fp16"}


def megatron(layers: int, hidden: int, heads: int) -> ModelShape:
    return ModelShape(
        layers=layers,
        hidden=hidden,
        heads=heads,
        inner=4 * hidden,
        gated=False,
        vocabulary=51200,
        tied=True,
        positions="learned",
        max_positions=2048,
        biases=True,
        norm="layer",
    )


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pp", "virtual", "micro", "batch", "seconds"),
    [
        # arXiv 2205.05198 Table 5, full recompute: 22B on 8 A100, 175B on 64, 530B on 280, 1T on 512.
        (48, 6144, 64, 1, 1, 4, 4, 1.42),
        (96, 12288, 96, 8, 3, 1, 64, 18.13),
        (105, 20480, 128, 35, 3, 1, 280, 49.05),
        (128, 25600, 160, 64, 1, 1, 512, 94.42),
    ],
)
def test_megatrons_four_models(
    layers: int, hidden: int, heads: int, pp: int, virtual: int, micro: int, batch: int, seconds: float
) -> None:
    layout = Layout(
        tp=8,
        pp=pp,
        virtual=virtual,
        micro_batch=micro,
        accumulation=batch // micro,
        recompute="full",
        schedule="interleaved" if virtual > 1 else "1f1b",
    )
    job = Job(batch=batch, sequence=2048, **MEGATRON)  # type: ignore[arg-type]
    found = estimate(megatron(layers, hidden, heads), preset("dgx-a100-80g", pp), layout, job)
    assert found.step_s.value == pytest.approx(seconds, rel=0.2)
    assert found.step_s.low < found.step_s.value < found.step_s.high


def test_the_parts_are_the_step() -> None:
    layout = Layout(tp=4, sp=True, pp=4, dp=8, virtual=2, zero=1, accumulation=8, schedule="interleaved")
    job = Job(batch=64, sequence=4096)
    found = estimate(model_preset("llama3-70b"), preset("dgx-h100", 16), layout, job)
    assert sum(found.parts.values()) == pytest.approx(found.step_s.value)
    assert min(found.parts.values()) >= 0
    assert found.tokens_per_s == pytest.approx(64 * 4096 / found.step_s.value)
    assert found.mfu == found.hfu, "nothing is recomputed"
    assert len(found.memory) == 4
    assert found.memory_peak == max(sum(stage.values()) for stage in found.memory)
    assert found.timeline == ()


def test_the_timeline_shows_every_pass() -> None:
    layout = Layout(tp=8, pp=4, dp=2, accumulation=6)
    found = estimate(GPT3, preset("dgx-a100-80g", 8), layout, Job(batch=12, sequence=2048), timeline=True)
    assert len(found.timeline) == 4 * 6 * 2
    assert max(event.end_s for event in found.timeline) < found.step_s.value


def test_gpt3_on_300_billion_tokens() -> None:
    # Kaplan's 6 N D over 1,000 A100: 23 days where half of the peak is reached.
    days = training_flops(174.6e9, 300e9) / (1000 * 312e12 * 0.5) / 86400
    assert days == pytest.approx(23.3, rel=0.01)
    layout = Layout(
        tp=8, sp=True, pp=8, dp=16, virtual=3, zero=1, micro_batch=1, accumulation=96, schedule="interleaved"
    )
    found = estimate(GPT3, preset("dgx-a100-80g", 128), layout, Job(batch=1536, sequence=2048))
    predicted = 300e9 / found.tokens_per_s / 86400
    assert 20 < predicted < 32
    assert 0.35 < found.mfu < 0.55
    apart = sum(found.parts.get(part, 0.0) for part in ("tensor_parallel", "data_parallel", "bubble"))
    assert 0.05 < apart / found.step_s.value < 0.3


def test_a_mixture_of_1_8_trillion() -> None:
    # 280B weights for each token, 13T tokens: 2.15e25 FLOPs; 90 to 100 days on 25,000 A100 at 32 to 36 %.
    total = training_flops(280e9, 13e12)
    assert total == pytest.approx(2.18e25, rel=0.02)
    days = [total / (25000 * 312e12 * share) / 86400 for share in (0.36, 0.32)]
    assert days == pytest.approx([90, 101], rel=0.02)


def step(layout: Layout, **job: object) -> float:
    asked = Job(**{"batch": layout.batch, "sequence": 2048, **job})  # type: ignore[arg-type]
    return estimate(GPT3, preset("dgx-a100-80g", 128), layout, asked).step_s.value


def test_what_costs_more_takes_longer() -> None:
    plain = Layout(tp=8, pp=8, dp=16, accumulation=32)
    full = plain.model_copy(update={"recompute": "full"})
    some = plain.model_copy(update={"recompute": "full", "recompute_layers": 6})
    assert step(plain) < step(some) < step(full)
    gpipe = plain.model_copy(update={"schedule": "gpipe"})
    assert step(plain) <= step(gpipe) * 1.0001
    assert step(plain.model_copy(update={"schedule": "zero_bubble"})) < step(plain)
    assert step(plain) < step(plain, attention="materialised")
    uneven = plain.model_copy(update={"stages": (14, 14, 14, 14, 10, 10, 10, 10)})
    assert step(plain) < step(uneven)


def test_tensor_parallelism_across_nodes_is_slow() -> None:
    # Measured with Megatron-DeepSpeed (vTrain, arXiv 2312.12391): 18.4B on 256 A100, 800 Gb/s a node, takes
    # 10.5 s with tp = 8 and 20.4 s with tp = 16, in micro batches of two.
    cluster = overridden(preset("dgx-a100-80g", 32), {"across": {"bandwidth": 12.5e9}})
    job = Job(batch=1024, sequence=2048, **MEGATRON)  # type: ignore[arg-type]
    for tp, measured in ((8, 10.5), (16, 20.4)):
        layout = Layout(tp=tp, dp=256 // tp, micro_batch=2, accumulation=2 * tp, recompute="full")
        found = estimate(megatron(40, 6144, 48), cluster, layout, job)
        assert found.step_s.value == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 5, "dp": 1}, "tp = 5 does not divide the 96 heads; the nearest that does is 4"),
        ({"accumulation": 7}, "is not the batch 1536; the nearest batch"),
        ({"dp": 64, "accumulation": 24}, "needs 4096 devices"),
        ({"ep": 2}, "ep = 2 does not divide the model's 0 experts"),
        ({"pp": 128, "dp": 1, "accumulation": 1536}, "is more than the model's 96 layers"),
    ],
)
def test_a_layout_that_does_not_fit_is_refused(changes: dict[str, int], message: str) -> None:
    layout = Layout(**{"tp": 8, "pp": 8, "dp": 16, "accumulation": 96, **changes})  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        estimate(GPT3, preset("dgx-a100-80g", 128), layout, Job(batch=1536, sequence=2048))


def test_a_layout_that_contradicts_itself_is_refused() -> None:
    for wrong in ({"sp": True}, {"virtual": 2}, {"pp": 2, "stages": (1, 2, 3)}, {"tp": 0}):
        with pytest.raises(ValueError, match=r"sp needs|needs pp|stages has|greater than 0"):
            Layout(**wrong)  # type: ignore[arg-type]


def test_overrides_change_the_prediction_and_unknown_ones_are_refused() -> None:
    base = preset("dgx-a100-80g", 128)
    layout, job = Layout(tp=8, pp=8, dp=16, accumulation=96), Job(batch=1536, sequence=2048)
    faster = overridden(base, {"device": {"overrides": {"matmul": 0.9}}})
    assert estimate(GPT3, faster, layout, job).step_s.value < estimate(GPT3, base, layout, job).step_s.value
    wrong = overridden(base, {"device": {"overrides": {"matmull": 0.9}}})
    with pytest.raises(ConfigError, match="did you mean 'matmul'"):
        estimate(GPT3, wrong, layout, job)


def test_a_device_that_nobody_calibrated_is_said_to_be_so() -> None:
    base = preset("dgx-a100-80g")
    unknown = overridden(base, {"device": {"name": "new", "constants": ""}})
    layout, job = Layout(tp=8, accumulation=2), Job(batch=2, sequence=2048)
    found, known = (estimate(megatron(8, 4096, 32), where, layout, job) for where in (unknown, base))
    assert (found.confidence, known.confidence) == ("catalogue", "calibrated")
    assert found.notes
    width = (found.step_s.high - found.step_s.low) / found.step_s.value
    assert width > (known.step_s.high - known.step_s.low) / known.step_s.value


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 2, "across": {"bandwidth": 400e9}}, "across.bandwidth = 4e\\+11 B/s is more than inside"),
        ({"inside": {"bandwidth": 3e12}}, "more than the device's memory bandwidth"),
        ({"domain": 4}, "domain = 4 is less than devices_per_node = 8"),
        ({"nods": 2}, "did you mean 'nodes'"),
        ({"nodes": 0}, "nodes: Input should be greater than 0"),
    ],
)
def test_a_cluster_that_contradicts_itself_is_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        overridden(preset("dgx-a100-80g"), changes)


def test_a_cluster_file_builds_on_a_preset(tmp_path) -> None:  # type: ignore[no-untyped-def]
    file = tmp_path / "mine.toml"
    file.write_text('base = "dgx-a100-80g"\nnodes = 4\n[across]\nbandwidth = 12.5e9\n', encoding="utf-8")
    found = load(file)
    assert isinstance(found, Cluster)
    assert (found.devices, found.across.bandwidth.value) == (32, 12.5e9)
    file.write_text('name = "x"\n', encoding="utf-8")
    with pytest.raises(InputError, match="is missing"):
        load(file)


def test_odd_sizes_are_slow() -> None:
    clock = Clock(preset("dgx-a100-80g").device, "bf16", Constants())
    # A product of one tile more than the cores hold takes two waves.
    full, more = clock.product(108 * 128, 256, 4096), clock.product(109 * 128, 256, 4096)
    assert more > 1.15 * full
    rate = [n / clock.product(4096, n, n) ** 0.5 for n in (512, 2048, 8192)]
    assert rate == sorted(rate)
    known = constants(preset("dgx-a100-80g").device)
    assert known.misaligned < 1
    assert clock.flash(1e12, 100, 2048, False) > clock.flash(1e12, 96, 2048, False)

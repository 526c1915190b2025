"""Memory by category, beside the figures of papers."""

from __future__ import annotations

import pytest

from hasten.plan.cluster import preset as cluster_preset
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.memory import held, in_flight, layer_activations, stage_memory
from hasten.plan.model import ModelShape, preset

GIB = 2.0**30
TRAINING = Job(batch=64, sequence=2048, attention="materialised", dropout=True)


def gpt(layers: int, hidden: int, heads: int) -> ModelShape:
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
    ("tp", "sp", "recompute", "factor"),
    [
        # arXiv 2205.05198 Table 2, in units of s b h; a = 64, s = 2048, h = 6144.
        (1, False, "none", 34 + 5 * 64 * 2048 / 6144),
        (8, False, "none", 10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8),
        (8, True, "none", 34 / 8 + 5 * 64 * 2048 / 6144 / 8),
        (8, False, "selective", 10 + 24 / 8),
        (8, True, "selective", 34 / 8),
        (8, False, "full", 2),
    ],
)
def test_activations_of_a_layer_follow_the_paper(tp: int, sp: bool, recompute: str, factor: float) -> None:
    layout = Layout(tp=tp, sp=sp, micro_batch=4, accumulation=16, recompute=recompute)  # type: ignore[arg-type]
    found = layer_activations(gpt(48, 6144, 64), layout, TRAINING, 0)
    assert found == pytest.approx(factor * 2048 * 4 * 6144, rel=1e-9)


@pytest.mark.parametrize(
    ("layers", "hidden", "heads", "pp", "virtual", "micro", "states", "activations"),
    [
        # arXiv 2205.05198 Figure 1, GiB of the first stage without recomputation: 22B, 175B, 530B, 1T.
        (48, 6144, 64, 1, 1, 4, 45.56, 59.25),
        (96, 12288, 96, 8, 3, 1, 45.56, 66.84),
        (105, 20480, 128, 35, 3, 1, 31.64, 114.02),
        (128, 25600, 160, 64, 1, 1, None, 131.25),
    ],
)
def test_the_papers_four_models(
    layers: int,
    hidden: int,
    heads: int,
    pp: int,
    virtual: int,
    micro: int,
    states: float | None,
    activations: float,
) -> None:
    layout = Layout(
        tp=8,
        pp=pp,
        virtual=virtual,
        micro_batch=micro,
        accumulation=280 // micro,
        schedule="interleaved" if virtual > 1 else "1f1b",
    )
    job = TRAINING.model_copy(update={"batch": layout.batch})
    first = stage_memory(gpt(layers, hidden, heads), cluster_preset("dgx-a100-80g", pp), layout, job)[0]
    if states is not None:
        found = first["weights"] + first["gradients"] + first["optimizer"]
        assert found / GIB == pytest.approx(states, rel=0.01)
    # The paper's figure leaves out the mask of the embedding's dropout: s b h for each micro batch.
    assert first["activations"] / GIB == pytest.approx(activations, rel=0.05)


@pytest.mark.parametrize(
    ("level", "gigabytes"), [(1, (52.5, 35.6, 31.4)), (2, (41.3, 21.6, 16.6)), (3, (30.0, 7.5, 1.88))]
)
def test_zeros_table(level: int, gigabytes: tuple[float, ...]) -> None:
    # ZeRO (arXiv 1910.02054) Table 1: 7.5B parameters over 4, 16 and 64 devices, fp16 gradients.
    per = held(Job(batch=1, sequence=1, gradient_bytes=2))
    for ways, expected in zip((4, 16, 64), gigabytes, strict=True):
        cut = [ways if level >= wanted else 1 for wanted in (3, 2, 1)]
        assert 7.5 * sum(b / c for b, c in zip(per, cut, strict=True)) == pytest.approx(expected, rel=0.005)


def test_175b_takes_three_terabytes() -> None:
    model, count = preset("gpt3-175b"), 64
    layout = Layout(tp=8, pp=8, micro_batch=1, accumulation=64, recompute="full")
    stages = stage_memory(model, cluster_preset("dgx-a100-80g", 8), layout, TRAINING)
    states = sum(s[k] for s in stages for k in ("weights", "gradients", "optimizer", "embedding_head")) * 8
    assert states / 1e12 == pytest.approx(3.15, rel=0.03)
    assert count * cluster_preset("dgx-a100-80g").device.memory_bytes.value > states


def test_length_moves_the_peak_from_parameters_to_activations() -> None:
    model = preset("llama2-7b")
    shares = []
    for sequence in (512, 4096, 32768):
        job = Job(batch=8, sequence=sequence)
        layout = Layout(dp=8, zero=1, micro_batch=1, accumulation=1)
        found = stage_memory(model, cluster_preset("dgx-a100-80g"), layout, job)[0]
        states = found["weights"] + found["gradients"] + found["optimizer"]
        shares.append(found["activations"] / (states + found["activations"]))
    assert shares[0] < 0.25 < shares[1] < shares[2]
    assert shares[2] > 0.7


def test_in_flight_micro_batches() -> None:
    plain = Layout(pp=4, accumulation=16)
    assert [in_flight(plain, s) for s in range(4)] == [4, 3, 2, 1]
    assert in_flight(Layout(pp=4, accumulation=2), 0) == 2
    assert in_flight(Layout(pp=4, accumulation=16, schedule="gpipe"), 3) == 16
    woven = Layout(pp=4, virtual=2, accumulation=16, schedule="interleaved")
    assert in_flight(woven, 0) == pytest.approx(4 * (1 + 3 / 8))


def test_sharding_recomputing_and_offloading_save() -> None:
    model, where = preset("llama3-8b"), cluster_preset("dgx-a100-80g")
    job = Job(batch=16, sequence=4096)

    def peak(**changes: object) -> float:
        layout = Layout(**{"dp": 8, "micro_batch": 2, "accumulation": 1, **changes})  # type: ignore[arg-type]
        return sum(stage_memory(model, where, layout, job)[0].values())

    assert peak() > peak(zero=1) > peak(zero=2) > peak(zero=3)
    assert peak(zero=3, recompute="full") < peak(zero=3, recompute="operators") < peak(zero=3)
    assert peak(zero=1, offload="optimizer") < peak(zero=1)
    assert peak(recompute="selective") == peak(), "flash attention leaves nothing for it to save"

"""The scores of the planner: how they are computed, and what they are on published runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from benchmarks.planner.adapters import Refused, case, held_back
from benchmarks.planner.fit import without_mean
from benchmarks.planner.memories import arithmetic
from benchmarks.planner.score import Score, score_folder, tau_and_regret, times

DATA = os.environ.get("HASTEN_PLANNER_DATA", "")
needs_data = pytest.mark.skipif(
    not Path(DATA).is_dir() or not DATA, reason="HASTEN_PLANNER_DATA names no folder of published runs"
)

ROW = {
    "id": "mine-1",
    "source": "a run of ours",
    "model": "GPT",
    "arch": "gpt",
    "layers": "24",
    "hidden": "2048",
    "ffn": "8192",
    "heads": "16",
    "vocab": "50257",
    "seq": "2048",
    "gated_mlp": "0",
    "gpu": "A100-SXM-80GB",
    "gpus_per_node": "8",
    "n_gpus": "16",
    "tp": "2",
    "pp": "2",
    "dp": "4",
    "mbs": "2",
    "gbs": "64",
    "vpp": "1",
    "recompute": "full",
    "precision": "fp16",
    "iter_time_s": "1.5",
    "notes": "sim config uses inter 800 Gb/s per node",
}


def test_a_row_becomes_what_it_says() -> None:
    one = case("mine", ROW)
    assert (one.layout.tp, one.layout.pp, one.layout.dp, one.layout.accumulation) == (2, 2, 4, 8)
    assert one.layout.recompute == "full"
    assert one.job.batch == 64
    assert one.cluster.across.bandwidth.value == pytest.approx(800e9 / 8 / 8)
    assert one.seconds == 1.5


@pytest.mark.parametrize(
    ("changes", "alike"),
    [
        ({"tp": "4", "dp": "2"}, True),
        ({"mbs": "4"}, True),
        ({"recompute": "none"}, True),
        ({"zero_stage": "1"}, True),
        ({"id": "mine-2", "iter_time_s": "1.6", "locator": "another line"}, True),
        ({"gbs": "128"}, False),
        ({"layers": "26"}, False),
        ({"seq": "1024"}, False),
        ({"n_gpus": "32", "dp": "8"}, False),
        # The planner has one set of figures for both, the runs do not.
        ({"gpu": "A100-PCIE-80GB"}, False),
        ({"precision": "fp16/bf16"}, False),
        ({"precision": "bf16"}, False),
        ({"source": "a run of yours"}, False),
        ({"locator": "a summary; release 26.04 Container"}, False),
    ],
)
def test_runs_of_one_group_differ_in_their_layout_alone(changes: dict[str, str], alike: bool) -> None:
    assert (case("mine", ROW).group == case("mine", {**ROW, **changes}).group) is alike


def test_releases_and_a_mended_machine_are_no_layouts() -> None:
    first, same, other = (
        case("mine", {**ROW, "locator": f"line {line}; release {release} Container"}).group
        for line, release in ((1, "26.04"), (2, "26.04"), (2, "26.06"))
    )
    assert first == same != other
    jean_zay = {**ROW, "source": "BigScience (measured on JeanZay)"}
    days = [
        case("mine", {**jean_zay, "notes": f"{day}; so and so"}).group for day in ("02-21", "02-24", "02-25")
    ]
    assert days[0] == days[1] != days[2]


def test_a_layout_measured_twice_is_ranked_once() -> None:
    lines = [
        {**ROW, "iter_time_s": "1.5"},
        {**ROW, "id": "mine-2", "iter_time_s": "1.7"},
        {**ROW, "id": "mine-3", "mbs": "4", "iter_time_s": "1.4"},
    ]
    score, groups = times("mine", lines)
    assert score.rows == 3
    (group,) = groups.values()
    assert sorted(measured for _, measured in group) == [1.4, pytest.approx(1.6)]
    assert score.tau in (-1.0, 1.0)


def test_facts_of_a_machine_and_of_its_software_come_with_the_source() -> None:
    row = {**ROW, "precision": "fp16/bf16", "zero_stage": "1"}
    plain = case("mine", row)
    named = case("mine", {**row, "source": "BigScience BLOOM-176B prequel (measured on JeanZay)"})
    assert plain.cluster.inside.bandwidth.value == 300e9
    assert named.cluster.inside.bandwidth.value == 100e9
    # 40 of the 100 Gb/s of each of a node's four interfaces, for eight devices.
    assert named.cluster.across.bandwidth.value == pytest.approx(4 * 40.5e9 / 8 / 8)
    assert (plain.job.reduce_whole, named.job.reduce_whole) == (False, True)
    later = case("mine", {**row, "precision": "bf16+fp32 grad accumulation"})
    assert (named.job.gradient_bytes, later.job.gradient_bytes) == (2, 0)
    wide = {**row, "n_gpus": "320", "dp": "80", "gbs": "640"}
    assert not named.job.blocking
    assert not case("mine", wide).job.blocking
    assert case("mine", {**wide, "source": "BigScience BLOOM-176B final run"}).job.blocking
    bridge = case("mine", {**row, "source": "NVIDIA Megatron-Bridge performance summary"})
    assert (plain.job.dispatch, bridge.job.dispatch) == ("pairs", "tokens")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"mbs": ""}, "mbs is missing"),
        ({"heads": ""}, "heads is missing"),
        ({"recompute": ""}, "recompute is missing"),
        ({"gpu": "TPU v4"}, "no figures of the device 'TPU v4'"),
        ({"gbs": "60"}, "gbs = 60 is not a multiple of dp x mbs = 8"),
        ({"n_gpus": "32"}, "is not n_gpus = 32"),
        ({"iter_time_s": ""}, "no time is given"),
        ({"kv_heads": "MLA"}, "latent attention"),
    ],
)
def test_a_row_that_lacks_what_matters_is_refused(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(Refused, match=reason):
        case("mine", {**ROW, **changes})


def test_the_half_does_not_depend_on_the_rows_number() -> None:
    assert held_back(ROW) == held_back({**ROW, "id": "mine-2"})
    assert len({held_back({**ROW, "gbs": str(64 * k)}) for k in range(1, 20)}) == 2


def test_tau_and_regret() -> None:
    assert tau_and_regret([[(1, 10), (2, 20), (3, 30)]]) == (1.0, 0.0)
    assert tau_and_regret([[(3, 10), (2, 20), (1, 30)]]) == (-1.0, 200.0)
    assert tau_and_regret([[(1, 10)], []]) == (None, None)
    tau, regret = tau_and_regret([[(1, 11), (2, 10), (3, 30)], [(5, 1), (6, 2)]])
    assert (tau, regret) == (pytest.approx(2 / 4), pytest.approx(5.0))


def test_a_fit_for_the_order_looks_at_errors_less_their_groups_mean() -> None:
    cases = [case("mine", {**ROW, **c}) for c in ({}, {"mbs": "4"}, {"mbs": "8"}, {"gbs": "128"})]
    apart = without_mean(cases)
    assert (apart @ [0.1, 0.2, 0.6, 0.5]).tolist() == pytest.approx([-0.2, -0.1, 0.3, 0.0])
    # What all runs of a group have in common is nothing.
    assert (apart @ [7.0, 7.0, 7.0, 3.0]).tolist() == pytest.approx([0.0] * 4, abs=1e-12)


def test_formulas_are_arithmetic_alone() -> None:
    assert arithmetic("s*b*h*(10+24/t)", {"s": 2, "b": 3, "h": 5, "t": 8}) == 390
    for wrong in ("__import__('os')", "s**2", "x", "s*("):
        with pytest.raises(Refused):
            arithmetic(wrong, {"s": 2.0})


@pytest.fixture(scope="module")
def scores() -> dict[str, Score]:
    return score_folder(Path(DATA))


# What the planner reaches on the rows at hand, with room for those held back elsewhere.
@needs_data
@pytest.mark.parametrize(
    ("file", "most"),
    [
        ("vtrain_multi", 9),
        ("vtrain_single", 6),
        ("megatron", 12),
        ("mpt_fsdp", 12),
        ("bigscience", 12),
        ("nemo", 12),
        ("ascend", 12),
        ("actmem", 5),
        ("zero_memory", 5),
        ("torch_fsdp", 5),
        ("flops_per_token", 0.2),
    ],
)
def test_errors_stay_within_reach(scores: dict[str, Score], file: str, most: float) -> None:
    error = scores[file].summary()["mean_abs_pct"]
    assert isinstance(error, float)
    assert error <= most


@needs_data
def test_the_chosen_layout_is_hardly_slower_than_the_best(scores: dict[str, Score]) -> None:
    for name in ("ranking", "ranking:several_nodes"):
        regret = scores[name].regret
        assert regret is not None
        assert regret <= 3


@needs_data
def test_layouts_come_in_the_order_in_which_they_were_measured(scores: dict[str, Score]) -> None:
    tau = scores["ranking"].tau
    assert tau is not None
    assert tau >= 0.85

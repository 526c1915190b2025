"""What single operators and collectives cost, where a fact of the framework or of the shapes decides it."""

from __future__ import annotations

import pytest

from hasten.plan.cluster import Cluster, overridden, preset
from hasten.plan.collectives import Network, place
from hasten.plan.cost import Costs
from hasten.plan.efficiency import Clock, Constants
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import ModelShape
from hasten.plan.step import step

SHAPE = ModelShape(
    layers=4,
    hidden=2048,
    heads=16,
    inner=8192,
    gated=False,
    vocabulary=50304,
    tied=True,
    positions="learned",
    max_positions=1024,
    biases=True,
    norm="layer",
)


def costs(shape: ModelShape = SHAPE, cluster: Cluster | None = None, **changes: object) -> Costs:
    layout = {name: changes.pop(name) for name in list(changes) if name in Layout.model_fields}
    plan = Layout(**layout)  # type: ignore[arg-type]
    job = Job(**{"batch": plan.batch, "sequence": 1024, "attention": "materialised", **changes})  # type: ignore[arg-type]
    return Costs(shape, cluster or preset("dgx-a100-80g", 8), plan, job)


def attention_s(tp: int, micro_batch: int, **changes: object) -> float:
    return costs(tp=tp, micro_batch=micro_batch, **changes).layer(0, False).parts["attention"]


def test_a_softmax_that_cannot_be_fused_costs_operators_and_bytes() -> None:
    # 16 heads over 8 devices: two a device, which Megatron-LM's kernel takes from two sequences on.
    odd, even = costs(tp=8, micro_batch=1), costs(tp=8, micro_batch=2)
    assert odd.layer(0, False).host > even.layer(0, False).host
    assert attention_s(8, 1) > attention_s(8, 2) / 2
    assert costs(tp=4, micro_batch=1).layer(0, False).host == even.layer(0, False).host
    # Longer than the kernel's rows; and nothing of it where attention is one kernel.
    assert attention_s(4, 1, sequence=8192) > 4.5 * attention_s(4, 1, sequence=4096)
    flash = [costs(tp=8, micro_batch=m, attention="flash").layer(0, False).host for m in (1, 2)]
    assert flash[0] == flash[1]


def head_s(vocabulary: int, tp: int = 1, **changes: object) -> float:
    shape = SHAPE.model_copy(update={"vocabulary": vocabulary})
    node = overridden(preset("dgx-a100-80g", 8), {"device": {"overrides": {"unaligned": 0.5}}})
    both = costs(shape, node, tp=tp, **changes)
    return sum(both.head(backward).parts["head"] for backward in (False, True))


def test_an_odd_vocabulary_is_slow_until_it_is_cut() -> None:
    assert head_s(50257) > 1.2 * head_s(50304)
    # Cut over devices it is padded; in fp32 a row of logits has no such grain.
    assert head_s(50257, tp=2) == pytest.approx(head_s(50304, tp=2), rel=0.01)
    assert head_s(50257, precision="fp32") == pytest.approx(head_s(50304, precision="fp32"), rel=0.01)


def test_the_loss_is_many_passes_in_megatron_and_few_where_it_is_fused() -> None:
    parts = [head_s(50304, **job) for job in ({}, {"master": "fp32"}, {"fused_loss": True})]
    assert parts[0] > parts[1] > parts[2]


def test_a_tied_table_has_two_gradients_to_add() -> None:
    loose = SHAPE.model_copy(update={"tied": False})
    tied, own = (costs(s).embedding(True).parts["embedding"] for s in (SHAPE, loose))
    assert tied > own
    table = SHAPE.embedding_parameters * 2.0 / costs().clock.bandwidth
    assert own > table
    assert costs(adapters=True).embedding(True).parts["embedding"] < own - 0.9 * table


def test_fp16_masters_take_more_passes_than_bf16() -> None:
    half, brain = (costs(precision=p, gradient_bytes=2).optimizer(1e9) for p in ("fp16", "bf16"))
    assert half > brain


def test_autocast_casts_each_gradient_once_a_micro_batch() -> None:
    once = costs(master="fp32").accumulate(1e9)
    again = costs(master="fp32", accumulation=4).accumulate(1e9)
    assert again == pytest.approx(3 * once)
    assert costs(master="fp32", precision="fp32").accumulate(1e9) == 0.0
    assert costs(master="split").accumulate(1e9) == 0.0
    assert costs(master="split", accumulation=2).accumulate(1e9) > 0.0


def test_deepspeeds_pipeline_reduces_whole_fp32_gradients() -> None:
    layout = {"tp": 8, "dp": 8, "zero": 1, "accumulation": 2, "precision": "bf16"}
    whole = costs(reduce_whole=True, **layout).reduce_gradients(1e9)  # type: ignore[arg-type]
    scattered = costs(**layout).reduce_gradients(1e9)  # type: ignore[arg-type]
    # 2 x 4 bytes reduced and 2 gathered, against 2 and 2.
    assert whole / scattered == pytest.approx(10 / 4, rel=0.1)


def test_a_token_travels_once_to_a_node_whatever_it_wants_there() -> None:
    cluster = overridden(preset("dgx-h100", 4), {})
    network = Network(cluster, Constants(inside_s=0.0, across_step_s=0.0))
    bytes_, choices = 1e9, 8
    inside = place(cluster, 8)
    assert network.dispatch(bytes_, choices, place(cluster, 1)) == 0.0
    # One choice: nothing to save. Many: never more than every other device once.
    assert network.dispatch(bytes_, 1, inside) == pytest.approx(network.all_to_all(bytes_, inside))
    assert network.dispatch(bytes_, 999, inside) == pytest.approx(7 * bytes_ / network.inside_bandwidth(8))
    across = place(cluster, 32)
    assert network.dispatch(bytes_, 999, across) == pytest.approx(3 * bytes_ / network.across_bandwidth())
    pairs = network.all_to_all(bytes_ * choices, across)
    assert network.dispatch(bytes_, choices, across) < 0.5 * pairs


def test_no_graph_of_kernels_holds_a_sparse_layer() -> None:
    sparse = SHAPE.model_copy(update={"experts": 8, "experts_per_token": 2, "expert_inner": 1024})
    plain = [costs(compiled=c).layer(0, False).host for c in (False, True)]
    mixed = [costs(sparse, compiled=c).layer(0, False).host for c in (False, True)]
    assert plain[1] < plain[0]
    # Only the fused softmax, which a compiler also makes, may differ.
    assert mixed[1] == mixed[0]


def test_the_two_copies_of_a_tied_table_meet_on_the_links_between_them() -> None:
    layout = {"tp": 1, "pp": 4, "accumulation": 4}
    loose = SHAPE.model_copy(update={"tied": False})
    # One stage a node against all of them in one, with the same links otherwise.
    wide = overridden(preset("dgx-a100-80g", 4), {"devices_per_node": 1, "domain": 1})
    near, far = (
        step(costs(SHAPE, c, **layout)).parts["data_parallel"]
        - step(costs(loose, c, **layout)).parts["data_parallel"]
        for c in (preset("dgx-a100-80g", 1), wide)
    )
    assert 0 < near < far / 4


def test_a_host_that_waits_for_each_kernel_adds_its_time() -> None:
    beside, after = costs(micro_batch=2), costs(micro_batch=2, blocking=True)
    piece = after.layer(0, True)
    assert after.launched(piece.device, piece.host) == piece.device + piece.host
    assert (
        max(piece.device, piece.host) < beside.launched(piece.device, piece.host) < piece.device + piece.host
    )
    # Of a step: the host's part is there whole, the device's as it was.
    parts = [step(one).parts for one in (beside, after)]
    assert parts[0]["launch"] < parts[1]["launch"]
    assert {n: s for n, s in parts[0].items() if n != "launch"} == pytest.approx(
        {n: s for n, s in parts[1].items() if n != "launch"}, rel=1e-6
    )


@pytest.mark.parametrize(("size", "tiles"), [(64, 64), (72, 128), (96, 128), (128, 128), (136, 192)])
def test_a_result_one_head_wide_is_made_in_whole_tiles(size: int, tiles: int) -> None:
    clock = Clock(preset("dgx-a100-80g").device, "fp16", Constants(kernel_s=0.0, batched=0.01))
    whole = clock.materialised(8, 1024, 1024, size, inner=True)
    assert clock.materialised(8, 1024, 1024, size, inner=False) / whole == pytest.approx(tiles / size)


def test_attention_of_odd_heads_costs_more_for_the_same_width() -> None:
    # 3,072 wide: 24 heads of 128 or 32 of 96, which take the tiles of 128 for a third more heads.
    even, odd = (
        costs(
            SHAPE.model_copy(update={"hidden": 3072, "heads": n, "kv_heads": n, "head_size": 3072 // n}),
            micro_batch=4,
        )
        for n in (24, 32)
    )
    assert odd.layer(0, True).parts["attention"] > 1.15 * even.layer(0, True).parts["attention"]
    assert odd.layer(0, True).parts["matmul"] == even.layer(0, True).parts["matmul"]

"""The whole prediction for one layout: time by part, memory by stage, shares of the peak, an interval."""

from __future__ import annotations

import math
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from hasten.base.errors import ConfigError
from hasten.plan.cluster import Cluster
from hasten.plan.collectives import Group
from hasten.plan.cost import Costs
from hasten.plan.efficiency import calibrated
from hasten.plan.flops import flops_per_token
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.memory import stage_memory
from hasten.plan.model import ModelShape
from hasten.plan.schedule import simulate

# Half-widths of the interval; how they were taken stands in presets/fitted.toml.
_SPREAD_CALIBRATED, _SPREAD_CATALOGUE = 0.12, 0.35


class Interval(BaseModel):
    """A figure with the bounds between which it is expected."""

    model_config = ConfigDict(frozen=True)

    value: float
    low: float
    high: float


class Event(BaseModel):
    """One bar of the pipeline's timeline; seconds from the step's beginning."""

    model_config = ConfigDict(frozen=True)

    stage: int
    kind: str
    """forward, backward, weight (zero-bubble), reduce, optimizer."""
    micro: int
    chunk: int
    start_s: float
    end_s: float


class Estimate(BaseModel):
    """What one layout costs."""

    model_config = ConfigDict(frozen=True)

    layout: Layout
    step_s: Interval
    parts: dict[str, float]
    """Seconds of the slowest stage by part; they add up to `step_s.value`."""
    memory: tuple[dict[str, float], ...]
    """For each pipeline stage: bytes by category."""
    mfu: float
    """Model FLOPs over peak: 6 per weight and token, attention counted causally (half) where it is causal."""
    hfu: float
    """Hardware FLOPs over peak: what is recomputed counts too."""
    tokens_per_s: float
    timeline: tuple[Event, ...] = ()
    notes: tuple[str, ...] = ()
    confidence: str = "catalogue"
    """catalogue | calibrated | replayed."""

    @property
    def memory_peak(self) -> float:
        """Bytes of the fullest stage."""
        return max(sum(stage.values()) for stage in self.memory)


def _sum(into: dict[str, float], parts: dict[str, float], times: float = 1.0) -> None:
    for part, seconds in parts.items():
        into[part] = into.get(part, 0.0) + seconds * times


class _Chunk(NamedTuple):
    forward: float
    backward: float
    parts: dict[str, float]
    parameters: float


def _chunk(costs: Costs, layers: list[int], first: bool, last: bool) -> _Chunk:
    """Seconds of one model chunk's two passes for one micro batch, by part."""
    model, layout, known = costs.model, costs.layout, costs.known
    parts: dict[str, float] = {}
    totals = [0.0, 0.0]
    again = len(layers)
    if layout.recompute_layers is not None:
        again = min(again, -(-layout.recompute_layers // layout.virtual))
    kinds: dict[bool, list[int]] = {}
    for index in layers:
        kinds.setdefault(model.sparse(index), []).append(index)
    for indices in kinds.values():
        count = len(indices)
        redone = count * again / max(1, len(layers))
        passes = [(costs.layer(indices[0], False), None), (costs.layer(indices[0], True), costs.recomputed(indices[0]))]
        weights = 0.0
        if layout.zero == 3 and costs.data.size > 1:
            dense, routed = costs.parameters([indices[0]], False, False)
            weights = dense + (routed if layout.ep == 1 else 0.0)
        for direction, (piece, rebuilt) in enumerate(passes):
            device, host = piece.device, piece.host
            if rebuilt is not None and rebuilt.parts:
                device += rebuilt.device * redone / count
                host += rebuilt.host * redone / count
                parts["recompute"] = parts.get("recompute", 0.0) + rebuilt.device * redone
            _sum(parts, piece.parts, count)
            if weights:
                traffic = costs.gather_weights(weights)
                calls = 1.0
                if direction:
                    traffic += costs.scatter_gradients(weights)
                    calls = 2.0
                host += calls * known.collective_launch_s
                # Collectives run beside computation and slow it down; what does not fit beside it is waited for.
                beside = min(traffic, device)
                exposed = max(traffic - known.overlap * device, (1 - known.overlap) * traffic * 0.25)
                exposed = max(exposed, 0.0) + beside * (known.slowdown - 1)
                parts["data_parallel"] = parts.get("data_parallel", 0.0) + exposed * count
                device += exposed
            whole = costs.clock.launched(device, host)
            parts["launch"] = parts.get("launch", 0.0) + (whole - device) * count
            totals[direction] += whole * count
    for wanted, end in ((first, costs.embedding), (last, costs.head)):
        if wanted:
            for direction in (0, 1):
                piece = end(bool(direction))
                whole = costs.clock.launched(piece.device, piece.host)
                _sum(parts, piece.parts)
                parts["launch"] = parts.get("launch", 0.0) + whole - piece.device
                totals[direction] += whole
    share = known.micro_s / layout.virtual
    parts["launch"] = parts.get("launch", 0.0) + share
    dense, routed = costs.parameters(layers, first, last)
    return _Chunk(totals[0] + share * 0.4, totals[1] + share * 0.6, parts, dense + routed)


def estimate(
    model: ModelShape, cluster: Cluster, layout: Layout, job: Job, timeline: bool = False
) -> Estimate:
    """Memory and time of one step. Pure: the same facts give the same figures.

    Args:
        timeline: whether to return the pipeline's bars too (slower).

    Raises:
        ConfigError: the layout does not fit the model, the batch or the cluster.
    """
    layout.check(model)
    if layout.batch != job.batch:
        raise ConfigError(
            f"dp x micro_batch x accumulation = {layout.dp} x {layout.micro_batch} x {layout.accumulation} = "
            f"{layout.batch} is not the batch {job.batch}; the nearest batch that this layout can do is "
            f"{max(1, round(job.batch / (layout.dp * layout.micro_batch))) * layout.dp * layout.micro_batch}"
        )
    if layout.devices > cluster.devices:
        raise ConfigError(f"the layout needs {layout.devices} devices; {cluster.name} has {cluster.devices}")
    costs = Costs(model, cluster, layout, job)
    known = costs.known
    sizes = layout.chunks(model.layers)
    count = len(sizes)
    cache: dict[tuple[int, int, bool, bool], _Chunk] = {}
    chunks, start = [], 0
    for c, size in enumerate(sizes):
        layers = list(range(start, start + size))
        sparse = sum(model.sparse(i) for i in layers)
        key = (size, sparse, c == 0, c == count - 1)
        if key not in cache:
            cache[key] = _chunk(costs, layers, key[2], key[3])
        chunks.append(cache[key])
        start += size
    nodes = max(1, layout.devices // cluster.devices_per_node)
    wait = 1 + known.straggle * math.log2(nodes)
    send = 0.0
    if layout.pp > 1:
        volume = costs.tokens * model.hidden * costs.size / (layout.tp if layout.sp or layout.virtual > 1 else 1)
        send = costs.network.send(volume, near=layout.tp * layout.cp * layout.dp < cluster.joined)
    forward, backward = [c.forward * wait for c in chunks], [c.backward * wait for c in chunks]
    run = simulate(
        layout.schedule, layout.pp, layout.virtual, layout.accumulation, forward, backward, send, timeline
    )
    slowest = max(range(layout.pp), key=lambda s: run.busy[s])
    parts: dict[str, float] = {}
    for c in range(slowest, count, layout.pp):
        _sum(parts, chunks[c].parts, layout.accumulation * wait)
    parts["bubble"] = run.seconds - sum(parts.values())
    # Once a step: the stage with the most parameters.
    held_by = [sum(chunks[c].parameters for c in range(s, count, layout.pp)) for s in range(layout.pp)]
    largest = max(held_by)
    reduction = costs.reduce_gradients(largest) if layout.zero < 3 else 0.0
    if layout.zero == 3 and layout.shard and layout.shard < costs.data.size:
        outer = Group(1, costs.data.size // layout.shard)
        reduction = costs.network.all_reduce(largest * 4.0 / layout.shard, outer)
    if job.overlap_gradients and reduction:
        window = sum(backward[c] for c in range(0, count, layout.pp))
        reduction = max(reduction - known.overlap * window, (1 - known.overlap) * reduction)
    parts["data_parallel"] = parts.get("data_parallel", 0.0) + reduction
    if model.tied and layout.pp > 1:
        # The two copies of the table are kept alike.
        table = model.embedding_parameters / layout.tp * 2.0
        parts["data_parallel"] += costs.network.all_reduce(table, Group(1, 2))
    parts["optimizer"] = costs.optimizer(largest)
    parts["overhead"] = known.step_s
    step = sum(parts.values())
    tokens = job.batch * job.sequence
    peak = cluster.device.peak(job.precision) * layout.devices
    model_flops = flops_per_token(model, job.sequence, "model" if job.causal else "full") * tokens
    hardware = model_flops
    if layout.recompute == "full":
        head = 6 * model.vocabulary * model.hidden * tokens
        share = 1.0
        if layout.recompute_layers is not None:
            share = min(1.0, layout.recompute_layers * layout.pp / model.layers)
        hardware += share * (model_flops - head) / 3
    known_device = calibrated(cluster.device)
    spread = _SPREAD_CALIBRATED if known_device else _SPREAD_CATALOGUE
    bars = tuple(
        Event(stage=b.stage, kind=b.kind, micro=b.micro, chunk=b.chunk, start_s=b.start, end_s=b.end)
        for b in run.bars
    )
    return Estimate(
        layout=layout,
        step_s=Interval(value=step, low=step * (1 - spread), high=step * (1 + spread)),
        parts=parts,
        memory=stage_memory(model, cluster, layout, job),
        mfu=model_flops / step / peak,
        hfu=hardware / step / peak,
        tokens_per_s=tokens / step,
        timeline=bars,
        notes=() if known_device else (f"{cluster.device.name} has not been calibrated: constants of no device",),
        confidence="calibrated" if known_device else "catalogue",
    )

"""Seconds of one step by part: the chunks of the pipeline, their schedule, and what happens once."""

from __future__ import annotations

import math
from typing import NamedTuple

from hasten.plan.collectives import Group
from hasten.plan.cost import Costs
from hasten.plan.schedule import Bar, simulate


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
    model, layout, job, known = costs.model, costs.layout, costs.job, costs.known
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
        passes = [
            (costs.layer(indices[0], False), None),
            (costs.layer(indices[0], True), costs.recomputed(indices[0])),
        ]
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
                # Collectives run beside computation and slow it down; what does not fit beside it is
                # waited for.
                if job.overlap_gradients:
                    exposed = max(traffic - known.overlap * device, (1 - known.overlap) * traffic * 0.25)
                    exposed += min(traffic, device) * (known.slowdown - 1)
                else:
                    exposed = traffic
                parts["data_parallel"] = parts.get("data_parallel", 0.0) + exposed * count
                device += exposed
            whole = costs.launched(device, host)
            parts["launch"] = parts.get("launch", 0.0) + (whole - device) * count
            totals[direction] += whole * count
    for wanted, end in ((first, costs.embedding), (last, costs.head)):
        if wanted:
            for direction in (0, 1):
                piece = end(bool(direction))
                whole = costs.launched(piece.device, piece.host)
                _sum(parts, piece.parts)
                parts["launch"] = parts.get("launch", 0.0) + whole - piece.device
                totals[direction] += whole
    dense, routed = costs.parameters(layers, first, last)
    added = costs.accumulate(dense + routed)
    parts["elementwise"] = parts.get("elementwise", 0.0) + added
    totals[1] += added
    share = known.micro_s / layout.virtual
    parts["launch"] = parts.get("launch", 0.0) + share
    return _Chunk(totals[0] + share * 0.4, totals[1] + share * 0.6, parts, dense + routed)


class Step(NamedTuple):
    """Seconds by part of the slowest stage, and the bars of the pipeline where they were asked for."""

    parts: dict[str, float]
    bars: tuple[Bar, ...]

    @property
    def seconds(self) -> float:
        """All parts together."""
        return sum(self.parts.values())


def step(costs: Costs, timeline: bool = False) -> Step:
    """One step of the layout that the prices are for."""
    model, cluster, layout, job, known = costs.model, costs.cluster, costs.layout, costs.job, costs.known
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
        # Each device of the tensor-parallel group sends its part (arXiv 2104.04473 section 4.1).
        volume = costs.tokens * model.hidden * costs.size / layout.tp
        send = costs.network.send(volume, near=layout.tp * layout.cp * layout.dp < cluster.joined)
    hop = 0.0
    if layout.pp > 1 and layout.virtual == 1:
        # Without chunks to turn to, a stage waits for its own transfers.
        far = layout.tp * layout.cp * layout.dp >= cluster.joined
        hop, send = send + (known.hop_s if far else 0.0), 0.0
    forward = [c.forward * wait + hop for c in chunks]
    backward = [c.backward * wait + hop for c in chunks]
    run = simulate(
        layout.schedule, layout.pp, layout.virtual, layout.accumulation, forward, backward, send, timeline
    )
    slowest = max(range(layout.pp), key=lambda s: run.busy[s])
    parts: dict[str, float] = {}
    for c in range(slowest, count, layout.pp):
        _sum(parts, chunks[c].parts, layout.accumulation * wait)
    if hop:
        parts["pipeline"] = 2 * hop * layout.accumulation
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
        ends = Group(2, 1) if layout.devices <= cluster.joined else Group(1, 2)
        parts["data_parallel"] += costs.network.all_reduce(table, ends)
    parts["optimizer"] = costs.optimizer(largest)
    parts["overhead"] = known.step_s
    return Step(parts, run.bars)

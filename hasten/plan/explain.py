"""Questions beside the best layout: two of them side by side, does it fit, how does it scale, what does a
run cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from hasten.base.errors import ConfigError
from hasten.base.screen import spell_time
from hasten.plan.candidates import candidates, check_fixed
from hasten.plan.cluster import Cluster
from hasten.plan.estimate import Estimate, Interval
from hasten.plan.flops import training_flops
from hasten.plan.job import Job
from hasten.plan.memory import stage_memory
from hasten.plan.model import ModelShape
from hasten.plan.search import (
    SECONDS_PER_DAY,
    Found,
    Limits,
    Rejected,
    check_layer,
    search,
    why_nothing,
)


class Row(NamedTuple):
    """One line of a comparison; seconds or bytes."""

    name: str
    a: float
    b: float

    @property
    def difference(self) -> float:
        """b over a."""
        return self.b - self.a


class Comparison(NamedTuple):
    """Two layouts side by side; `time` and `memory` (of the fullest stage) are sorted by what differs
    most."""

    a: Estimate
    b: Estimate
    time: tuple[Row, ...]
    memory: tuple[Row, ...]
    sentences: tuple[str, ...]


def compare(a: Estimate, b: Estimate) -> Comparison:
    """Where the difference of two layouts comes from; the rows of each table add up to its difference."""
    times = _rows(a.parts, b.parts)
    memories = _rows(fullest(a), fullest(b))
    slow, fast, name = (b, a, "B") if b.step_s.value >= a.step_s.value else (a, b, "A")
    gap = slow.step_s.value - fast.step_s.value
    sign = 1 if name == "B" else -1
    sentences = [
        f"{name} is slower by {spell_time(gap)} ({100 * gap / fast.step_s.value:.1f} %)"
        if gap
        else "both take the same time"
    ]
    losses = sorted(((sign * row.difference, row.name) for row in times), reverse=True)
    lost = [f"{spell_time(loss)} in {part}" for loss, part in losses[:3] if loss > 0.01 * max(gap, 1e-12)]
    won = [
        f"{spell_time(-loss)} in {part}" for loss, part in losses[::-1][:2] if -loss > 0.05 * max(gap, 1e-12)
    ]
    if lost and gap:
        sentences.append(f"it loses {', '.join(lost)}")
    if won and gap:
        sentences.append(f"it gains {', '.join(won)}")
    more = b.memory_peak - a.memory_peak
    if abs(more) > 1e6 and memories:
        most = max(memories, key=lambda row: row.difference * (1 if more > 0 else -1))
        sentences.append(
            f"B needs {abs(more) / 1e9:.2f} GB {'more' if more > 0 else 'less'} at its fullest stage, "
            f"{abs(most.difference) / 1e9:.2f} GB of it {most.name}"
        )
    return Comparison(a, b, times, memories, tuple(sentences))


def fullest(item: Estimate) -> dict[str, float]:
    """Bytes by category of the stage that needs most."""
    return max(item.memory, key=lambda stage: sum(stage.values()))


class Fit(NamedTuple):
    """Whether a model fits: the smallest layout, what is missing, and on how many devices it would fit."""

    fits: bool
    layout: str
    need_bytes: float
    room_bytes: float
    stage: int
    by_category: dict[str, float]
    devices: int
    smallest_devices: int | None
    """The smallest number of devices, in whole nodes once there is more than one, on which it fits."""

    @property
    def missing_bytes(self) -> float:
        """0 where it fits."""
        return max(0.0, self.need_bytes - self.room_bytes)


# Beyond these a search for the smallest number of devices ends.
MOST_DEVICES = 1 << 15


def fit(
    model: ModelShape,
    cluster: Cluster,
    job: Job,
    limits: Limits | None = None,
) -> Fit:
    """Whether any layout fits, by memory alone; nothing is timed.

    Raises:
        ConfigError: no layout can be made at all.
    """
    limits = limits or Limits()
    devices = limits.devices or cluster.devices
    check_fixed(limits.fixed)
    check_layer(model, cluster, job)
    room = cluster.device.memory_bytes.value * (1.0 - limits.headroom)
    smallest = _smallest(model, cluster, job, devices, limits)
    if smallest is None:
        raise ConfigError(why_nothing(model, cluster, job, devices, limits.fixed))
    layout, stages = smallest
    sums = [sum(stage.values()) for stage in stages]
    if max(sums) > room and limits.offload and "offload" not in limits.fixed:
        hosted = limits.model_copy(update={"fixed": {**limits.fixed, "offload": "optimizer"}})
        other = _smallest(model, cluster, job, devices, hosted)
        if other is not None and max(sum(s.values()) for s in other[1]) <= room:
            layout, stages = other
            sums = [sum(stage.values()) for stage in stages]
    stage = max(range(len(sums)), key=sums.__getitem__)
    enough: int | None = None
    for count in _counts(cluster):
        if count > max(devices, MOST_DEVICES):
            break
        wide = cluster.model_copy(update={"nodes": max(1, -(-count // cluster.devices_per_node))})
        found = _smallest(model, wide, job, count, limits, room)
        if found is not None and max(sum(s.values()) for s in found[1]) <= room:
            enough = count
            break
    return Fit(
        fits=sums[stage] <= room,
        layout=layout.describe(),
        need_bytes=sums[stage],
        room_bytes=room,
        stage=stage,
        by_category=dict(stages[stage]),
        devices=devices,
        smallest_devices=enough,
    )


class Scale(NamedTuple):
    """The best layout at one number of devices. `efficiency`: tokens/s per device over that of the fewest."""

    devices: int
    best: Estimate | None
    miss: Rejected | None
    efficiency: float | None
    note: str = ""


def scaling(
    model: ModelShape, cluster: Cluster, job: Job, counts: Sequence[int], limits: Limits | None = None
) -> list[Scale]:
    """The best layout at each number of devices, the batch staying the same (strong scaling)."""
    limits = limits or Limits()
    found: list[Scale] = []
    base: float | None = None
    for count in sorted(set(counts)):
        nodes = max(1, -(-count // cluster.devices_per_node))
        wide = cluster.model_copy(update={"nodes": nodes})
        try:
            answer: Found = search(model, wide, job, limits.model_copy(update={"devices": count}))
        except ConfigError as error:
            found.append(Scale(count, None, None, None, str(error)))
            continue
        if answer.best is None:
            found.append(Scale(count, None, answer.nearest_miss, None))
            continue
        each = answer.best.tokens_per_s / count
        base = base or each
        found.append(Scale(count, answer.best, None, each / base))
    return found


class Training(NamedTuple):
    """A whole run of `tokens` tokens. Days as an interval; cost in the currency of the cluster's price."""

    tokens: float
    flops: float
    days: Interval
    device_hours: float
    cost: float


def training(item: Estimate, model: ModelShape, cluster: Cluster, job: Job) -> Training | None:
    """What the whole run takes, or None where no number of tokens was given. FLOPs are 6 per weight that a
    token visits (arXiv 2001.08361), attention not counted."""
    if not job.tokens_total:
        return None
    steps = job.tokens_total / (job.batch * job.sequence)
    days = Interval(
        value=steps * item.step_s.value / SECONDS_PER_DAY,
        low=steps * item.step_s.low / SECONDS_PER_DAY,
        high=steps * item.step_s.high / SECONDS_PER_DAY,
    )
    hours = days.value * 24 * item.layout.devices
    flops = training_flops(model.active_parameters, job.tokens_total)
    return Training(job.tokens_total, flops, days, hours, hours * cluster.price_per_device_hour)


def days_at(flops: float, devices: int, peak_flops: float, share: float) -> float:
    """Days that `flops` take on so many devices at a share of their peak: the estimate on the back of an
    envelope.

    Raises ConfigError for a share that is not between 0 and 1.
    """
    if not 0 < share <= 1:
        raise ConfigError(f"share of the peak = {share}: give more than 0 and at most 1")
    return flops / (devices * peak_flops * share) / SECONDS_PER_DAY


def _rows(a: dict[str, float], b: dict[str, float]) -> tuple[Row, ...]:
    rows = [Row(name, a.get(name, 0.0), b.get(name, 0.0)) for name in dict.fromkeys([*a, *b])]
    return tuple(sorted(rows, key=lambda row: -abs(row.difference)))


def _counts(cluster: Cluster) -> list[int]:
    """Numbers of devices to try: powers of two within a node, then doubling nodes."""
    per = cluster.devices_per_node
    inside = [count for count in (1 << n for n in range(12)) if count < per]
    counts = [*inside, per]
    while counts[-1] < MOST_DEVICES:
        counts.append(2 * counts[-1])
    return counts


def _smallest(
    model: ModelShape,
    cluster: Cluster,
    job: Job,
    devices: int,
    limits: Limits,
    enough_bytes: float = 0.0,
) -> tuple[Any, Sequence[dict[str, float]]] | None:
    """The layout whose fullest stage is the smallest; the first below `enough_bytes` will do."""
    best: tuple[Any, Sequence[dict[str, float]]] | None = None
    least = float("inf")
    for layout in candidates(model, cluster, job, devices, limits.fixed):
        if layout.recompute == "none" and "recompute" not in limits.fixed:
            continue  # Never the smallest.
        stages = stage_memory(model, cluster, layout, job)
        peak = max(sum(stage.values()) for stage in stages)
        if peak < least:
            best, least = (layout, stages), peak
            if peak <= enough_bytes:
                break
    return best

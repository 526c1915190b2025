"""The search for the best layout: every candidate is weighed, those that fit are timed, the rest say why not.

Memory comes first because it is cheap; of those that fit each gets a full estimate. The answer keeps the
best, the runners-up, the Pareto set of step time against memory, and a reason for every layout that was left
out.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from hasten.base.errors import ConfigError, nearest
from hasten.base.screen import spell_time
from hasten.plan import cluster as clusters
from hasten.plan.candidates import candidates, check_fixed, divisors
from hasten.plan.cluster import Cluster
from hasten.plan.estimate import Estimate, estimate
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.memory import stage_memory
from hasten.plan.model import ModelShape

Kind = Literal["memory", "slower", "limit"]
REASONS: dict[str, str] = {"memory": "out of memory", "slower": "slower", "limit": "outside a limit"}
"""Why a layout was left out, in words."""

SECONDS_PER_DAY = 86400.0


class Bound(BaseModel):
    """One wish: `figure` of the answer stays below or above `value` (s, bytes, days, tokens/s, share,
    money)."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    figure: str
    below: bool
    value: float

    def met(self, value: float) -> bool:
        """Whether a figure is as wished."""
        return value <= self.value if self.below else value >= self.value


class Limits(BaseModel):
    """What the search may use and what its answer must meet. Frozen; unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    devices: int = Field(default=0, ge=0)
    """0: all of the cluster."""
    fixed: dict[str, Any] = Field(default_factory=dict)
    """Fields of `Layout` with one value."""
    bounds: tuple[Bound, ...] = ()
    offload: bool = True
    """A layout that does not fit is also tried with the optimizer's states on the host."""
    headroom: float = Field(default=0.0, ge=0.0, lt=1.0)
    """Share of a device's memory that stays free."""
    runners_up: int = Field(default=9, ge=0)


class Rejected(NamedTuple):
    """A layout that was left out: by memory (`missing_bytes` short), by a limit, or because another is
    faster."""

    layout: Layout
    kind: Kind
    reason: str
    missing_bytes: float = 0.0
    step_s: float | None = None


@dataclass(frozen=True)
class Found:
    """The answer of a search. `best` is None where nothing fits; `nearest_miss` is then the closest."""

    best: Estimate | None
    ranked: tuple[Estimate, ...]
    """The best and the runners-up, fastest first; one that uses the host counts 3 % slower than it is."""
    pareto: tuple[Estimate, ...]
    """Those of which none is both faster and smaller, fastest first."""
    fitting: tuple[Estimate, ...]
    """All that fit and meet the limits, fastest first."""
    rejected: tuple[Rejected, ...]
    nearest_miss: Rejected | None
    looked_at: int
    seconds: float
    notes: tuple[str, ...] = ()

    def counts(self) -> dict[str, int]:
        """How many layouts were left out for what."""
        return dict(Counter(item.kind for item in self.rejected))


def search(
    model: ModelShape,
    cluster: Cluster,
    job: Job,
    limits: Limits | None = None,
) -> Found:
    """The fastest layout of `job` on `cluster` that fits and meets `limits`.

    Raises:
        ConfigError: no layout can be made at all (batch, heads, a fixed field, a device smaller than one
        layer).
    """
    limits = limits or Limits()
    begin = time.perf_counter()
    devices = limits.devices or cluster.devices
    if devices > cluster.devices:
        raise ConfigError(f"devices = {devices}: the cluster has {cluster.devices}; give more nodes")
    check_fixed(limits.fixed)
    check_layer(model, cluster, job)
    room = cluster.device.memory_bytes.value * (1.0 - limits.headroom)
    notes: list[str] = []
    listed = list(candidates(model, cluster, job, devices, limits.fixed))
    if not listed:
        raise ConfigError(why_nothing(model, cluster, job, devices, limits.fixed))
    fits, rejected = _weighed(model, cluster, job, listed, room)
    looked_at = len(listed)
    if limits.offload and "offload" not in limits.fixed:
        hosted = [item.layout.model_copy(update={"offload": "optimizer"}) for item in rejected]
        more, still = _weighed(model, cluster, job, hosted, room)
        if more and not fits:
            notes.append("nothing fits with the optimizer's states on the device: they are on the host")
        fits += more
        rejected += still
        looked_at += len(hosted)
    timed = sorted((estimate(model, cluster, layout, job) for layout in fits), key=_rank)
    timed = _refined(model, cluster, job, timed, room)
    good, broken = _within(timed, limits, cluster, job)
    rejected += broken
    rejected += [slower(item, good[0]) for item in good[1 + limits.runners_up :]]
    miss = min((r for r in rejected if r.kind == "memory"), key=lambda r: r.missing_bytes, default=None)
    return Found(
        best=good[0] if good else None,
        ranked=tuple(good[: 1 + limits.runners_up]),
        pareto=tuple(pareto(good)),
        fitting=tuple(good),
        rejected=tuple(rejected),
        nearest_miss=miss,
        looked_at=looked_at,
        seconds=time.perf_counter() - begin,
        notes=tuple(notes),
    )


def pareto(estimates: Sequence[Estimate]) -> list[Estimate]:
    """Those of which none is both faster and smaller, fastest first."""
    kept: list[Estimate] = []
    for item in sorted(estimates, key=lambda e: (e.step_s.value, e.memory_peak)):
        if not kept or item.memory_peak < kept[-1].memory_peak:
            kept.append(item)
    return kept


def slower(item: Estimate, best: Estimate) -> Rejected:
    """Why `item` is not the answer: the parts in which it loses, largest first."""
    behind = item.step_s.value - best.step_s.value
    names = sorted(set(item.parts) | set(best.parts))
    losses = [(item.parts.get(name, 0.0) - best.parts.get(name, 0.0), name) for name in names]
    worst = [
        f"{spell_time(loss)} in {name}"
        for loss, name in sorted(losses, reverse=True)[:2]
        if loss > 0.02 * behind
    ]
    percent = 100 * behind / best.step_s.value
    reason = f"slower by {spell_time(behind)} ({percent:.0f} %)" + (f": {', '.join(worst)}" if worst else "")
    return Rejected(item.layout, "slower", reason, step_s=item.step_s.value)


def out_of_memory(layout: Layout, stages: Sequence[dict[str, float]], room: float) -> Rejected:
    """Why a layout does not fit: the fullest stage, by how much, and what fills it."""
    sums = [sum(stage.values()) for stage in stages]
    stage = max(range(len(sums)), key=sums.__getitem__)
    missing = sums[stage] - room
    name, most = max(stages[stage].items(), key=lambda pair: pair[1])
    reason = (
        f"out of memory at stage {stage} by {missing / 1e9:.1f} GB: needs {sums[stage] / 1e9:.1f} of "
        f"{room / 1e9:.1f} GB, most of it {name} ({most / 1e9:.1f} GB)"
    )
    return Rejected(layout, "memory", reason, missing_bytes=missing)


def check_layer(model: ModelShape, cluster: Cluster, job: Job) -> None:
    """Whether a device holds one layer's weights, cut as finely as tensor and expert parallel can.

    Raises:
        ConfigError: it does not; names the smallest device among the presets that does.
    """
    element = 4 if job.precision == "fp32" or job.master == "fp32" else 2
    tp = max(d for d in divisors(model.heads) if d <= cluster.joined)
    need = max(
        element
        * (model.shared_layer_parameters(i) / tp + model.expert_parameters(i) / max(model.experts, 1) / tp)
        for i in {0, model.layers - 1}
    )
    room = cluster.device.memory_bytes.value
    if need <= room:
        return
    sizes = sorted(
        (float(entry["memory_bytes"]["value"]), name) for name, entry in clusters.devices().items()
    )
    near = next((f"{name} with {size / 1e9:.0f} GB" for size, name in sizes if size >= need), None)
    raise ConfigError(
        f"{cluster.device.name} has {room / 1e9:.3g} GB: less than the weights of one layer of {model.name} "
        f"({need / 1e9:.3g} GB in {8 * element} bits, cut by tp = {tp}); "
        + (f"the nearest device that holds it is {near}" if near else "no device among the presets holds it")
    )


def why_nothing(model: ModelShape, cluster: Cluster, job: Job, devices: int, fixed: dict[str, Any]) -> str:
    """What is wrong where not a single layout can be made, and the nearest that works."""
    wanted = ", ".join(f"{name} = {value}" for name, value in fixed.items())
    kind = f"no layout of {devices} devices" + (f" with {wanted}" if fixed else "")
    if not {"micro_batch", "accumulation"} & set(fixed):
        batch = nearest_batch(model, cluster, job, devices, fixed)
        if batch is not None:
            return (
                f"{kind} divides a batch of {job.batch} sequences; the nearest batch that one divides "
                f"is {batch}"
            )
    for name, value in fixed.items():
        rest = {key: other for key, other in fixed.items() if key != name}
        works = {getattr(x, name) for x in candidates(model, cluster, job, devices, rest)}
        if works:
            number = isinstance(value, int) and not isinstance(value, bool)
            close = min(works, key=lambda v: abs(v - value)) if number else min(map(str, works))
            return (
                f"{kind} cuts {model.name} ({model.heads} heads, {model.layers} layers) and divides the "
                f"batch of "
                f"{job.batch}; the nearest that works is {name} = {close}"
            )
    near = next(
        (n for n in range(devices - 1, 0, -1) if next(candidates(model, cluster, job, n), None)), None
    )
    return (
        f"no layout cuts {model.name} ({model.heads} heads, {model.layers} layers) over {devices} devices "
        f"with a "
        f"batch of {job.batch}" + (f"; the nearest number that works is {near}" if near else "")
    )


def nearest_batch(
    model: ModelShape, cluster: Cluster, job: Job, devices: int, fixed: dict[str, Any]
) -> int | None:
    """The batch nearest to the job's that some layout divides; None where no batch helps."""
    # A batch that every dp up to `devices` divides shows which there are.
    any_batch = job.model_copy(update={"batch": devices})
    degrees = {x.dp for x in candidates(model, cluster, any_batch, devices, fixed)}
    near = [dp * rows for dp in degrees for rows in (job.batch // dp, job.batch // dp + 1) if rows]
    return min(near, key=lambda b: abs(b - job.batch), default=None)


def figures(item: Estimate, cluster: Cluster, job: Job) -> dict[str, float]:
    """The figures that a limit can bound. days and cost are those of `tokens_total` (0 where it is not
    asked)."""
    devices = item.layout.devices
    days = job.tokens_total / item.tokens_per_s / SECONDS_PER_DAY
    return {
        "step": item.step_s.value,
        "memory": item.memory_peak,
        "days": days,
        "cost": days * 24 * devices * cluster.price_per_device_hour,
        "tokens_per_s": item.tokens_per_s,
        "mfu": item.mfu,
        "hfu": item.hfu,
        "devices": float(devices),
    }


_UNITS = {
    "step": {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0},
    "memory": {"": 1.0, "b": 1.0, "mb": 1e6, "gb": 1e9, "gib": 2.0**30, "tb": 1e12},
    "days": {"": 1.0, "d": 1.0, "days": 1.0, "h": 1 / 24},
    "cost": {"": 1.0, "k": 1e3, "m": 1e6},
    "tokens_per_s": {"": 1.0, "k": 1e3, "m": 1e6},
    "mfu": {"": 1.0, "%": 0.01},
    "hfu": {"": 1.0, "%": 0.01},
}


def parse_limit(text: str) -> Bound:
    """`"step<5s"`, `"memory<70GB"`, `"days<30"`, `"mfu>40%"`, `"cost<2m"`.

    Raises ConfigError: an unknown figure or unit, or no comparison.
    """
    match = re.fullmatch(r"\s*([a-z_]+)\s*(<=|<|>=|>)\s*([0-9.]+(?:e[+-]?\d+)?)\s*([a-z%]*)\s*", text.lower())
    if match is None:
        raise ConfigError(f"limit {text!r}: give FIGURE<VALUE, for example step<5s, memory<70GB or mfu>40%")
    figure, sign, number, unit = match.groups()
    if figure not in _UNITS:
        raise ConfigError(f"limit {text!r}: no figure {figure!r}; {nearest(figure, _UNITS)}")
    if unit not in _UNITS[figure]:
        allowed = [name for name in _UNITS[figure] if name]
        raise ConfigError(f"limit {text!r}: {figure} has no unit {unit!r}; {nearest(unit, allowed)}")
    try:
        value = float(number)
    except ValueError:
        raise ConfigError(f"limit {text!r}: {number!r} is not a number") from None
    return Bound(figure=figure, below=sign.startswith("<"), value=value * _UNITS[figure][unit])


# How much faster a layout that uses the host must be to come before one that does not: what a host does
# beside its devices (data, checkpoints, other jobs) is the least certain of all figures.
_HOST_MARGIN = 1.03


def _rank(item: Estimate) -> tuple[float, float, str]:
    margin = 1.0 if item.layout.offload == "none" else _HOST_MARGIN
    return item.step_s.value * margin, item.memory_peak, item.layout.describe()


def _weighed(
    model: ModelShape, cluster: Cluster, job: Job, layouts: Sequence[Layout], room: float
) -> tuple[list[Layout], list[Rejected]]:
    fits: list[Layout] = []
    rejected: list[Rejected] = []
    for layout in layouts:
        stages = stage_memory(model, cluster, layout, job)
        if max(sum(stage.values()) for stage in stages) <= room:
            fits.append(layout)
        else:
            rejected.append(out_of_memory(layout, stages, room))
    return fits, rejected


# Of the fastest, so many are tried with fewer layers recomputed.
_REFINE = 12


def _refined(
    model: ModelShape,
    cluster: Cluster,
    job: Job,
    timed: list[Estimate],
    room: float,
) -> list[Estimate]:
    """The fastest that recompute every layer, also with as few layers recomputed as memory allows."""
    more: list[Estimate] = []
    for item in [e for e in timed if e.layout.recompute == "full" and e.layout.recompute_layers is None][
        :_REFINE
    ]:
        low, high = 0, max(item.layout.chunks(model.layers)) * item.layout.virtual
        fitting: Layout | None = None
        while low < high:
            middle = (low + high) // 2
            layout = item.layout.model_copy(update={"recompute_layers": middle})
            if max(sum(s.values()) for s in stage_memory(model, cluster, layout, job)) <= room:
                fitting, high = layout, middle
            else:
                low = middle + 1
        if fitting is not None and fitting.recompute_layers:
            more.append(estimate(model, cluster, fitting, job))
    return sorted([*timed, *more], key=_rank)


def _within(
    timed: Sequence[Estimate], limits: Limits, cluster: Cluster, job: Job
) -> tuple[list[Estimate], list[Rejected]]:
    good: list[Estimate] = []
    broken: list[Rejected] = []
    for item in timed:
        got = figures(item, cluster, job)
        bound = next((b for b in limits.bounds if not b.met(got[b.figure])), None)
        if bound is None:
            good.append(item)
            continue
        sign = "above" if bound.below else "below"
        reason = f"{bound.figure} = {got[bound.figure]:.4g} is {sign} the limit {bound.value:.4g}"
        broken.append(Rejected(item.layout, "limit", reason, step_s=item.step_s.value))
    return good, broken

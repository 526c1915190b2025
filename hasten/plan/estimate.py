"""The whole prediction for one layout: time by part, memory by stage, shares of the peak, an interval."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hasten.base.errors import ConfigError
from hasten.plan.cluster import Cluster
from hasten.plan.cost import Costs
from hasten.plan.efficiency import calibrated
from hasten.plan.flops import flops_per_token
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.memory import stage_memory
from hasten.plan.model import ModelShape
from hasten.plan.step import step

# Measured over predicted time: the 5th and 95th percentile over 607 dense rows of published runs that no fit
# has seen, a file counting as 60 of them at most (benchmarks/planner, 2026-11-30).
_CALIBRATED = (0.87, 1.24)
# Of a device that nobody calibrated, and of mixtures, whose routing is not modelled: an assumption.
_CATALOGUE = (0.65, 1.5)

# One profiled device: measured over replayed was 0.90 to 1.12 in 11 runs that were not the profiled one
# (benchmarks/planner/own.py, 2026-11-29); a little wider.
_REPLAYED = (0.87, 1.15)


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
    done = step(costs, timeline)
    seconds = done.seconds
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
    replayed = cluster.device.replayed
    known_device = calibrated(cluster.device)
    notes = [] if known_device else [f"{cluster.device.name} has not been calibrated: constants of no device"]
    if model.experts:
        notes.append("routing is taken as balanced; published mixtures are predicted 22 % off on average")
    if replayed:
        times = ", ".join(f"{kind} x {factor:.3g}" for kind, factor in replayed.items())
        notes.append(f"replayed from a profile: {times}; collectives are not")
    low, high = _CALIBRATED if known_device and not model.experts else _CATALOGUE
    if replayed and layout.devices == 1:
        low, high = _REPLAYED
    bars = tuple(
        Event(stage=b.stage, kind=b.kind, micro=b.micro, chunk=b.chunk, start_s=b.start, end_s=b.end)
        for b in done.bars
    )
    return Estimate(
        layout=layout,
        step_s=Interval(value=seconds, low=seconds * low, high=seconds * high),
        parts=done.parts,
        memory=stage_memory(model, cluster, layout, job),
        mfu=model_flops / seconds / peak,
        hfu=hardware / seconds / peak,
        tokens_per_s=tokens / seconds,
        timeline=bars,
        notes=tuple(notes),
        confidence="replayed" if replayed else "calibrated" if known_device else "catalogue",
    )

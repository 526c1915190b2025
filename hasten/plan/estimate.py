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
    known_device = calibrated(cluster.device)
    spread = _SPREAD_CALIBRATED if known_device else _SPREAD_CATALOGUE
    bars = tuple(
        Event(stage=b.stage, kind=b.kind, micro=b.micro, chunk=b.chunk, start_s=b.start, end_s=b.end)
        for b in done.bars
    )
    return Estimate(
        layout=layout,
        step_s=Interval(value=seconds, low=seconds * (1 - spread), high=seconds * (1 + spread)),
        parts=done.parts,
        memory=stage_memory(model, cluster, layout, job),
        mfu=model_flops / seconds / peak,
        hfu=hardware / seconds / peak,
        tokens_per_s=tokens / seconds,
        timeline=bars,
        notes=()
        if known_device
        else (f"{cluster.device.name} has not been calibrated: constants of no device",),
        confidence="calibrated" if known_device else "catalogue",
    )

"""The whole prediction for one layout: time by part, memory by stage, shares of the peak, an interval."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from hasten.plan.cluster import Cluster
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import ModelShape


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


def estimate(model: ModelShape, cluster: Cluster, layout: Layout, job: Job) -> Estimate:
    """Memory and time of one step. Pure: the same facts give the same figures."""
    raise NotImplementedError

"""What a plan is written as: one JSON document, which `--json` prints and the page draws.

Format `hasten-plan/1`. Sizes are bytes, times seconds, rates per second, shares between 0 and 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hasten.plan.cluster import Cluster
from hasten.plan.estimate import Estimate
from hasten.plan.explain import Comparison, Fit, Scale, training
from hasten.plan.job import Job
from hasten.plan.model import ModelShape
from hasten.plan.search import Found

FORMAT = "hasten-plan/1"
MFU = "model FLOPs: 6 per weight a token visits, causal attention counted half; HFU adds what is recomputed"
# A timeline of a thousand micro batches is a grey bar; the first of them show the schedule.
MOST_EVENTS = 4000


def plan_document(
    model: ModelShape, cluster: Cluster, job: Job, found: Found, rejected: bool = True
) -> dict[str, Any]:
    """The answer of a search. `rejected`: also every layout that was left out, with its reason."""
    document: dict[str, Any] = {
        "format": FORMAT,
        **facts_document(model, cluster, job),
        "best": estimate_document(found.best, timeline=True) if found.best else None,
        "training": training_document(found.best, model, cluster, job) if found.best else None,
        "ranked": [estimate_document(item) for item in found.ranked],
        "pareto": [estimate_document(item) for item in found.pareto],
        "fitting": [
            {"layout": item.layout.describe(), "step_s": item.step_s.value, "memory_bytes": item.memory_peak}
            for item in found.fitting
        ],
        "looked_at": found.looked_at,
        "rejected_counts": found.counts(),
        "search_s": found.seconds,
        "notes": list(found.notes),
    }
    if found.best is None and found.nearest_miss is not None:
        miss = found.nearest_miss
        document["nearest_miss"] = {"layout": miss.layout.describe(), "reason": miss.reason}
    if rejected:
        document["rejected"] = [
            {"layout": item.layout.describe(), "kind": item.kind, "reason": item.reason}
            for item in found.rejected
        ]
    return document


def facts_document(model: ModelShape, cluster: Cluster, job: Job) -> dict[str, Any]:
    """Model, cluster and job as they were understood."""
    return {
        "model": {
            **model.model_dump(),
            "parameters": model.parameters,
            "active_parameters": model.active_parameters,
        },
        "cluster": {**cluster.model_dump(), "devices": cluster.devices},
        "job": job.model_dump(),
        "mfu_convention": MFU,
    }


def estimate_document(item: Estimate, timeline: bool = False) -> dict[str, Any]:
    """One layout with its figures."""
    document: dict[str, Any] = {
        "layout": item.layout.model_dump(),
        "name": item.layout.describe(),
        "step_s": item.step_s.model_dump(),
        "parts_s": dict(item.parts),
        "memory_bytes": [dict(stage) for stage in item.memory],
        "memory_peak_bytes": item.memory_peak,
        "mfu": item.mfu,
        "hfu": item.hfu,
        "tokens_per_s": item.tokens_per_s,
        "confidence": item.confidence,
        "notes": list(item.notes),
    }
    if timeline:
        events = sorted(item.timeline, key=lambda event: event.start_s)[:MOST_EVENTS]
        document["timeline"] = [
            [e.stage, e.kind, e.micro, e.chunk, round(e.start_s, 6), round(e.end_s, 6)] for e in events
        ]
    return document


def training_document(item: Estimate, model: ModelShape, cluster: Cluster, job: Job) -> dict[str, Any] | None:
    """The whole run, or None where no number of tokens was given."""
    whole = training(item, model, cluster, job)
    if whole is None:
        return None
    return {**whole._asdict(), "days": whole.days.model_dump()}


def comparison_document(comparison: Comparison) -> dict[str, Any]:
    """Two layouts side by side."""
    return {
        "a": estimate_document(comparison.a),
        "b": estimate_document(comparison.b),
        "time_s": [{**row._asdict(), "difference": row.difference} for row in comparison.time],
        "memory_bytes": [{**row._asdict(), "difference": row.difference} for row in comparison.memory],
        "sentences": list(comparison.sentences),
    }


def fit_document(answer: Fit) -> dict[str, Any]:
    """The answer to `--fit`."""
    return {**answer._asdict(), "missing_bytes": answer.missing_bytes}


def scaling_document(rows: Sequence[Scale]) -> list[dict[str, Any]]:
    """One entry for each number of devices."""
    return [
        {
            "devices": row.devices,
            "best": estimate_document(row.best) if row.best else None,
            "efficiency": row.efficiency,
            "why_not": row.miss.reason if row.miss else row.note or None,
        }
        for row in rows
    ]

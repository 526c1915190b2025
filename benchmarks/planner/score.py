"""Errors, ranking and regret of the planner on one folder of published runs."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.planner.adapters import Refused, Row, case, held_back, rows
from benchmarks.planner.memories import memory_pairs
from benchmarks.planner.shapes import named
from hasten.base.errors import UserError
from hasten.plan.estimate import estimate
from hasten.plan.flops import flops_per_token
from hasten.plan.layout import Layout

TIMES = (
    "vtrain_multi",
    "vtrain_single",
    "megatron",
    "mpt_fsdp",
    "bigscience",
    "nemo",
    "ascend",
    "public_runs",
)
# Files whose groups are runs on several nodes. Of all comparable pairs they are a seventh, so their own tau
# stands beside that of all.
SEVERAL_NODES = ("vtrain_multi", "bigscience")


@dataclass
class Score:
    """What one file says of the planner. Errors are in per cent of the measured figure."""

    rows: int = 0
    refused: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    errors: list[float] = field(default_factory=list)
    fitted: list[float] = field(default_factory=list)
    kept: list[float] = field(default_factory=list)
    tau: float | None = None
    regret: float | None = None
    covered: float | None = None

    def add(self, predicted: float, measured: float, back: bool) -> None:
        """One row."""
        error = 100 * abs(predicted / measured - 1) if measured else 0.0 if abs(predicted) < 1e-9 else 100.0
        self.rows += 1
        self.errors.append(error)
        (self.kept if back else self.fitted).append(error)

    def refuse(self, reason: str) -> None:
        """One row that lacks what matters."""
        self.refused += 1
        self.reasons[reason] += 1

    def summary(self) -> dict[str, object]:
        """For JSON; figures that do not exist are null."""

        def mean(values: Sequence[float]) -> float | None:
            return round(statistics.fmean(values), 3) if values else None

        return {
            "rows": self.rows,
            "refused": self.refused,
            "mean_abs_pct": mean(self.errors),
            "median_abs_pct": round(statistics.median(self.errors), 3) if self.errors else None,
            "tau": None if self.tau is None else round(self.tau, 4),
            "regret_pct": None if self.regret is None else round(self.regret, 3),
            "mean_abs_pct_fit_half": mean(self.fitted),
            "mean_abs_pct_held_back": mean(self.kept),
            "in_interval_pct": None if self.covered is None else round(self.covered, 1),
            "reasons": dict(self.reasons.most_common()),
        }


def tau_and_regret(groups: Iterable[Sequence[tuple[float, float]]]) -> tuple[float | None, float | None]:
    """Kendall's tau over all pairs inside the groups, and the mean regret in per cent.

    Args:
        groups: of (predicted, measured) seconds of each layout; pairs that were measured alike are left out.
    """
    agree = pairs = 0
    regrets = []
    for group in groups:
        if len(group) < 2:
            continue
        for i, (p, m) in enumerate(group):
            for q, n in group[i + 1 :]:
                if m == n:
                    continue
                pairs += 1
                agree += (p < q) == (m < n) if p != q else 0
                agree -= (p < q) != (m < n) if p != q else 0
        chosen = min(group)[1]
        regrets.append(100 * (chosen / min(m for _, m in group) - 1))
    return (agree / pairs if pairs else None), (statistics.fmean(regrets) if regrets else None)


def times(
    file: str, lines: Iterable[Row]
) -> tuple[Score, dict[tuple[object, ...], list[tuple[float, float]]]]:
    """Step times of one file, and its comparable runs."""
    score, inside = Score(), 0
    found_by: dict[tuple[object, ...], dict[Layout, tuple[float, list[float]]]] = {}
    for row in lines:
        try:
            one = case(file, row)
            found = estimate(one.model, one.cluster, one.layout, one.job)
        except (Refused, UserError) as error:
            score.refuse(str(error))
            continue
        score.add(found.step_s.value, one.seconds, held_back(row))
        inside += found.step_s.low <= one.seconds <= found.step_s.high
        layouts = found_by.setdefault(one.group, {})
        layouts.setdefault(one.layout, (found.step_s.value, []))[1].append(one.seconds)
    # What is ranked are layouts: one that was measured several times counts once, with its mean.
    groups = {
        group: [(predicted, statistics.fmean(measured)) for predicted, measured in layouts.values()]
        for group, layouts in found_by.items()
    }
    score.tau, score.regret = tau_and_regret(groups.values())
    score.covered = 100 * inside / score.rows if score.rows else None
    return score, groups


def flops(lines: Iterable[Row]) -> Score:
    """FLOPs per token under the convention of the row's source."""
    score = Score()
    for row in lines:
        model = named(row.get("model") or "")
        if model is None:
            score.refuse(f"the shape of {row.get('model')} is not public, or no Transformer's")
            continue
        if float(row.get("spread_pct") or 0) > 5:
            score.refuse("the source's own figures differ by more than 5 %")
            continue
        convention = "model" if "Bridge" in (row.get("source") or "") else "full"
        value = flops_per_token(model, int(row["seq"]), convention) / 1e9  # type: ignore[arg-type]
        score.add(value, float(row["gflop_per_token_published"]), held_back(row))
    return score


def memories(file: str, lines: Iterable[Row]) -> Score:
    """Memory figures of one file."""
    score = Score()
    for row in lines:
        try:
            for predicted, measured in memory_pairs(file, row):
                score.add(predicted, measured, held_back(row))
        except (Refused, UserError) as error:
            score.refuse(str(error))
    return score


def score_folder(folder: Path) -> dict[str, Score]:
    """All files of a folder; an absent one is left out."""
    found: dict[str, Score] = {}
    ranked: dict[str, list[list[tuple[float, float]]]] = {}
    for file in (*TIMES, "torch_fsdp"):
        lines = rows(folder, file)
        if not lines:
            continue
        name, mixtures = file, ()
        if file == "nemo":
            lines, mixtures = (
                [row for row in lines if bool((row.get("experts") or "").strip()) is sparse]
                for sparse in (False, True)
            )
        elif file == "torch_fsdp":
            name = "torch_fsdp:time"
        found[name], groups = times(file, lines)
        ranked[file] = list(groups.values())
        if mixtures:
            found["nemo:moe"], groups = times(file, mixtures)
            ranked[file] += groups.values()
    for name, files in (("ranking", tuple(ranked)), ("ranking:several_nodes", SEVERAL_NODES)):
        if groups_ := [group for file in files for group in ranked.get(file, ()) if len(group) > 1]:
            score = Score(rows=sum(map(len, groups_)))
            score.tau, score.regret = tau_and_regret(groups_)
            found[name] = score
    for file in ("actmem", "zero_memory", "torch_fsdp"):
        if lines := rows(folder, file):
            found[file] = memories(file, lines)
    if lines := rows(folder, "flops_per_token"):
        found["flops_per_token"] = flops(lines)
    return found

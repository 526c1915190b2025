"""Fits the constants of one device on half of the rows and reports the error on both halves.

`python -m benchmarks.planner.fit --data DIR --constants a100` prints a table for `presets/fitted.toml`.
The half
is chosen by a hash of the row (`adapters.held_back`). What is minimised is the mean over files of the mean
absolute logarithm of predicted over measured time, each constant within bounds that physics allows.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np

from benchmarks.planner.adapters import Case, Refused, case, held_back, rows
from hasten.plan.cost import Costs
from hasten.plan.efficiency import Constants, constants
from hasten.plan.step import step

FILES = (
    "vtrain_single",
    "vtrain_multi",
    "megatron",
    "mpt_fsdp",
    "bigscience",
    "nemo",
    "ascend",
    "torch_fsdp",
)

# Between which values a constant is looked for. Shares of a datasheet's figure stay below 1; latencies are
# those of launches and interconnects.
BOUNDS = {
    "matmul": (0.4, 0.95),
    "matmul_fp8": (0.3, 0.9),
    "depth": (1.0, 1500.0),
    "tall": (1.0, 1500.0),
    "memory": (0.3, 0.9),
    "flash": (0.2, 0.85),
    "flash_backward": (0.5, 1.0),
    "flash_narrow": (0.4, 1.0),
    "batched": (0.1, 0.9),
    "batched_narrow": (4.0, 500.0),
    "misaligned": (0.05, 1.0),
    "unaligned": (0.2, 1.0),
    "kernel_s": (1e-6, 1e-5),
    "launch_s": (1e-6, 8e-5),
    "collective_launch_s": (1e-6, 5e-4),
    "micro_s": (1e-5, 3e-2),
    "step_s": (1e-4, 1e-1),
    "launch_norm": (1.5, 16.0),
    "inside": (0.2, 0.9),
    "across": (0.1, 0.95),
    "inside_s": (5e-6, 2e-4),
    "inside_step_s": (1e-7, 5e-5),
    "across_step_s": (1e-6, 1e-4),
    "point": (0.1, 0.95),
    "hop_s": (1e-5, 3e-2),
    "overlap": (0.1, 0.95),
    "slowdown": (1.0, 1.3),
    "optimizer": (0.2, 0.95),
    "straggle": (1e-4, 0.05),
}


# What collectives.csv says itself of the fast links, and is therefore not fitted on step times: the slope of
# nccl-tests' all-reduce over 2, 4 and 8 devices (A100: 197 to 229 GB/s beyond 1 GB; H200: 361 to 366 GB/s of
# ring, gather and scatter).
# unaligned: what a micro batch costs beyond its layers is separated from them by least squares over the
# numbers of layers and micro batches (vtrain_single's first half): with one device for the table (50,257
# columns) the part that grows with tokens is 2.8 times that of two devices (padded), where 2 is due. Left to
# the fit it trades against the share of the products, which is in every row.
MEASURED = {
    "a100": {"inside": 0.75, "unaligned": 0.55},
    "h100": {"inside": 0.81},
}


def collect(folder: Path, name: str, most: int = 120) -> list[tuple[bool, Case]]:
    """The dense runs on devices with these constants, and whether they are held back; of a file with many
    rows an even choice of the first half."""
    found: list[tuple[bool, Case]] = []
    for file in FILES:
        mine = []
        for row in rows(folder, file):
            try:
                one = case(file, row)
            except Refused:
                continue
            if (one.cluster.device.constants or one.cluster.device.name) == name and not one.model.experts:
                mine.append((held_back(row), one))
        fitted = [pair for pair in mine if not pair[0]]
        stride = -(-len(fitted) // most)
        found += fitted[:: max(1, stride)] + [pair for pair in mine if pair[0]]
    return found


def errors(cases: Iterable[Case], known: Constants) -> dict[str, list[float]]:
    """Logarithms of predicted over measured time, by file."""
    out: dict[str, list[float]] = {}
    for one in cases:
        seconds = step(Costs(one.model, one.cluster, one.layout, one.job, known)).seconds
        out.setdefault(one.file, []).append(math.log(seconds / one.seconds))
    return out


def fit(
    cases: list[Case],
    known: Constants,
    rounds: int,
    weights: dict[str, float],
    prior: float,
    fixed: dict[str, float],
    order: float,
) -> Constants:
    """Levenberg-Marquardt in the logarithms of the constants, reweighted towards absolute errors.

    With a weight of `order` the same is asked of each error less the mean of its group's: what all runs of a
    group have in common does not change their order.

    Each constant is held near an unknown device's with a standard deviation of `prior` (in logarithms), so
    that what the rows do not tell apart stays where physics puts it.
    """
    names = [name for name in BOUNDS if name not in fixed]
    base = replace(Constants(), **fixed)
    low, high = (np.log(np.array([BOUNDS[n][side] for n in names])) for side in (0, 1))
    middle = np.clip(np.log([max(getattr(Constants(), n), BOUNDS[n][0]) for n in names]), low, high)
    x = np.clip(np.log([max(getattr(known, n), BOUNDS[n][0]) for n in names]), low, high)
    counts = {one.file: sum(c.file == one.file for c in cases) for one in cases}
    share = np.array([weights.get(one.file, 1.0) / counts[one.file] for one in cases])
    share /= share.sum()
    apart = without_mean(cases)

    def residuals(at: np.ndarray) -> np.ndarray:
        found = replace(base, **{n: float(v) for n, v in zip(names, np.exp(at), strict=True)})
        return np.array(
            [
                math.log(step(Costs(c.model, c.cluster, c.layout, c.job, found)).seconds / c.seconds)
                for c in cases
            ]
        )

    def value(at: np.ndarray, r: np.ndarray) -> float:
        errors = np.abs(r) + order * np.abs(apart @ r)
        return float((share * errors).sum() + 0.002 * (((at - middle) / prior) ** 2).mean())

    r = residuals(x)
    best, damping = value(x, r), 0.03
    for number in range(rounds):
        slopes = np.stack([(residuals(x + 0.02 * row) - r) / 0.02 for row in np.eye(len(x))], axis=1)
        pull = 0.004 / (prior**2 * len(x))
        hessian, slope = pull * np.eye(len(x)), pull * (x - middle)
        for s, e, factor in ((slopes, r, 1.0), (apart @ slopes, apart @ r, order)):
            weight = factor * share / np.maximum(np.abs(e), 0.02)
            hessian = hessian + s.T @ (s * weight[:, None])
            slope = slope + s.T @ (weight * e)
        moved = False
        for _ in range(6):
            free = ~(((x <= low + 1e-9) & (slope > 0)) | ((x >= high - 1e-9) & (slope < 0)))
            move = np.zeros_like(x)
            inner = hessian[np.ix_(free, free)]
            move[free] = -np.linalg.solve(inner + damping * np.diag(np.diag(inner) + 1e-4), slope[free])
            trial = np.clip(x + np.clip(move, -0.7, 0.7), low, high)
            again = residuals(trial)
            if (now := value(trial, again)) < best - 1e-6:
                x, r, best, moved = trial, again, now, True
                damping = max(1e-4, damping / 4)
                break
            damping *= 5
        print(f"# round {number}: {best:.4f}", flush=True)
        if not moved:
            break
    return replace(base, **{n: float(v) for n, v in zip(names, np.exp(x), strict=True)})


def without_mean(cases: list[Case]) -> np.ndarray:
    """The matrix that takes from each run's error the mean of its group; nothing of a run that is alone."""
    groups = [one.group for one in cases]
    same = np.array([[float(a == b) for b in groups] for a in groups])
    counts = same.sum(axis=1)
    return (np.eye(len(cases)) - same / counts[:, None]) * (counts > 1)[:, None]


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--constants", required=True)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--most", type=int, default=120, help="rows of one file that are fitted")
    parser.add_argument("--fresh", action="store_true", help="start from an unknown device's constants")
    parser.add_argument("--prior", type=float, default=0.6)
    parser.add_argument("--order", type=float, default=0.0, help="weight of the order inside groups")
    parser.add_argument("--start", action="append", default=[], metavar="CONSTANT=VALUE")
    parser.add_argument("--weight", action="append", default=[], metavar="FILE=W")
    asked = parser.parse_args()
    pairs = collect(asked.data, asked.constants, asked.most)
    fitted = [one for kept, one in pairs if not kept]
    device = pairs[0][1].cluster.device
    start = Constants() if asked.fresh else constants(device)
    start = replace(start, **{text.split("=")[0]: float(text.split("=")[1]) for text in asked.start})
    weights = {text.split("=")[0]: float(text.split("=")[1]) for text in asked.weight}
    known = fit(
        fitted, start, asked.rounds, weights, asked.prior, MEASURED.get(asked.constants, {}), asked.order
    )
    print(f"[{asked.constants}]")
    for name in BOUNDS:
        print(f"{name} = {getattr(known, name):.4g}")
    for label, wanted in (("fit half", False), ("held back", True)):
        for file, values in errors((one for kept, one in pairs if kept is wanted), known).items():
            mean = sum(abs(math.expm1(v)) for v in values) / len(values)
            print(f"# {label}: {file}: {len(values)} rows, mean {100 * mean:.1f} %")


if __name__ == "__main__":
    main()

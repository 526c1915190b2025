"""Which matrix gets how many bits, so that the whole stays within a budget and says most nearly what it said.

The error of a matrix in a format is what it adds to the KL divergence of the model (`calibrate.py`), measured
on a sample of its rows. Formats are then raised one at a time, whichever gives most for its bytes, until no
step fits the budget: scales, minima, padding, the embedding, the head and all that stays in fp32 included.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ConfigError, InputError, nearest
from hasten.base.screen import Screen
from hasten.ops.panels import Format, named
from hasten.serve.calibrate import Calibration, Matrix, matrices_of
from hasten.serve.quantise import Quantised, output_errors, rounding_costs, rounding_errors, search
from hasten.serve.weights import Source, Weight, part_of

BUDGETS: dict[str, float | str] = {
    # One eighth of fp32, everything counted.
    "int4": 4.0,
    "int8": "int8r",
    "bfloat16": "bfloat16",
    "float32": "float32",
}
"""Names of budgets -> bits a weight over all of the model, or the one format of all matrices."""

LADDER: tuple[str, ...] = ("int3r", "int4r", "int5r", "int6r", "int8r", "bfloat16")
"""Formats that a mixed plan chooses from. Minima gain nothing once a matrix is rotated."""

# Rows whose error stands for a matrix's.
_SAMPLE_ROWS = 64
_SAMPLE_WORDS = 1024
_SEED = 20260102
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class Row:
    """One matrix of a plan.

    `error`: the KL that it is expected to add, in nats a token; without a calibration the relative squared
    error times the number of weights; NaN where it was not measured.
    """

    matrix: Matrix
    format: Format
    bytes: int
    error: float


@dataclass(frozen=True)
class Plan:
    """Formats of a model's matrices. `str(plan)` is a table."""

    rows: tuple[Row, ...]
    other_weights: int
    """Weights that stay in fp32: norms, biases, learned positions."""
    choice: str
    """What was asked for: the name of a budget, or bits a weight."""

    def format(self, weight: Weight | str) -> Format | None:
        """The format of a matrix by its parameter's name; None for one that the plan does not have."""
        name = weight if isinstance(weight, str) else weight.name
        return self._by_name().get(name)

    @property
    def weights(self) -> int:
        """Weights of the whole model, each counted once."""
        return sum(row.matrix.N * row.matrix.K for row in self.rows) + self.other_weights

    @property
    def bytes(self) -> int:
        """Bytes of the whole model, all in."""
        return sum(row.bytes for row in self.rows) + _FLOAT_BYTES * self.other_weights

    @property
    def bits_per_weight(self) -> float:
        return 8 * self.bytes / max(1, self.weights)

    @property
    def error(self) -> float:
        """The errors of all matrices together: with a calibration the KL that is expected, nats a token."""
        return sum(row.error for row in self.rows)

    def quantised(self, source: Source, screen: Screen) -> dict[str, Quantised]:
        """The matrices whose formats have codes, each rounded by itself; by parameter."""
        moments = source.calibration.moments if source.calibration else {}
        found = {}
        with screen.bar("quantising", len(self.rows)) as bar:
            for number, row in enumerate(self.rows):
                if not row.format.dense:
                    matrix = row.matrix
                    dense = part_of(source.dense(matrix.name), Weight(matrix.name, matrix.transposed))
                    try:
                        found[matrix.name] = search(dense, row.format, moments.get(matrix.name))
                    except InputError as error:
                        raise InputError(f"{matrix.name}: {error}") from error
                bar.update(number + 1, row.matrix.name)
        return found

    def as_dict(self) -> dict[str, Any]:
        return {
            "choice": self.choice,
            "bits_per_weight": self.bits_per_weight,
            "bytes": self.bytes,
            "error": self.error,
            "formats": {row.matrix.name: row.format.name for row in self.rows},
        }

    def __str__(self) -> str:
        width = max((len(row.matrix.name) for row in self.rows), default=6)
        lines = [f"{'matrix':{width}}  {'format':9}  {'MB':>8}  {'error':>9}"]
        for row in self.rows:
            error = "-" if math.isnan(row.error) else f"{row.error:9.2e}"
            lines.append(
                f"{row.matrix.name:{width}}  {row.format.name:9}  {row.bytes / 1e6:8.2f}  {error:>9}"
            )
        lines.append(
            f"{'in all':{width}}  {self.bits_per_weight:.3f} bits  {self.bytes / 1e6:8.2f}"
            + ("" if math.isnan(self.error) else f"  {self.error:9.2e}")
        )
        return "\n".join(lines)

    def _by_name(self) -> dict[str, Format]:
        table = {row.matrix.name: row.format for row in self.rows}
        return table | {row.matrix.alias: row.format for row in self.rows if row.matrix.alias}


def plan_bits(source: Source, budget: str | float = "int4", ladder: Sequence[str] = LADDER) -> Plan:
    """The formats of a model's matrices for a budget.

    Args:
        source: its weights; with `source.calibration` errors are those of the outputs, weighted by what they
            matter, else of the weights alone.
        budget: `int4` (4.0 bits a weight over the whole), `int8`, `bfloat16`, `float32` (one format for all
            matrices), the name of a format, or bits a weight.

    Raises ConfigError for a name that is none, and for fewer bits than the smallest formats take.
    """
    model = source.skeleton()
    matrices = matrices_of(model)
    planned = sum(model.get_parameter(matrix.name).numel() for matrix in matrices)
    other = sum(parameter.numel() for parameter in model.parameters()) - planned
    choice = str(budget)
    bits = _bits(budget)
    if isinstance(bits, Format):
        rows = [Row(m, bits, bits.matrix_bytes(m.N, m.K), math.nan) for m in matrices]
        return Plan(tuple(rows), other, choice)
    formats = [named(name) for name in ladder]
    weights = sum(m.N * m.K for m in matrices) + other
    limit = int(bits * weights / 8) - _FLOAT_BYTES * other
    table = [measure(source, matrix, formats) for matrix in matrices]
    rows = allocate(matrices, formats, table, limit)
    least = sum(min(format.matrix_bytes(m.N, m.K) for format in formats) for m in matrices)
    if not rows and matrices:
        smallest = 8 * (least + _FLOAT_BYTES * other) / weights
        raise ConfigError(f"{bits:g} bits a weight; this model takes at least {smallest:.3f}")
    return Plan(tuple(rows), other, choice)


def _bits(budget: str | float) -> float | Format:
    if not isinstance(budget, str):
        bits = float(budget)
    elif budget in BUDGETS:
        value = BUDGETS[budget]
        return named(value) if isinstance(value, str) else value
    else:
        try:
            bits = float(budget)
        except ValueError:
            try:
                return named(budget)
            except ConfigError as error:
                raise ConfigError(
                    f"budget {budget!r}; {nearest(budget, BUDGETS)}, a format, or bits"
                ) from error
    if not 0 < bits < math.inf:
        raise ConfigError(f"{budget} bits a weight; allowed: a positive number, for example 4.0")
    return bits


def measure(source: Source, matrix: Matrix, formats: Sequence[Format]) -> list[float]:
    """The KL that a matrix adds in each format, nats a token, from a sample of its rows.

    Without a calibration: the squared error of its weights over their squares, times their number.
    """
    calibration = source.calibration or Calibration()
    moments, outputs = calibration.moments.get(matrix.name), calibration.outputs.get(matrix.name)
    dense = part_of(source.dense(matrix.name), Weight(matrix.name, matrix.transposed))
    rows = dense[_sample(matrix, outputs)].float()
    if outputs is None:
        size = float(output_errors(rows, torch.zeros_like(rows), moments).sum())
        scale = matrix.N * matrix.K / max(size, 1e-30)
    else:
        scale = 0.5 * float(outputs.sum()) / max(1, len(rows))
    costs = {
        turned: rounding_costs(moments, turned) for turned in {f.rotated for f in formats if not f.dense}
    }
    errors = []
    for format in formats:
        if format.dense:
            found = rows.bfloat16().float() if format.bits < 32 else rows
            error = float(output_errors(rows, found, moments).sum())
        else:
            error = float(rounding_errors(rows, format, costs[format.rotated]).sum())
        errors.append(scale * error)
    return errors


def _sample(matrix: Matrix, outputs: Tensor | None) -> Tensor:
    """Rows as often as they matter: some words of a vocabulary count a million times as much as others."""
    count = _SAMPLE_ROWS if matrix.role == "projection" else _SAMPLE_WORDS
    if outputs is None or not float(outputs.sum()) > 0:
        return torch.linspace(0, matrix.N - 1, min(matrix.N, count)).long()
    generator = torch.Generator().manual_seed(_SEED)
    # By the inverse of the distribution: no limit on the number of rows.
    steps = outputs.double().cumsum(0)
    drawn = torch.rand(count, dtype=torch.float64, generator=generator) * steps[-1]
    return torch.searchsorted(steps, drawn).clamp_max(matrix.N - 1)


def allocate(
    matrices: Sequence[Matrix],
    formats: Sequence[Format],
    errors: Sequence[Sequence[float]],
    limit_bytes: int,
) -> list[Row]:
    """A format for each matrix, at most `limit_bytes` together; empty where even the smallest do not fit.

    Greedy: from the smallest formats the step with the most error saved for its bytes, as long as one fits.
    """
    sizes = [[format.matrix_bytes(m.N, m.K) for format in formats] for m in matrices]
    chosen = [
        min(range(len(formats)), key=list(zip(size, error, strict=True)).__getitem__)
        for size, error in zip(sizes, errors, strict=True)
    ]
    left = limit_bytes - sum(size[pick] for size, pick in zip(sizes, chosen, strict=True))
    if left < 0:
        return []
    steps = {
        index: _best_step(sizes[index], errors[index], chosen[index], left) for index in range(len(matrices))
    }
    while True:
        index = max(steps, key=lambda i: steps[i][0], default=-1)
        if index < 0 or steps[index][0] <= 0:
            break
        target = steps[index][1]
        extra = sizes[index][target] - sizes[index][chosen[index]]
        if extra > left:
            # What is left shrank since this step was looked for.
            steps[index] = _best_step(sizes[index], errors[index], chosen[index], left)
            continue
        left -= extra
        chosen[index] = target
        steps[index] = _best_step(sizes[index], errors[index], target, left)
    return [
        Row(matrix, formats[pick], size[pick], error[pick])
        for matrix, size, error, pick in zip(matrices, sizes, errors, chosen, strict=True)
    ]


def _best_step(sizes: Sequence[int], errors: Sequence[float], current: int, left: int) -> tuple[float, int]:
    """Error saved a byte and the format that saves it, among those that fit; (0, current) where none does."""
    best = (0.0, current)
    for target, (size, error) in enumerate(zip(sizes, errors, strict=True)):
        extra, saved = size - sizes[current], errors[current] - error
        if saved <= 0 or extra > left:
            continue
        best = max(best, (saved / extra if extra > 0 else math.inf, target))
    return best


def describe_choice(plan: Plan | None) -> Mapping[str, Any]:
    """What of a plan belongs into the key of a stored program."""
    return {"weights": "stored"} if plan is None else {"weights": plan.choice}

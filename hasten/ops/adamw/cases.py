"""Cases of the AdamW step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hasten.ops.adamw import adamw_
from hasten.ops.adamw import reference as meaning
from hasten.ops.cases import Case, Inputs

HYPER = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}


def operator(
    params: list[Tensor], grads: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor],
    steps: list[Tensor], **hyper: float,
) -> list[Tensor]:  # fmt: skip
    """The operator on copies: the changed tensors."""
    changed = [[t.clone() for t in column] for column in (params, exp_avg, exp_avg_sq, steps)]
    adamw_(changed[0], grads, changed[1], changed[2], changed[3], **hyper)
    return [t for column in changed for t in column]


def reference(
    params: list[Tensor], grads: list[Tensor], exp_avg: list[Tensor], exp_avg_sq: list[Tensor],
    steps: list[Tensor], **hyper: Any,
) -> list[Tensor]:  # fmt: skip
    """The formula for each parameter."""
    rows = zip(params, grads, exp_avg, exp_avg_sq, steps, strict=True)
    new = [meaning.adamw(*row, **hyper) for row in rows]
    return [row[column] for column in range(4) for row in new]


def case(
    name: str,
    shapes: Sequence[tuple[int, ...]],
    *,
    transposed: bool = False,
    benchmark: bool = False,
    **hyper: float,
) -> Case:
    """One case: parameters in the case's dtype, float32 state after three steps."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        def draw(*, positive: bool = False, wide: bool = False) -> list[Tensor]:
            drawn = [torch.randn(shape, generator=generator) for shape in shapes]
            drawn = [t.square() if positive else t for t in drawn]
            drawn = [t.t() if transposed else t for t in drawn]
            return [t.to(torch.promote_types(dtype, torch.float32) if wide else dtype) for t in drawn]

        steps = [torch.tensor(3.0) for _ in shapes]
        columns: tuple[Any, ...] = (draw(), draw(), draw(wide=True), draw(positive=True, wide=True), steps)
        return columns, {**HYPER, **hyper}

    def flops() -> float:
        return 12.0 * sum(torch.Size(shape).numel() for shape in shapes)

    return Case("adamw_", name, make, operator, reference, None, (), flops=flops, benchmark=benchmark)


CASES = [
    case("three", [(63, 5), (1,), (513,)]),
    case("scaled", [(63, 5), (1,), (513,)], grad_scale=0.3),
    case("pieces", [(2**20 + 13,)], grad_scale=0.3),
    case("transposed", [(63, 5)], transposed=True, grad_scale=0.3),
    case("empty", [(0, 4), (2, 2)]),
    case("smollm2-layer", [(576, 576)] * 2 + [(192, 576)] * 2 + [(1536, 576)] * 2 + [(576, 1536)],
         benchmark=True),
]  # fmt: skip

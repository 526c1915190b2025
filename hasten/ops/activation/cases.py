"""Cases of activation and gated_activation: every kind, odd and strided shapes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from hasten.ops.activation import activation, gated_activation, reference
from hasten.ops.cases import Case, Inputs

_ALL = (torch.float32, torch.bfloat16, torch.float16)


def _make(
    shape: tuple[int, ...], inputs: int, kind: str, strided: bool = False, columns: bool = False
) -> Callable[[Generator, torch.dtype], Inputs]:
    def make(generator: Generator, dtype: torch.dtype) -> Inputs:
        if strided:
            *rows, width = shape
            packed = torch.randn(*rows, 2 * width, generator=generator).to(dtype)
            return (*packed.chunk(2, -1)[:inputs], kind), {}
        if columns:
            draws = [torch.randn(shape[::-1], generator=generator).to(dtype).mT for _ in range(inputs)]
            return (*draws, kind), {}
        tensors: list[Tensor] = [torch.randn(shape, generator=generator).to(dtype) for _ in range(inputs)]
        return (*tensors, kind), {}

    return make


def _cases(operator: str, op: Callable[..., Any], meaning: Callable[..., Any], inputs: int) -> list[Case]:
    def case(name: str, *shape: int, kind: str = "silu", **options: Any) -> Case:
        layout = {key: options.pop(key) for key in ("strided", "columns") if key in options}
        make = _make(shape, inputs, kind, **layout)
        return Case(operator, name, make, op, meaning, grads=tuple(range(inputs)), **options)

    return [
        *[case(f"{kind}-2x3x63", 2, 3, 63, kind=kind, dtypes=_ALL) for kind in reference.KINDS],
        case("one", 1),
        case("empty", 0, 64),
        case("511x513", 511, 513),
        case("halves", 5, 3, 64, strided=True),
        case("columns", 17, 31, columns=True),
        case("gelu-halves", 5, 64, kind="gelu", strided=True),
        case("1024x1536", 1024, 1536, benchmark=True),
        case("gelu-1024x3072", 1024, 3072, kind="gelu", benchmark=True),
    ]


CASES = _cases("activation", activation, reference.activation, 1) + _cases(
    "gated_activation", gated_activation, reference.gated_activation, 2
)

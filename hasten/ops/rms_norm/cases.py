"""Cases of rms_norm and add_rms_norm: odd last sizes, dtype mixes, Llama's and Gemma's rounding."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from hasten.ops.cases import Case, Inputs
from hasten.ops.rms_norm import add_rms_norm, reference, rms_norm

_ALL = (torch.float32, torch.bfloat16, torch.float16)
_GEMMA: dict[str, Any] = {"offset": 1.0, "round_first": False}


def _make(
    shape: tuple[int, ...],
    *,
    inputs: int = 1,
    weight: str = "same",
    strided: bool = False,
    residual: torch.dtype | None = None,
    **kwargs: Any,
) -> Callable[[Generator, torch.dtype], Inputs]:
    def make(generator: Generator, dtype: torch.dtype) -> Inputs:
        def draw(dtype: torch.dtype) -> Tensor:
            if strided:
                return torch.randn(*shape[::-1], generator=generator).to(dtype).mT
            return torch.randn(shape, generator=generator).to(dtype)

        tensors: list[Any] = [draw(dtype), draw(residual or dtype)][:inputs]
        w = torch.rand(shape[-1], generator=generator) + 0.5
        tensors.append({"same": w.to(dtype), "fp32": w, "none": None}[weight])
        return (*tensors, 1e-6), kwargs

    return make


def _cases(operator: str, op: Callable[..., Any], meaning: Callable[..., Any], inputs: int) -> list[Case]:
    def case(name: str, *shape: int, dtypes: tuple[torch.dtype, ...] = _ALL[:2], **options: Any) -> Case:
        grads = tuple(range(inputs)) if options.get("weight") == "none" else tuple(range(inputs + 1))
        benchmark = options.pop("benchmark", False)
        make = _make(shape, inputs=inputs, **options)
        return Case(operator, name, make, op, meaning, grads=grads, dtypes=dtypes, benchmark=benchmark)

    return [
        case("one", 1, 1),
        case("67x3", 67, 3),
        case("4x63", 4, 63, dtypes=_ALL),
        case("vector-513", 513),
        case("2x3x511", 2, 3, 511),
        case("2x2x3x64", 2, 2, 3, 64),
        case("wide-4109", 3, 4109, weight="fp32"),
        case("empty", 0, 64),
        case("strided", 65, 63, strided=True),
        case("no-weight", 5, 64, weight="none"),
        case("gemma", 5, 513, dtypes=_ALL, **_GEMMA),
        case("gemma-fp32-weight", 5, 64, weight="fp32", **_GEMMA),
        case("fp32-out", 5, 64, out_dtype=torch.float32),
        case(
            "bf16-out", 35, 17, weight="fp32", residual=torch.float32, out_dtype=torch.bfloat16, dtypes=_ALL
        ),
        case("fp16-out", 3, 64, out_dtype=torch.float16, dtypes=(torch.bfloat16,)),
        case("1024x576", 1024, 576, benchmark=True),
        case(
            "1024x576-training",
            1024,
            576,
            weight="fp32",
            residual=torch.float32,
            out_dtype=torch.bfloat16,
            benchmark=True,
        ),
    ]


CASES = _cases("rms_norm", rms_norm, reference.rms_norm, 1) + _cases(
    "add_rms_norm", add_rms_norm, reference.add_rms_norm, 2
)

"""Cases of layer_norm and add_layer_norm: last odd last sizes, dtype mixes, missing parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from hasten.ops.cases import Case, Inputs
from hasten.ops.layer_norm import add_layer_norm, layer_norm, reference

_ALL = (torch.float32, torch.bfloat16, torch.float16)


def _make(
    shape: tuple[int, ...],
    *,
    inputs: int = 1,
    parameters: str = "same",
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
        weight = torch.rand(shape[-1], generator=generator) + 0.5
        bias = torch.randn(shape[-1], generator=generator)
        if parameters == "same":
            weight, bias = weight.to(dtype), bias.to(dtype)
        keep_weight, keep_bias = parameters != "none", parameters not in ("none", "weight")
        return (*tensors, weight if keep_weight else None, bias if keep_bias else None, 1e-5), kwargs

    return make


def _cases(operator: str, op: Callable[..., Any], meaning: Callable[..., Any], inputs: int) -> list[Case]:
    def case(name: str, *shape: int, dtypes: tuple[torch.dtype, ...] = _ALL[:2], **options: Any) -> Case:
        present = {"none": 0, "weight": 1}.get(options.get("parameters", "same"), 2)
        benchmark = options.pop("benchmark", False)
        make = _make(shape, inputs=inputs, **options)
        grads = tuple(range(inputs + present))
        return Case(operator, name, make, op, meaning, grads=grads, dtypes=dtypes, benchmark=benchmark)

    return [
        case("4x63", 4, 63, dtypes=_ALL),
        case("67x3", 67, 3),
        case("vector-513", 513),
        case("2x3x511", 2, 3, 511),
        case("2x2x3x64", 2, 2, 3, 64, parameters="fp32"),
        case("wide-4109", 3, 4109),
        case("empty", 0, 64),
        case("strided", 65, 63, strided=True),
        case("no-parameters", 5, 64, parameters="none"),
        case("fp32-weight-alone", 5, 64, parameters="weight"),
        case("fp32-out", 5, 64, out_dtype=torch.float32),
        case("bf16-out", 35, 17, parameters="fp32", residual=torch.float32, out_dtype=torch.bfloat16),
        case("1024x576", 1024, 576, benchmark=True),
    ]


CASES = _cases("layer_norm", layer_norm, reference.layer_norm, 1) + _cases(
    "add_layer_norm", add_layer_norm, reference.add_layer_norm, 2
)

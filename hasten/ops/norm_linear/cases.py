"""Cases of norm_linear, its parameters passed one after the other so that each can get a gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from hasten.ops.cases import Case, Inputs
from hasten.ops.linear.cases import draw, draw_weight, with_gaps
from hasten.ops.norm_linear import norm_linear, reference

_ALL = (torch.float32, torch.bfloat16, torch.float16)


def _meaning(
    x: Tensor,
    weights: list[Tensor],
    biases: list[Tensor | None],
    *,
    norm: str,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    residual: Tensor | None,
    offset: float = 0.0,
    round_first: bool = True,
    compute: torch.dtype | None = None,
) -> list[Tensor]:
    norm_arguments = (norm, norm_weight, norm_bias, eps, offset, round_first)
    return reference.norm_linear(x, residual, *norm_arguments, weights, biases, compute)


def _case(
    name: str,
    x_shape: tuple[int, ...],
    out_sizes: tuple[int, ...],
    *,
    norm: str = "rms",
    residual: bool = False,
    parameters: bool = True,
    bias: bool | tuple[bool, ...] = False,
    parameter_dtype: torch.dtype | None = None,
    compute: torch.dtype | None = None,
    gemma: bool = False,
    **options: Any,
) -> Case:
    width, count = x_shape[-1], len(out_sizes)
    biased = bias if isinstance(bias, tuple) else (bias,) * count
    present = ["x"] + ["residual"] * residual + ["norm_weight"] * parameters
    present += ["norm_bias"] * (parameters and norm == "layer")
    constants: dict[str, Any] = {"norm": norm, "eps": 1e-6}
    if gemma:
        constants.update(offset=1.0, round_first=False)

    def make(generator: Generator, dtype: torch.dtype) -> Inputs:
        p = parameter_dtype or dtype
        tensors = {
            "x": draw(generator, *x_shape, dtype=dtype),
            "residual": draw(generator, *x_shape, dtype=dtype),
            "norm_weight": (torch.rand(width, generator=generator) + 0.5).to(p),
            "norm_bias": draw(generator, width, dtype=p),
        }
        weights = [draw_weight(generator, size, width, p) for size in out_sizes]
        pairs = zip(out_sizes, biased, strict=True)
        biases = [draw(generator, size, dtype=p) for size, has_bias in pairs if has_bias]
        return (*[tensors[key] for key in present], *weights, *biases), {"compute": compute}

    def spread(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*tensors: Tensor, compute: torch.dtype | None) -> Any:
            named: dict[str, Any] = {"residual": None, "norm_weight": None, "norm_bias": None}
            named.update(zip(present, tensors, strict=False))
            rest = list(tensors[len(present) :])
            biases = with_gaps(rest[count:], biased)
            return function(named.pop("x"), rest[:count], biases, **named, **constants, compute=compute)

        return call

    grads = tuple(range(len(present) + count + sum(biased)))
    op, meaning = spread(norm_linear), spread(_meaning)
    products = 2.0 * torch.Size(x_shape).numel() * sum(out_sizes)
    return Case("norm_linear", name, make, op, meaning, grads=grads, flops=lambda: products, **options)


CASES = [
    _case("rms-qkv", (2, 17, 64), (64, 32, 32), dtypes=_ALL),
    _case("rms-residual", (2, 17, 64), (65, 63), residual=True, dtypes=_ALL),
    _case("rms-fp32-parameters", (2, 17, 63), (48, 16), residual=True, parameter_dtype=torch.float32),
    _case("gemma", (2, 17, 64), (48, 16), residual=True, gemma=True),
    _case("rms-no-weight", (7, 513), (16,), parameters=False),
    _case("layer", (2, 17, 64), (64, 64, 64), norm="layer", bias=True, dtypes=_ALL),
    _case("layer-residual", (2, 17, 64), (511,), norm="layer", residual=True, bias=True),
    _case("layer-some-biases", (2, 5, 16), (8, 3, 8), norm="layer", residual=True, bias=(False, True, False)),
    _case("layer-no-parameters", (1, 64), (5,), norm="layer", parameters=False),
    _case("layer-fp32-parameters", (9, 63), (5,), norm="layer", bias=True, parameter_dtype=torch.float32),
    _case("4d", (2, 2, 3, 64), (1,), bias=True),
    _case("empty", (0, 64), (5, 7), residual=True),
    _case("bf16-compute", (5, 64), (16, 8), compute=torch.bfloat16, dtypes=(torch.float32,)),
    _case("1024x576-gate-up", (1024, 576), (1536, 1536), residual=True, benchmark=True),
]

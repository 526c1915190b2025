"""Cases of linear, linear_group and activation_linear.

The parameters of `linear_group` are passed one after the other, so that each can be asked for its gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from hasten.ops.activation.reference import KINDS
from hasten.ops.cases import Case, Inputs
from hasten.ops.linear import activation_linear, linear, linear_group, reference

_ALL = (torch.float32, torch.bfloat16, torch.float16)
_WIDE: dict[str, Any] = {"parameter_dtype": torch.float32}


def draw(generator: Generator, *shape: int, dtype: torch.dtype) -> Tensor:
    """Standard normal values."""
    return torch.randn(shape, generator=generator).to(dtype)


def draw_weight(generator: Generator, out_size: int, in_size: int, dtype: torch.dtype) -> Tensor:
    """[out, in] of scale 1 / sqrt(in): the product of values of scale 1 has scale 1."""
    return (torch.randn(out_size, in_size, generator=generator) * max(in_size, 1) ** -0.5).to(dtype)


def with_gaps(biases: Sequence[Tensor], biased: Sequence[bool]) -> list[Tensor | None]:
    """One entry for each projection: its bias, or None where it has none; empty if none has."""
    present = iter(biases)
    return [next(present) if has_bias else None for has_bias in biased] if any(biased) else []


def _linear(
    name: str,
    x_shape: tuple[int, ...],
    out_size: int,
    *,
    bias: bool = True,
    kind: str = "identity",
    compute: torch.dtype | None = None,
    parameter_dtype: torch.dtype | None = None,
    strided: bool = False,
    **options: Any,
) -> Case:
    def make(generator: Generator, dtype: torch.dtype) -> Inputs:
        x = (
            draw(generator, *x_shape[::-1], dtype=dtype).mT
            if strided
            else draw(generator, *x_shape, dtype=dtype)
        )
        weight = draw_weight(generator, out_size, x_shape[-1], parameter_dtype or dtype)
        b = draw(generator, out_size, dtype=parameter_dtype or dtype) if bias else None
        return (x, weight, b), {"kind": kind, "compute": compute}

    rows = torch.Size(x_shape[:-1]).numel()
    options.setdefault("flops", lambda: 2.0 * rows * x_shape[-1] * out_size)
    return Case(
        "linear", name, make, linear, reference.linear, grads=(0, 1, 2) if bias else (0, 1), **options
    )


def _group(
    name: str,
    x_shape: tuple[int, ...],
    out_sizes: tuple[int, ...],
    bias: bool | tuple[bool, ...],
    **options: Any,
) -> Case:
    parameter_dtype = options.pop("parameter_dtype", None)
    compute = options.pop("compute", None)
    count = len(out_sizes)
    biased = bias if isinstance(bias, tuple) else (bias,) * count

    def make(generator: Generator, dtype: torch.dtype) -> Inputs:
        x = draw(generator, *x_shape, dtype=dtype)
        weights = [draw_weight(generator, size, x_shape[-1], parameter_dtype or dtype) for size in out_sizes]
        biases = [
            draw(generator, size, dtype=parameter_dtype or dtype)
            for size, has_bias in zip(out_sizes, biased, strict=True)
            if has_bias
        ]
        return (x, *weights, *biases), {"compute": compute}

    def spread(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(x: Tensor, *parameters: Tensor, compute: torch.dtype | None) -> Any:
            return function(x, parameters[:count], with_gaps(parameters[count:], biased), compute=compute)

        return call

    grads = tuple(range(1 + count + sum(biased)))
    op, meaning = spread(linear_group), spread(reference.linear_group)
    products = 2.0 * torch.Size(x_shape).numel() * sum(out_sizes)
    return Case("linear_group", name, make, op, meaning, grads=grads, flops=lambda: products, **options)


def _activation(
    name: str,
    x_shape: tuple[int, ...],
    out_size: int,
    *,
    kind: str = "silu",
    gate: bool = True,
    bias: bool = False,
    compute: torch.dtype | None = None,
    parameter_dtype: torch.dtype | None = None,
    **options: Any,
) -> Case:
    def make(generator: Generator, dtype: torch.dtype) -> Inputs:
        x = draw(generator, *x_shape, dtype=dtype)
        up = draw(generator, *x_shape, dtype=dtype) if gate else None
        weight = draw_weight(generator, out_size, x_shape[-1], parameter_dtype or dtype)
        b = draw(generator, out_size, dtype=parameter_dtype or dtype) if bias else None
        return (x, up, kind, weight, b), {"compute": compute}

    grads = (0, 3, *((1,) if gate else ()), *((4,) if bias else ()))
    op, meaning = activation_linear, reference.activation_linear
    products = 2.0 * torch.Size(x_shape).numel() * out_size
    return Case("activation_linear", name, make, op, meaning, grads=grads, flops=lambda: products, **options)


CASES = [
    _linear("one", (1, 1), 1),
    _linear("63x511x65", (63, 511), 65, dtypes=_ALL),
    _linear("vector", (513,), 7),
    _linear("3d-no-bias", (2, 3, 64), 33, bias=False),
    _linear("4d", (2, 2, 3, 17), 64),
    _linear("empty", (0, 64), 5),
    _linear("strided", (65, 63), 31, strided=True),
    _linear("fp32-parameters", (2, 17, 64), 48, **_WIDE),
    _linear("bf16-compute", (2, 17, 64), 48, compute=torch.bfloat16, dtypes=(torch.float32,)),
    *[_linear(f"{kind}-5x64", (5, 64), 63, kind=kind) for kind in KINDS],
    _linear("1024x576x1536", (1024, 576), 1536, bias=False, benchmark=True),
    _group("qkv", (2, 17, 64), (64, 32, 32), bias=True, dtypes=_ALL),
    _group("gate-up", (63, 64), (513, 511), bias=False),
    _group("alone", (3, 64), (1,), bias=True),
    _group("some-biases", (2, 5, 16), (8, 3, 8, 4), bias=(False, True, False, True), dtypes=_ALL),
    _group("empty", (0, 64), (5, 7), bias=True),
    _group("fp32-parameters", (2, 17, 64), (48, 16), bias=True, **_WIDE),
    _group("1024-qkv", (1024, 576), (576, 192, 192), bias=False, benchmark=True),
    *[_activation(f"{kind}-gated", (2, 5, 63), 33, kind=kind) for kind in KINDS],
    _activation("gelu-bias", (2, 5, 63), 33, kind="gelu", gate=False, bias=True, dtypes=_ALL),
    _activation("identity-bias", (2, 5, 63), 33, kind="identity", gate=False, bias=True),
    _activation("relu", (7, 513), 16, kind="relu", gate=False),
    _activation("empty", (0, 64), 5),
    _activation("fp32-parameters", (2, 17, 64), 48, bias=True, **_WIDE),
    _activation("1024x1536x576", (1024, 1536), 576, benchmark=True),
]

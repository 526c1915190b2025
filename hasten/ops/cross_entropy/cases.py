"""Cases of linear_cross_entropy: the mean and the sum with every option of the loss."""

from __future__ import annotations

from typing import Any

import torch
from torch import Generator, Tensor

from hasten.ops.cases import Case, Inputs
from hasten.ops.cross_entropy import linear_cross_entropy, reference
from hasten.ops.linear.cases import draw, draw_weight

_ALL = (torch.float32, torch.bfloat16, torch.float16)


def _meaning(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    reduction: str = "mean",
    token_weight: Tensor | None = None,
    **options: Any,
) -> Tensor:
    flat_weight = None if token_weight is None else token_weight.reshape(-1)
    loss_sum, weight_sum, _ = reference.linear_cross_entropy(
        x.reshape(-1, x.shape[-1]), weight, labels.reshape(-1), bias, token_weight=flat_weight, **options
    )
    return loss_sum if reduction == "sum" else loss_sum / weight_sum


def _case(
    name: str,
    x_shape: tuple[int, ...],
    vocabulary: int,
    *,
    bias: bool = False,
    ignore: float = 0.0,
    token_weight: bool = False,
    parameter_dtype: torch.dtype | None = None,
    dtypes: tuple[torch.dtype, ...] = _ALL[:2],
    benchmark: bool = False,
    **options: Any,
) -> Case:
    def make(generator: Generator, dtype: torch.dtype) -> Inputs:
        p = parameter_dtype or dtype
        x = draw(generator, *x_shape, dtype=dtype)
        weight = draw_weight(generator, vocabulary, x_shape[-1], p)
        labels = torch.randint(vocabulary, x_shape[:-1], generator=generator)
        ignored = torch.rand(x_shape[:-1], generator=generator) < ignore
        labels = labels.masked_fill(ignored, options.get("ignore_index", -100))
        kwargs = dict(options)
        if token_weight:
            kwargs["token_weight"] = torch.rand(x_shape[:-1], generator=generator) + 0.5
        return (x, weight, labels, draw(generator, vocabulary, dtype=p) if bias else None), kwargs

    rows = torch.Size(x_shape[:-1]).numel()
    return Case(
        "linear_cross_entropy",
        name,
        make,
        linear_cross_entropy,
        _meaning,
        grads=(0, 1, 3) if bias else (0, 1),
        dtypes=dtypes,
        # Where no gradient is asked for: with one, the forward pass makes three products.
        flops=lambda: 2.0 * rows * x_shape[-1] * vocabulary,
        benchmark=benchmark,
    )


CASES = [
    _case("mean", (63, 64), 511, dtypes=_ALL),
    _case("sum", (63, 64), 513, reduction="sum", dtypes=_ALL),
    _case("one", (1, 1), 2),
    _case("3d-bias", (2, 17, 32), 101, bias=True),
    _case("ignore", (2, 33, 32), 101, ignore=0.4),
    _case("ignore-index-0", (65, 32), 101, ignore=0.2, ignore_index=0),
    _case("all-ignored-sum", (5, 32), 101, ignore=1.1, reduction="sum"),
    _case("token-weight", (65, 32), 101, bias=True, ignore=0.3, token_weight=True),
    _case("token-weight-sum", (65, 32), 101, bias=True, token_weight=True, reduction="sum"),
    _case("label-smoothing", (65, 32), 101, label_smoothing=0.1, ignore=0.3, token_weight=True),
    _case("z-loss", (65, 32), 101, z_loss=1e-2, ignore=0.3, token_weight=True),
    _case("softcap", (65, 32), 101, softcap=1.5, bias=True),
    _case("scale", (65, 32), 101, logit_scale=0.25),
    _case(
        "all",
        (65, 32),
        101,
        bias=True,
        ignore=0.3,
        token_weight=True,
        label_smoothing=0.1,
        z_loss=1e-2,
        softcap=3.0,
        logit_scale=0.5,
    ),
    _case("fp32-parameters", (65, 32), 101, bias=True, parameter_dtype=torch.float32),
    _case("empty", (0, 32), 101, reduction="sum"),
    _case("1024x576x49152", (1024, 576), 49152, benchmark=True),
]

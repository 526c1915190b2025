"""Products x W^T and their gradients over flattened rows.

Weights are cast to the dtype of the product in the forward pass, and again in the backward pass unless the
operator saved the copy; `hasten.ops.shadow` says when. Casting was measured on 2026-11-29 (AVX512-BF16, two
cores, 1024 rows, K=576) at 4 % of the product for M=960 and 7 % for M=3072.

Projections of one input stay separate products. One product over packed weights was measured at 0.99x to
1.01x of the separate ones there, and its outputs would be strided: silu(gate) * up then takes 1.5x.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest

import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.ops import packed, shadow


def product(x: Tensor, weight: Tensor, bias: Tensor | None, compute: torch.dtype) -> Tensor:
    """x W^T + b with every operand in the dtype `compute`; contiguous [..., M]."""
    return products(x, [weight], [] if bias is None else [bias], compute)[0]


def products(
    x: Tensor, weights: Sequence[Tensor], biases: Sequence[Tensor], compute: torch.dtype
) -> list[Tensor]:
    """[x W_i^T + b_i]; x is cast once. `biases` belong to the first weights; those behind them have none."""
    x = x.to(compute)
    pairs = list(zip_longest(weights, biases))
    done = [packed.product(x, weight, bias, "identity", compute) for weight, bias in pairs]
    plain = [weight for weight, y in zip(weights, done, strict=True) if y is None]
    narrowed = iter(shadow.narrow(plain, compute))
    return [
        F.linear(x, next(narrowed), None if bias is None else bias.to(compute)).contiguous()
        if y is None
        else y
        for (_, bias), y in zip(pairs, done, strict=True)
    ]


def input_gradient(
    dys: Sequence[Tensor | None], weights: Sequence[Tensor], compute: torch.dtype
) -> Tensor | None:
    """Sum of dy_i W_i as [N, K] in the dtype `compute`, added inside the products; None if every dy is.

    The weights may be the copies of `shadow.claim`.
    """
    total: Tensor | None = None
    for dy, weight in zip(dys, weights, strict=True):
        if dy is None:
            continue
        dy_NM, weight = _rows(dy).to(compute), weight.to(compute)
        total = dy_NM @ weight if total is None else total.addmm_(dy_NM, weight)
    return total


def weight_gradient(dy: Tensor | None, x_NK: Tensor, weight: Tensor) -> Tensor | None:
    """dy^T x as [M, K], a product in the dtype of x, returned in the dtype of the weight."""
    if dy is None:
        return None
    return (_rows(dy).to(x_NK.dtype).t() @ x_NK).to(weight.dtype)


def bias_gradient(dy: Tensor | None, bias: Tensor) -> Tensor | None:
    """The column sum of dy as [M], summed in float32 or wider, in the dtype of the bias."""
    return None if dy is None else _rows(dy).sum(0).to(bias.dtype)


def _rows(t: Tensor) -> Tensor:
    return t.reshape(-1, t.shape[-1])

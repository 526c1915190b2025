"""Rotation of a matrix and of what it is multiplied with, so that no value stands out when both are rounded.

    y = x W^T = (x T) (W T / 128)^T          T symmetric, T T = 128 I

T is made of Hadamard matrices H_n times sqrt(128 / n): one of 128 for each 128 columns and, of the columns
that are left, the largest power of two at a time. A large input is so spread over 128 values of one size,
which eight bits with one scale tell apart (QuaRot: Ashkboos et al. 2024, arXiv:2404.00456, section 4). The
natural order is meant: H_1 = [1], H_2n = [[H_n, H_n], [H_n, -H_n]].
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import torch
from torch import Tensor

from hasten.ops.panels.formats import ROTATED_GROUP


def rotate(x: Tensor) -> Tensor:
    """x T over the last size, in the dtype of x; differentiable. Twice gives 128 x."""
    K = x.shape[-1]
    parts = [
        (x[..., begin : begin + count * n].unflatten(-1, (count, n)) @ _turn(n).to(x.dtype)).flatten(-2)
        for begin, count, n in _runs(K)
    ]
    return torch.cat(parts, dim=-1) if len(parts) != 1 else parts[0]


def rotated_weights(matrix: Tensor) -> Tensor:
    """W T / 128 of [..., N, K]: what is rounded. `rotate` is the way back."""
    return rotate(matrix) / ROTATED_GROUP


def rotated_moments(moments: Tensor) -> Tensor:
    """Of inputs x T, from those of x: T H T of [K, K]; of mean squares [K] alone, the mean squares."""
    if moments.dim() == 2:
        return rotate(rotate(moments).t()).t()
    # Every number of T is sqrt(128 / n) or its opposite.
    parts = [
        moments[begin : begin + count * n].view(count, n).mean(1).mul(ROTATED_GROUP).repeat_interleave(n)
        for begin, count, n in _runs(len(moments))
    ]
    return torch.cat(parts) if parts else moments


def _runs(K: int) -> Iterator[tuple[int, int, int]]:
    """Runs of blocks of one size: the first column, how many blocks, their size."""
    whole = K // ROTATED_GROUP
    if whole:
        yield 0, whole, ROTATED_GROUP
    begin = whole * ROTATED_GROUP
    while begin < K:
        n = 1 << ((K - begin).bit_length() - 1)
        yield begin, 1, n
        begin += n


@cache
def _turn(n: int) -> Tensor:
    matrix = torch.ones(1, 1)
    while len(matrix) < n:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix * (ROTATED_GROUP / n) ** 0.5

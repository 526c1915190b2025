"""Checks of the native products with panels, for this process's level; `test_panels_native.py` and
`level_suite.py` run them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasten.ops.panels import BFLOAT16, FLOAT32, Format, Panels, quantised, rotated
from hasten.ops.panels.native import linear, rows
from hasten.ops.panels.reference import pack, pack_codes, unpack
from hasten.ops.panels.rotation import rotate

FORMATS: tuple[Format, ...] = (
    FLOAT32,
    BFLOAT16,
    *(
        quantised(bits, group, minima)
        for bits in (3, 4, 5, 6, 8)
        for group in (16, 32, 64, 128)
        for minima in (False, True)
        if not (group == 16 and bits in (3, 5))
    ),
    *(rotated(bits, minima) for bits in (3, 4, 5, 6, 8) for minima in (False, True)),
    Format("quantised", 4, 32, zero=3),
    Format("rotated", 5, 128, zero=20),
)
COMMON: tuple[Format, ...] = (
    FLOAT32,
    BFLOAT16,
    quantised(4, 32, True),
    quantised(8),
    quantised(6, 16),
    quantised(5, 64),
    quantised(4, 128, True),
    rotated(3),
    rotated(8, True),
)
ROWS = (1, 2, 4, 5, 8, 9, 17, 33, 70)
BLOCK = 32


@dataclass(frozen=True)
class Made:
    """Panels, the matrix in float64, and for each weight the largest number that its rounding starts from.

    `held`: the matrix that the numbers of the panels stand for, rotated or not; `size` is of its weights.
    """

    panels: Panels
    held: Tensor
    size: Tensor

    @property
    def matrix(self) -> Tensor:
        return rotate(self.held) if self.panels.format.rotated else self.held

    def seen(self, x: Tensor) -> Tensor:
        """What of x the held matrix is multiplied with, float64."""
        return rotate(x.double()) if self.panels.format.rotated else x.double()

    def size_of_rows(self) -> Tensor:
        """As `size`, of rows of the matrix."""
        if not self.panels.format.rotated:
            return self.size
        groups = [part.sum(1, keepdim=True).expand_as(part) for part in self.size.split(128, 1)]
        return 8 * torch.cat(groups, 1)  # 8: no number of T is larger than sqrt(128)


def make(format: Format, N: int, K: int, seed: int, exact: bool = False) -> Made:
    """A random matrix [N, K]. With `exact` its weights are multiples of 1/2 with few bits."""
    g = torch.Generator().manual_seed(seed)
    if format.dense:
        dense = torch.randint(-64, 65, (N, K), generator=g) / 2 if exact else torch.randn(N, K, generator=g)
        panels = pack(dense, format)
        matrix = unpack(panels).double()
        return Made(panels, matrix, matrix.abs())
    groups = format.groups(K)
    codes = torch.randint(0, format.highest + 1, (N, K), generator=g, dtype=torch.uint8)
    minima = None
    if exact:
        scales = torch.randint(1, 3, (N, groups), generator=g) / 2
        if format.minima:
            minima = -torch.randint(0, 2**format.bits, (N, groups), generator=g) * scales
        unit = 2.0
    else:
        scales = torch.rand(N, groups, generator=g) + 0.1
        if format.minima:
            minima = -scales * 2**format.bits * torch.rand(N, groups, generator=g)
        unit = 0.37
    panels = pack_codes(codes, scales, minima, format, unit)
    held = unpack(replace(panels, format=replace(format, kind="quantised"))).double()
    if minima is None:
        minima = -scales * float(format.zero or 0)
    spread = [t.half().double().abs().repeat_interleave(format.group, 1)[:, :K] for t in (scales, minima)]
    return Made(panels, held, unit * (spread[0] * codes + spread[1]))


def steps(x: Tensor, block: int) -> Tensor:
    """The scale of int8 that each value of x [M, K] gets: the largest of its block over 127."""
    K = x.shape[1]
    padded = torch.nn.functional.pad(x.double().abs(), (0, -K % block))
    largest = padded.view(x.shape[0], -1, block).amax(2) / 127
    return largest.repeat_interleave(block, 1)[:, :K]


def bound(x: Tensor, made: Made) -> Tensor:
    """How far a product [M, N] may be from the truth.

    Quantised: half a step of int8 of x for each weight, or with many rows what bf16 loses in x and in the
    weights. bf16: what it loses in x. float32: nothing. And the rounding of fp32 sums, in a rotation too.
    """
    format, K, plain, x = made.panels.format, x.shape[1], x.double().abs(), made.seen(x)
    fp32 = (8 + math.sqrt(K)) * 2.0**-23 * (x.abs() @ made.size.T)
    if format == FLOAT32:
        return fp32
    weights = made.held.abs().T
    if format == BFLOAT16:
        return fp32 + 2.0**-8 * x.abs() @ weights
    if format.rotated:
        groups = [part.sum(1, keepdim=True).expand_as(part) for part in plain.split(128, 1)]
        fp32 = fp32 + 12 * 8 * 2.0**-24 * torch.cat(groups, 1) @ weights
    int8 = (steps(x, 128 if format.rotated else BLOCK) * (0.5 + 2.0**-10)) @ weights
    bf16 = (2.0**-7 + 2.0**-16) * x.abs() @ weights
    return fp32 + torch.maximum(int8, bf16)


def check_close(found: Tensor, truth: Tensor, allowed: Tensor, what: str) -> None:
    """|found - truth| <= allowed everywhere; NaN fails."""
    error = (found.double() - truth).abs()
    if found.dtype != torch.float32 or found.shape != truth.shape:
        raise AssertionError(f"{what}: {found.dtype} {list(found.shape)}, not float32 {list(truth.shape)}")
    if not bool((error <= allowed).all()):
        worst = int((error / allowed.clamp_min(1e-30)).nan_to_num(nan=float("inf")).argmax())
        raise AssertionError(
            f"{what}: element {worst} is {found.reshape(-1)[worst]}, the truth {truth.reshape(-1)[worst]}, "
            f"allowed are {allowed.reshape(-1)[worst]:.3g}"
        )


def check_bound(format: Format, N: int, K: int, M: int) -> None:
    """Against float64 of the unpacked matrix, with a bias."""
    made = make(format, N, K, seed=N + K + M)
    x = torch.randn(M, K)
    bias = torch.randn(N)
    truth = x.double() @ made.matrix.T + bias.double()
    allowed = bound(x, made) + 2.0**-22 * truth.abs()
    check_close(linear(x, made.panels, bias), truth, allowed, f"{format} [{N}, {K}], {M} rows")


def check_exact(format: Format, N: int, K: int, M: int) -> None:
    """Where x has no more than 7 bits and the weights few, nothing is rounded and every sum is exact."""
    made = make(format, N, K, seed=N + K + M, exact=True)
    x = torch.randint(-127, 128, (M, K)).float()
    x[:, ::BLOCK] = 127.0  # the step of int8 is 1
    if format.rotated:  # x of which these are the rotation; exact for parts of 128, 32, 8 and 2
        x = rotate(x) / 128
    truth = x.double() @ made.matrix.T
    found = linear(x, made.panels)
    check_close(found, truth, torch.zeros_like(truth), f"{format} [{N}, {K}], {M} rows of integers")


def check_end(format: Format, M: int, kind: str, gated: bool) -> None:
    """Bias, activation, factor, scale and residual."""
    N, K = 37, 75
    made, factor = make(format, N, K, seed=1), make(format, N, K, seed=2)
    norm = float(made.matrix.square().mean().sqrt()) * math.sqrt(K)
    x = torch.randn(M, K) / norm
    bias, up_bias, residual = torch.randn(N), torch.randn(N), torch.randn(M, N)
    before = x.double() @ made.matrix.T + bias.double()
    truth = KINDS[kind](before)
    # No slope of these activations is above 1.2 (relu2 is not among them).
    allowed = 1.2 * bound(x, made) + 2.0**-20 * (1 + before.abs())
    if gated:
        up = x.double() @ factor.matrix.T + up_bias.double()
        up_allowed = bound(x, factor) + 2.0**-20 * (1 + up.abs())
        allowed = allowed * (up.abs() + up_allowed) + truth.abs() * up_allowed
        truth = truth * up
    truth = 0.5 * truth + residual.double()
    found = linear(
        x,
        made.panels,
        bias,
        up=factor.panels if gated else None,
        up_bias_N=up_bias if gated else None,
        kind=kind,
        residual=residual,
        scale=0.5,
    )
    what = f"{format}, {M} rows, {'gated ' if gated else ''}{kind}"
    check_close(found, truth, 0.5 * allowed + 2.0**-22 * truth.abs(), what)


KINDS = {
    "identity": lambda x: x,
    "silu": torch.nn.functional.silu,
    "gelu": torch.nn.functional.gelu,
    "tanh": torch.tanh,
    "relu": torch.relu,
}


def check_not_finite(format: Format, M: int) -> None:
    """A row with NaN or infinity gives no finite number; the other rows do not see it."""
    N, K = 19, 70
    made = make(format, N, K, seed=3)
    matrix = made.panels
    x = torch.randn(M, K)
    clean = linear(x, matrix)
    for value in (float("nan"), float("inf"), -float("inf")):
        spoiled = x.clone()
        spoiled[M - 1, K - 1] = value
        found = linear(spoiled, matrix)
        finite = found[M - 1].isfinite() & (made.matrix[:, K - 1] != 0)
        if finite.any():
            raise AssertionError(f"{format}, {M} rows: {value} in x became {found[M - 1][finite][0]}")
        if not torch.equal(found[: M - 1], clean[: M - 1]):
            raise AssertionError(f"{format}, {M} rows: {value} in the last row changed others")


def check_rows(format: Format) -> None:
    """Rows as an embedding reads them are the unpacked rows."""
    made = make(format, 37, 75, seed=4)
    ids = torch.tensor([[36, 0, 15], [16, 36, 31]])
    truth = made.matrix[ids]
    allowed = 2.0**-22 * made.size_of_rows()[ids]
    check_close(rows(made.panels, ids), truth, allowed, f"rows of {format}")


def check_same_row(format: Format, counts: tuple[int, ...]) -> None:
    """A row's bits do not depend on how many others there are, nor on what they hold."""
    made = make(format, 37, 600, seed=5)
    x = torch.randn(max(counts), 600)
    # Blocks of numbers at the ends of the range, in some rows whole and in others in part.
    for special in (None, 0.0, 1e-45, 1e-37, 1e30, float("inf"), float("nan")):
        if special is not None:
            x[1::3, 64:200] = special
            x[2::3, 599] = special
        alone = torch.cat([linear(row[None], made.panels) for row in x])
        for M in counts:
            together = linear(x[:M], made.panels)
            # Which NaN it is does not matter.
            if not torch.equal(together.isnan(), alone[:M].isnan()) or not torch.equal(
                together.nan_to_num(), alone[:M].nan_to_num()
            ):
                raise AssertionError(f"{format}: rows among {M} have other bits than alone, {special}")


def check_threads(format: Format, M: int) -> None:
    """The bits do not depend on the number of threads."""
    made = make(format, 200, 130, seed=6)
    x = torch.randn(M, 130)
    before = torch.get_num_threads()
    try:
        found = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.append(linear(x, made.panels))
    finally:
        torch.set_num_threads(before)
    if not all(torch.equal(found[0], other) for other in found):
        raise AssertionError(f"{format}, {M} rows: other bits at another number of threads")


def suite(smallest: bool) -> Iterator[tuple[str, Callable[[], None]]]:
    """(name, call) of the checks for a process of its own."""
    formats = (COMMON[2],) if smallest else FORMATS
    for format in formats:
        for M in (1, 5) if smallest else (1, 2, 5, 9, 33):
            yield f"panels {format} {M} rows", lambda f=format, m=M: check_bound(f, 37, 75, m)
            yield f"panels {format} {M} exact rows", lambda f=format, m=M: check_exact(f, 19, 130, m)
        yield f"panels {format} row", lambda f=format: check_rows(f)
    if not smallest:
        for format in COMMON:
            for M in (1, 3, 40):
                yield f"panels {format} {M} end", lambda f=format, m=M: check_end(f, m, "silu", True)
                yield f"panels {format} {M} not finite", lambda f=format, m=M: check_not_finite(f, m)
                yield f"panels {format} {M} threads", lambda f=format, m=M: check_threads(f, m)
            yield f"panels {format} same row", lambda f=format: check_same_row(f, (1, 2, 3, 5, 8))

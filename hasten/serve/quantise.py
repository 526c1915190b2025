"""Quantising a matrix well: scales and minima by search, and errors that the columns to come make up for.

For each group of a row the scale (and minimum) with the least weighted squared error

    sum_k h_k (w_k - (scale q_k + minimum))^2

is looked for: rounding to nearest over the whole range, ranges that are somewhat narrower, each followed by a
step of least squares for the codes that it gave. h_k is the mean square of input k where it is known, else 1.

Where the second moments H = E[x x^T] of the inputs are known, columns are rounded one after the other and the
error of each is subtracted from those to come so that E |x (W - W')^T|^2 stays least (GPTQ, Frantar et al.
2022, arXiv:2210.17323, section 3). A row keeps the plain result where that turns out better.

For rotated formats all of this happens to the rotated matrix, with the moments of rotated inputs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from hasten.base.errors import InputError, ShapeError
from hasten.ops.panels import Format, Panels
from hasten.ops.panels.formats import ROTATED_GROUP
from hasten.ops.panels.reference import pack, pack_codes
from hasten.ops.panels.rotation import rotate, rotated_moments, rotated_weights

# Weights looked at together; temporaries of that size stay in the caches.
_CHUNK = 1 << 18
# Shares of a group's range that are tried beside all of it.
_SHRINK = (1.0, 0.94, 0.88, 0.8, 0.7)
# Rows whose columns are rounded together: each of K steps looks at all of them.
_COMPENSATED_CHUNK = 1 << 22
# Added to the diagonal of H, in units of its mean, so that it can be inverted (the paper's 1 %).
_DAMPING = 0.01
# The largest magnitude becomes this power of two in units of the matrix: the upper half of fp16's range.
_TOP_EXPONENT = 13


@dataclass(frozen=True)
class Quantised:
    """Codes uint8 [N, K]; scales and minima fp16 [N, groups], in units of `unit`; of the rotated matrix in a
    rotated format."""

    codes: Tensor
    scales: Tensor
    minima: Tensor | None
    unit: float
    format: Format

    def dense(self) -> Tensor:
        """The matrix that the codes stand for, fp32 [N, K]."""
        group, K = self.format.group, self.codes.shape[1]
        scales = self.scales.float().repeat_interleave(group, 1)[:, :K]
        if self.minima is None:
            matrix = (self.codes.float() - float(self.format.zero or 0)) * scales * self.unit
        else:
            minima = self.minima.float().repeat_interleave(group, 1)[:, :K]
            matrix = (self.codes.float() * scales + minima) * self.unit
        return rotate(matrix) if self.format.rotated else matrix

    def part(self, rows: tuple[int, int] | None, columns: tuple[int, int] | None) -> Quantised:
        """Some rows and columns. Raises ShapeError where columns do not begin or end at a group."""
        down, across = slice(*(rows or (None,))), slice(*(columns or (None,)))
        K, group = self.codes.shape[1], self.format.group
        if columns and (columns[0] % group or (columns[1] % group and columns[1] != K)):
            raise ShapeError(f"columns {columns[0]} to {columns[1]} cut groups of {group} apart")
        groups = slice(columns[0] // group, -(-columns[1] // group)) if columns else slice(None)
        return replace(
            self,
            codes=self.codes[down, across],
            scales=self.scales[down, groups],
            minima=None if self.minima is None else self.minima[down, groups],
        )

    def panels(self) -> Panels:
        return pack_codes(self.codes, self.scales, self.minima, self.format, self.unit)


def quantise(matrix_NK: Tensor, format: Format, moments: Tensor | None = None) -> Panels:
    """A floating-point matrix [N, K] in panels of `format`; dense formats round it.

    `moments`: mean squares of the inputs [K], or their second moments [K, K] (docstring of this file).

    Raises InputError for a matrix with a number that is not finite, ShapeError where shapes do not fit.
    """
    if format.dense:
        return pack(matrix_NK, format)
    return search(matrix_NK, format, moments).panels()


def search(matrix_NK: Tensor, format: Format, moments: Tensor | None = None) -> Quantised:
    """As `quantise`, before packing."""
    N, K = _checked(matrix_NK, moments)
    if format.rotated:
        seen = None if moments is None else rotated_moments(moments.float())
        found = search(rotated_weights(matrix_NK.float()), _of_rotated(format), seen)
        return replace(found, format=format)
    full = moments.float() if moments is not None and moments.dim() == 2 else None
    weights_GK = _weights(moments if full is None else full.diagonal(), K, format)
    unit = _unit(matrix_NK)
    if full is None:
        parts = [
            _search_rows(rows.float(), weights_GK, format, unit) for rows in _row_chunks(matrix_NK, _CHUNK)
        ]
        return _joined(parts, N, K, format, unit)
    factor = _inverse_factor(full)
    parts = []
    for rows in _row_chunks(matrix_NK, _COMPENSATED_CHUNK):
        rows = rows.float()
        plain = [_search_rows(few, weights_GK, format, unit) for few in _row_chunks(rows, _CHUNK)]
        other = _compensated(rows, factor, weights_GK, format, unit)
        parts.append(_better_rows(rows, full, _joined(plain, len(rows), K, format, unit), other))
    return _joined(parts, N, K, format, unit)


def round_to_nearest(matrix_NK: Tensor, format: Format) -> Quantised:
    """The plain way: the whole range of each group, rounded to nearest. What `search` is never worse than."""
    N, K = _checked(matrix_NK, None)
    if format.rotated:
        found = round_to_nearest(rotated_weights(matrix_NK.float()), _of_rotated(format))
        return replace(found, format=format)
    unit, parts = _unit(matrix_NK), []
    for rows in _row_chunks(matrix_NK, _CHUNK):
        grouped = _grouped(rows.float(), format)
        scale, minimum = _whole_range(grouped, format)
        parts.append(_at_most_fp16(grouped, scale, minimum, format, unit))
    return _joined(parts, N, K, format, unit)


def _of_rotated(format: Format) -> Format:
    """How the rotated matrix itself is rounded."""
    return replace(format, kind="quantised")


def output_errors(matrix_NK: Tensor, other_NK: Tensor, moments: Tensor | None) -> Tensor:
    """Mean squared error of each row's product with the inputs: (W - W') H (W - W')^T on its diagonal, [N].

    H is the identity where `moments` is None and diagonal where it is [K].
    """
    difference = matrix_NK.float() - other_NK.float()
    if moments is None:
        return difference.square().sum(1)
    if moments.dim() == 1:
        return difference.square() @ moments.float()
    return ((difference @ moments.float()) * difference).sum(1).clamp_min(0.0)


def rounding_costs(moments: Tensor | None, rotated: bool) -> Tensor | None:
    """What the squared rounding error of a weight of each column [K] adds to a row's error in the end.

    Where columns are rounded in turn and those to come make up for the error, that is 1 / u_kk^2, u the upper
    Cholesky factor of H^-1 (the paper's section 3); else the mean square of the input. `rotated`: of the
    rotated inputs and weights. None where `moments` is.
    """
    if moments is None:
        return None
    seen = rotated_moments(moments.float()) if rotated else moments.float()
    return seen if seen.dim() == 1 else _inverse_factor(seen).diagonal().square().reciprocal()


def rounding_errors(matrix_NK: Tensor, format: Format, costs: Tensor | None) -> Tensor:
    """The error of each row [N] that is expected of `search` with the moments behind `rounding_costs`."""
    if not format.rotated:
        return output_errors(matrix_NK, search(matrix_NK, format, costs).dense(), costs)
    seen = rotated_weights(matrix_NK.float())
    errors = output_errors(seen, search(seen, _of_rotated(format), costs).dense(), costs)
    # Inputs of which nothing is known are of one size: rotated ones of 128 times that, squared.
    return errors * ROTATED_GROUP if costs is None else errors


def _checked(matrix_NK: Tensor, moments: Tensor | None) -> tuple[int, int]:
    if matrix_NK.dim() != 2:
        raise ShapeError(f"a matrix [N, K] can be quantised, not a tensor {list(matrix_NK.shape)}")
    N, K = matrix_NK.shape
    if moments is not None and tuple(moments.shape) not in ((K,), (K, K)):
        raise ShapeError(
            f"moments {list(moments.shape)} for a matrix [{N}, {K}]; allowed: [{K}] or [{K}, {K}]"
        )
    if not bool(torch.isfinite(matrix_NK).all()):
        raise InputError(f"a matrix [{N}, {K}] holds numbers that are not finite; it cannot be quantised")
    return N, K


def _unit(matrix_NK: Tensor) -> float:
    largest = float(matrix_NK.abs().max()) if matrix_NK.numel() else 0.0
    return 2.0 ** (math.ceil(math.log2(largest)) - _TOP_EXPONENT) if largest > 0 else 1.0


def _weights(diagonal: Tensor | None, K: int, format: Format) -> Tensor:
    """Weights of the squared errors, [groups, group], zero for the padding."""
    weights = torch.zeros(format.groups(K) * format.group)
    if diagonal is None:
        weights[:K] = 1.0
    else:
        # An input that was always zero in the sample is not free to be wrong by any amount.
        floor = 1e-3 * float(diagonal.float().mean()) if K else 0.0
        weights[:K] = diagonal.float().clamp_min(max(floor, 1e-30))
    return weights.view(-1, format.group)


def _row_chunks(matrix_NK: Tensor, weights: int) -> Iterator[Tensor]:
    """Rows of about that many weights together."""
    step = max(1, weights // max(1, matrix_NK.shape[1]))
    for begin in range(0, matrix_NK.shape[0], step):
        yield matrix_NK[begin : begin + step]


def _grouped(rows_NK: Tensor, format: Format) -> Tensor:
    """[N, groups, group]; the padding repeats the last weight, so that no range grows by it."""
    N, K = rows_NK.shape
    missing = format.groups(K) * format.group - K
    if missing:
        rows_NK = torch.cat([rows_NK, rows_NK[:, -1:].expand(N, missing)], dim=1)
    return rows_NK.reshape(N, -1, format.group)


Part = tuple[Tensor, Tensor, Tensor | None]


def _joined(parts: list[Part], N: int, K: int, format: Format, unit: float) -> Quantised:
    groups = format.groups(K)
    codes = (
        torch.cat([part[0].reshape(part[0].shape[0], -1) for part in parts]) if parts else torch.zeros(0, K)
    )
    scales = torch.cat([part[1] for part in parts]) if parts else torch.zeros(0, groups)
    minima = None
    if format.minima:
        minima = torch.cat([part[2] for part in parts if part[2] is not None]) if parts else scales
    halves = None if minima is None else minima.half()
    return Quantised(codes[:, :K].to(torch.uint8).contiguous(), scales.half(), halves, unit, format)


def _whole_range(grouped_NGK: Tensor, format: Format) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum that reach every weight of a group; [N, groups]."""
    if format.minima:
        low, high = grouped_NGK.aminmax(dim=-1)
        return (high - low) / format.highest, low
    assert format.zero is not None  # a symmetric format has one
    return grouped_NGK.abs().amax(-1) / max(1, format.highest - format.zero), None


def _ranges(grouped_NGK: Tensor, format: Format) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Scales and minima to try."""
    if format.minima:
        low, high = grouped_NGK.aminmax(dim=-1)
        for share in _SHRINK:
            cut = (high - low) * ((1 - share) / 2)
            yield (high - low) * (share / format.highest), low + cut
        return
    # The code 0 lies one step further from zero than the highest one: the largest weight goes there.
    place = grouped_NGK.abs().argmax(-1, keepdim=True)
    extreme = grouped_NGK.gather(-1, place).squeeze(-1)
    for share in _SHRINK:
        yield extreme * (-share / max(1, format.zero or 0)), None


def _codes(grouped_NGK: Tensor, scale: Tensor, minimum: Tensor | None, format: Format) -> Tensor:
    """Codes as floats."""
    inverse = torch.where(scale == 0, 0.0, 1.0 / scale).unsqueeze(-1)
    if minimum is None:
        codes = torch.mul(grouped_NGK, inverse).add_(float(format.zero or 0))
    else:
        codes = torch.sub(grouped_NGK, minimum.unsqueeze(-1)).mul_(inverse)
    return codes.round_().clamp_(0, format.highest)


def _errors(
    grouped_NGK: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    format: Format,
    weights_GK: Tensor,
) -> Tensor:
    """Weighted squared error of each group."""
    base = scale * -float(format.zero or 0) if minimum is None else minimum
    difference = torch.addcmul(base.unsqueeze(-1), codes, scale.unsqueeze(-1)).sub_(grouped_NGK)
    return difference.square_().mul_(weights_GK).sum(-1)


def _least_squares(
    grouped_NGK: Tensor,
    codes: Tensor,
    scale: Tensor,
    minimum: Tensor | None,
    format: Format,
    weights_GK: Tensor,
) -> tuple[Tensor, Tensor | None]:
    """The best scale and minimum for these codes; those given where the codes determine none."""
    if minimum is None:
        steps = codes - float(format.zero or 0)
        weighted = steps * weights_GK
        square = (weighted * steps).sum(-1)
        found = (weighted * grouped_NGK).sum(-1) / square
        return torch.where(square > 0, found, scale), None
    weighted = codes * weights_GK
    total = weights_GK.sum(-1)
    q, qq = weighted.sum(-1), (weighted * codes).sum(-1)
    w, qw = (grouped_NGK * weights_GK).sum(-1), (weighted * grouped_NGK).sum(-1)
    determinant = total * qq - q * q
    solvable = determinant > 1e-6 * total * qq
    found = (total * qw - q * w) / determinant
    low = (w - found * q) / total
    return torch.where(solvable, found, scale), torch.where(solvable, low, minimum)


def _rounded(scale: Tensor, minimum: Tensor | None, unit: float) -> tuple[Tensor, Tensor | None]:
    """Both as fp16 in units of the matrix stores them."""
    return (scale / unit).half().float() * unit, (
        None if minimum is None else (minimum / unit).half().float() * unit
    )


def _at_most_fp16(
    grouped_NGK: Tensor, scale: Tensor, minimum: Tensor | None, format: Format, unit: float
) -> Part:
    """Codes for scales and minima rounded to fp16, all in units of the matrix."""
    scale, minimum = _rounded(scale, minimum, unit)
    codes = _codes(grouped_NGK, scale, minimum, format)
    return codes, scale / unit, None if minimum is None else minimum / unit


def _search_rows(rows_NK: Tensor, weights_GK: Tensor, format: Format, unit: float) -> Part:
    grouped = _grouped(rows_NK, format)
    scale, minimum = _best_scales(grouped, weights_GK, format, unit)
    return (
        _codes(grouped, scale, minimum, format).to(torch.uint8),
        scale / unit,
        (None if minimum is None else minimum / unit),
    )


def _best_scales(
    grouped: Tensor, weights_GK: Tensor, format: Format, unit: float
) -> tuple[Tensor, Tensor | None]:
    """Scale and minimum of each group, as fp16 in units of the matrix stores them; [N, groups]."""
    best_scale: Tensor | None = None
    best_minimum: Tensor | None = None
    best_error = torch.empty(0)

    def consider(scale: Tensor, minimum: Tensor | None) -> Tensor:
        nonlocal best_scale, best_minimum, best_error
        scale, minimum = _rounded(scale, minimum, unit)
        codes = _codes(grouped, scale, minimum, format)
        error = _errors(grouped, codes, scale, minimum, format, weights_GK)
        if best_scale is None:
            best_scale, best_minimum, best_error = scale, minimum, error
            return codes
        better = error < best_error
        best_scale = torch.where(better, scale, best_scale)
        if minimum is not None and best_minimum is not None:
            best_minimum = torch.where(better, minimum, best_minimum)
        best_error = torch.where(better, error, best_error)
        return codes

    consider(*_whole_range(grouped, format))
    for scale, minimum in _ranges(grouped, format):
        codes = consider(scale, minimum)
        consider(*_least_squares(grouped, codes, scale, minimum, format, weights_GK))
    assert best_scale is not None  # the whole range was considered
    return best_scale, best_minimum


def _compensated(
    rows_NK: Tensor, factor_KK: Tensor, weights_GK: Tensor, format: Format, unit: float
) -> Quantised:
    """Columns rounded in turn; those to come make up for the error of each. `factor_KK`: of H^-1, upper."""
    N, K = rows_NK.shape
    left_KN = torch.empty(K, N).copy_(rows_NK.t())  # a copy in any case: it is written to
    codes_KN = torch.empty(K, N)
    scales, minima = torch.empty(N, format.groups(K)), torch.empty(N, format.groups(K))
    for number, begin in enumerate(range(0, K, format.group)):
        end = min(begin + format.group, K)
        block = left_KN[begin:end]
        grouped = _grouped(block.t().contiguous(), format)
        scale, minimum = (
            None if found is None else found[:, 0]
            for found in _best_scales(grouped, weights_GK[number : number + 1], format, unit)
        )
        assert scale is not None  # every format has one
        scales[:, number] = scale / unit
        base = scale * -float(format.zero or 0) if minimum is None else minimum
        minima[:, number] = base / unit
        inverse = torch.where(scale == 0, 0.0, 1.0 / scale)
        errors = torch.empty_like(block)
        for place in range(end - begin):
            at = begin + place
            code = (
                torch.sub(block[place], base, out=codes_KN[at])
                .mul_(inverse)
                .round_()
                .clamp_(0, format.highest)
            )
            torch.addcmul(base, code, scale, out=errors[place]).sub_(block[place]).div_(-factor_KK[at, at])
            later = factor_KK[at, at + 1 : end].unsqueeze(1)
            block[place + 1 :].addcmul_(later, errors[place].unsqueeze(0), value=-1)
        left_KN[end:].addmm_(factor_KK[begin:end, end:].t(), errors, alpha=-1)
    codes = codes_KN.t().to(torch.uint8).contiguous()
    return Quantised(codes, scales.half(), minima.half() if format.minima else None, unit, format)


def _inverse_factor(moments_KK: Tensor) -> Tensor:
    """The upper Cholesky factor of (H + damping)^-1, fp32."""
    wide = moments_KK.double()
    diagonal = wide.diagonal().clone()
    level = float(diagonal.mean()) or 1.0
    damping = _DAMPING
    while True:
        damped = wide.clone()
        damped.diagonal().copy_(diagonal.clamp_min(0) + damping * level)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            break
        damping *= 10
    inverse = torch.cholesky_inverse(lower)
    return torch.linalg.cholesky(inverse, upper=True).float()


def _better_rows(rows_NK: Tensor, moments_KK: Tensor, plain: Quantised, other: Quantised) -> Part:
    """For each row the one of the two whose products with the inputs are nearer."""
    ours, theirs = (output_errors(rows_NK, found.dense(), moments_KK) for found in (other, plain))
    keep = (ours < theirs).unsqueeze(1)
    minima = None
    if other.minima is not None and plain.minima is not None:
        minima = torch.where(keep, other.minima, plain.minima)
    return torch.where(keep, other.codes, plain.codes), torch.where(keep, other.scales, plain.scales), minima

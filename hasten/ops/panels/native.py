"""Products with panels by the native kernels (`cpu*.cpp`): for tests, timing, and models outside a program.

Where no kernels are loaded, or the tensors are of a kind that they do not take, the reference answers.
"""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.base.errors import ConfigError, ShapeError, nearest
from hasten.ops import native
from hasten.ops.activation.cpu import CODES
from hasten.ops.activation.reference import activation
from hasten.ops.panels.formats import Format
from hasten.ops.panels.matrix import Panels
from hasten.ops.panels.reference import linear as reference_linear
from hasten.ops.panels.reference import unpack

_CODE_OF_NONE = -1


def native_format(format: Format) -> list[int]:
    """kind, bits, group and zero (-1 where minima are stored), as the kernels know a format."""
    return [format.code, format.bits, format.group, -1 if format.zero is None else format.zero]


def linear(
    x: Tensor,
    panels: Panels,
    bias_N: Tensor | None = None,
    *,
    up: Panels | None = None,
    up_bias_N: Tensor | None = None,
    kind: str = "identity",
    residual: Tensor | None = None,
    scale: float = 1.0,
) -> Tensor:
    """scale * (kind(x W^T + b) * (x Up^T + b_up)) + residual, in fp32; without `up` there is no factor.

    Quantised panels: x is rounded to int8 with one scale for each 32 values, so that the result is off by at
    most sum |w| * scale / 2. Rotated ones likewise, of x and w rotated, with one scale for each 128. bf16
    panels, and those with codes where many rows are multiplied otherwise (`few_rows_limit` in layout.h): x,
    and codes times scales, are rounded to bf16 where the processor multiplies pairs of bf16. float32 panels:
    nothing is rounded.

    Args:
        x: [..., K].
        panels, up: matrices [N, K], both dense of one format, both quantised or both rotated.
        bias_N, up_bias_N: [N].
        kind: an activation of `hasten.ops.activation`.
        residual: [..., N].

    Raises:
        ShapeError: where sizes or formats do not fit.
        ConfigError: an unknown activation.
    """
    if kind != "identity" and kind not in CODES:
        raise ConfigError(f"activation {kind!r}; {nearest(kind, ['identity', *CODES])}")
    if x.dim() == 0 or x.shape[-1] != panels.K:
        raise ShapeError(f"x is {list(x.shape)}; its last size must be {panels.K}, the columns of the matrix")
    if up is not None and (up.N, up.K) != (panels.N, panels.K):
        raise ShapeError(f"up is [{up.N}, {up.K}], the matrix is [{panels.N}, {panels.K}]")
    if up is not None and up.format.kind != panels.format.kind:
        raise ShapeError(
            f"up is {up.format}, the matrix {panels.format}: both dense alike, quantised, or rotated"
        )
    if native.refusal(x, bias_N, up_bias_N, residual):
        y = reference_linear(x, panels, bias_N)
        y = y if kind == "identity" else activation(y, kind)
        y = y if up is None else y * reference_linear(x, up, up_bias_N)
        return y * scale if residual is None else y * scale + residual
    y = torch.ops.hasten_cpu.panel_linear(
        x,
        torch.from_numpy(panels.data),
        native_format(panels.format),
        panels.unit,
        panels.N,
        panels.K,
        bias_N,
        None if up is None else torch.from_numpy(up.data),
        [] if up is None else native_format(up.format),
        1.0 if up is None else up.unit,
        up_bias_N,
        CODES.get(kind, _CODE_OF_NONE),
        residual,
        scale,
    )
    return y


def rows(panels: Panels, ids: Tensor) -> Tensor:
    """Rows of the matrix, as an embedding reads them: ids [...] -> fp32 [..., K].

    Raises IndexError for an id outside the matrix.
    """
    if native.state().level is None:
        return unpack(panels)[ids]
    found: Tensor = torch.ops.hasten_cpu.panel_rows(
        torch.from_numpy(panels.data), native_format(panels.format), panels.unit, panels.N, panels.K, ids
    )
    return found

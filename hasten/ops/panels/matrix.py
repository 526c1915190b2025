"""A matrix in panels, as bytes: what is kept on disk and what programs read. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from hasten.base.errors import ShapeError
from hasten.ops.panels.formats import LANES, Format


@dataclass(frozen=True, eq=False)
class Panels:
    """A matrix [N, K] in panels. `data`: uint8 [ceil(N / 16), format.panel_bytes(K)], contiguous.

    Raises ShapeError for data of another shape or type.
    """

    data: np.ndarray
    format: Format
    N: int
    K: int
    unit: float = 1.0

    def __post_init__(self) -> None:
        expected = (-(-self.N // LANES), self.format.panel_bytes(self.K))
        if self.data.dtype != np.uint8 or self.data.shape != expected:
            raise ShapeError(
                f"panels of {self.format} for a matrix [{self.N}, {self.K}] are uint8 {list(expected)}, "
                f"not {self.data.dtype} {list(self.data.shape)}"
            )
        if not self.data.flags.c_contiguous:
            raise ShapeError(f"panels of a matrix [{self.N}, {self.K}] are not contiguous")

    @property
    def nbytes(self) -> int:
        """Bytes in memory, padding included."""
        return self.data.nbytes

    def __repr__(self) -> str:
        return f"Panels({self.format}, [{self.N}, {self.K}], {self.nbytes} bytes)"


def describe(panels: Panels) -> dict[str, Any]:
    """What beside the bytes makes panels, as data for JSON; `restore` reads it."""
    format = panels.format
    return {
        "kind": format.kind,
        "bits": format.bits,
        "group": format.group,
        "zero": format.zero,
        "N": panels.N,
        "K": panels.K,
        "unit": panels.unit,
    }


def restore(description: dict[str, Any], data: np.ndarray) -> Panels:
    """Panels from what `describe` gave and their bytes (uint8, any shape with the right count).

    Raises ShapeError where the bytes are too few or too many, KeyError where the description lacks something.
    """
    format = Format(*(description[name] for name in ("kind", "bits", "group", "zero")))
    N, K = description["N"], description["K"]
    if data.size != format.matrix_bytes(N, K):
        expected = format.matrix_bytes(N, K)
        raise ShapeError(f"{format} of a matrix [{N}, {K}] takes {expected} bytes, not {data.size}")
    return Panels(data.reshape(-(-N // LANES), format.panel_bytes(K)), format, N, K, description["unit"])

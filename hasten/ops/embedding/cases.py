"""Cases of the embedding."""

from __future__ import annotations

from typing import Any

import torch

from hasten.ops.cases import Case, Inputs
from hasten.ops.embedding import embedding
from hasten.ops.embedding import reference as meaning


def case(
    name: str, ids_shape: tuple[int, ...], rows: int, dim: int, *, benchmark: bool = False, **options: Any
) -> Case:
    """One case; ids repeat."""

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        ids = torch.randint(0, rows, ids_shape, generator=generator)
        weight = torch.randn(rows, dim, generator=generator).to(dtype)
        return (ids, weight), dict(options)

    def moved(inputs: Inputs, out: torch.Tensor) -> int:
        ids, weight = inputs[0]
        # Of the table only the rows that the ids name.
        read = ids.unique().numel() * dim * weight.element_size()
        return int(ids.numel() * ids.element_size() + read + out.numel() * out.element_size())

    return Case(
        "embedding", name, make, embedding, meaning.embedding, None, (1,), benchmark=benchmark, moved=moved
    )


CASES = [
    case("plain", (2, 63), 40, 24),
    case("one", (1, 1), 7, 63),
    case("many-repeats", (511,), 3, 16),
    case("padding-and-scale", (2, 513), 50, 16, padding_idx=3, scale=4.1),
    case("empty", (2, 0), 7, 8),
    case("smollm2", (2, 512), 49152, 576, benchmark=True),
]

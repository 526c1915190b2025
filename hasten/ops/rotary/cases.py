"""Cases of rotary position embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hasten.ops.cases import Case, Inputs
from hasten.ops.rotary import reference as meaning
from hasten.ops.rotary import rotary


def plain_torch(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, out_dtype: torch.dtype | None = None
) -> Tensor:
    """As a model's code has it: everything in the tensors' own dtypes."""
    width = cos.shape[-1]
    cos, sin = cos.unsqueeze(-3), sin.unsqueeze(-3)
    part, rest = x[..., :width], x[..., width:]
    if interleaved:
        turned = torch.stack((-part[..., 1::2], part[..., 0::2]), dim=-1).flatten(-2)
    else:
        turned = torch.cat((-part[..., width // 2 :], part[..., : width // 2]), dim=-1)
    y = torch.cat((part * cos + turned * sin, rest), dim=-1)
    return y if out_dtype is None else y.to(out_dtype)


def case(
    name: str,
    shape: tuple[int, int, int, int],
    width: int,
    *,
    table_batch: int | None = 1,
    table_dtype: torch.dtype | None = None,
    layout: str = "projected",
    benchmark: bool = False,
    **options: Any,
) -> Case:
    """One case; `table_batch` None gives cos and sin without a batch dimension."""
    batch, heads, length, dim = shape

    def make(generator: torch.Generator, dtype: torch.dtype) -> Inputs:
        if layout == "contiguous":
            x = torch.randn(shape, generator=generator).to(dtype)
        elif layout == "columns":
            x = torch.randn(batch, heads, dim, length, generator=generator).to(dtype).mT
        else:
            x = torch.randn(batch, length, heads, dim, generator=generator).to(dtype).transpose(1, 2)
        angles = (
            torch.rand(table_batch or 1, length, width // 2, generator=generator, dtype=torch.float64) * 6.28
        )
        both = (
            angles.repeat_interleave(2, dim=-1)
            if options.get("interleaved")
            else torch.cat((angles,) * 2, dim=-1)
        )
        both = both[0] if table_batch is None else both
        cos, sin = (t.to(table_dtype or dtype) for t in (both.cos(), both.sin()))
        return (x, cos, sin), dict(options)

    def flops() -> float:
        return 3.0 * batch * heads * length * width

    return Case(
        "rotary", name, make, rotary, meaning.rotary, plain_torch, (0,), flops=flops, benchmark=benchmark
    )


CASES = [
    case("half-split", (2, 3, 63, 64), 64),
    case("half-split-no-batch", (2, 3, 1, 16), 16, table_batch=None),
    case("half-split-positions-per-row", (2, 3, 17, 16), 16, table_batch=2, layout="contiguous"),
    case("partial", (1, 4, 513, 80), 20),
    case("interleaved", (2, 3, 63, 64), 64, interleaved=True),
    case("interleaved-partial", (1, 3, 17, 64), 32, interleaved=True),
    case("wide-table", (2, 3, 63, 64), 64, table_dtype=torch.float32),
    case("wide-table-narrow-result", (2, 3, 63, 64), 64, table_dtype=torch.float32, out_dtype=torch.bfloat16),
    case("narrow", (2, 1, 3, 3), 2),
    case("odd", (1, 2, 7, 511), 22),
    case("columns", (2, 2, 7, 63), 62, layout="columns"),
    case("interleaved-odd", (1, 2, 7, 513), 38, interleaved=True),
    case("interleaved-wide-table", (2, 3, 17, 64), 64, interleaved=True, table_dtype=torch.float32),
    case("long", (1, 1, 4096 + 13, 8), 8),
    case("empty", (2, 3, 0, 16), 16),
    case("smollm2-q-512", (2, 9, 512, 64), 64, benchmark=True),
    case("smollm2-q-2048", (1, 9, 2048, 64), 64, benchmark=True),
]

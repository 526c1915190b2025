"""Rotary position embedding in the spellings of the field, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rewriting import assert_same, operators, rewrite
from torch import Tensor

B, H, S, D = 2, 3, 5, 8
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(B, H, S, D, generator=GENERATOR)
X_BSHD = torch.randn(B, S, H, D, generator=GENERATOR)
ANGLES = torch.rand(1, S, D // 2, generator=GENERATOR) * 6
HALF = [ANGLES.cos(), ANGLES.sin()]
WHOLE = [torch.cat([t, t], -1) for t in HALF]
TWICE = [t.repeat_interleave(2, -1) for t in HALF]
COMPLEX = torch.polar(torch.ones_like(ANGLES), ANGLES)


def halves(x: Tensor) -> tuple[Tensor, Tensor]:
    return x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]


def sliced(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    x1, x2 = halves(x)
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


def sliced_with_heads_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    cos, sin = cos[:, :, None], sin[:, :, None]
    x1, x2 = halves(x)
    return torch.cat((cos * x1 - sin * x2, sin * x1 + cos * x2), dim=3)


def by_one_table(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x.split(x.shape[-1] // 2, dim=-1)
    cos, sin = cos[0], sin[0]
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


def rounded(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return sliced(x.float(), cos, sin).to(x.dtype)


def opposite(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = halves(x)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)


def opposite_whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """nanochat."""
    x1, x2 = halves(x)
    return x * cos.unsqueeze(1) + torch.cat((x2, -x1), dim=-1) * sin.unsqueeze(1)


def strided(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x[..., ::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack([even * cos - odd * sin, even * sin + odd * cos], dim=-1).flatten(3)


def viewed_as_pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    even, odd = x.reshape(*x.shape[:-1], -1, 2).unbind(-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).view_as(x)


def apart(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """DeepSeek-V3: pairs are read interleaved and written as halves."""
    even, odd = x[..., 0::2], x[..., 1::2]
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((even * cos - odd * sin, odd * cos + even * sin), dim=-1)


def complex_numbers(x: Tensor, angles: Tensor) -> Tensor:
    """Llama 4, DeepSeek-V2."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * angles.unsqueeze(1)).flatten(3).type_as(x)


def whole(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = halves(x)
    return x * cos.unsqueeze(1) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(1)


def pairs(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)
    return x * cos.unsqueeze(1) + turned * sin.unsqueeze(1)


def partial(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([sliced(x[..., :4], cos, sin), x[..., 4:]], dim=-1)


def partial_split(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    turned, rest = torch.split(x, [4, 4], dim=-1)
    return torch.cat([whole(turned, cos, sin), rest], dim=-1)


def partial_with_heads_last(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.cat([sliced_with_heads_last(x[..., :4], cos, sin), x[..., 4:]], dim=-1)


QUARTER = [t[..., :2] for t in HALF]
SPELLINGS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "half tables, slices": (sliced, [X, *HALF]),
    "half tables, heads last": (sliced_with_heads_last, [X_BSHD, *HALF]),
    "half tables without a batch": (by_one_table, [X, *HALF]),
    "half tables, rounded": (rounded, [X.bfloat16(), *HALF]),
    "half tables, the opposite angle": (opposite, [X, *HALF]),
    "half tables, strided": (strided, [X, *HALF]),
    "half tables, pairs of a view": (viewed_as_pairs, [X, *HALF]),
    "half tables, pairs put apart": (apart, [X, *HALF]),
    "one sequence without a batch": (
        lambda x, cos, sin: whole(x, cos[0], sin[0]),
        [X_BSHD[0], *WHOLE],
    ),
    "whole tables": (whole, [X, *WHOLE]),
    "whole tables, pairs": (pairs, [X, *TWICE]),
    "whole tables, the opposite angle": (opposite_whole, [X, *WHOLE]),
    "complex numbers": (complex_numbers, [X, COMPLEX]),
    "a part of the head": (partial, [X, *QUARTER]),
    "a part of the head, split off": (partial_split, [X, *(torch.cat([t, t], -1) for t in QUARTER)]),
    "a part of the head, heads last": (partial_with_heads_last, [X_BSHD, *QUARTER]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_recognised_and_the_same(name: str) -> None:
    function, (x, *tables) = SPELLINGS[name]
    module, log = rewrite(function, x, *tables)
    assert operators(module) == {"rotary": 1}, [entry.declined for entry in log]
    tolerance = 2**-7 if x.dtype == torch.bfloat16 else 1e-5
    assert_same(module, function, x, *tables, tolerance=tolerance, constants=len(tables))
    if name.startswith("a part"):  # the rest of the head is taken through, not put behind it
        assert not any(
            n.target is torch.ops.aten.cat.default and n.args[0][0].meta["val"].dim() == 4
            for n in module.graph.nodes
        )


NOT_ROTARY: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "both signs the same": (
        lambda x, c, s: torch.cat(
            [halves(x)[0] * c + halves(x)[1] * s, halves(x)[1] * c + halves(x)[0] * s], -1
        ),
        [X, *HALF],
    ),
    "other tables for each half": (
        lambda x, c, s: torch.cat(
            [halves(x)[0] * c - halves(x)[1] * s, halves(x)[1] * s + halves(x)[0] * c], -1
        ),
        [X, *HALF],
    ),
    "a half with itself": (
        lambda x, c, s: x * c + torch.cat((-x[..., :4], x[..., :4]), -1) * s,
        [X, *WHOLE],
    ),
    "pairs put behind one another": (
        lambda x, c, s: x * c + torch.cat((-x[..., 1::2], x[..., ::2]), -1) * s,
        [X, *WHOLE],
    ),
}


@pytest.mark.parametrize("name", NOT_ROTARY)
def test_what_only_looks_alike_stays(name: str) -> None:
    function, (x, *tables) = NOT_ROTARY[name]
    module, _ = rewrite(function, x, *tables)
    assert operators(module)["rotary"] == 0
    assert_same(module, function, x, *tables)

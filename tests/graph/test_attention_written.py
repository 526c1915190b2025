"""Attention that is written out, in the spellings of the field, and what only looks like it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from rewriting import assert_same, operators, rewrite
from torch import Tensor

B, H, S, D = 2, 3, 5, 8
LOWEST = torch.finfo(torch.float32).min
GENERATOR = torch.Generator().manual_seed(0)
Q, K, V = torch.randn(3, B, H, S, D, generator=GENERATOR)
ADDED = torch.randn(B, 1, S, S, generator=GENERATOR)
KEYS = torch.randn(B, 1, 1, S, generator=GENERATOR)
PLACES = torch.randn(H, 1, S, generator=GENERATOR)
BANNED = torch.ones(B, 1, S, S, dtype=torch.bool).triu(1)
BANNED[0, :, 3] = True  # a query without a key
CAPPED = 2.0


def scores(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.transpose(-1, -2)


def merged(x: Tensor) -> Tensor:
    return x.reshape(-1, *x.shape[2:])


def plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) / math.sqrt(D), -1) @ v


def scaled_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(scores(q * D**-0.5, k), -1, dtype=torch.float32).to(q.dtype) @ v


def masked(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) * 0.3 + mask, -1) @ v


def scaled_with_the_bias(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    return torch.softmax((scores(q, k) + bias) / 3.0 + bias, -1) @ v


def subtracted(q: Tensor, k: Tensor, v: Tensor, penalty: Tensor) -> Tensor:
    return torch.softmax(scores(q, k) - penalty, -1) @ v


def capped(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    return torch.softmax(torch.tanh(scores(q, k) * 0.5 / CAPPED) * CAPPED + mask, -1) @ v


def biased_and_filled(q: Tensor, k: Tensor, v: Tensor, places: Tensor, banned: Tensor) -> Tensor:
    """MPT."""
    s = scores(q, k) * 0.4 + places
    return torch.softmax(s.masked_fill(banned, LOWEST).float(), -1).to(v.dtype) @ v


def chosen(q: Tensor, k: Tensor, v: Tensor, banned: Tensor) -> Tensor:
    """GPT-Neo."""
    value = torch.tensor(LOWEST, dtype=q.dtype)
    return torch.softmax(torch.where(~banned, scores(q, k), value), -1) @ v


def three_dims(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
    """XGLM: batch and heads are one dim, apart where the mask is added; no score is below the lowest."""
    s = torch.bmm(merged(q), merged(k).transpose(1, 2)).view(B, H, S, S) + mask
    s = torch.max(s, torch.tensor(LOWEST)).view(B * H, S, S)
    return torch.bmm(torch.softmax(s, -1), merged(v)).view(B, H, S, D)


def of_three_dims(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.bmm(torch.softmax(torch.bmm(merged(q), merged(k).mT), -1), merged(v))


def one_product_with_the_bias(q: Tensor, k: Tensor, v: Tensor, places: Tensor, mask: Tensor) -> Tensor:
    """BLOOM, GPT-NeoX of old: the second product has four dims or three."""
    bias = places.repeat(B, 1, 1)
    s = (
        torch.baddbmm(bias, merged(q), merged(k).transpose(-1, -2), beta=1.0, alpha=0.3).view(B, H, S, S)
        + mask
    )
    return torch.softmax(s, -1) @ v


def disentangled(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, banned: Tensor) -> Tensor:
    """DeBERTa: keys are divided by a tensor, the bias is the model's own, whole rows are filled."""
    keys = merged(k).transpose(-1, -2) / torch.sqrt(torch.tensor(24.0))
    s = torch.bmm(merged(q), keys) + merged(bias.expand(B, H, S, S))
    s = s.view(-1, H, S, S).masked_fill(banned, LOWEST)
    weights = torch.softmax(s, -1)
    return torch.bmm(weights.view(-1, S, S), merged(v)).view(-1, H, S, D).permute(0, 2, 1, 3).contiguous()


SPELLINGS: dict[str, tuple[Callable[..., Tensor], list[Tensor]]] = {
    "plain": (plain, [Q, K, V]),
    "one key head for all": (plain, [Q, K[:, :1], V[:, :1]]),
    "scaled before": (scaled_before, [Q, K, V]),
    "a mask of every query": (masked, [Q, K, V, ADDED]),
    "a mask of the keys": (masked, [Q, K, V, KEYS]),
    "values expanded to the heads": (
        lambda q, k, v: torch.softmax(scores(q, k), -1) @ v.expand(B, H, S, D),
        [Q, K, V[:, :1]],
    ),
    "a scale behind a bias": (scaled_with_the_bias, [Q, K, V, ADDED]),
    "a penalty": (subtracted, [Q, K, V, KEYS]),
    "a soft-cap": (capped, [Q, K, V, KEYS]),
    "a bias and a fill": (biased_and_filled, [Q, K, V, PLACES, BANNED]),
    "a choice": (chosen, [Q, K, V, BANNED]),
    "three dims and four": (three_dims, [Q, K, V, KEYS]),
    "three dims": (of_three_dims, [Q, K, V]),
    "a product with a bias": (one_product_with_the_bias, [Q, K, V, PLACES, KEYS]),
    "disentangled": (disentangled, [Q, K, V, ADDED, BANNED]),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_recognised_and_the_same(name: str) -> None:
    function, examples = SPELLINGS[name]
    module, log = rewrite(function, *examples)
    assert operators(module)["attention"] == 1, [entry.declined for entry in log]
    assert not any(n.target is torch.ops.aten.softmax.int for n in module.graph.nodes)
    assert_same(module, function, *examples)


def shared_weights(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = torch.softmax(scores(q, k), -1)
    return weights @ v + weights.sum(-1, keepdim=True)


def changed_scores(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    s = scores(q, k) * 0.5
    s[..., 0].sub_(1.0)
    return torch.softmax(s, -1) @ v


LEFT: dict[str, tuple[Callable[..., Any], list[Tensor], str]] = {
    "a fill that may count": (
        lambda q, k, v, m: torch.softmax(scores(q, k).masked_fill(m, -1e4), -1) @ v,
        [Q, K, V, BANNED],
        "set to -10000.0",
    ),
    "a number added": (lambda q, k, v: torch.softmax(scores(q, k) + 1.0, -1) @ v, [Q, K, V], "a number"),
    "weights used twice": (shared_weights, [Q, K, V], "used elsewhere"),
    "scores changed in place": (changed_scores, [Q, K, V], "used elsewhere"),
    "a softmax over the queries": (lambda q, k, v: torch.softmax(scores(q, k), -2) @ v, [Q, K, V], ""),
    "dropout": (lambda q, k, v: F.dropout(torch.softmax(scores(q, k), -1), 0.5) @ v, [Q, K, V], ""),
    "a cap behind a bias": (
        lambda q, k, v, m: torch.softmax(torch.tanh((scores(q, k) + m) / 2.0) * 2.0, -1) @ v,
        [Q, K, V, KEYS],
        "soft-cap comes behind a bias",
    ),
}


@pytest.mark.parametrize("name", LEFT)
def test_left_as_it_is_with_the_reason(name: str) -> None:
    function, examples, reason = LEFT[name]
    module, log = rewrite(function, *examples)
    assert operators(module)["attention"] == 0
    assert any(reason in text for entry in log for text in entry.declined) or not reason
    if name != "dropout":
        assert_same(module, function, *examples)

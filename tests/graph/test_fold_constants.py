"""What depends on no input is computed once, at capture; everything else stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from rewriting import assert_same, rewrite
from torch import Tensor, fx

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def folded(module: fx.GraphModule) -> list[fx.Node]:
    return [n for n in module.graph.nodes if n.op == "get_attr" and "_folded_" in str(n.target)]


def names(module: fx.GraphModule) -> set[str]:
    return {n.target.overloadpacket.__name__ for n in module.graph.nodes if n.op == "call_function"}


def positions(x: Tensor) -> Tensor:
    return x * torch.arange(8.0).mul(0.5).exp()


def mask_of_the_configuration(x: Tensor) -> Tensor:
    return x.masked_fill(torch.ones(3, 8, dtype=torch.bool).triu(1), 0.0)


def two_tables(x: Tensor) -> Tensor:
    angles = torch.arange(8.0) / 8
    return x * angles.cos() + x.flip(-1) * angles.sin()


@pytest.mark.parametrize(
    ("function", "count", "gone"),
    [
        (positions, 1, {"arange", "exp"}),
        (mask_of_the_configuration, 1, {"ones", "triu"}),
        (two_tables, 2, {"arange", "cos", "sin"}),
    ],
)
def test_constants_are_folded(function: Callable[[Tensor], Tensor], count: int, gone: set[str]) -> None:
    module, log = rewrite(function, X)
    assert len(folded(module)) == count
    assert {entry.name: entry.count for entry in log}["fold_constants"] == count
    assert not gone & names(module)
    assert_same(module, function, X)


def depends_on_the_input(x: Tensor) -> Tensor:
    return x * x.detach().mean().exp()


def random(x: Tensor) -> Tensor:
    return x * torch.rand(8)


def written_in_place(x: Tensor) -> Tensor:
    table = torch.zeros(8)
    table.add_(x.detach()[0])
    return x * table


def too_large_to_hold(x: Tensor) -> Tensor:
    return x * torch.arange(2.0**21).exp()[:8]


@pytest.mark.parametrize("function", [depends_on_the_input, random])
def test_what_may_change_stays(function: Callable[[Tensor], Tensor]) -> None:
    module, _ = rewrite(function, X)
    assert not folded(module)
    torch.manual_seed(0)
    ours = module(X)
    torch.manual_seed(0)
    torch.testing.assert_close(ours, function(X))


def test_no_call_leaves_a_trace_in_a_table() -> None:
    module, _ = rewrite(written_in_place, X)
    for scale in (1.0, 2.0):
        torch.testing.assert_close(module(scale * X), written_in_place(scale * X))


def test_only_small_tables_are_held() -> None:
    module, _ = rewrite(too_large_to_hold, X)
    assert sum(b.numel() for b in module.buffers()) <= 1 << 20
    assert_same(module, too_large_to_hold, X)


def test_a_weight_inside_the_graph_keeps_its_gradient() -> None:
    weight = torch.nn.Parameter(torch.ones(8))
    module, _ = rewrite(lambda x: x * weight.exp(), X)
    assert not folded(module)
    module(X).sum().backward()
    torch.testing.assert_close(weight.grad, X.sum(0) * torch.e)

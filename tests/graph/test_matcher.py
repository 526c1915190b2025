"""Where a pattern stands, and where it only seems to."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hasten.base.errors import CaptureError
from hasten.graph.canonical import canonicalise, trace
from hasten.graph.matcher import Match, find, trace_pattern
from hasten.graph.nodes import calls
from hasten.graph.rules import Rule, apply_rule

X, Y = 0.3 * torch.randn(2, 2, 3, 8, generator=torch.Generator().manual_seed(0))


def graph_of(function: Callable[..., Any], *examples: torch.Tensor) -> fx.GraphModule:
    with FakeTensorMode() as mode:
        module = trace(function, [mode.from_tensor(e) for e in examples])
    canonicalise(module.graph)
    return module


def matches(
    pattern: Callable[..., Any], function: Callable[..., Any], *examples: torch.Tensor
) -> list[Match]:
    traced = trace_pattern(pattern, [e[:1, :1] for e in examples])
    found = [find(traced, node) for node in calls(graph_of(function, *examples).graph)]
    return [match for match in found if match is not None]


def two(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.exp() * y + x


def test_operands_of_sums_and_products_may_be_swapped() -> None:
    for function in (two, lambda x, y: x + y * x.exp(), lambda x, y: x + x.exp() * y):
        found = matches(two, function, X, Y)
        assert len(found) == 1
        assert [found[0].inputs[name].name for name in ("x", "y")] == ["x_1", "y_1"]


def test_a_quotient_may_not() -> None:
    assert matches(lambda x, y: x.exp() / y, lambda x, y: y / x.exp(), X, Y) == []


def test_one_argument_is_one_tensor() -> None:
    assert matches(two, lambda x, y: x.exp() * y + y, X, Y) == []


def test_numbers_are_bound_and_must_agree() -> None:
    def scaled(x: torch.Tensor, a: float) -> torch.Tensor:
        return (x * a).exp() * a

    found = matches(scaled, lambda x: (x * 3).exp() * 3, X)
    assert found[0].inputs["a"] == 3.0
    assert matches(scaled, lambda x: (x * 3).exp() * 4, X) == []


def test_a_constant_of_the_pattern_must_be_the_same() -> None:
    def pattern(x: torch.Tensor) -> torch.Tensor:
        return (x * 0.044715).exp()

    assert len(matches(pattern, lambda x: (x * 0.0447150001).exp(), X)) == 1
    assert matches(pattern, lambda x: (x * 0.0448).exp(), X) == []


def shared(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    inner = x.exp()
    return inner * y + x, inner


def test_an_inner_result_that_is_used_elsewhere_refuses() -> None:
    assert matches(two, shared, X, Y) == []
    assert len(matches(two, lambda x, y: shared(x, y)[0], X, Y)) == 1


def test_a_pattern_of_several_outputs() -> None:
    def pattern(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        inner = x.exp()
        return inner, inner * y + x

    found = matches(pattern, lambda x, y: shared(x, y)[::-1], X, Y)
    assert len(found) == 1
    assert [n.name for n in found[0].outputs] == ["exp", "add"]


def test_views_take_any_size_and_casts_to_low_precision_any_dtype() -> None:
    def pattern(x: torch.Tensor) -> torch.Tensor:
        return x.view(-1).to(torch.bfloat16).exp()

    assert len(matches(pattern, lambda x: x.view(6, 8).to(torch.float16).exp(), X)) == 1


def test_a_wide_intermediate_must_be_wide() -> None:
    def pattern(x: torch.Tensor) -> torch.Tensor:
        return x.to(torch.float32).exp()

    half = X.to(torch.float16)
    assert len(matches(pattern, lambda x: x.to(torch.float32).exp(), half)) == 1
    assert len(matches(pattern, lambda x: x.to(torch.float64).exp(), half)) == 1
    assert matches(pattern, lambda x: x.to(torch.bfloat16).exp(), half) == []


def test_a_keyword_with_a_default_keeps_its_value() -> None:
    def pattern(x: torch.Tensor, kind: str = "tanh") -> torch.Tensor:
        return F.gelu(x, approximate=kind)

    assert len(matches(pattern, lambda x: F.gelu(x, approximate="tanh"), X)) == 1
    assert matches(pattern, lambda x: F.gelu(x), X) == []


def test_patterns_that_compute_nothing_are_refused() -> None:
    with pytest.raises(CaptureError, match="computed"):
        trace_pattern(lambda x: x, [X])


def replaced(function: Callable[..., Any], *examples: torch.Tensor) -> tuple[int, list[str], fx.GraphModule]:
    rule = Rule("two", two, lambda x, y: torch.addcmul(x, x.exp(), y), lambda: [X[:1], Y[:1]], 1, "the same")
    module = graph_of(function, *examples)
    done = apply_rule(module.graph, rule, None)
    module.graph.lint()
    module.recompile()
    torch.testing.assert_close(
        module(*(e.clone() for e in examples)), function(*(e.clone() for e in examples))
    )
    return done.count, done.declined, module


def test_every_occurrence_is_replaced() -> None:
    count, declined, module = replaced(lambda x, y: two(two(x, y), y), X, Y)
    assert (count, declined) == (2, [])
    assert not [n for n in module.graph.nodes if n.op == "call_function" and "add.Tensor" in str(n.target)]


def changed_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = x + 0.5
    product = inner.exp() * y
    inner.mul_(2.0)
    return product + inner


def view_changed_in_place(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    inner = x + 0.5
    out = inner.exp() * y + inner
    inner[0].zero_()
    return out + inner


def test_a_tensor_that_is_changed_in_place_refuses() -> None:
    assert replaced(changed_in_place, X, Y)[0] == 0
    count, declined, _ = replaced(view_changed_in_place, X, Y)
    assert count == 0
    assert "changed in place" in declined[0]


def across_autocast(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        product = x.exp() * y
    return product + x


def across_no_grad(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    torch._C._set_grad_enabled(False)  # as Dynamo writes `torch.no_grad()`
    product = x.exp() * y
    torch._C._set_grad_enabled(True)
    return product + x


@pytest.mark.parametrize("function", [across_autocast, across_no_grad])
def test_a_change_of_autocast_or_grad_mode_inside_refuses(function: Callable[..., Any]) -> None:
    count, declined, _ = replaced(function, X, Y)
    assert count == 0
    assert "autocast or grad mode" in declined[0]

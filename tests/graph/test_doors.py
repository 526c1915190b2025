"""The user's own rules, and PyTorch's own door."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import assert_budget, forward, make_batch, original_of, run
from torch import nn

import hasten
from hasten.base.errors import ConfigError
from hasten.graph import backend
from hasten.models.tiny import tiny_model


@pytest.fixture(autouse=True)
def own_rules() -> Iterator[None]:
    with hasten.fusion_patterns():
        yield


class Soft(nn.Module):
    """A layer with an activation that hasten does not know: x * sigmoid(3 x) + 0.5."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.up(x)
        return x + self.down(y * torch.sigmoid(3.0 * y) + 0.5)


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Soft(), Soft())


def pattern(x: torch.Tensor, steepness: float, shift: float) -> torch.Tensor:
    return x * torch.sigmoid(steepness * x) + shift


def examples() -> Sequence[torch.Tensor]:
    return [torch.empty(2, 3, 8)]


def results(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    leaf = x.clone().requires_grad_()
    out = model(leaf)
    out.square().sum().backward()
    return [out.detach(), leaf.grad, *(p.grad.clone() for p in model.parameters())]


def test_a_rule_of_the_user_is_used_counted_and_proved() -> None:
    @hasten.register_fusion_pattern(pattern, examples=examples, name="soft", reason="the same, over SiLU")
    def soft(x: Any, steepness: float, shift: float) -> Any:
        return F.silu(steepness * x) / steepness + shift

    x = torch.randn(2, 7, 16)
    own = results(stack(), x)
    model = hasten.optimize(stack(), measure=False)
    torch.testing.assert_close(results(model, x), own)
    report = hasten.report(model)
    assert report.rule_counts()["soft"] == 1  # one graph for both layers
    assert report.graphs[0].runs == "rewritten"
    assert report.graphs[0].proof.passed
    assert "soft: 1 replaced" in str(report)


def test_a_wrong_rule_is_caught_and_the_block_left_as_it_was() -> None:
    @hasten.register_fusion_pattern(pattern, examples=examples, name="wrong")
    def wrong(x: Any, steepness: float, shift: float) -> Any:
        return F.silu(steepness * x) / steepness + shift * 1.01

    x = torch.randn(2, 7, 16)
    own = results(stack(), x)
    model = hasten.optimize(stack(), measure=False)
    ours = results(model, x)
    assert all(torch.equal(a, b) for a, b in zip(ours, own, strict=True))
    graph = hasten.report(model).graphs[0]
    assert graph.runs == "original"
    assert not graph.proof.passed
    assert "proof failed" in str(hasten.report(model))


def test_a_wrong_gradient_is_caught_too() -> None:
    @hasten.register_fusion_pattern(pattern, examples=examples)
    def no_gradient_of_the_gate(x: Any, steepness: float, shift: float) -> Any:
        return x * torch.sigmoid(steepness * x.detach()) + shift

    x = torch.randn(2, 7, 16)
    own = results(stack(), x)
    model = hasten.optimize(stack(), measure=False)
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), own, strict=True))
    assert "gradient" in hasten.report(model).graphs[0].proof.reason


def test_a_condition_declines_with_its_reason() -> None:
    @hasten.register_fusion_pattern(
        pattern,
        examples=examples,
        name="narrow",
        condition=lambda c: "too wide" if c.shape("x")[-1] > 8 else "",
    )
    def narrow(x: Any, steepness: float, shift: float) -> Any:
        return F.silu(steepness * x) / steepness + shift

    model = hasten.optimize(stack(), measure=False)
    results(model, torch.randn(2, 7, 16))
    assert hasten.report(model).rule_counts()["narrow"] == 0
    assert "too wide" in str(hasten.report(model)) or not hasten.report(model).graphs[0].rules


def test_a_replacement_of_another_dtype_leaves_the_block() -> None:
    @hasten.register_fusion_pattern(pattern, examples=examples)
    def narrowing(x: Any, steepness: float, shift: float) -> Any:
        return (F.silu(steepness * x) / steepness + shift).to(torch.bfloat16)

    x = torch.randn(2, 7, 16)
    model = hasten.optimize(stack(), measure=False)
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), results(stack(), x), strict=True))
    assert "bfloat16" in hasten.report(model).graphs[0].reason


def test_rules_that_cannot_be() -> None:
    with pytest.raises(ConfigError, match="level"):
        hasten.register_fusion_pattern(pattern, examples=examples, level=5)
    with pytest.raises(hasten.HastenError, match="traced"):
        hasten.register_fusion_pattern(lambda x: x.no_such_method(), examples=examples)(lambda x: x)
    with pytest.raises(hasten.HastenError, match="computed"):
        hasten.register_fusion_pattern(lambda x: x, examples=examples)(lambda x: x)


def test_rules_are_forgotten_at_the_end_of_their_block() -> None:
    with hasten.fusion_patterns():
        hasten.register_fusion_pattern(pattern, examples=examples, name="short")(
            lambda x, steepness, shift: x
        )
        assert [rule.name for rule in backend.registered_rules()] == ["short"]
    assert backend.registered_rules() == ()


class Amplified(torch.autograd.Function):
    """The identity, with a gradient of the caller's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 3.0 * grad


class WithOwnGradient(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(Amplified.apply(self.norm(x)))))


@pytest.mark.parametrize("verify", [True, False])
def test_a_gradient_written_by_the_user_is_kept(verify: bool) -> None:
    torch.manual_seed(0)
    original = nn.Sequential(WithOwnGradient(), WithOwnGradient())
    model = hasten.optimize(original_of(original), measure=False, verify=verify)
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(results(model, x), results(original, x), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2", "bert"])
def test_torch_compile(family: str) -> None:
    model = tiny_model(family)
    original = original_of(model)
    compiled = torch.compile(model, backend="hasten", options={"measure": False})
    batch = make_batch(17, "right")
    own = run(original, batch)
    # A compiled module hides the signature that the helper looks at.
    more = {} if family == "bert" else {"use_cache": False}
    before = len(backend.reports())
    model.zero_grad()
    loss, logits = forward(compiled, batch, **more)
    loss.backward()
    ours = type(own)(
        loss.item(),
        logits.detach().double(),
        {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None},
    )
    assert_budget(ours, own, own, batch, torch.float32)
    records = backend.reports()[before:] or backend.reports()[-1:]
    operators = sum((record.operators for record in records), start=type(records[0].operators)())
    assert operators["norm_linear"] + operators["add_layer_norm"] >= 6, operators
    for record in records:
        # Dynamo may break off a graph of the loss alone, where there is nothing to do.
        assert record.runs == "rewritten" or record.reason == "no pattern matched", record.reason
        assert record.runs == "original" or record.proof.passed


def test_torch_compile_takes_settings_and_refuses_unknown_ones() -> None:
    x = torch.randn(2, 7, 16)
    own = stack()(x)
    torch.testing.assert_close(torch.compile(stack(), backend="hasten", options={"level": 0})(x), own)
    with pytest.raises(Exception, match="level"):
        torch.compile(stack(), backend="hasten", options={"levle": 0})(x)


def _raises(x: Any, steepness: float, shift: float) -> Any:
    raise ValueError("no")


BROKEN: dict[str, tuple[Any, str]] = {
    "raises": (_raises, "replacement raised ValueError: no"),
    "too few dims": (lambda x, steepness, shift: x.sum(-1), "gives shape"),
    "another size": (lambda x, steepness, shift: x[..., :1], "gives shape"),
    "nothing": (lambda x, steepness, shift: None, "no tensor"),
    "a tensor of its own": (lambda x, steepness, shift: x * torch.tensor(3.0), "tensor of its own"),
    "other arguments": (lambda x: x, "unexpected keyword"),
    "sizes that do not fit": (lambda x, steepness, shift: x @ x, "does not fit"),
    "control flow": (lambda x, steepness, shift: x if x.sum() > 0 else -x, "control flow"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_replacement_leaves_the_block_and_says_why(name: str) -> None:
    replacement, words = BROKEN[name]
    hasten.register_fusion_pattern(pattern, examples=examples, name="broken")(replacement)
    x = torch.randn(2, 7, 16)
    model = hasten.optimize(stack(), measure=False)
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), results(stack(), x), strict=True))
    graph = hasten.report(model).graphs[0]
    assert graph.runs == "original"
    assert words in graph.reason


def test_a_broken_condition_leaves_the_block_too() -> None:
    def condition(context: Any) -> str:
        return context.no_such_fact

    hasten.register_fusion_pattern(pattern, examples=examples, name="broken", condition=condition)(_raises)
    x = torch.randn(2, 7, 16)
    model = hasten.optimize(stack(), measure=False)
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), results(stack(), x), strict=True))
    assert "condition raised AttributeError" in hasten.report(model).graphs[0].reason


def test_any_callable_is_a_replacement() -> None:
    def scaled(factor: float, x: Any, steepness: float, shift: float) -> Any:
        return factor * F.silu(steepness * x) / steepness + shift

    hasten.register_fusion_pattern(pattern, examples=examples, name="partial")(functools.partial(scaled, 1.0))
    x = torch.randn(2, 7, 16)
    model = hasten.optimize(stack(), measure=False)
    torch.testing.assert_close(results(model, x), results(stack(), x))
    assert hasten.report(model).rule_counts()["partial"] == 1


@torch.library.custom_op("hasten_tests::brittle", mutates_args=())
def brittle(x: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("not on this machine")


@brittle.register_fake
def _brittle_shape(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def test_a_rewritten_block_that_raises_is_left_as_it_was() -> None:
    @hasten.register_fusion_pattern(pattern, examples=examples, name="brittle")
    def replacement(x: Any, steepness: float, shift: float) -> Any:
        return torch.ops.hasten_tests.brittle(x)

    x = torch.randn(2, 7, 16)
    model = hasten.optimize(stack(), measure=False)
    assert all(torch.equal(a, b) for a, b in zip(results(model, x), results(stack(), x), strict=True))
    graph = hasten.report(model).graphs[0]
    assert graph.runs == "original"
    assert "RuntimeError: not on this machine" in graph.reason

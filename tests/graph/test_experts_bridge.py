"""Experts through transformers' registry: the same numbers, and nothing left behind."""

from __future__ import annotations

import pytest
import torch
from unlisted import unlisted_model

from hasten.graph.experts_bridge import NAME, expert_stacks, experts_by_name
from hasten.graph.whole import capture_whole
from hasten.ops.routed_linear.reference import routed_linear

ROUTED = ("mixtral", "qwen2_moe", "gpt_oss", "deepseek_v3_moe", "granitemoe")


@pytest.mark.parametrize("name", ROUTED)
def test_experts_by_name_compute_the_same(name: str) -> None:
    model = unlisted_model(name).eval()
    ids = torch.arange(40)[None] + 3
    with torch.no_grad():
        expected = model(ids).logits
        calls = []

        def product(*given: object) -> torch.Tensor:
            calls.append(given)
            return routed_linear(*given)  # type: ignore[arg-type]

        with experts_by_name(model, product):
            assert model.config._experts_implementation == NAME
            found = model(ids).logits
        assert model.config._experts_implementation != NAME
        assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
        assert {id(call[1]) for call in calls} == {id(stack) for stack, _ in expert_stacks(model)}
        count = len(calls)
        assert torch.equal(model(ids).logits, expected)
        assert len(calls) == count


def test_a_captured_graph_holds_experts_by_name_and_the_model_is_as_before() -> None:
    model = unlisted_model("mixtral").eval()
    before = model.config._experts_implementation
    targets = [str(node.target) for node in capture_whole(model).module.graph.nodes]
    assert targets.count("hasten.routed_linear.default") == 4
    assert model.config._experts_implementation == before

"""What happens to a step when rewriting itself goes wrong."""

import pytest
import torch

import hasten
from hasten.graph import capture
from hasten.models.tiny import tiny_model


@pytest.mark.parametrize("fault", [AssertionError, RuntimeError, TypeError])
def test_a_fault_in_a_pass_leaves_the_original_and_says_so(monkeypatch, fault):
    def broken(*args, **kwargs):
        raise fault("no such kind of graph")

    model = tiny_model("llama").train()
    ids = torch.randint(0, 256, (1, 16), generator=torch.Generator().manual_seed(0))
    expected = model(input_ids=ids, labels=ids, use_cache=False).loss
    monkeypatch.setattr(capture, "run_passes", broken)
    hasten.optimize(model)
    with pytest.warns(UserWarning, match="runs as it was, rewriting failed"):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=0)
    (graph,) = hasten.report(model).graphs
    assert graph.runs == "original"
    assert "no such kind of graph" in graph.reason

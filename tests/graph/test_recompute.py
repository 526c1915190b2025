"""A bound on memory: fewer bytes stored, the same bits."""

import pytest
import torch

import hasten
from hasten.graph.recompute import Recompute
from hasten.models.tiny import tiny_model


def _step(model, ids):
    model.zero_grad()
    stored = {}

    def pack(tensor):
        stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach(), {n: p.grad.clone() for n, p in model.named_parameters()}, sum(stored.values())


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_recomputed_blocks_give_the_same_bits(dropout):
    overrides = {"resid_pdrop": dropout} if dropout else {}
    model = tiny_model("gpt2", **overrides).train()
    ids = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0))
    results = []
    for memory in (None, "1MB"):
        hasten.optimize(model, measure=False, memory=memory)
        for _ in range(2):
            torch.manual_seed(3)
            results.append(_step(model, ids))
    plain, bounded = results[1], results[3]
    assert torch.equal(plain[0], bounded[0])
    assert all(torch.equal(plain[1][name], bounded[1][name]) for name in plain[1])
    assert bounded[2] < plain[2]
    assert "3 of 3 blocks are recomputed" in hasten.report(model).doors["memory"]


def test_a_bound_that_is_wide_enough_changes_nothing():
    model = tiny_model("llama").train()
    ids = torch.randint(0, 256, (1, 32))
    hasten.optimize(model, measure=False, memory=0.9)
    _step(model, ids)
    assert "0 of 3 blocks" in hasten.report(model).doors["memory"]


@pytest.mark.parametrize(
    ("bound_extra", "expected"), [(10_000, 0), (2_900, 1), (2_000, 2), (300, 3), (-(10**6), 4)]
)
def test_as_many_blocks_as_the_bound_needs(monkeypatch, bound_extra, expected):
    """Four blocks without parameters, 1,000 bytes stored each, 100 of which are the block's input."""
    import psutil

    now = psutil.Process().memory_info()
    monkeypatch.setattr(psutil.Process, "memory_info", lambda self: now)
    recompute = Recompute(now.rss + bound_extra)
    recompute.blocks = [torch.nn.Identity() for _ in range(4)]
    recompute._decide(1_000, 100)
    assert recompute.recomputed == expected
    assert ("cannot be kept" in recompute.state) == (bound_extra < 0)

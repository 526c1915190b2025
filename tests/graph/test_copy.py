"""A copy of an optimised model stands on its own feet."""

import copy

import torch

import hasten
from hasten.models.tiny import tiny_model


def _loss(model, ids):
    model.zero_grad()
    loss = model(input_ids=ids, labels=ids).loss
    loss.backward()
    return loss.detach()


def test_restoring_a_copy_leaves_the_original_optimised_and_the_reverse():
    model = tiny_model("llama").train()
    ids = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(0))
    before = model.config._attn_implementation
    hasten.optimize(model, measure=False)
    expected = _loss(model, ids)
    twin = copy.deepcopy(model)
    hasten.restore(twin)
    assert twin.config._attn_implementation == before
    assert model.config._attn_implementation == "hasten"
    assert hasten.report(model).blocks
    assert torch.equal(_loss(model, ids), expected)
    torch.testing.assert_close(_loss(twin, ids), expected, rtol=1e-5, atol=0)

    other = copy.deepcopy(model)
    hasten.restore(model)
    assert other.config._attn_implementation == "hasten"
    assert torch.equal(_loss(other, ids), expected)


def test_a_copy_recomputes_its_own_blocks():
    model = hasten.optimize(tiny_model("llama").train(), measure=False, memory="1MB")
    ids = torch.randint(0, 256, (1, 24))
    _loss(model, ids)
    twin = copy.deepcopy(model)
    engines = {id(layer.forward.engine) for layer in twin.model.layers}
    assert len(engines) == 1
    blocks = twin.model.layers[0].forward.engine.recompute.blocks
    assert [id(b) for b in blocks] == [id(layer) for layer in twin.model.layers]


def test_the_allocator_is_released_once_for_each_copy():
    from hasten.ops import buffers

    users = buffers.status().users
    model = hasten.optimize(tiny_model("llama"), measure=False)
    twin = copy.deepcopy(model)
    hasten.restore(model)
    hasten.restore(twin)
    hasten.restore(twin)
    assert buffers.status().users == users


def test_a_module_that_is_reached_twice_is_put_back_once():
    from hasten.graph.instance import InstanceForward, put_back

    module = torch.nn.Linear(2, 2)
    module.forward = own = lambda x: x
    module.forward = InstanceForward(module)
    module.forward = InstanceForward(module)
    put_back(module)
    assert module.forward is own

"""The copies of weights that `optimize` allows, seen from its doors."""

from __future__ import annotations

import copy

import torch

import hasten
from hasten.models.tiny import tiny_model
from hasten.ops import shadow
from hasten.ops.adamw.optimizer import AdamW


def steps(*, shadows: bool, optimise: bool = True) -> tuple[list[float], torch.nn.Module]:
    torch.manual_seed(0)
    model = tiny_model("llama").train()
    if optimise:
        hasten.optimize(model, precision="bf16")
    optimizer = AdamW(model.parameters(), lr=1e-2, shadows=shadows, max_grad_norm=1.0)
    ids = torch.randint(64, (2, 17))
    losses = []
    for _ in range(4):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, model


def test_lasting_copies_change_no_bit_and_are_reported_and_released() -> None:
    plain, _ = steps(shadows=False)
    losses, model = steps(shadows=True)
    assert losses == plain
    copies = model.__dict__["_hasten"].copies
    assert copies.lasting_bytes() > 0
    assert "written by the optimizer" in str(hasten.report(model))
    twin = copy.deepcopy(model)
    assert "cast in the forward and in the backward" in str(hasten.report(twin))
    hasten.restore(model)
    assert copies.lasting_bytes() == 0


def test_a_model_that_is_not_optimised_has_no_copies() -> None:
    _, model = steps(shadows=True, optimise=False)
    assert not any(parameter in shadow._WEIGHTS for parameter in model.parameters())

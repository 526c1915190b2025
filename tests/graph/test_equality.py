"""Logits, loss and every gradient of each family, within budget of the original.

Truth is the original in float64 (for bf16: in fp32 with the same weights). Where that is not finite (its mask
of a query without keys overflows), the original is compared with itself, within the floor alone.
"""

from __future__ import annotations

import pytest
import torch
from comparing import Batch, Run, assert_budget, assert_rewritten, make_batch, original_of, run
from torch import nn

import hasten
from hasten.models.tiny import FAMILIES, tiny_model

# 17 first, so that 1, which Dynamo always specialises on, comes to a model that already knows dynamic sizes.
LENGTHS = (17, 128, 513, 1)


def truth_of(wide: nn.Module, batch: Batch, own: Run) -> Run:
    truth = run(wide, batch)
    sane = torch.isfinite(truth.logits).all() and truth.gradients.keys() == own.gradients.keys()
    return truth if sane else own


@pytest.mark.parametrize("family", FAMILIES)
def test_fp32(family: str) -> None:
    model = tiny_model(family)
    original, wide = original_of(model), original_of(model, torch.float64)
    hasten.optimize(model, measure=False)
    cases = [(length, "right") for length in LENGTHS] + [(17, "left"), (128, "left"), (17, "")]
    for length, padding in cases:
        batch = make_batch(length, padding)
        own = run(original, batch)
        truth = truth_of(wide, batch, own)
        assert_budget(run(model, batch), own, truth, batch, torch.float32, f"{family} {length} {padding}")
    assert_rewritten(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_autocast(family: str) -> None:
    model = tiny_model(family)
    original = original_of(model)
    hasten.optimize(model, measure=False)
    for length, padding in ((17, "right"), (128, "left"), (513, "right"), (1, "right")):
        batch = make_batch(length, padding)
        own, truth = run(original, batch, torch.bfloat16), run(original, batch)
        assert_budget(
            run(model, batch, torch.bfloat16),
            own,
            truth,
            batch,
            torch.bfloat16,
            f"{family} {length} {padding}",
        )
    assert_rewritten(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_bf16_weights(family: str) -> None:
    model = tiny_model(family).to(torch.bfloat16)
    original, wide = original_of(model), original_of(model, torch.float32)
    hasten.optimize(model, measure=False)
    for length, padding in ((17, "right"), (128, "left"), (513, "right"), (1, "right")):
        batch = make_batch(length, padding)
        own, truth = run(original, batch), run(wide, batch)
        assert_budget(run(model, batch), own, truth, batch, torch.bfloat16, f"{family} {length} {padding}")
    assert_rewritten(model)

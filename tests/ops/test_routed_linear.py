"""routed_linear: each slot's own product, shapes, and what does not fit."""

from __future__ import annotations

import pytest
import torch

from hasten.base.errors import ShapeError
from hasten.ops.routed_linear import routed_linear


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("slots", [1, 3])
def test_each_slot_is_multiplied_by_its_expert(slots: int, transposed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(7, slots, 5, generator=generator, dtype=torch.float64)
    weight, bias = (torch.randn(*s, generator=generator, dtype=torch.float64) for s in ((4, 6, 5), (4, 6)))
    experts = torch.randint(4, (7, 3), generator=generator)
    found = routed_linear(x, weight.transpose(1, 2) if transposed else weight, bias, experts, transposed)
    for t in range(7):
        for s in range(3):
            e = experts[t, s]
            torch.testing.assert_close(found[t, s], weight[e] @ x[t, s % slots] + bias[e])
    fake = torch.ops.hasten.routed_linear(
        *(t.to("meta") for t in (x, weight.transpose(1, 2) if transposed else weight, bias, experts)),
        transposed,
    )
    assert fake.shape == found.shape


@pytest.mark.parametrize(
    ("x", "experts", "bias"),
    [
        ((7, 2, 5), (7, 3), None),
        ((7, 1, 4), (7, 3), None),
        ((6, 1, 5), (7, 3), None),
        ((7, 1, 5), (7, 3), (4, 5)),
    ],
)
def test_what_does_not_fit_is_named(
    x: tuple[int, ...], experts: tuple[int, ...], bias: tuple[int, ...] | None
) -> None:
    given = None if bias is None else torch.zeros(bias)
    with pytest.raises(ShapeError):
        routed_linear(torch.zeros(x), torch.zeros(4, 6, 5), given, torch.zeros(experts, dtype=torch.long))

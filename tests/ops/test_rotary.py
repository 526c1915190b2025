"""Rotary position embedding."""

from __future__ import annotations

import pytest
import torch

from hasten.base.errors import ShapeError
from hasten.ops.cases import Case, check_backward, check_forward, select
from hasten.ops.rotary import rotary
from hasten.ops.rotary.cases import CASES

both_bodies = pytest.mark.usefixtures("body")


@both_bodies
@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype)


@both_bodies
@pytest.mark.parametrize(("case", "dtype"), select(CASES, backward=True), ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    check_backward(case, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
def test_backward_is_the_transpose_even_for_unequal_halves(interleaved: bool) -> None:
    x = torch.randn(2, 2, 3, 8, dtype=torch.float64, requires_grad=True)
    cos, sin = torch.randn(2, 2, 3, 6, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda t: rotary(t, cos, sin, interleaved), (x,))


@both_bodies
def test_position_zero_is_the_identity() -> None:
    x = torch.randn(1, 2, 1, 8)
    assert torch.equal(rotary(x, torch.ones(1, 8), torch.zeros(1, 8)), x)


@both_bodies
@pytest.mark.parametrize(
    ("x", "cos", "asked", "given"),
    [
        (torch.bfloat16, torch.bfloat16, None, torch.bfloat16),
        (torch.bfloat16, torch.float32, None, torch.float32),
        (torch.bfloat16, torch.float32, torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.bfloat16, None, torch.float32),
        (torch.float64, torch.float32, None, torch.float64),
    ],
)
def test_dtypes(x: torch.dtype, cos: torch.dtype, asked: torch.dtype | None, given: torch.dtype) -> None:
    leaf = torch.randn(1, 2, 3, 8, dtype=x, requires_grad=True)
    y = rotary(leaf, torch.ones(3, 8, dtype=cos), torch.zeros(3, 8, dtype=cos), out_dtype=asked)
    assert y.dtype == given
    assert y.is_contiguous()
    y.sum().backward()
    assert leaf.grad is not None
    assert leaf.grad.dtype == x


@both_bodies
def test_gradient_keeps_the_order_of_dimensions_in_memory() -> None:
    x = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    (dx,) = torch.autograd.grad(rotary(x, torch.ones(5, 8), torch.ones(5, 8)).sum(), x)
    assert dx.stride() == x.stride()


def test_saves_only_the_tables() -> None:
    x = torch.randn(1, 2, 3, 8, requires_grad=True)
    cos, sin = torch.randn(2, 3, 8)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        rotary(x, cos, sin)
    assert saved == [(3, 8), (3, 8)]


@pytest.mark.parametrize("interleaved", [False, True])
def test_opcheck(interleaved: bool) -> None:
    x = torch.randn(2, 5, 3, 8).transpose(1, 2).requires_grad_()
    cos, sin = torch.randn(2, 1, 5, 6)
    torch.library.opcheck(torch.ops.hasten.rotary.default, (x, cos, sin, interleaved))


@pytest.mark.parametrize(
    ("x", "table"),
    [((2, 3, 8), (3, 8)), ((2, 3, 5, 8), (4, 8)), ((2, 3, 5, 8), (5, 10)), ((2, 3, 5, 8), (5, 7))],
)
def test_refuses_shapes_that_do_not_fit(x: tuple[int, ...], table: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="got"):
        rotary(torch.randn(x), torch.randn(table), torch.randn(table))

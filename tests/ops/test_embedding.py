"""Embedding lookup."""

from __future__ import annotations

import pytest
import torch

from hasten.base.errors import ShapeError
from hasten.ops.cases import Case, check_backward, check_forward, select
from hasten.ops.embedding import embedding
from hasten.ops.embedding.cases import CASES


@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), select(CASES, backward=True), ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    check_backward(case, dtype)


def test_narrow_gradient_is_summed_in_float32() -> None:
    weight = torch.zeros(2, 1, dtype=torch.bfloat16, requires_grad=True)
    # In bfloat16, 256 + 1 is 256: summed there, the gradient would stop growing.
    embedding(torch.zeros(1000, dtype=torch.int64), weight).sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [[1000.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_padding_row_gets_no_gradient(dtype: torch.dtype) -> None:
    weight = torch.randn(4, 3, dtype=dtype, requires_grad=True)
    embedding(torch.tensor([[0, 2, 2], [1, 2, 0]]), weight, padding_idx=2).sum().backward()
    assert weight.grad is not None
    assert weight.grad[:, 0].tolist() == [2.0, 1.0, 0.0, 0.0]


def test_saves_only_the_ids() -> None:
    weight = torch.randn(7, 3, requires_grad=True)
    saved: list[tuple[int, ...]] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(tuple(t.shape)) or t, lambda t: t):
        embedding(torch.zeros(2, 5, dtype=torch.int32), weight)
    assert saved == [(2, 5)]


def test_opcheck() -> None:
    weight = torch.randn(7, 3, requires_grad=True)
    torch.library.opcheck(torch.ops.hasten.embedding.default, (torch.tensor([[1, 5, 1]]), weight, 1, 2.0))


def test_refuses_what_does_not_fit() -> None:
    with pytest.raises(ShapeError, match="int32 or int64"):
        embedding(torch.zeros(3), torch.randn(4, 2))
    with pytest.raises(ShapeError, match="weight"):
        embedding(torch.zeros(3, dtype=torch.int64), torch.randn(4))
    with pytest.raises(IndexError):
        embedding(torch.tensor([4]), torch.randn(4, 2))

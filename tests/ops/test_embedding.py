"""Embedding lookup."""

from __future__ import annotations

import pytest
import torch

from hasten.base.errors import ShapeError
from hasten.ops import native
from hasten.ops.cases import Case, check_backward, check_forward, select
from hasten.ops.embedding import embedding
from hasten.ops.embedding.cases import CASES

pytestmark = pytest.mark.usefixtures("body")


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [1, 63, 513, 1024 + 13])
def test_tables_of_any_width(width: int, dtype: torch.dtype) -> None:
    ids = torch.tensor([[5, 0, 2047], [5, 5, 1]], dtype=torch.int32)
    grad = torch.randn(2, 3, width).to(dtype)
    table = torch.zeros(2048, width, dtype=torch.float64)
    table.index_add_(0, ids.reshape(-1).long(), grad.reshape(6, width).double() * 1.5)
    table[1] = 0
    got = torch.ops.hasten.embedding_backward(grad, ids, 2048, dtype, 1, 1.5)
    torch.testing.assert_close(got.double(), table, rtol=2 * torch.finfo(dtype).eps, atol=1e-6)
    assert got.dtype == dtype


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_sums_are_in_the_order_of_the_tokens(threads: int) -> None:
    ids, grad = torch.randint(3, (500,)), torch.randn(500, 33)
    torch.set_num_threads(threads)
    got = torch.ops.hasten.embedding_backward(grad, ids, 3, torch.float32, -1, 1.0)
    expected = torch.zeros(3, 33)
    for token, row in zip(ids.tolist(), grad, strict=True):
        expected[token] += row
    assert torch.equal(got, expected)


def test_ids_outside_the_table_are_refused() -> None:
    if native.refusal():
        pytest.skip("torch's own kernel does not look")
    for wrong in (-1, 4):
        with pytest.raises(IndexError, match="outside"):
            torch.ops.hasten.embedding_backward(
                torch.ones(1, 2), torch.tensor([wrong]), 4, torch.float32, -1, 1.0
            )


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

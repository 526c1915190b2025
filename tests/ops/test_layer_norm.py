from __future__ import annotations

import itertools

import pytest
import torch
import torch.nn.functional as F

from hasten.base.errors import ShapeError
from hasten.ops.cases import Case, check_backward, check_forward, select
from hasten.ops.layer_norm import add_layer_norm, layer_norm
from hasten.ops.layer_norm.cases import CASES

both_bodies = pytest.mark.usefixtures("body")
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@both_bodies
@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype)


@both_bodies
@pytest.mark.parametrize(("case", "dtype"), select(CASES, backward=True), ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    check_backward(case, dtype)


@both_bodies
@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize(
    ("x_dtype", "parameter_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float64, torch.float64),
    ],
)
def test_equals_torch(x_dtype: torch.dtype, parameter_dtype: torch.dtype, autocast: bool) -> None:
    x, weight, bias = torch.randn(5, 64, dtype=x_dtype), torch.randn(64), torch.randn(64)
    weight, bias = weight.to(parameter_dtype), bias.to(parameter_dtype)
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        expected = F.layer_norm(x, (64,), weight, bias, 1e-5)
        y = layer_norm(x, weight, bias, 1e-5)
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected)


@both_bodies
def test_statistics_are_float32_whatever_the_parameters() -> None:
    x = torch.randn(5, 64).bfloat16()
    for weight, bias in itertools.product([None, torch.ones(64), torch.ones(64).bfloat16()], [None, x[0]]):
        _, mean, rstd = torch.ops.hasten.layer_norm(x, weight, bias, 1e-5)
        assert mean.dtype == rstd.dtype == torch.float32
        torch.testing.assert_close(mean, x.float().mean(-1, keepdim=True), rtol=1e-5, atol=1e-6)


@both_bodies
def test_either_gradient_of_the_residual_form_may_be_missing() -> None:
    shapes = [(3, 8), (3, 8), (8,), (8,)]
    x, residual, weight, bias = (torch.randn(shape, requires_grad=True) for shape in shapes)
    y, h = add_layer_norm(x, residual, weight, bias, 1e-5)
    (dh,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
    assert torch.equal(dh, torch.ones(3, 8))
    (dy,) = torch.autograd.grad(y.square().sum(), x, retain_graph=True)
    both, dbias = torch.autograd.grad(y.square().sum() + h.sum(), [residual, bias])
    torch.testing.assert_close(both, dh + dy)
    assert dbias.shape == (8,)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    shapes = [(999, 65), (999, 65), (65,), (65,)]
    leaves = [torch.randn(shape, requires_grad=True) for shape in shapes]

    def results() -> list[torch.Tensor]:
        y, h = add_layer_norm(*leaves, 1e-5)
        return [y, h, *torch.autograd.grad((y * h).sum(), leaves)]

    expected = results()
    torch.set_num_threads(threads)
    for value, other in zip(results(), expected, strict=True):
        assert torch.equal(value, other)


@both_bodies
def test_a_large_mean_does_not_spoil_the_variance() -> None:
    x = torch.randn(3, 513) + 1e3
    expected = F.layer_norm(x.double(), (513,), None, None, 1e-5)
    torch.testing.assert_close(layer_norm(x, None, None, 1e-5).double(), expected, rtol=1e-3, atol=1e-3)


def test_operators_declare_what_they_do() -> None:
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(1, 8).bfloat16().requires_grad_()
    weight, bias = torch.randn(8, requires_grad=True), torch.randn(8, requires_grad=True)
    for dtype in [None, torch.bfloat16]:
        arguments = (weight, bias, 1e-6, dtype)
        torch.library.opcheck(torch.ops.hasten.layer_norm, (x, *arguments), test_utils=CHECKS)
        torch.library.opcheck(torch.ops.hasten.add_layer_norm, (x, residual, *arguments), test_utils=CHECKS)
    narrow = x.detach().bfloat16()
    torch.library.opcheck(torch.ops.hasten.layer_norm, (narrow, None, None, 1e-6), test_utils=CHECKS[:3])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"bias is \[7\]; needs \[8\]"):
        layer_norm(torch.randn(3, 8), None, torch.ones(7), 1e-6)
    with pytest.raises(ShapeError, match="do not broadcast"):
        add_layer_norm(torch.randn(3, 8), torch.randn(2, 8), None, None, 1e-6)

from __future__ import annotations

import itertools

import pytest
import torch
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from hasten.base.errors import ShapeError
from hasten.ops.cases import Case, check_backward, check_forward, select
from hasten.ops.rms_norm import add_rms_norm, rms_norm
from hasten.ops.rms_norm.cases import CASES

DTYPES = [torch.float32, torch.bfloat16]
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
@pytest.mark.parametrize(("x_dtype", "weight_dtype"), list(itertools.product(DTYPES, DTYPES)))
def test_rounds_as_the_models_do(x_dtype: torch.dtype, weight_dtype: torch.dtype, autocast: bool) -> None:
    x = torch.randn(5, 64).to(x_dtype)
    for module, options in [
        (LlamaRMSNorm(64, eps=1e-6), {}),
        (Gemma2RMSNorm(64, eps=1e-6), {"offset": 1.0, "round_first": False}),
    ]:
        torch.nn.init.normal_(module.weight)
        module.to(weight_dtype)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            expected = module(x)
            y = rms_norm(x, module.weight, 1e-6, **options)
        assert y.dtype == expected.dtype
        # The sum of squares is added up in another order: a few values round the other way.
        torch.testing.assert_close(y, expected, rtol=2**-7 if x_dtype == torch.bfloat16 else 1e-6, atol=1e-6)
        if x_dtype == torch.bfloat16:
            assert (y != expected).float().mean() < 0.02


@both_bodies
def test_either_gradient_of_the_residual_form_may_be_missing() -> None:
    x, residual, weight = (torch.randn(shape, requires_grad=True) for shape in [(3, 8), (3, 8), (8,)])
    y, h = add_rms_norm(x, residual, weight, 1e-6)
    (dh,) = torch.autograd.grad(h.sum(), x, retain_graph=True)
    assert torch.equal(dh, torch.ones(3, 8))
    (dy,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
    both, dweight = torch.autograd.grad(y.sum() + h.sum(), [residual, weight])
    torch.testing.assert_close(both, dh + dy)
    assert dweight.shape == (8,)


@both_bodies
def test_a_residual_that_broadcasts_gets_its_summed_gradient() -> None:
    x, residual = torch.randn(2, 3, 8, requires_grad=True), torch.randn(1, 3, 8, requires_grad=True)
    y, h = add_rms_norm(x, residual, None, 1e-6)
    assert h.shape == y.shape == (2, 3, 8)
    dx, dresidual = torch.autograd.grad(y.square().sum() + h.square().sum(), [x, residual])
    torch.testing.assert_close(dx.sum(0, keepdim=True), dresidual)


@both_bodies
def test_not_a_number_stays_in_its_row() -> None:
    x = torch.randn(3, 8)
    x[1, 2] = float("nan")
    y = rms_norm(x, torch.ones(8), 1e-6)
    assert y[1].isnan().all()
    assert y[[0, 2]].isfinite().all()


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    x, residual = torch.randn(999, 65).bfloat16().requires_grad_(), torch.randn(999, 65, requires_grad=True)
    weight = torch.randn(65, requires_grad=True)

    def results() -> list[torch.Tensor]:
        y, h = add_rms_norm(x, residual, weight, 1e-6, out_dtype=torch.bfloat16)
        return [y, h, *torch.autograd.grad((y.float() * h).sum(), [x, residual, weight])]

    expected = results()
    torch.set_num_threads(threads)
    for value, other in zip(results(), expected, strict=True):
        assert torch.equal(value, other)


@both_bodies
def test_each_summand_gets_its_gradient_in_its_own_dtype() -> None:
    x, residual = torch.randn(5, 64).bfloat16().requires_grad_(), torch.randn(5, 64, requires_grad=True)
    y, h = add_rms_norm(x, residual, torch.ones(64), 1e-6)
    dx, dresidual = torch.autograd.grad(y.square().sum() + h.sum(), [x, residual])
    assert (dx.dtype, dresidual.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(dx, dresidual.bfloat16())


@both_bodies
def test_the_sum_of_gradients_has_the_bits_of_autograds_sum() -> None:
    x, residual = (torch.randn(37, 65, requires_grad=True) for _ in range(2))
    weight, dy, dh = torch.randn(65), torch.randn(37, 65), torch.randn(37, 65)
    y, h = add_rms_norm(x, residual, weight, 1e-6)
    (together,) = torch.autograd.grad([y, h], x, [dy, dh])
    apart = (x + residual).detach().requires_grad_()
    (alone,) = torch.autograd.grad(rms_norm(apart, weight, 1e-6), apart, dy)
    assert torch.equal(together, alone + dh)


def test_saves_its_input_and_one_number_a_row() -> None:
    saved: list[torch.Size] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        rms_norm(torch.randn(6, 8, requires_grad=True), torch.ones(8), 1e-6)
    assert sorted(saved) == [(6, 1), (6, 8), (8,)]


def test_operators_declare_what_they_do() -> None:
    x, residual = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8).bfloat16().requires_grad_()
    weight = torch.randn(8, requires_grad=True)
    for dtype in [None, torch.bfloat16]:
        arguments = (weight, 1e-6, 1.0, False, dtype)
        torch.library.opcheck(torch.ops.hasten.rms_norm, (x, *arguments), test_utils=CHECKS)
        torch.library.opcheck(torch.ops.hasten.add_rms_norm, (x, residual, *arguments), test_utils=CHECKS)
    torch.library.opcheck(torch.ops.hasten.rms_norm, (x.mT, None, 1e-6), test_utils=CHECKS[:3])


def test_sizes_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"weight is \[7\]; needs \[8\]"):
        rms_norm(torch.randn(3, 8), torch.ones(7), 1e-6)
    with pytest.raises(ShapeError, match="do not broadcast"):
        add_rms_norm(torch.randn(3, 8), torch.randn(2, 8), None, 1e-6)
    with pytest.raises(ShapeError, match="floating"):
        rms_norm(torch.ones(3, 8, dtype=torch.int64), None, 1e-6)

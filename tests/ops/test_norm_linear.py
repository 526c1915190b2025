from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.base.errors import ConfigError, ShapeError
from hasten.ops.cases import Case, check_backward, check_forward, select
from hasten.ops.norm_linear import norm_linear
from hasten.ops.norm_linear.cases import CASES

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


def _parameters(*shapes: tuple[int, ...]) -> list[Tensor]:
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_gives_torchs_dtypes(x_dtype: torch.dtype) -> None:
    x, residual = torch.randn(3, 8).to(x_dtype), torch.randn(3, 8).to(x_dtype)
    x.requires_grad_()
    parameter_dtype = torch.float64 if x_dtype == torch.float64 else torch.float32
    scale, weight = torch.randn(8, dtype=parameter_dtype), torch.randn(5, 8, dtype=parameter_dtype)
    weight.requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(F.layer_norm(x + residual, (8,), scale, scale, 1e-5), weight)
        h, y = norm_linear(
            x, [weight], norm="layer", norm_weight=scale, norm_bias=scale, eps=1e-5, residual=residual
        )
    assert h.dtype == x_dtype
    assert y.dtype == expected.dtype
    torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
    got = torch.autograd.grad(y.sum(), [x, weight])
    for gradient, other in zip(got, torch.autograd.grad(expected.sum(), [x, weight]), strict=True):
        assert gradient.dtype == other.dtype
        torch.testing.assert_close(gradient, other, rtol=2**-5, atol=2**-5)


@both_bodies
@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_any_gradient_may_be_missing(norm: str) -> None:
    x, residual, scale, first, second = _parameters((3, 8), (3, 8), (8,), (5, 8), (4, 8))
    leaves = [x, residual, scale, first, second]

    def gradients(*used: int) -> list[Tensor]:
        outputs = norm_linear(x, [first, second], norm=norm, norm_weight=scale, eps=1e-6, residual=residual)
        loss = sum(outputs[index].square().sum() for index in used)
        found = torch.autograd.grad(loss, leaves, allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for t, g in zip(leaves, found, strict=True)]

    parts = [gradients(index) for index in range(3)]
    for gradient, *terms in zip(gradients(0, 1, 2), *parts, strict=True):
        torch.testing.assert_close(gradient, sum(terms))
    assert not parts[0][3].any()
    assert not parts[1][4].any()


@both_bodies
def test_frozen_parts_get_no_gradient_and_the_rest_is_the_same() -> None:
    x, scale, weight = _parameters((3, 8), (8,), (5, 8))
    (y,) = norm_linear(x, [weight], norm="rms", norm_weight=scale, eps=1e-6)
    dx, dscale, dweight = torch.autograd.grad(y.square().sum(), [x, scale, weight])
    for leaf, gradient in [(x, dx), (scale, dscale), (weight, dweight)]:
        mine = [t if t is leaf else t.detach() for t in (x, scale, weight)]
        (y,) = norm_linear(mine[0], [mine[2]], norm="rms", norm_weight=mine[1], eps=1e-6)
        assert torch.equal(torch.autograd.grad(y.square().sum(), leaf)[0], gradient)


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_the_normalised_value_is_not_saved(norm: str) -> None:
    x, residual, scale, weight = _parameters((6, 8), (6, 8), (8,), (5, 8))
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        h, _ = norm_linear(x, [weight], norm=norm, norm_weight=scale, eps=1e-6, residual=residual)
    assert [t.data_ptr() for t in saved if t.shape == (6, 8)] == [h.data_ptr()]
    assert sorted(t.shape for t in saved if t.dim() == 2) == sorted(
        [(6, 8), (5, 8)] + [(6, 1)] * (1 if norm == "rms" else 2)
    )


@pytest.mark.parametrize("norm", ["rms", "layer"])
def test_operator_declares_what_it_does(norm: str) -> None:
    x, residual, scale, weight, bias = _parameters((2, 3, 8), (1, 3, 8), (8,), (5, 8), (5,))
    norm_bias = scale if norm == "layer" else None
    constants = (norm, scale, norm_bias, 1e-6, 0.0, True)
    operator = torch.ops.hasten.norm_linear
    torch.library.opcheck(operator, (x, None, *constants, [weight, weight], []), test_utils=CHECKS)
    arguments = (x, residual, *constants, [weight, weight], [bias, bias], torch.bfloat16)
    torch.library.opcheck(operator, arguments, test_utils=CHECKS)


def test_mistakes_are_refused() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with pytest.raises(ConfigError, match="did you mean 'layer'"):
        norm_linear(x, [weight], norm="layr", norm_weight=None, eps=1e-6)
    with pytest.raises(ConfigError, match="takes no norm_bias"):
        norm_linear(x, [weight], norm="rms", norm_weight=None, norm_bias=torch.ones(8), eps=1e-6)
    with pytest.raises(ShapeError, match=r"norm_weight is \[7\]"):
        norm_linear(x, [weight], norm="rms", norm_weight=torch.ones(7), eps=1e-6)
    with pytest.raises(ShapeError, match=r"needs \[M, 8\]"):
        norm_linear(x, [weight.mT], norm="rms", norm_weight=None, eps=1e-6)

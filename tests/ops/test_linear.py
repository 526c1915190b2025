from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hasten.base.errors import ConfigError, ShapeError
from hasten.ops.activation.reference import KINDS
from hasten.ops.cases import Case, check_backward, check_forward, select
from hasten.ops.linear import activation_linear, linear, linear_group
from hasten.ops.linear.cases import CASES

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


def _parameters(*shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]


def _saved_shapes(call: object) -> list[tuple[torch.Size, torch.dtype]]:
    saved: list[tuple[torch.Size, torch.dtype]] = []
    hooks = torch.autograd.graph.saved_tensors_hooks(
        lambda t: saved.append((t.shape, t.dtype)) or t, lambda t: t
    )
    with hooks:
        call()
    return saved


@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_autocast_gives_torchs_dtypes(x_dtype: torch.dtype) -> None:
    x = torch.randn(3, 8).to(x_dtype).requires_grad_()
    weight, bias = _parameters(
        (5, 8), (5,), dtype=torch.float64 if x_dtype == torch.float64 else torch.float32
    )
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.linear(x, weight, bias)
        got = [
            linear(x, weight, bias),
            *linear_group(x, [weight, weight], [bias, bias]),
            activation_linear(x, None, "identity", weight, bias),
        ]
    dexpected = torch.autograd.grad(expected.sum(), [x, weight, bias])
    for y in got:
        assert y.dtype == expected.dtype
        torch.testing.assert_close(y, expected, rtol=2**-7, atol=2**-7)
        gradients = torch.autograd.grad(y.sum(), [x, weight, bias], retain_graph=True)
        for gradient, other in zip(gradients, dexpected, strict=True):
            assert gradient.dtype == other.dtype
            torch.testing.assert_close(gradient, other, rtol=2**-6, atol=2**-6)


def test_autocast_rounds_the_gated_product_as_torch_does() -> None:
    x, up = torch.randn(3, 8).bfloat16(), torch.randn(3, 8).bfloat16()
    (weight,) = _parameters((5, 8))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        expected = F.linear(F.silu(x) * up, weight)
        assert torch.equal(activation_linear(x, up, "silu", weight), expected)
        assert torch.equal(linear(F.silu(x) * up, weight), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_the_value_before_the_activation_is_saved_only_if_there_is_one(kind: str) -> None:
    x, weight = _parameters((3, 8), (5, 8))
    shapes = [shape for shape, _ in _saved_shapes(lambda: linear(x, weight, kind=kind))]
    assert shapes == [(3, 8), (5, 8)] + ([] if kind == "identity" else [(3, 5)])


def test_what_is_saved_has_the_dtype_of_the_product_and_a_frozen_weight_saves_no_input() -> None:
    x, weight = _parameters((3, 8), (5, 8))
    with torch.autocast("cpu", torch.bfloat16):
        assert _saved_shapes(lambda: linear(x, weight)) == [((3, 8), torch.bfloat16), ((5, 8), torch.float32)]
        frozen = weight.detach()
        assert _saved_shapes(lambda: linear(x, frozen)) == [((5, 8), torch.float32)]
        assert _saved_shapes(lambda: linear_group(x, [frozen])) == [((5, 8), torch.float32)]
    (dx,) = torch.autograd.grad(linear(x, frozen).sum(), x)
    torch.testing.assert_close(dx, frozen.sum(0).expand(3, 8))


def test_missing_gradients() -> None:
    x, first, second, bias = _parameters((3, 8), (5, 8), (4, 8), (4,))
    y, z = linear_group(x, [first, second], [torch.zeros(5), bias])
    dx, dfirst, dsecond = torch.autograd.grad(
        y.sum(), [x, first, second], retain_graph=True, allow_unused=True
    )
    assert dsecond is None
    torch.testing.assert_close(dx, first.detach().sum(0).expand(3, 8))
    torch.testing.assert_close(dfirst, x.detach().sum(0).expand(5, 8))
    (dbias,) = torch.autograd.grad(z.sum(), bias)
    assert torch.equal(dbias, torch.full((4,), 3.0))

    gate, up, weight = _parameters((3, 8), (3, 8), (5, 8))
    frozen_gate = activation_linear(gate.detach(), up, "silu", weight)
    dup, dweight = torch.autograd.grad(frozen_gate.sum(), [up, weight])
    torch.testing.assert_close(dup, F.silu(gate.detach()) * weight.detach().sum(0))
    torch.testing.assert_close(dweight, (F.silu(gate.detach()) * up.detach()).sum(0).expand(5, 8))
    only_weight = activation_linear(gate.detach(), up.detach(), "silu", weight)
    torch.testing.assert_close(torch.autograd.grad(only_weight.sum(), weight)[0], dweight)


def test_projections_are_separate_memory() -> None:
    x, first, second = _parameters((3, 8), (5, 8), (5, 8))
    y, z = linear_group(x, [first, second])
    kept = z.detach().clone()
    y.mul_(0)
    assert torch.equal(z, kept)
    assert y.is_contiguous()
    assert z.is_contiguous()


@pytest.mark.parametrize("kind", ["identity", "gelu"])
def test_operators_declare_what_they_do(kind: str) -> None:
    x, weight, bias = _parameters((2, 3, 8), (5, 8), (5,))
    ops = torch.ops.hasten
    for compute, checks in [(None, CHECKS[:3]), (torch.bfloat16, CHECKS)]:
        torch.library.opcheck(
            ops.linear_and_preactivation, (x, weight, bias, kind, compute), test_utils=checks
        )
        torch.library.opcheck(ops.activation_linear, (x, x, kind, weight, bias, compute), test_utils=checks)
        torch.library.opcheck(
            ops.linear_group, (x, [weight, weight], [bias, bias], compute), test_utils=checks
        )
    torch.library.opcheck(ops.linear, (x, weight, bias, kind))
    torch.library.opcheck(ops.linear, (x, weight), test_utils=CHECKS[:3])
    torch.library.opcheck(ops.linear_group, (x, [weight], []), test_utils=CHECKS[:3])


def test_mistakes_are_refused() -> None:
    x, weight = torch.randn(3, 8), torch.randn(5, 8)
    with pytest.raises(ShapeError, match=r"weight \[5, 8\] needs \[M, 7\]"):
        linear(torch.randn(3, 7), weight)
    with pytest.raises(ShapeError, match=r"bias \[4\] needs \[5\]"):
        linear(x, weight, torch.ones(4))
    with pytest.raises(ShapeError, match="1 biases for 2 weights"):
        linear_group(x, [weight, weight], [torch.ones(5)])
    with pytest.raises(ConfigError, match="did you mean 'silu'"):
        linear(x, weight, kind="silo")
    with pytest.raises(ShapeError, match="must be the same"):
        activation_linear(x, torch.randn(3, 9), "silu", weight)

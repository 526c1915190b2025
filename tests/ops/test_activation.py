from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from hasten.base.errors import ConfigError, ShapeError
from hasten.ops.activation import activation, gated_activation
from hasten.ops.activation.cases import CASES
from hasten.ops.activation.kernel import gated_backward
from hasten.ops.activation.reference import KINDS
from hasten.ops.cases import Case, check_backward, check_forward, select

both_bodies = pytest.mark.usefixtures("body")
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
TRANSFORMERS_NAMES = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_tanh": "gelu_pytorch_tanh",
    "gelu_quick": "quick_gelu",
    "relu": "relu",
    "relu2": "relu2",
    "sigmoid": "sigmoid",
    "tanh": "tanh",
    "identity": "linear",
}


@both_bodies
@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype)


@both_bodies
@pytest.mark.parametrize(("case", "dtype"), select(CASES, backward=True), ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    check_backward(case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_activation_of_the_same_meaning_in_transformers(
    kind: str, dtype: torch.dtype, body: str
) -> None:
    x, up = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    expected = ACT2FN[TRANSFORMERS_NAMES[kind]](x)
    y, product = activation(x, kind), gated_activation(x, up, kind)
    if body == "torch":
        assert torch.equal(y, expected)
        assert torch.equal(product, expected * up)
    else:  # another order of rounding
        tolerance = {"rtol": 1e-6, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 2**-6, "atol": 2**-8}
        torch.testing.assert_close(y, expected, **tolerance)
        torch.testing.assert_close(product, expected * up, **tolerance)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "identity"])
def test_values_and_derivatives_to_a_millionth_over_the_whole_range(kind: str, body: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -100.0, -0.0, 1e-30, 100.0, 1e4])])
    exact = x.double().requires_grad_()
    truth = KINDS[kind](exact)
    (slope,) = torch.autograd.grad(truth.sum(), exact)
    leaf = x.clone().requires_grad_()
    y = activation(leaf, kind)
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    torch.testing.assert_close(y.double(), truth.detach(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), slope, rtol=2e-6, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_narrow_values_and_derivatives_over_the_whole_range(kind: str, dtype: torch.dtype, body: str) -> None:
    x = torch.cat([torch.linspace(-20, 20, 4001), torch.tensor([-1e4, -100.0, 100.0, 1e4])]).to(dtype)
    exact = x.double().requires_grad_()
    truth = KINDS[kind](exact)
    (slope,) = torch.autograd.grad(truth.sum(), exact)
    leaf = x.clone().requires_grad_()
    y = activation(leaf, kind)
    (dx,) = torch.autograd.grad(y.sum(), leaf)
    unit = torch.finfo(dtype).eps / 2  # the rounding of the result, and 4e-6 for float32 before it
    torch.testing.assert_close(y.double(), truth.detach(), rtol=1.01 * unit, atol=4e-6)
    torch.testing.assert_close(dx.double(), slope, rtol=1.01 * unit, atol=4e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_values_that_are_not_finite(kind: str, body: str) -> None:
    y = activation(torch.tensor([float("nan"), float("inf"), 1.0]), kind)
    assert y[0].isnan()
    # torch's own gelu of infinity is NaN in its vectorised form.
    assert y[1] == (1 if kind in ("sigmoid", "tanh") else float("inf")) or body == "torch"
    assert y[2].isfinite()
    gate = torch.tensor([float("nan"), 1.0, 1.0]).requires_grad_()
    up = torch.tensor([1.0, float("nan"), 1.0]).requires_grad_()
    product = gated_activation(gate, up, kind)
    assert product.isnan().tolist() == [True, True, False]
    dgate, dup = torch.autograd.grad(product.sum(), [gate, up])
    assert dgate[1].isnan()
    assert dup[0].isnan()
    assert dgate[2].isfinite()
    assert dup[2].isfinite()


def test_the_gradient_of_a_gate_may_lie_over_its_own_memory(body: str) -> None:
    gate, up, dy = (torch.randn(7, 65).bfloat16() for _ in range(3))
    dgate, dup, product = gated_backward(dy.clone(), gate, up, "silu", need_product=True)
    over = dy.clone()
    again = gated_backward(over, gate, up, "silu", need_product=True, own_dy=True)
    assert again[1].data_ptr() == over.data_ptr()
    assert product is not None
    for got, expected in zip(again, (dgate, dup, product), strict=True):
        assert got is not None
        assert torch.equal(got, expected)
    assert torch.equal(product, gated_activation(gate, up, "silu"))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_number_of_threads_gives_the_same_bits(threads: int) -> None:
    gate, up, dy = (torch.randn(3, 12345) for _ in range(3))
    expected = (gated_activation(gate, up, "gelu"), *gated_backward(dy, gate, up, "gelu", True))
    torch.set_num_threads(threads)
    got = (gated_activation(gate, up, "gelu"), *gated_backward(dy, gate, up, "gelu", True))
    for value, other in zip(got, expected, strict=True):
        assert value is not None
        assert torch.equal(value, other)


@pytest.mark.parametrize("kind", KINDS)
def test_the_result_is_fresh_memory(kind: str) -> None:
    x, up = torch.randn(3, 8), torch.ones(3, 8)
    before = x.clone()
    activation(x, kind).fill_(7)
    gated_activation(x, up, kind).fill_(7)
    assert torch.equal(x, before)
    assert torch.equal(up, torch.ones(3, 8))


def test_dtypes_promote_and_autocast_leaves_them() -> None:
    gate, up = torch.randn(3, 8).bfloat16().requires_grad_(), torch.randn(3, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = gated_activation(gate, up, "silu")
        assert activation(up, "gelu").dtype == torch.float32
    assert y.dtype == torch.float32
    dgate, dup = torch.autograd.grad(y.sum(), [gate, up])
    assert (dgate.dtype, dup.dtype) == (torch.bfloat16, torch.float32)


def test_saves_only_the_inputs() -> None:
    gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        gated_activation(gate, up, "gelu")
    assert saved == [gate.data_ptr(), up.data_ptr()]


def test_operators_declare_what_they_do() -> None:
    gate, up = torch.randn(3, 8, requires_grad=True), torch.randn(3, 8, requires_grad=True)
    for kind in ["silu", "identity"]:
        torch.library.opcheck(torch.ops.hasten.activation, (gate, kind), test_utils=CHECKS)
        torch.library.opcheck(torch.ops.hasten.gated_activation, (gate, up, kind), test_utils=CHECKS)
    torch.library.opcheck(torch.ops.hasten.activation, (gate.mT, "gelu"), test_utils=CHECKS[:3])


def test_mistakes_are_refused() -> None:
    with pytest.raises(ConfigError, match="did you mean 'gelu_tanh'"):
        activation(torch.randn(3), "gelu_tan")
    with pytest.raises(ShapeError, match=r"gate is \[3\], up is \[4\]"):
        gated_activation(torch.randn(3), torch.randn(4), "silu")

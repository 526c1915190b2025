from __future__ import annotations

import pytest
import torch
from transformers.activations import ACT2FN

from hasten.base.errors import ConfigError, ShapeError
from hasten.ops.activation import activation, gated_activation
from hasten.ops.activation.cases import CASES
from hasten.ops.activation.reference import KINDS
from hasten.ops.cases import Case, check_backward, check_forward, select

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


@pytest.mark.parametrize(("case", "dtype"), select(CASES), ids=str)
def test_forward(case: Case, dtype: torch.dtype) -> None:
    check_forward(case, dtype)


@pytest.mark.parametrize(("case", "dtype"), select(CASES, backward=True), ids=str)
def test_backward(case: Case, dtype: torch.dtype) -> None:
    check_backward(case, dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_activation_of_the_same_meaning_in_transformers(kind: str, dtype: torch.dtype) -> None:
    x, up = torch.randn(5, 64).to(dtype), torch.randn(5, 64).to(dtype)
    expected = ACT2FN[TRANSFORMERS_NAMES[kind]](x)
    assert torch.equal(activation(x, kind), expected)
    assert torch.equal(gated_activation(x, up, kind), expected * up)


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

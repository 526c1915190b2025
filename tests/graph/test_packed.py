"""Packed weights: the same results, never those of a changed weight, and memory that is given back."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hasten
from hasten.models import tiny_model
from hasten.ops import native, packed
from hasten.ops.activation.reference import KINDS

pytestmark = pytest.mark.skipif(not native.state().bf16, reason="needs kernels and products of bf16")
BF16 = torch.bfloat16


def layer(out: int = 48, width: int = 32) -> tuple[nn.Linear, packed.Packs, torch.Tensor]:
    linear = nn.Linear(width, out, dtype=BF16)
    return linear, packed.register(linear, 1 << 20), torch.randn(packed.MIN_ROWS, width, dtype=BF16)


@pytest.mark.parametrize("kind", packed.ATTRIBUTES)
@pytest.mark.parametrize("bias", [False, True])
def test_products_and_activations(kind: str, bias: bool) -> None:
    linear, packs, x = layer(49, 33)
    x = torch.randn(2, 9, 33, dtype=BF16)
    given = linear.bias.detach() if bias else None
    with packed.allowed():
        found = packed.product(x, linear.weight, given, kind, BF16)
    assert found is not None
    assert packs.bytes == 49 * 33 * 2
    exact = KINDS[kind](
        F.linear(x.double(), linear.weight.double(), None if given is None else given.double())
    )
    torch.testing.assert_close(found.double(), exact, rtol=2**-7, atol=2**-7)


def test_only_where_it_is_allowed_and_worth_it() -> None:
    linear, packs, x = layer()
    assert packed.product(x, linear.weight, None, "identity", BF16) is None
    with packed.allowed():
        assert packed.product(x[:2], linear.weight, None, "identity", BF16) is None
        assert packed.product(x.float(), linear.weight, None, "identity", torch.float32) is None
        assert packed.product(x, linear.weight, None, "mish", BF16) is None
        assert packed.product(x, torch.randn(48, 32, dtype=BF16), None, "identity", BF16) is None
        with native.switched_off():
            assert packed.product(x, linear.weight, None, "identity", BF16) is None
        torch._C._set_mkldnn_enabled(False)
        try:
            assert packed.product(x, linear.weight, None, "identity", BF16) is None
        finally:
            torch._C._set_mkldnn_enabled(True)
    assert packs.bytes == 0


def _assign(linear: nn.Linear) -> None:
    with torch.no_grad():
        linear.weight[3, 5] += 1


def _exchange(linear: nn.Linear) -> None:
    linear.weight.data = torch.randn_like(linear.weight)


def _write_data(linear: nn.Linear) -> None:
    linear.weight.data[47, 31] += 1


def _swap_rows(linear: nn.Linear) -> None:
    linear.weight.data.copy_(linear.weight.data.flip(0))


def _load(linear: nn.Linear) -> None:
    linear.load_state_dict({k: v + 1 for k, v in linear.state_dict().items()})


@pytest.mark.parametrize("change", [_assign, _exchange, _write_data, _swap_rows, _load])
def test_a_changed_weight_is_seen(change: Callable[[nn.Linear], None]) -> None:
    linear, packs, x = layer()
    with packed.allowed():
        packed.product(x, linear.weight, None, "identity", BF16)
        change(linear)
        found = packed.product(x, linear.weight, None, "identity", BF16)
    assert found is not None
    torch.testing.assert_close(found, F.linear(x, linear.weight).detach(), rtol=2**-7, atol=2**-7)
    assert packs.bytes == linear.weight.numel() * 2


def test_the_limit_holds_and_release_gives_back() -> None:
    linear, packs, x = layer()
    packs.limit_bytes = linear.weight.numel() * 2 - 1
    with packed.allowed():
        assert packed.product(x, linear.weight, None, "identity", BF16) is None
        packs.limit_bytes += 1
        assert packed.product(x, linear.weight, None, "identity", BF16) is not None
        packs.release()
        assert packs.bytes == 0
        assert packed.product(x, linear.weight, None, "identity", BF16) is not None
        packs.forget()
        assert packed.product(x, linear.weight, None, "identity", BF16) is None


@pytest.mark.parametrize("family", ["bert", "llama", "opt"])
def test_models_without_gradients(family: str) -> None:
    model = tiny_model(family).eval()
    model.config.use_cache = False
    ids = torch.randint(0, 90, (2, 33))

    def logits() -> torch.Tensor:
        with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
            return model(input_ids=ids).logits.float()

    plain = logits()
    hasten.optimize(model)
    found = logits()
    packs = model.__dict__["_hasten"].engine.packs
    assert packs.bytes > 0
    assert "held now" in str(hasten.report(model))
    torch.testing.assert_close(found, plain, rtol=0.05, atol=0.02 * plain.abs().max().item())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.data.mul_(1.25)
    changed = logits()
    hasten.restore(model)
    assert packs.bytes == 0
    torch.testing.assert_close(changed, logits(), rtol=0.05, atol=0.02 * changed.abs().max().item())


def test_a_training_step_frees_them() -> None:
    model = hasten.optimize(tiny_model("llama"))
    model.config.use_cache = False
    ids = torch.randint(0, 90, (2, 33))
    with torch.no_grad(), torch.autocast("cpu", dtype=BF16):
        model(input_ids=ids)
    packs = model.__dict__["_hasten"].engine.packs
    assert packs.bytes > 0
    with torch.autocast("cpu", dtype=BF16):
        model(input_ids=ids, labels=ids).loss.backward()
    assert packs.bytes == 0


def test_fingerprint_sees_every_byte() -> None:
    weight = torch.randn(300, 1001).to(BF16)
    first = torch.ops.hasten_cpu.fingerprint(weight)
    assert first == torch.ops.hasten_cpu.fingerprint(weight.clone())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    assert first == torch.ops.hasten_cpu.fingerprint(weight)
    torch.set_num_threads(threads)
    for place in (0, 131_071, 131_072, weight.numel() - 1):
        changed = weight.clone()
        changed.view(-1).view(torch.int16)[place] ^= 1
        assert torch.ops.hasten_cpu.fingerprint(changed) != first
    assert torch.ops.hasten_cpu.fingerprint(weight[:0]) != first

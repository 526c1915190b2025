"""Copies of weights: used only where they equal the weight, and gone when nobody needs them."""

from __future__ import annotations

import copy
import gc
import io
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from hasten.ops import shadow
from hasten.ops.adamw.optimizer import AdamW
from hasten.ops.linear import activation_linear, linear, linear_group
from hasten.ops.norm_linear import norm_linear

pytestmark = pytest.mark.usefixtures("body")
BF16 = torch.bfloat16
SIZE = 24 * 16 * 2


class Model(nn.Module):
    """Every operator that takes a weight, once or twice."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.randn(24, 16)) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weights
        with torch.autocast("cpu", BF16):
            a = linear(x, w[0], kind="silu")
            b, c = linear_group(x, [w[1], w[2]])
            d = activation_linear(x, None, "gelu", w[3])
            (e,) = norm_linear(x, [w[4]], norm="rms", norm_weight=None, eps=1e-6)
        return (a + b * c + d + e).float().square().mean()


@pytest.fixture
def model() -> Iterator[Model]:
    made = Model()
    yield made
    for entry in list(shadow._WEIGHTS.values()):
        entry.owner.release()


def gradients(model: Model, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    return list(torch.autograd.grad(model(x), [x, *model.parameters()]))


def casts(run: Callable[[], object]) -> int:
    """How often a float32 matrix of the weights' shape is cast."""
    count = 0

    plain = Tensor.to

    def counted(tensor: Tensor, *args: object, **kwargs: object) -> Tensor:
        nonlocal count
        made = plain(tensor, *args, **kwargs)
        count += tensor.shape == (24, 16) and tensor.dtype == torch.float32 and made.dtype == BF16
        return made

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Tensor, "to", counted)
        run()
    return count


def test_one_cast_from_forward_to_backward_and_the_same_bits(model: Model) -> None:
    x = torch.randn(7, 16)
    plain = gradients(model, x)
    assert casts(lambda: gradients(model, x)) == 10
    copies = shadow.register(model, limit_bytes=1 << 20)
    assert casts(lambda: gradients(model, x)) == 5
    for value, other in zip(gradients(model, x), plain, strict=True):
        assert torch.equal(value, other)
    assert copies.waiting_bytes == 0


def test_the_limit_is_kept_and_freed_with_the_graph(model: Model) -> None:
    x = torch.randn(7, 16, requires_grad=True)
    copies = shadow.register(model, limit_bytes=3 * SIZE + 1)
    loss = model(x)
    assert copies.waiting_bytes == 3 * SIZE
    loss.backward()
    assert copies.waiting_bytes == 0
    loss = model(x)  # the last graph still exists, its copies do not count
    assert copies.waiting_bytes == 3 * SIZE
    del loss
    gc.collect()
    assert copies.waiting_bytes == 0
    kept = model(x)
    kept.backward(retain_graph=True)
    assert copies.waiting_bytes == 3 * SIZE
    kept.backward()
    assert copies.waiting_bytes == 0
    assert casts(lambda: gradients(model, x.detach())) == 7


def test_without_a_gradient_nothing_waits(model: Model) -> None:
    copies = shadow.register(model, limit_bytes=1 << 20)
    with torch.no_grad():
        model(torch.randn(7, 16))
    assert copies.waiting_bytes == 0
    model(torch.randn(7, 16))  # x needs no gradient, so no backward pass needs a weight
    assert copies.waiting_bytes == 0
    assert len(shadow._MADE.copies) <= 1


def test_frozen_weights_have_copies_as_well(model: Model) -> None:
    model.requires_grad_(False)
    shadow.register(model, limit_bytes=1 << 20)
    x = torch.randn(7, 16, requires_grad=True)
    assert casts(lambda: torch.autograd.grad(model(x), x)) == 5


def test_checkpointing_keeps_no_copies(model: Model) -> None:
    copies = shadow.register(model, limit_bytes=1 << 20)
    x = torch.randn(7, 16, requires_grad=True)
    loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False)
    assert copies.waiting_bytes == 0
    got = torch.autograd.grad(loss, [x, *model.parameters()])
    assert copies.waiting_bytes == 0
    for value, other in zip(got, gradients(model, x.detach()), strict=True):
        assert torch.equal(value, other)


CHANGES: dict[str, Callable[[Model], object]] = {
    "in place": lambda m: m.weights[1].mul_(2),
    "load_state_dict": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}),
    "assign": lambda m: m.load_state_dict({k: v * 2 for k, v in m.state_dict().items()}, assign=True),
    ".data =": lambda m: setattr(m.weights[1], "data", m.weights[1].data * 2),
    ".data.mul_": lambda m: m.weights[1].data.mul_(2),
    "replaced": lambda m: m.weights.__setitem__(1, nn.Parameter(m.weights[1].detach() * 2)),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("optimizer", ["torch", "own"])
def test_a_changed_weight_is_seen(model: Model, change: str, optimizer: str) -> None:
    x = torch.randn(7, 16)
    shadow.register(model, limit_bytes=1 << 20)
    kind = torch.optim.AdamW if optimizer == "torch" else AdamW
    steps = kind(model.parameters(), lr=1e-2)
    model(x).backward()
    steps.step()
    with torch.no_grad():
        CHANGES[change](model)
    fresh = Model()
    fresh.load_state_dict(model.state_dict())
    for value, other in zip(gradients(model, x), gradients(fresh, x), strict=True):
        assert torch.equal(value, other)


@pytest.mark.parametrize("change", [c for c in CHANGES if c != ".data.mul_"])
def test_a_changed_weight_is_seen_with_lasting_copies(model: Model, change: str) -> None:
    x = torch.randn(7, 16)
    shadow.register(model, limit_bytes=0)
    model(x).backward()
    AdamW(model.parameters(), lr=1e-2, shadows=True).step()
    with torch.no_grad():
        CHANGES[change](model)
    fresh = Model()
    fresh.load_state_dict(model.state_dict())
    for value, other in zip(gradients(model, x), gradients(fresh, x), strict=True):
        assert torch.equal(value, other)


def test_the_optimizer_writes_lasting_copies(model: Model) -> None:
    x, twin = torch.randn(7, 16), copy.deepcopy(model)
    copies = shadow.register(model, limit_bytes=0)
    ours, plain = AdamW(model.parameters(), lr=1e-2, shadows=True), AdamW(twin.parameters(), lr=1e-2)
    buffers = []
    for _ in range(3):
        for m, steps in ((model, ours), (twin, plain)):
            steps.zero_grad()
            m(x).backward()
            steps.step()
        buffers.append([e.lasting.data_ptr() for e in shadow._WEIGHTS.values() if e.lasting is not None])
    for weight, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(weight, other)
    assert copies.lasting_bytes() == 5 * SIZE
    assert buffers[0] == buffers[2]
    assert casts(lambda: gradients(model, x)) == 0
    for weight, entry in shadow._WEIGHTS.items():
        assert torch.equal(entry.lasting, weight.detach().to(BF16))
    copies.release()
    assert copies.lasting_bytes() == 0
    assert casts(lambda: gradients(model, x)) == 10


def test_an_old_graph_notices_a_rewritten_copy(model: Model) -> None:
    x = torch.randn(7, 16, requires_grad=True)
    shadow.register(model, limit_bytes=0)
    steps = AdamW(model.parameters(), shadows=True)
    model(x).backward()
    steps.step()
    old = model(x)
    steps.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward()


def test_copies_are_not_saved_pickled_or_copied_and_die_with_the_model() -> None:
    model = Model()
    copies = shadow.register(model, limit_bytes=0)
    model(torch.randn(7, 16)).backward()
    AdamW(model.parameters(), shadows=True).step()
    stored = io.BytesIO()
    torch.save(model.state_dict(), stored)
    assert stored.tell() < 5 * SIZE * 2 + 8000
    assert all(not p.__dict__ for p in model.parameters())
    twin = copy.deepcopy(model)
    assert not any(p in shadow._WEIGHTS for p in twin.parameters())
    assert copies.lasting_bytes() == 5 * SIZE
    del model
    gc.collect()
    assert copies.lasting_bytes() == 0


def test_says_what_it_holds(model: Model) -> None:
    assert "cast in the forward and in the backward" in str(shadow.register(model, limit_bytes=0))
    assert "up to 7 MB" in str(shadow.register(model, limit_bytes=7_000_000))

"""What operators become in a program, told by small decoders written by hand: against themselves in torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from programs import ByHand
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from hasten.base.errors import CaptureError
from hasten.graph.canonical import trace
from hasten.graph.passes import run_passes
from hasten.graph.whole import Whole
from hasten.ops import native
from hasten.ops.panels import FLOAT32
from hasten.ops.panels.reference import pack
from hasten.ops.program.reference import run
from hasten.ops.routed_linear import routed_linear
from hasten.serve.link import CacheSettings, Linked
from hasten.serve.lowering import lower
from hasten.serve.native_runner import NativeRunner
from hasten.serve.program import Program
from hasten.serve.weights import part_of

pytestmark = pytest.mark.skipif(native.state().level is None, reason=native.state().reason)

VOCABULARY, HIDDEN, CONTEXT, T = 41, 24, 128, 67
Body = Callable[[Tensor, Tensor, "Weights"], Tensor]


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = {"embedding": (VOCABULARY, HIDDEN), "head": (VOCABULARY, HIDDEN), "square": (HIDDEN, HIDDEN)}
        shapes |= {"other": (HIDDEN, HIDDEN), "stack": (4, HIDDEN, HIDDEN)}
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.randn(shape, generator=generator)))


def decoder(body: Body, weights: Weights) -> Callable[[Tensor, Tensor], Tensor]:
    def forward(ids: Tensor, positions: Tensor) -> Tensor:
        x = nn.functional.embedding(ids, weights.embedding)
        return nn.functional.linear(body(x, positions, weights), weights.head)

    return forward


def capture(body: Body, weights: Weights, tokens: int = T) -> Whole:
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    with mode:
        ids, positions = torch.zeros(1, tokens, dtype=torch.long), torch.zeros(1, tokens, dtype=torch.long)
    module = trace(decoder(body, weights), [ids, positions])
    run_passes(module, 1, None, gradients=False)
    known = {id(parameter): name for name, parameter in weights.named_parameters()}
    targets = {str(n.target) for n in module.graph.nodes if n.op == "get_attr"}
    names = {t: known[id(getattr(module, t))] for t in targets if id(getattr(module, t)) in known}
    return Whole(module, tokens, names, lambda count: capture(body, weights, count))


def lowered(body: Body, weights: Weights) -> Program:
    return lower(capture(body, weights), weights.get_parameter, VOCABULARY, CONTEXT)


def check(body: Body) -> Program:
    """The native program, and its meaning, against the decoder itself; also in pieces."""
    weights = Weights().requires_grad_(False)
    program = lowered(body, weights)
    dense = [part_of(weights.get_parameter(use.weight.name), use.weight) for use in program.matrices]
    ids = torch.randint(VOCABULARY, (1, 90), generator=torch.Generator().manual_seed(1))
    expected = decoder(body, weights)(ids, torch.arange(90)[None])[0]
    meant = run(program, dense, ids[0], torch.float32)
    settings = CacheSettings("float32", tuple(8 for _ in program.windows()))
    runner = NativeRunner(Linked(program, [pack(m, FLOAT32) for m in dense], settings, 90, 90))
    by_hand = ByHand(runner)
    found = np.concatenate([by_hand.feed({0: ids[0, :40].tolist()}), by_hand.feed({0: ids[0, 40:].tolist()})])
    allowed = 1e-5 * float(expected.abs().max())
    assert float((meant - expected).abs().max()) <= allowed
    assert float((torch.from_numpy(found) - expected).abs().max()) <= allowed
    return program


def product(x: Tensor, w: Weights) -> Tensor:
    return nn.functional.linear(x, w.square)


def slices_of_a_buffer(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    buffer = x.new_empty(1, x.shape[1], HIDDEN)
    buffer[..., ::2] = x[..., : HIDDEN // 2]
    buffer[..., 1::2] = x[..., HIDDEN // 2 :]
    return buffer


def a_view_changed_in_place(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    y = product(x, w)
    y[..., :5].mul_(3.0)
    y[..., 3:9] += x[..., :6]
    return y


def a_copy_of_what_changes(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    y = product(x, w)
    before = y.clone()
    y[..., 4:] = 0.5
    return y * before


def a_sum_over_its_own_product(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    y = product(x, w)
    view = y[..., :]
    y.add_(product(y, w))
    return view + 1


def products_of_what_changes_before_they_are_used(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    y = product(x, w)
    more, gate, up = product(y, w), product(y, w), nn.functional.linear(y, w.other)
    y[..., :4] = 0.0
    return y + more + nn.functional.silu(gate) * up


def experts_by_place(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    chosen = torch.stack((positions[0] % 4, (positions[0] + 1) % 4), -1)
    y = routed_linear(x.view(-1, 1, HIDDEN), w.stack, None, chosen)
    return routed_linear(y.tanh(), w.stack, w.stack[:, 0], chosen, True).sum(1).view(x.shape)


def masks(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    y = torch.where(x > 0, x * 2, x.masked_fill(x < -1, -7.0))
    y = y.masked_fill(~((x > 0.5) & (x <= 1.5) | (x == 0)), 0.25)
    return y + (x >= 0.1).to(x.dtype) + (x != x.abs()).float()


def functions(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    y = x.abs() + 0.3
    return (
        y.log() + y.sqrt() + y.rsqrt() + y.reciprocal() + x.clamp(-0.5, 0.7).exp() + torch.log1p(y)
        + torch.expm1(x.clamp(max=1)) + x**2 + y**1.7 + nn.functional.softplus(x) + x.trunc()
        + torch.maximum(x, y - 1) + torch.minimum(x, y) + (x * 3).floor()
    )  # fmt: skip


def sums(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    parts = x.view(1, x.shape[1], 4, 6)
    inner = parts.sum(2).repeat(1, 1, 4) + parts.mean(-1, keepdim=True).expand(-1, -1, 4, 6).flatten(2)
    return inner + parts.amax(dim=2, keepdim=True).expand(-1, -1, 4, 6).flatten(2) + x.amin(-1, True)


def a_router(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    flat = product(x, w).reshape(-1, HIDDEN)
    scores = flat[:, :12].softmax(-1)
    group = scores.view(-1, 3, 4).topk(2, dim=-1)[0].sum(-1)
    kept = torch.zeros_like(group).scatter_(1, group.topk(2, dim=-1, sorted=False)[1], 1.0)
    hidden = scores.masked_fill(~kept[..., None].expand(-1, 3, 4).reshape(-1, 12).bool(), float("-inf"))
    values, places = hidden.topk(3, dim=-1)
    values = values / values.sum(-1, keepdim=True)
    best, at = scores.max(dim=-1)
    more = torch.cat(
        (values, scores.gather(1, places), places.float(), best[:, None], at[:, None].float()), -1
    )
    lowest = scores.topk(2, dim=-1, largest=False)[1].float() + scores.argmax(-1, keepdim=True)
    return torch.cat((more, lowest), -1).repeat(1, 3)[:, :HIDDEN].view(x.shape)


def the_smallest_places(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    numbers = torch.arange(HIDDEN) * 0.5
    index = torch.tensor([7, 2, 2, 0])
    picked = x[..., index].repeat(1, 1, 6) + x[:, :, torch.tensor([1, 4, 7])].repeat(1, 1, 8)
    return picked + numbers[x.topk(HIDDEN, -1, largest=False)[1]]


def a_constant_for_each_place(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
    places = torch.arange(x.shape[1])
    return x + (places % 5)[None, :, None] * 0.1 + torch.ones(1, x.shape[1], 1)


BODIES = (
    slices_of_a_buffer, a_view_changed_in_place, a_copy_of_what_changes, a_sum_over_its_own_product,
    products_of_what_changes_before_they_are_used, experts_by_place, masks, functions, sums, a_router,
    the_smallest_places, a_constant_for_each_place,
)  # fmt: skip


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
def test_a_program_computes_what_is_written(body: Body) -> None:
    check(body)


def attended(x: Tensor, w: Weights, bias: Tensor) -> Tensor:
    q, k = (t.view(1, x.shape[1], 3, 8).transpose(1, 2) for t in (product(x, w), x))
    weights = (q @ k.transpose(-1, -2) * 0.2 + bias).softmax(-1)
    return (weights @ k).transpose(1, 2).reshape(x.shape)


@pytest.mark.parametrize("window", [1, 9, 66, 67, 80, 127])
def test_a_window_of_any_width_is_found_behind_a_mask(window: int) -> None:
    def body(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = places[:, None] - places
        hidden = (distance < 0) | (distance >= window)
        return attended(x, w, torch.zeros(1, 1, *hidden.shape).masked_fill(hidden, float("-inf")))

    assert check(body).windows() == (window,)


def test_slopes_are_found_with_a_window() -> None:
    def body(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = places[:, None] - places
        slopes = torch.tensor([0.5, 0.0, 0.125])[:, None, None] * -distance
        return attended(x, w, slopes.masked_fill((distance < 0) | (distance >= 70), float("-inf"))[None])

    assert check(body).windows() == (70,)


def far(distance: Tensor) -> Tensor:
    return distance >= torch.where(torch.arange(len(distance)) > 100, 7, 90)[:, None]


@pytest.mark.parametrize(
    ("bias", "why"),
    [
        (lambda d: (d == 3) * 1.0, "linear"),
        (lambda d: (d > 90) * 1.0, "linear"),
        (lambda d: torch.zeros(d.shape).masked_fill(d == 5, float("-inf")), "not causal"),
        (lambda d: torch.zeros(d.shape).masked_fill(far(d), float("-inf")), "not causal"),
    ],
)  # fmt: skip
def test_a_bias_that_is_neither_is_refused_however_far_it_shows(
    bias: Callable[[Tensor], Tensor], why: str
) -> None:
    def body(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
        places = torch.arange(x.shape[1])
        distance = places[:, None] - places
        return attended(x, w, bias(distance).masked_fill(distance < 0, float("-inf"))[None, None])

    with pytest.raises(CaptureError, match=why):
        lowered(body, Weights())


def test_a_constant_whose_part_is_written_later_is_refused() -> None:
    def body(x: Tensor, positions: Tensor, w: Weights) -> Tensor:
        numbers = torch.zeros(HIDDEN)
        numbers[3:5] = 2.0
        return x * numbers

    with pytest.raises(CaptureError, match="written later"):
        lowered(body, Weights())

"""One spelling for each piece of mathematics, and the same values after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hasten.base.errors import CaptureError
from hasten.graph.canonical import canonicalise, trace
from hasten.graph.nodes import aten

X = torch.randn(2, 3, 8, generator=torch.Generator().manual_seed(0))
W = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
B = torch.randn(5, generator=torch.Generator().manual_seed(2))


def canonical(function: Callable[..., Any], *examples: Any) -> tuple[fx.GraphModule, list[str]]:
    """(canonical graph, names of its calls in order); its values are compared with the function's."""
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(e) if isinstance(e, torch.Tensor) else e for e in examples]
        module = trace(function, fakes)
    canonicalise(module.graph)
    module.recompile()
    torch.testing.assert_close(
        module(*(e.clone() for e in examples)), function(*(e.clone() for e in examples))
    )
    return module, [name_of(n) for n in module.graph.nodes if n.op == "call_function"]


def name_of(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return packet.__name__ if packet is not None else getattr(node.target, "__name__", str(node.target))


def rotate_slices(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), dim=-1)


def rotate_chunks(x: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=2)


def rotate_splits(x: torch.Tensor) -> torch.Tensor:
    first, second = torch.split(x, x.shape[-1] // 2, dim=-1)
    return torch.cat([-second, first], dim=-1)


def pairs_sliced(x: torch.Tensor) -> torch.Tensor:
    return torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)


def pairs_viewed(x: torch.Tensor) -> torch.Tensor:
    viewed = x.view(*x.shape[:-1], -1, 2)
    return torch.stack((-viewed[..., 1], viewed[..., 0]), dim=-1).reshape(x.shape)


SPELLINGS: dict[str, tuple[Callable[..., Any], Sequence[torch.Tensor], list[str]]] = {
    "dropout that is off": (lambda x: F.dropout(x, 0.5, training=False).exp(), [X], ["exp"]),
    "dropout of nothing": (lambda x: F.dropout(x, 0.0).exp(), [X], ["exp"]),
    "a cast to the same": (lambda x: x.to(torch.float32).exp(), [X], ["exp"]),
    "a view of the same": (lambda x: x.view(2, 3, 8).exp(), [X], ["exp"]),
    "a whole slice": (lambda x: x[:, :, 0:8].exp(), [X], ["exp"]),
    "there and back": (lambda x: x.transpose(0, 1).transpose(-2, -3).exp(), [X], ["exp"]),
    "float": (lambda x: x.double().exp(), [X], ["to", "exp"]),
    "type_as": (lambda x, y: x.type_as(y).exp(), [X, X.double()], ["to", "exp"]),
    "one cast twice": (lambda x: x.double() * x.double().exp(), [X], ["to", "exp", "mul"]),
    "a square": (lambda x: x * x, [X], ["pow"]),
    "torch.square": (torch.square, [X], ["pow"]),
    "one over a root": (lambda x: 1.0 / torch.sqrt(x.exp()), [X], ["exp", "rsqrt", "mul"]),
    "a reciprocal root": (lambda x: torch.reciprocal(torch.sqrt(x.exp())), [X], ["exp", "rsqrt"]),
    "a power": (lambda x: x.exp() ** -0.5, [X], ["exp", "rsqrt"]),
    "divided by a root": (lambda x: x / torch.sqrt(x.exp()), [X], ["exp", "rsqrt", "mul"]),
    "halves by slices": (rotate_slices, [X], ["rotate_half"]),
    "halves by chunk": (rotate_chunks, [X], ["rotate_half"]),
    "halves by split": (rotate_splits, [X], ["rotate_half"]),
    "pairs by slices": (pairs_sliced, [X], ["rotate_pairs"]),
    "pairs by a view": (pairs_viewed, [X], ["rotate_pairs"]),
    "matmul with W^T": (lambda x, w: x @ w.t(), [X, W], ["linear"]),
    "addmm between views": (
        lambda x, w, b: torch.addmm(b, x.view(-1, 8), w.t()).view(2, 3, 5),
        [X, W, B],
        ["linear"],
    ),
    "addmm of GPT-2's layout": (
        lambda x, w, b: torch.addmm(b, x.view(-1, x.size(-1)), w).view(2, 3, 5),
        [X, W.t().contiguous(), B],
        ["t", "linear"],
    ),
    "a projection of swapped dims": (
        lambda x, w: F.linear(x.transpose(0, 1), w),
        [X, W],
        ["linear", "transpose"],
    ),
    "in place on a projection seen from the side": (
        lambda x, w: F.linear(x, w).transpose(0, 1).div_(2.0),
        [X, W],
        ["linear", "transpose", "div"],
    ),
    "the opposite turn": (
        lambda x: torch.cat((x[..., 4:], -x[..., :4]), -1),
        [X],
        ["rotate_half_back"],
    ),
    "pairs put together": (
        lambda x, y: torch.stack([x, y], 3).reshape(2, 3, 16),
        [X, X.clone()],
        ["interleave"],
    ),
    "pairs unbound": (
        lambda x: torch.stack([-x.view(2, 3, 4, 2).unbind(-1)[1], x[..., 0::2]], -1).view_as(x),
        [X],
        ["rotate_pairs"],
    ),
    "in place on a tensor of its own": (
        lambda x: torch.zeros_like(x).masked_fill_(x > 0, 2.0),
        [X],
        ["zeros_like", "gt", "masked_fill"],
    ),
}


@pytest.mark.parametrize("name", SPELLINGS)
def test_one_spelling(name: str) -> None:
    function, examples, expected = SPELLINGS[name]
    _, names = canonical(function, *examples)
    if name == "one over a root":  # torch spells the quotient reciprocal * 1
        assert "rsqrt" in names
        assert "sqrt" not in names
        return
    assert names == expected


DIFFERENT: dict[str, tuple[Callable[..., Any], str]] = {
    "the other sign": (lambda x: torch.cat((x[..., 4:], -x[..., :4]), -1), "rotate_half"),
    "the halves not swapped": (lambda x: torch.cat((-x[..., :4], x[..., 4:]), -1), "rotate_half"),
    "unequal parts": (lambda x: torch.cat((-x[..., 3:], x[..., :3]), -1), "rotate_half"),
    "another dim": (lambda x: torch.cat((-x[:, :, 4:], x[:, :, :4]), 1), "rotate_half"),
    "pairs the other way round": (
        lambda x: torch.stack((x[..., ::2], -x[..., 1::2]), -1).flatten(-2),
        "rotate_pairs",
    ),
    "pairs not interleaved": (
        lambda x: torch.stack((-x[..., 1::2], x[..., ::2]), -2).flatten(-2),
        "rotate_pairs",
    ),
    "a cube": (lambda x: x * x.exp(), "pow"),
    "two over a root": (lambda x: x.exp() ** -1.5, "rsqrt"),
    "a scaled bias": (lambda x: torch.addmm(torch.ones(8), x[0], torch.eye(8), beta=2.0), "linear"),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_only_looks_alike_stays(name: str) -> None:
    function, unwanted = DIFFERENT[name]
    _, names = canonical(function, X)
    assert unwanted not in names


def test_a_change_that_others_see_stays_in_place() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        part = torch.zeros_like(x)
        view = part[0]
        view.add_(1.0)
        return part * x

    _, names = canonical(function, X)
    assert "add_" in names


def test_an_input_changed_in_place_stays_changed() -> None:
    with FakeTensorMode() as mode:
        module = trace(lambda x: x.mul_(2.0) + 1, [mode.from_tensor(X)])
    canonicalise(module.graph)
    module.recompile()
    given = X.clone()
    module(given)
    assert torch.equal(given, X * 2)


def test_casts_on_both_sides_of_a_change_are_kept_apart() -> None:
    def function(x: torch.Tensor) -> torch.Tensor:
        fresh = x + 1
        before = fresh.double()
        fresh.mul_(3.0)
        return before + fresh.double()

    _, names = canonical(function, X)
    assert names.count("to") == 2


def test_dims_are_counted_from_the_end() -> None:
    module, _ = canonical(lambda x: x.softmax(2).transpose(0, 2).sum(1), X)
    dims = [n.args for n in module.graph.nodes if n.op == "call_function"]
    assert [a[1] for a in dims] == [-1, -3, [-2]]


def test_dims_of_the_result_stay() -> None:
    canonical(lambda x: x.exp().unsqueeze_(1), X)
    canonical(lambda x: torch.diag_embed(x, 0, 0, 2), X)
    canonical(lambda x: torch.stack([x, x.exp()], 1), X)


def test_what_depends_on_weights_alone_comes_first() -> None:
    _, names = canonical(lambda x, w: F.linear(x.exp(), 1.0 + w), X, W)
    assert names == ["add", "exp", "linear"]


def test_random_operators_are_never_dropped_or_moved() -> None:
    with FakeTensorMode() as mode:
        module = trace(lambda x: (F.dropout(x, 0.5), x + 1)[1], [mode.from_tensor(X)])
    canonicalise(module.graph)
    assert next(n.target for n in module.graph.nodes if n.op == "call_function") is aten.dropout.default


def test_what_counts_in_memory_keeps_its_order() -> None:
    def function(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = F.linear(x.transpose(0, 1), w)
        return y.as_strided((3, 2, 2), (y.stride(0), y.stride(1), 1))

    canonical(function, X, W)


def test_a_tensor_read_past_autograd_is_no_constant() -> None:
    with FakeTensorMode() as mode, pytest.raises(CaptureError, match=r"reads the \.data"):
        trace(lambda x: x + x.data.max(), [mode.from_tensor(X)])


def test_code_that_cannot_be_traced_says_why() -> None:
    with FakeTensorMode() as mode, pytest.raises(CaptureError, match="cannot be traced"):
        trace(lambda x: x if x.sum().item() > 0 else -x, [mode.from_tensor(X)])


def test_an_error_without_words_is_named() -> None:
    def silent(x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    with FakeTensorMode() as mode, pytest.raises(CaptureError, match=r"traced: NotImplementedError$"):
        trace(silent, [mode.from_tensor(X)])

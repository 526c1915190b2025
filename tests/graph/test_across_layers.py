"""The residual sum of one layer joins the norm of the next: counts, the same bits, and all who look."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from comparing import Batch, assert_budget, assert_rewritten, make_batch, original_of, run
from torch import nn
from torch.utils.checkpoint import checkpoint

import hasten
from hasten.graph.across_layers import DeferredSum, sum_of
from hasten.models.tiny import tiny_model

# Family -> (graphs, graphs that leave their last sum, graphs whose first norm took it).
COUNTS = {
    "llama": (2, 2, 1),
    "mistral": (2, 2, 1),
    "qwen3": (2, 2, 1),
    "gemma2": (2, 2, 1),  # windows are in the key ranges, not in the graph
    "smollm3": (3, 3, 2),  # the third has no rotary
    "gpt2": (2, 2, 1),
    "opt": (2, 2, 1),
    "bloom": (2, 2, 1),
    "modernbert": (2, 2, 1),  # the first has no norm before attention
    "torch_encoder": (2, 2, 1),
    "gpt_neox": (1, 0, 0),  # ends in (mlp + attention) + input: the input belongs to the caller
    "bert": (1, 0, 0),  # ends in a norm
}


def counts(model: nn.Module) -> tuple[int, int, int]:
    report = hasten.report(model)
    rules = report.rule_counts()
    return len(report.graphs), rules["sum_to_next_layer"], rules["sum_of_last_layer"]


def both_levels(family: str = "llama", **settings: Any) -> tuple[nn.Module, nn.Module]:
    """(optimised, the same at level 2, where each layer does its own sum)."""
    model = tiny_model(family)
    other = original_of(model)
    return hasten.optimize(model, measure=False, **settings), hasten.optimize(other, measure=False, level=2)


def assert_same_bits(model: nn.Module, other: nn.Module, batch: Batch, **more: Any) -> None:
    ours, own = run(model, batch, **more), run(other, batch, **more)
    assert torch.equal(ours.logits, own.logits)
    assert ours.loss == own.loss
    assert ours.gradients.keys() == own.gradients.keys()
    for name, gradient in own.gradients.items():
        assert torch.equal(ours.gradients[name], gradient), name


@pytest.mark.parametrize("family", COUNTS)
def test_each_family_by_count_and_to_the_bit(family: str) -> None:
    model, other = both_levels(family)
    batch = make_batch(17)
    assert_same_bits(model, other, batch)
    assert counts(model) == COUNTS[family], str(hasten.report(model))
    assert_rewritten(model)
    assert_same_bits(model, other, batch, autocast=torch.bfloat16)
    graphs, left, taken = COUNTS[family]
    assert counts(model) == (2 * graphs, 2 * left, 2 * taken)
    assert_rewritten(model)


@pytest.mark.parametrize("autocast", [None, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2"])
def test_equal_to_the_original(family: str, autocast: torch.dtype | None) -> None:
    model = tiny_model(family)
    original, wide = original_of(model), original_of(model, torch.float64)
    hasten.optimize(model, measure=False)
    for length, padding in ((17, "right"), (40, "left")):
        batch = make_batch(length, padding)
        own = run(original, batch, autocast)
        truth = run(original, batch) if autocast else run(wide, batch)
        if not torch.isfinite(truth.logits).all():
            truth = own
        where = f"{family} {length} {padding}"
        assert_budget(run(model, batch, autocast), own, truth, batch, autocast or torch.float32, where)
    assert counts(model)[2] >= 1
    assert_rewritten(model)


def test_many_layers_and_lengths_have_few_graphs() -> None:
    model = hasten.optimize(tiny_model("llama", num_hidden_layers=8), measure=False)
    for length in (130, 257, 200):
        run(model, make_batch(length))
    assert counts(model) == (2, 2, 1)
    assert_rewritten(model)


def test_the_report_says_so() -> None:
    model, other = both_levels()
    run(model, make_batch(17))
    text = str(hasten.report(model))
    assert "across layers: on in training" in text
    assert "level 3 sum_to_next_layer: 1 replaced" in text
    assert "level 3 sum_of_last_layer: 1 replaced" in text
    assert "behind another layer]" in text
    assert hasten.report(other).doors["across layers"] == "off: level 2"
    alone = hasten.optimize(tiny_model("llama", num_hidden_layers=1), measure=False)
    assert hasten.report(alone).doors["across layers"].startswith("off: no two")
    parallel = hasten.optimize(tiny_model("gpt_neox"), measure=False)
    run(parallel, make_batch(17))
    assert "sum_to_next_layer: left, because a summand is the layer's own input" in str(
        hasten.report(parallel)
    )


def test_the_operator_keeps_the_sum_and_not_its_summands() -> None:
    """Bytes that autograd's graph holds behind the loss, with and without the hand-over: the same."""

    def held(model: nn.Module, autocast: bool) -> int:
        batch = make_batch(64)
        run(model, batch, torch.bfloat16 if autocast else None)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            loss = model(input_ids=batch.ids, labels=batch.labels, use_cache=False).loss
        # Nor does anything else: what stood between the layers is gone, without the garbage collector.
        assert not [o for o in gc.get_objects() if type(o) is DeferredSum]
        sizes: dict[int, int] = {}
        seen, stack = set[Any](), [loss.grad_fn]
        while stack:
            node = stack.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            saved = list(getattr(node, "saved_tensors", ()))
            saved += [getattr(node, name) for name in dir(node) if name.startswith("_saved_")]
            for t in saved:
                if isinstance(t, torch.Tensor):
                    sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            stack += [parent for parent, _ in node.next_functions]
        return sum(sizes.values())

    model = tiny_model("llama", num_hidden_layers=4)
    other = original_of(model)
    hasten.optimize(model, measure=False)
    hasten.optimize(other, measure=False, level=2)
    gc.collect()
    for autocast in (False, True):
        ours, own = held(model, autocast), held(other, autocast)
        assert own > 100_000
        assert ours == own
    assert counts(model)[2] == 2


def test_hidden_states_are_ordinary_sums_with_a_gradient_each() -> None:
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    found = []
    for m in (model, other):
        out = m(input_ids=batch.ids, labels=batch.labels, output_hidden_states=True, use_cache=False)
        states = out.hidden_states
        assert all(type(state) is torch.Tensor for state in states)
        found.append((states, torch.autograd.grad(out.loss, states[:-1])))
    for a, b in zip(*found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    assert_rewritten(model)


def by_hand(model: nn.Module, batch: Batch) -> tuple[Any, dict[str, Any]]:
    """(embedded tokens, the keywords that each layer of a Llama is called with)."""
    hidden = model.model.embed_tokens(batch.ids)
    positions = torch.arange(batch.ids.shape[1])[None]
    return hidden, {"position_embeddings": model.model.rotary_emb(hidden, positions)}


def test_layers_called_by_hand() -> None:
    """What goes from layer to layer can be kept, and has its value and its gradient afterwards."""
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    found = []
    for m in (model, other):
        hidden, named = by_hand(m, batch)
        kept = []
        for layer in m.model.layers:
            hidden = layer(hidden, **named)
            kept.append(hidden)
        loss = hidden.square().sum()
        gradients = torch.autograd.grad(loss, kept, retain_graph=True)
        found.append(([k + 0 for k in kept], gradients, torch.autograd.grad(loss, list(m.parameters())[1:4])))
    for a, b in zip(*found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
    hidden, named = by_hand(model, batch)
    first = model.model.layers[0](hidden, **named)
    assert isinstance(first, DeferredSum)
    assert first.shape == hidden.shape
    twice = [model.model.layers[1](first, **named) for _ in range(2)]  # the second call finds the value there
    torch.testing.assert_close(twice[0] + 0, twice[1] + 0)
    by_name = model.model.layers[1](hidden_states=model.model.layers[0](hidden, **named), **named)
    assert torch.equal(by_name + 0, twice[0] + 0)
    assert type(model.model.layers[2](first, **named)) is torch.Tensor  # nobody follows the last layer
    assert_rewritten(model)


CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "in place": lambda h: h.mul_(1.5),
    "by index": lambda h: h.__setitem__((0, 3), 0.25),
    "under no_grad": lambda h: torch.no_grad()(lambda: h.mul_(1.5))(),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_layers_reaches_the_next(name: str) -> None:
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    found = []
    for m in (model, other):
        hidden, named = by_hand(m, batch)
        for layer in m.model.layers:
            hidden = layer(hidden, **named)
            CHANGES[name](hidden)
        found.append([hidden + 0, *torch.autograd.grad(hidden.square().sum(), list(m.parameters())[:6])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_hooks_on_a_layer_see_tensors_and_replace_them() -> None:
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    seen: list[Any] = []

    def after(module: nn.Module, args: Any, out: Any) -> Any:
        seen.append((args[0], out))
        return out * 1.25

    def before(module: nn.Module, args: Any) -> Any:
        seen.append(args[0])
        return (args[0] + 0.5,)

    def backward(module: nn.Module, got: Any, given: Any) -> Any:
        seen.append((got[0], given[0]))
        return (got[0] * 2.0,)

    for register in (
        lambda layer: layer.register_forward_hook(after),
        lambda layer: layer.register_forward_pre_hook(before),
        lambda layer: layer.register_full_backward_hook(backward),
    ):
        hooks = [register(m.model.layers[1]) for m in (model, other)]
        seen.clear()
        assert_same_bits(model, other, batch)
        pairs = list(zip(seen[: len(seen) // 2], seen[len(seen) // 2 :], strict=True))
        assert pairs
        for ours, own in pairs:
            for a, b in zip(ours, own, strict=True) if isinstance(ours, tuple) else [(ours, own)]:
                assert type(a) is torch.Tensor
                assert torch.equal(a, b)
        for hook in hooks:
            hook.remove()
    assert_same_bits(model, other, batch)


class Doubled(torch.autograd.Function):
    """Two times its input, without the detour through `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2.0

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad * 2.0


def test_a_function_of_the_users_own_between_layers_gets_and_gives_its_gradient() -> None:
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    found = []
    for m in (model, other):
        hidden, named = by_hand(m, batch)
        for layer in m.model.layers:
            hidden = Doubled.apply(layer(hidden, **named))
        found.append([hidden, *torch.autograd.grad(hidden.square().sum(), list(m.parameters())[:6])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_of_the_users_own_around_layers(reentrant: bool) -> None:
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    found = []
    for m in (model, other):
        m.zero_grad()
        hidden, named = by_hand(m, batch)
        for layer in m.model.layers:
            call = lambda h, layer=layer, named=named: layer(h, **named)  # noqa: E731
            hidden = checkpoint(call, hidden, use_reentrant=reentrant)
        hidden.square().sum().backward()
        found.append([hidden + 0, *(p.grad for p in m.parameters() if p.grad is not None)])
    assert len(found[0]) == len(found[1]) > 10
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_gradient_checkpointing_switched_on_and_off() -> None:
    model, other = both_levels()
    batch = make_batch(17)
    for _ in range(2):
        assert_same_bits(model, other, batch)
        for m in (model, other):
            m.gradient_checkpointing_enable({"use_reentrant": False})
        assert_same_bits(model, other, batch)
        for m in (model, other):
            m.gradient_checkpointing_disable()
    assert_same_bits(model, other, batch)
    assert_rewritten(model)


def test_a_bound_on_memory_switches_it_off() -> None:
    model, other = both_levels(memory="1MB")
    for _ in range(2):
        assert_same_bits(model, other, make_batch(17))
    assert hasten.report(model).doors["across layers"].startswith("off: with a bound")
    assert counts(model)[2] == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_gradients_layers_do_their_own_sum(mode: Any) -> None:
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    found = []
    for m in (model.eval(), other.eval()):
        with mode():
            hidden, named = by_hand(m, batch)
            hidden = m.model.layers[0](hidden, **named)
            assert type(hidden) is torch.Tensor
            found.append(torch.as_tensor(m(input_ids=batch.ids, use_cache=False).logits) + 0)
    assert torch.equal(*found)
    assert_same_bits(model, other, batch)  # evaluation mode, with gradients


def test_a_sum_with_a_history_keeps_it_where_the_next_layer_runs_without() -> None:
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    found = []
    for m in (model, other):
        hidden, named = by_hand(m, batch)
        first = m.model.layers[0](hidden, **named)
        with torch.no_grad():
            second = m.model.layers[1](first, **named)
        assert not second.requires_grad
        found.append([second, *torch.autograd.grad(first.square().sum(), list(m.parameters())[1:4])])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_frozen_layers_get_no_history() -> None:
    model, other = both_levels()
    for m in (model, other):
        m.model.embed_tokens.requires_grad_(False)
        m.model.layers[0].requires_grad_(False)
    batch = make_batch(17)
    assert_same_bits(model, other, batch)
    hidden, named = by_hand(model, batch)
    assert type(model.model.layers[0](hidden, **named)) is torch.Tensor
    assert_rewritten(model)


def test_a_copy_and_the_way_back() -> None:
    model, other = both_levels()
    batch = make_batch(17)
    run(model, batch)
    twin = copy.deepcopy(model)
    assert_same_bits(twin, other, batch)
    layers = twin.model.layers
    assert layers[0].forward.engine.follower(layers[0]) is layers[1]
    assert layers[0].forward.engine.follower(layers[2]) is None
    hasten.restore(model)
    hasten.restore(other)
    assert_same_bits(model, other, batch)
    assert_same_bits(twin, hasten.optimize(other, measure=False, level=2), batch)
    hidden, named = by_hand(twin, batch)
    twin.model.layers[1].forward = type(layers[1]).forward.__get__(layers[1])  # replaced by somebody
    assert type(twin.model.layers[0](hidden, **named)) is torch.Tensor


class Broken(nn.Module):
    """A layer in two graphs: the sum in the middle ends the first of them."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.LayerNorm(16), nn.Linear(16, 16)
        self.norm2, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.mix(self.norm(x))
        y = self.mix(x) + self.mix(2 * x)
        torch._dynamo.graph_break()
        return y + self.down(torch.relu(self.up(self.norm2(y))))


def test_a_layer_in_pieces_is_equal() -> None:
    torch.manual_seed(0)
    original = nn.Sequential(Broken(), Broken(), Broken())
    model = hasten.optimize(original_of(original), measure=False)
    x = torch.randn(2, 7, 16)
    for _ in range(2):
        results = []
        for m in (model, original):
            m.zero_grad()
            out = m(x)
            out.square().mean().backward()
            results.append([out.detach(), *(p.grad for p in m.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def test_a_deferred_sum_is_an_ordinary_tensor_to_all_who_look() -> None:
    leaves = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    a, b = leaves[0] * 2, (leaves[1] * 3).to(torch.bfloat16)
    total = sum_of(a, b)
    assert total.dtype == torch.float32
    assert (tuple(total.shape), total.requires_grad, len(total)) == ((2, 3), True, 2)
    assert total.summands() is not None
    assert Doubled.apply(total).requires_grad
    gradients = torch.autograd.grad(Doubled.apply(total).sum(), leaves, retain_graph=True)
    assert [g.unique().item() for g in gradients] == [4.0, 6.0]
    assert torch.equal(torch.stack([total, total])[1], a + b)
    assert total.summands() is None
    assert "tensor(" in repr(total)
    assert torch.equal(torch.autograd.grad(total.sum(), leaves[0])[0], torch.full((2, 3), 2.0))
    looked = sum_of(a, b)
    with torch.inference_mode():
        assert torch.isfinite(looked + 1).all()
    assert torch.equal(torch.autograd.grad(looked.sum(), leaves[1])[0], torch.full((2, 3), 3.0))
    with torch.no_grad():
        assert type(sum_of(a, b)) is torch.Tensor
    assert type(sum_of(a.detach(), b.detach())) is torch.Tensor
    swapped = sum_of(b, a)
    assert swapped.dtype == torch.float32
    assert torch.equal(swapped, b + a)

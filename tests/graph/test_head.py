"""Deferred logits: chunked cross-entropy where it is asked for, ordinary logits for everything else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from comparing import make_batch, original_of, run
from torch import nn

import hasten
from hasten.graph.head import DeferredLogits, HeadForward, find_head
from hasten.models.tiny import tiny_model


def deferred(
    bias: bool = False, dtype: torch.dtype = torch.float32
) -> tuple[nn.Linear, torch.Tensor, Callable[[], torch.Tensor], Callable[[], torch.Tensor]]:
    """(head, hidden [2,5,8], makes deferred logits [2,5,11], makes ordinary ones)."""
    torch.manual_seed(0)
    head = nn.Linear(8, 11, bias=bias, dtype=dtype)
    hidden = torch.randn(2, 5, 8, dtype=dtype, requires_grad=True)
    forward = HeadForward(head)
    return head, hidden, lambda: forward(hidden), lambda: F.linear(hidden, head.weight, head.bias)


def gradients(loss: torch.Tensor, head: nn.Linear, hidden: torch.Tensor) -> list[torch.Tensor]:
    return list(torch.autograd.grad(loss, [hidden, *head.parameters()]))


def unseen(logits: torch.Tensor) -> bool:
    return isinstance(logits, DeferredLogits) and logits._value is None


TARGET = torch.tensor([1, 4, -100, 3, 10, 0, 2, -100, 7, 5])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"reduction": "sum"}, {"label_smoothing": 0.1}, {"ignore_index": 3}],
    ids=["mean", "sum", "smoothing", "ignore 3"],
)
def test_cross_entropy_without_logits(bias: bool, options: dict[str, object]) -> None:
    head, hidden, make, make_own = deferred(bias)
    target = TARGET if "ignore_index" not in options else TARGET.clamp(min=0)
    logits = make()
    loss = F.cross_entropy(logits.float().view(-1, 11), target, **options)
    assert unseen(logits)
    own = F.cross_entropy(make_own().float().view(-1, 11), target, **options)
    torch.testing.assert_close(loss, own)
    for a, b in zip(gradients(loss, head, hidden), gradients(own, head, hidden), strict=True):
        torch.testing.assert_close(a, b)


STAY = {
    "shifted": lambda x: x[..., :-1, :].contiguous().view(-1, 11),
    "rows": lambda x: x[:, 1:].reshape(8, 11),
    "first": lambda x: x[0],
    "flattened": lambda x: x.reshape(-1, x.size(-1)),
    "scaled": lambda x: (x * 0.25).view(-1, 11),
    "divided": lambda x: (x / 3).view(-1, 11),
    "detached": lambda x: x.detach().view(-1, 11),
    "soft-capped": lambda x: (torch.tanh(x / 2.0) * 2.0).view(-1, 11),
    "widened": lambda x: x.to(torch.float32).float().to(x.device),
}


@pytest.mark.parametrize("name", STAY)
def test_what_stays_deferred_has_the_same_value(name: str) -> None:
    _, _, make, make_own = deferred()
    logits = make()
    out, own = STAY[name](logits), STAY[name](make_own())
    assert unseen(logits)
    assert unseen(out)
    assert out.shape == own.shape
    assert out.dtype == own.dtype
    torch.testing.assert_close(out.materialise(), own)


LEAVE = {
    "argmax": lambda x: x.argmax(-1),
    "softmax": lambda x: x.softmax(-1),
    "log-softmax": lambda x: F.log_softmax(x, -1),
    "gather": lambda x: x.gather(-1, torch.zeros(2, 5, 1, dtype=torch.long)),
    "masked select": lambda x: x.masked_select(torch.eye(5, 11, dtype=torch.bool)),
    "last dim sliced": lambda x: x[..., :4],
    "boolean rows": lambda x: x[torch.tensor([[True, False, True, False, True]] * 2)],
    "divergence": lambda x: F.kl_div(
        F.log_softmax(x, -1), torch.full((2, 5, 11), 1 / 11), reduction="batchmean"
    ),
    "sum": lambda x: x + 1,
    "reflected": lambda x: 1.0 - x,
    "tanh alone": lambda x: torch.tanh(x),
    "tanh with another factor": lambda x: torch.tanh(x / 2.0) * 3.0,
    "capped twice": lambda x: torch.tanh((torch.tanh(x / 2.0) * 2.0) / 2.0) * 2.0,
    "narrowed": lambda x: x.to(torch.float16),
    "double": lambda x: x.double(),
    "stacked": lambda x: torch.stack([x, x]),
    "concatenated": lambda x: torch.cat([x, x]),
    "transposed": lambda x: x.transpose(0, 1),
    "other width": lambda x: x.view(-1),
    "unbound": lambda x: x.unbind(0)[1],
    "matrix product": lambda x: x @ torch.ones(11, 2),
    "class weights": lambda x: F.cross_entropy(x.view(-1, 11), TARGET, weight=torch.arange(1.0, 12.0)),
    "no reduction": lambda x: F.cross_entropy(x.view(-1, 11), TARGET, reduction="none"),
    "soft targets": lambda x: F.cross_entropy(x.view(-1, 11), torch.full((10, 11), 1 / 11)),
    "channels second": lambda x: F.cross_entropy(x.transpose(1, 2), TARGET.view(2, 5)),
    "nll": lambda x: F.nll_loss(F.log_softmax(x.view(-1, 11), -1), TARGET),
    "copied in": lambda x: torch.zeros(2, 5, 11).copy_(x),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "list": lambda x: torch.tensor(x.detach().tolist()),
    "numpy": lambda x: torch.from_numpy(x.detach().numpy()) + 0,
    "iterated": lambda x: torch.stack(list(x)),
    "cloned": lambda x: x.clone(),
    "other dtype's view": lambda x: x.detach().view(torch.int32),
}


@pytest.mark.parametrize("name", LEAVE)
def test_anything_else_sees_ordinary_logits(name: str) -> None:
    head, hidden, make, make_own = deferred()
    out, own = LEAVE[name](make()), LEAVE[name](make_own())
    assert not isinstance(out, DeferredLogits)
    torch.testing.assert_close(out, own)
    if own.is_floating_point() and own.requires_grad:
        assert out.requires_grad
        for a, b in zip(
            gradients(out.square().sum(), head, hidden),
            gradients(own.square().sum(), head, hidden),
            strict=True,
        ):
            torch.testing.assert_close(a, b)


def test_in_place_changes_are_kept() -> None:
    head, hidden, make, make_own = deferred()
    results = []
    for logits in (make(), make_own()):
        logits[..., 3] = -5.0
        logits += 1.0
        logits.mul_(2.0)
        results.append((torch.as_tensor(logits) + 0, gradients(logits.square().sum(), head, hidden)))
    torch.testing.assert_close(results[0], results[1])


def test_in_place_scaling_reaches_the_loss() -> None:
    _, _, make, make_own = deferred()
    losses = []
    for logits in (make(), make_own()):
        logits.div_(0.5)
        losses.append(F.cross_entropy(logits.view(-1, 11), TARGET))
    torch.testing.assert_close(losses[0], losses[1])


def test_facts_about_the_logits_do_not_compute_them() -> None:
    _, _, make, make_own = deferred()
    logits, own = make(), make_own()
    assert logits.shape == own.shape
    assert (logits.dtype, logits.device, logits.ndim, len(logits)) == (
        own.dtype,
        own.device,
        own.ndim,
        len(own),
    )
    assert (logits.size(-1), logits.dim(), logits.numel(), logits.requires_grad) == (11, 3, 110, True)
    assert torch.is_tensor(logits)
    assert logits.is_floating_point()
    assert unseen(logits)
    assert "11" in repr(logits.shape)


def test_the_logits_are_computed_once() -> None:
    _, _, make, _ = deferred()
    logits = make()
    assert logits.materialise() is logits.materialise()


def test_no_gradient_is_asked_for_under_no_grad() -> None:
    _, _, make, _ = deferred()
    with torch.no_grad():
        logits = make()
        assert not logits.requires_grad
        assert torch.isfinite(F.cross_entropy(logits.view(-1, 11), TARGET))
    assert unseen(logits)


def test_autocast_rounds_as_the_original() -> None:
    _, _, make, make_own = deferred()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits, own = make(), make_own()
        assert logits.dtype == own.dtype == torch.bfloat16
    assert torch.equal(torch.as_tensor(logits.float()) + 0, own.float())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = F.cross_entropy(make().float().view(-1, 11), TARGET)
    torch.testing.assert_close(loss, F.cross_entropy(own.float().view(-1, 11), TARGET), rtol=1e-2, atol=1e-2)


def test_a_single_row_is_computed_at_once() -> None:
    head, _, _, _ = deferred()
    assert type(HeadForward(head)(torch.randn(1, 1, 8))) is torch.Tensor


def test_heads_that_are_left_alone() -> None:
    assert find_head(nn.Linear(2, 2))[0] is None
    model = tiny_model("llama")
    head, why = find_head(model)
    assert head is model.lm_head
    assert why.startswith("on")
    model.lm_head.forward = lambda x: x
    assert find_head(model)[0] is None


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "bert", "qwen3"])
def test_a_training_step_never_makes_the_logits(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = hasten.optimize(tiny_model(family), measure=False)
    batch = make_batch(17)
    made = []
    original = DeferredLogits.materialise
    monkeypatch.setattr(DeferredLogits, "materialise", lambda self: made.append(1) or original(self))
    cache = {} if family == "bert" else {"use_cache": False}
    out = model(input_ids=batch.ids, labels=batch.labels, **cache)
    out.loss.backward()
    assert not made
    assert out.logits.shape == (2, 17, 256)
    out.logits.argmax(-1)
    assert made


def test_evaluation_with_labels_under_no_grad() -> None:
    model = tiny_model("llama").eval()
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17, "right")
    results = []
    for m in (model, original):
        with torch.no_grad():
            out = m(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels, use_cache=False)
        results.append((out.loss, (torch.as_tensor(out.logits) + 0)[batch.real]))
    torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-5)


def test_a_loss_of_ones_own() -> None:
    model = tiny_model("llama")
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17)
    found = []
    for m in (model, original):
        m.zero_grad()
        logits = m(input_ids=batch.ids, use_cache=False).logits
        picked = F.log_softmax(logits[:, :-1].float(), -1).gather(-1, batch.ids[:, 1:, None])
        (-picked.mean() + 1e-4 * logits.logsumexp(-1).square().mean()).backward()
        found.append({n: p.grad for n, p in m.named_parameters()})
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-5)


def test_loss_over_logits_of_the_last_tokens() -> None:
    model = tiny_model("llama")
    original = original_of(model)
    hasten.optimize(model, measure=False)
    ids = make_batch(17).ids
    ours = model(input_ids=ids, logits_to_keep=3, use_cache=False).logits
    assert ours.shape == (2, 3, 256)
    own = original(input_ids=ids, logits_to_keep=3, use_cache=False).logits
    torch.testing.assert_close(torch.as_tensor(ours) + 0, own, rtol=1e-4, atol=1e-5)
    assert run(model, make_batch(17)).loss == pytest.approx(run(original, make_batch(17)).loss, rel=1e-5)


def test_looking_without_gradients_keeps_them_for_later() -> None:
    head, hidden, make, make_own = deferred()
    found = []
    for logits in (make(), make_own()):
        with torch.no_grad():
            logits.argmax(-1)
            logits[:, :-1].softmax(-1)
        with torch.inference_mode():
            (logits + 1).argmax(-1)
        found.append(gradients(logits.log_softmax(-1).square().sum(), head, hidden))
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_teacher_gets_no_gradient(mode: Callable[[], object]) -> None:
    """Logits made without gradients carry none, wherever they are looked at."""
    _, _, make, make_own = deferred()
    with mode():
        logits, own = make(), make_own()
        rows = logits.float()[:, 1:].reshape(-1, 11)
    assert not logits.softmax(-1).requires_grad
    assert not rows.softmax(-1).requires_grad
    assert not logits.view(-1, 11).requires_grad
    assert not F.cross_entropy(logits.view(-1, 11), TARGET).requires_grad
    torch.testing.assert_close(logits.softmax(-1), own.softmax(-1))


def test_a_bias_trained_alone_gets_its_gradient() -> None:
    head, hidden, *_ = deferred(bias=True)
    head.weight.requires_grad_(False)
    logits = HeadForward(head)(hidden.detach())
    assert logits.requires_grad
    (gradient,) = torch.autograd.grad(logits.square().sum(), [head.bias])
    own = F.linear(hidden.detach(), head.weight, head.bias)
    torch.testing.assert_close(gradient, torch.autograd.grad(own.square().sum(), [head.bias])[0])


@pytest.mark.parametrize("look", [lambda x: x.argmax(-1), lambda x: F.cross_entropy(x.view(-1, 11), TARGET)])
def test_logits_looked_at_after_the_weights_changed_say_so(
    look: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    head, _, make, _ = deferred()
    logits, seen = make(), make()
    seen.argmax(-1)
    with torch.no_grad():
        head.weight.mul_(2.0)
    with pytest.warns(UserWarning, match="before the weights change"):
        look(logits)
    look(seen)  # computed before the change: no warning, which would be an error here


def test_the_head_of_a_model_inside_a_wrapper() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = tiny_model("llama")

    wrapper = hasten.optimize(Wrapper(), measure=False)
    assert hasten.report(wrapper).doors["output head"].startswith("on")
    assert isinstance(wrapper.module.lm_head.forward, HeadForward)
    hasten.restore(wrapper)
    assert "forward" not in wrapper.module.lm_head.__dict__


class Squared(torch.autograd.Function):
    """x^2; `apply` does not pass by `__torch_function__`."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 2 * x * grad


@pytest.mark.parametrize(
    "change",
    [lambda x: x, lambda x: x.float()[..., :-1, :].reshape(-1, 11), lambda x: torch.tanh(x / 2.0) * 2.0],
    ids=["as they are", "shifted rows", "soft-capped"],
)
@pytest.mark.parametrize("bias", [False, True])
def test_an_autograd_function_of_the_users_own_gets_the_gradient_through(
    bias: bool, change: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    head, hidden, make, make_own = deferred(bias)
    logits = change(make())
    assert unseen(logits)
    out, own = Squared.apply(logits), Squared.apply(change(make_own()))
    torch.testing.assert_close(out, own)
    for a, b in zip(gradients(out.sum(), head, hidden), gradients(own.sum(), head, hidden), strict=True):
        torch.testing.assert_close(a, b)


def test_backward_from_unseen_logits() -> None:
    head, hidden, make, make_own = deferred()
    grad = torch.randn(2, 5, 11)
    found = []
    for logits in (make(), make_own()):
        hidden.grad = head.weight.grad = None
        torch.autograd.backward([logits], [grad])
        found.append([hidden.grad, head.weight.grad])
    torch.testing.assert_close(found[0], found[1])

"""One step: the loss, the gradient of the whole batch, the optimizer's groups, the learning rate."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hasten.base.errors import ConfigError, HastenError
from hasten.models.tiny import tiny_model
from hasten.train.config import OptimizerSection, RunConfig, ScheduleSection
from hasten.train.data import IGNORE, Rows, TokenStream, shifted_labels
from hasten.train.loop import Loop, loss_sum
from hasten.train.optimizer import Stepper, decay_groups, lr_at
from hasten.train.packing import check_packing, keeps_documents_apart


def stream(tokens: int = 400, vocabulary: int = 256) -> TokenStream:
    """Documents of very different lengths, so that rows predict different numbers of tokens."""
    generator = np.random.default_rng(0)
    starts = np.unique(np.concatenate([[0], generator.integers(1, tokens, 40), np.arange(64, 96)]))
    return TokenStream(generator.integers(0, vocabulary, tokens).astype(np.uint16), starts, "x")


def loop_for(config: RunConfig, model: torch.nn.Module, held_out: bool = False) -> Loop:
    rows = Rows(stream(), config.batch.sequence_tokens, packing=config.data.packing)
    stepper = Stepper(model, config.optimizer, fused=False)
    return Loop(model, stepper, rows, rows if held_out else None, config, config.precision)


def test_loss_is_the_models_own(settings: Callable[..., RunConfig]) -> None:
    model = tiny_model("llama")
    batch = Rows(stream(), 32).batch([0, 2, 3])
    count = int((shifted_labels(batch.labels) != IGNORE).sum())
    ours = loss_sum(model, batch) / count
    # With a cache transformers does not look at position_ids for documents, and they would see each other.
    inputs = {"input_ids": batch.input_ids, "labels": batch.labels, "position_ids": batch.position_ids}
    theirs = model(**inputs, use_cache=False).loss
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-6)


def test_accumulation_gives_the_gradient_of_the_whole_batch(settings: Callable[..., RunConfig]) -> None:
    results = []
    for micro in (128, 64, 32):
        config = settings(batch__micro_batch_tokens=micro, optimizer__max_grad_norm=1e9)
        model = tiny_model("llama", seed=1)
        loop = loop_for(config, model)
        gradients: dict[str, torch.Tensor] = {}

        def keep(
            lr: float, norm: float, loop: Loop = loop, into: dict[str, torch.Tensor] = gradients
        ) -> None:
            into.update(
                {name: p.grad.clone() for name, p in loop.stepper.parameters.items() if p.grad is not None}
            )

        loop.stepper.step = keep  # type: ignore[method-assign]
        results.append((loop.step(), gradients))
    whole, gradients = results[0]
    for numbers, parts in results[1:]:
        assert numbers.loss == pytest.approx(whole.loss, rel=1e-6)
        assert numbers.grad_norm == pytest.approx(whole.grad_norm, rel=1e-5)
        for name, gradient in gradients.items():
            torch.testing.assert_close(parts[name], gradient, rtol=1e-4, atol=1e-6)


def test_clipping_scales_to_the_limit(settings: Callable[..., RunConfig]) -> None:
    """AdamW hides the scale of a gradient, so the gradients that reach it are looked at."""
    model = tiny_model("llama")
    loop = loop_for(settings(optimizer__max_grad_norm=0.5), model)
    seen: list[float] = []
    optimizer = loop.stepper.optimizer
    optimizer.register_step_pre_hook(lambda *_: seen.append(loop.stepper.gradient_norm()))
    numbers = loop.step()
    assert numbers.grad_norm > 0.5
    assert seen[0] == pytest.approx(0.5, rel=1e-4)
    assert all(parameter.grad is None for parameter in model.parameters())


def test_loss_falls(settings: Callable[..., RunConfig]) -> None:
    loop = loop_for(settings(steps=12, schedule__kind="constant"), tiny_model("llama"))
    losses = [loop.step().loss for _ in range(12)]
    assert losses[-1] < losses[0] - 0.5


def test_loss_that_is_not_finite_changes_nothing(settings: Callable[..., RunConfig]) -> None:
    model = tiny_model("llama")
    loop = loop_for(settings(), model)
    with torch.no_grad():
        model.lm_head.weight[0, 0] = math.nan
    before = {name: p.clone() for name, p in model.named_parameters()}
    with pytest.raises(HastenError, match=r"step 1: the loss is nan"):
        loop.step()
    assert loop.step_number == 0
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.nan_to_num(), before[name].nan_to_num())
        assert parameter.grad is None


def test_evaluation_weighs_tokens_not_batches(settings: Callable[..., RunConfig]) -> None:
    config = settings(eval__every_steps=1, data__validation_fraction=0.5, eval__batches=3)
    model = tiny_model("llama")
    loop = loop_for(config, model, held_out=True)
    batch = loop.rows.batch(list(range(6)))
    with torch.no_grad():
        count = int((shifted_labels(batch.labels) != IGNORE).sum())
        expected = float(loss_sum(model.eval(), batch)) / count
    assert loop.evaluate() == pytest.approx(expected, rel=1e-6)
    assert model.training


def test_bf16_runs_under_autocast(settings: Callable[..., RunConfig]) -> None:
    model = tiny_model("llama")
    seen: list[torch.dtype] = []
    model.model.layers[0].mlp.gate_proj.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    loop_for(settings(precision="bf16"), model).step()
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_decay_leaves_out_vectors_and_embeddings() -> None:
    model = tiny_model("gpt2")
    decayed, kept = decay_groups(model, 0.1)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed_names = {names[id(p)] for p in decayed["params"]}
    kept_names = {names[id(p)] for p in kept["params"]}
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.1, 0.0)
    assert "transformer.h.0.mlp.c_fc.weight" in decayed_names
    assert {"transformer.wte.weight", "transformer.wpe.weight", "transformer.ln_f.weight"} <= kept_names
    assert decayed_names | kept_names == set(names.values())
    assert not decayed_names & kept_names


def test_update_is_that_of_torchs_adamw(settings: Callable[..., RunConfig]) -> None:
    config = settings(optimizer__weight_decay=0.1, optimizer__max_grad_norm=1e9)
    model, twin = tiny_model("llama", seed=3), tiny_model("llama", seed=3)
    loop = loop_for(config, model)
    batch = loop.rows.batch(loop.order.take(0, 4))
    count = int((shifted_labels(batch.labels) != IGNORE).sum())
    numbers = loop.step()
    section = config.optimizer
    reference = torch.optim.AdamW(
        decay_groups(twin, 0.1), lr=numbers.lr, betas=section.betas, eps=section.eps, fused=False
    )
    (loss_sum(twin, batch) / count).backward()
    reference.step()
    for (name, ours), theirs in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 0.8, 0.6, 0.2]),
        ("cosine", [0.5, 1.0, 0.2 + 0.8 * (0.5 + math.sqrt(0.125)), 0.6, 0.2]),
    ],
)
def test_learning_rate(kind: Any, expected: list[float]) -> None:
    schedule = ScheduleSection(kind=kind, warmup_steps=2, min_lr_ratio=0.2)
    rates = [lr_at(step, 6, 3e-4, schedule) / 3e-4 for step in (1, 2, 3, 4, 6)]
    assert rates == pytest.approx(expected)


@pytest.mark.parametrize("family", ["llama", "gemma2", "qwen3", "gpt2", "gpt_neox"])
def test_packing_is_kept_apart(family: str) -> None:
    assert keeps_documents_apart(tiny_model(family), 256)


def test_packing_that_leaks_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"BloomForCausalLM does not keep.*data\.packing = false"):
        check_packing(tiny_model("bloom"), 256)


def test_a_model_that_ignores_positions_in_its_mask_is_found_out() -> None:
    model = tiny_model("llama")
    original = model.forward

    def forward(input_ids: Any = None, position_ids: Any = None, use_cache: bool = False) -> Any:
        return original(
            input_ids=input_ids, attention_mask=torch.ones_like(input_ids), position_ids=position_ids
        )

    model.forward = forward
    assert not keeps_documents_apart(model, 256)


def test_optimizer_section_gives_the_optimizer_its_numbers() -> None:
    section = OptimizerSection(lr=3e-4, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    stepper = Stepper(tiny_model("llama"), section, fused=False)
    group = stepper.optimizer.param_groups[0]
    assert (group["betas"], group["eps"], group["weight_decay"]) == ((0.8, 0.9), 1e-6, 0.2)

"""An optimised model in training: Trainer, PEFT, checkpointing, autocast, dropout, packing."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_budget, assert_rewritten, make_batch, original_of, rms, run
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Trainer, TrainingArguments

import hasten
from hasten.models.tiny import tiny_model


def losses_of_trainer(model: nn.Module, folder: Path) -> tuple[list[float], float]:
    rows = [{"input_ids": ids, "labels": ids} for ids in make_batch(24, rows=8).ids]
    arguments = TrainingArguments(
        str(folder), max_steps=4, per_device_train_batch_size=2, learning_rate=1e-3, logging_steps=1,
        report_to=[],
        use_cpu=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=False, seed=1,
    )  # fmt: skip
    trainer = Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:2])
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, trainer.evaluate()["eval_loss"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_trainer_sees_the_same_losses(tmp_path: Path) -> None:
    model = tiny_model("llama")
    own, own_eval = losses_of_trainer(original_of(model), tmp_path / "original")
    ours, ours_eval = losses_of_trainer(hasten.optimize(model, measure=False), tmp_path / "optimised")
    assert len(ours) == 4
    assert len(set(own)) == 4, "nothing was trained"
    assert ours == pytest.approx(own, rel=1e-4)
    assert ours_eval == pytest.approx(own_eval, rel=1e-4)
    assert hasten.report(model).operator_counts()["norm_linear"] >= 2


LORA = LoraConfig(
    r=4, target_modules=["q_proj", "v_proj", "up_proj"], lora_dropout=0.0, task_type="CAUSAL_LM"
)


def with_adapters(model: nn.Module) -> Any:
    torch.manual_seed(0)
    wrapped = get_peft_model(model, LORA)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return wrapped


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("order", ["before", "after"])
def test_lora_before_and_after(order: str) -> None:
    batch = make_batch(17, "right")
    own = run(with_adapters(tiny_model("llama")), batch)
    if order == "before":
        model = hasten.optimize(with_adapters(tiny_model("llama")), measure=False)
    else:
        base = hasten.optimize(tiny_model("llama"), measure=False)
        run(base, batch)
        base.zero_grad()
        model = with_adapters(base)
    ours = run(model, batch)
    assert ours.gradients
    assert all("lora_" in name for name in ours.gradients)
    assert_budget(ours, own, own, batch, torch.float32)
    assert_rewritten(model)
    assert hasten.report(model).operator_counts()["attention"] >= 1


class MatrixGradients(torch.utils._python_dispatch.TorchDispatchMode):
    """Shapes of the two-dimensional products that run inside."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            self.shapes.append(tuple(out.shape))
        return out


def test_frozen_weights_cost_no_gradient_products() -> None:
    model = tiny_model("llama")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    model.model.layers[0].input_layernorm.weight.requires_grad_()
    hasten.optimize(model, measure=False)
    batch = make_batch(17)
    run(model, batch)  # captured and proved before counting
    out = model(input_ids=batch.ids, labels=batch.labels, use_cache=False)
    with MatrixGradients() as seen:
        out.loss.backward()
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() == 2}
    weights |= {shape[::-1] for shape in weights}
    grouped = {(128, 64), (64, 128), (320, 64), (64, 320)}
    assert seen.shapes, "the products of the backward pass were not seen"
    assert not [shape for shape in seen.shapes if shape in weights | grouped]
    assert [n for n, p in model.named_parameters() if p.grad is not None] == [
        "model.layers.0.input_layernorm.weight"
    ]
    assert_rewritten(model)


def checkpoint(model: nn.Module, arguments: dict[str, Any]) -> None:
    with warnings.catch_warnings(
        action="ignore", category=FutureWarning
    ):  # the method is renamed in transformers 6
        model.gradient_checkpointing_enable(arguments)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = tiny_model("llama")
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17, "right")
    for m in (model, original):
        checkpoint(m, {"use_reentrant": reentrant})
        m.enable_input_require_grads()
    own = run(original, batch)
    assert_budget(run(model, batch), own, own, batch, torch.float32)
    assert_rewritten(model)
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        model.gradient_checkpointing_disable()
    assert_budget(run(model, batch), own, own, batch, torch.float32, "switched off again")


def test_checkpointing_stores_less() -> None:
    model = hasten.optimize(tiny_model("llama"), measure=False)
    batch = make_batch(128)

    def stored() -> int:
        run(model, batch)
        sizes: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            model(input_ids=batch.ids, labels=batch.labels, use_cache=False)
        return sum(sizes.values())

    plain = stored()
    checkpoint(model, {"use_reentrant": False})
    assert stored() < 0.8 * plain


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_dropout_draws_the_same_numbers(family: str) -> None:
    settings = {
        "gpt2": {"attn_pdrop": 0.1, "resid_pdrop": 0.1, "embd_pdrop": 0.1},
        "opt": {"dropout": 0.1, "attention_dropout": 0.0},
    }
    model = tiny_model(family, **settings[family])
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17)
    losses = []
    for m in (model, original):
        run(m, batch)  # the first call of the optimised one captures
        torch.manual_seed(5)
        losses.append([run(m, batch).loss for _ in range(2)])
    assert losses[1][0] != losses[1][1], "dropout was off"
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    ours, own = run(model.eval(), batch), run(original.eval(), batch)
    assert_budget(ours, own, own, batch, torch.float32, "evaluation")


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3_text"])
def test_packed_documents_do_not_see_each_other(family: str) -> None:
    model = tiny_model(family)
    original = original_of(model)
    hasten.optimize(model, measure=False)
    ids = make_batch(40, rows=1).ids
    positions = torch.cat([torch.arange(23), torch.arange(17)])[None]
    changed = ids.clone()
    changed[0, 3:20] = (changed[0, 3:20] + 7) % 256
    outputs = []
    for m in (model, original):
        with torch.no_grad():
            outputs.append(
                [
                    torch.as_tensor(m(input_ids=i, position_ids=positions, use_cache=False).logits)
                    for i in (ids, changed)
                ]
            )
    ours, own = outputs
    assert torch.equal(ours[0][0, 23:], ours[1][0, 23:])
    assert not torch.equal(ours[0][0, :23], ours[1][0, :23])
    torch.testing.assert_close(ours[0], own[0], rtol=1e-4, atol=1e-5)
    alone = model(input_ids=ids[:, 23:], use_cache=False).logits
    torch.testing.assert_close(ours[0][:, 23:], torch.as_tensor(alone), rtol=1e-4, atol=1e-5)


def test_autocast_comes_and_goes() -> None:
    model = tiny_model("llama")
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17)
    truth = run(original, batch)
    for dtype in (torch.bfloat16, None, torch.bfloat16):
        own = run(original, batch, dtype)
        ours = run(model, batch, dtype)
        assert_budget(ours, own, truth, batch, dtype or torch.float32, str(dtype))
    states = [graph.state for graph in hasten.report(model).graphs]
    assert any(state.startswith("autocast bfloat16") for state in states)
    assert any(state.startswith("no autocast") for state in states)


def test_precision_of_the_config_replaces_autocast() -> None:
    model = hasten.optimize(tiny_model("llama"), measure=False, precision="bf16")
    batch = make_batch(17)
    loss = model(input_ids=batch.ids, labels=batch.labels, use_cache=False).loss
    loss.backward()
    assert hasten.report(model).graphs[0].state.startswith("autocast bfloat16")
    assert all(p.grad.dtype == torch.float32 for p in model.parameters() if p.grad is not None)


def test_some_frozen_layers() -> None:
    model = tiny_model("qwen2")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("layers.2" in name or "bias" in name)
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17, "right")
    own = run(original, batch)
    assert_budget(run(model, batch), own, own, batch, torch.float32)
    assert_rewritten(model)


def test_optimizer_steps_stay_together() -> None:
    model = tiny_model("gpt_neox")
    original = original_of(model)
    hasten.optimize(model, measure=False)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, original)]
    for step in range(4):
        batch = make_batch(17, seed=step)
        losses = []
        for m, optimizer in zip((model, original), optimizers, strict=True):
            losses.append(run(m, batch).loss)
            optimizer.step()
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    for a, b in zip(model.parameters(), original.parameters(), strict=True):
        assert rms(a - b) < 1e-3 * max(rms(b), 1e-3)


def test_a_plain_training_loop_is_optimised() -> None:
    """Nobody writes `use_cache=False` in a loop of their own."""
    model = hasten.optimize(tiny_model("llama"), measure=False)
    batch = make_batch(17)
    model(input_ids=batch.ids, labels=batch.labels).loss.backward()
    assert_rewritten(model)


def test_dropout_in_attention_with_a_soft_cap() -> None:
    model = tiny_model("gemma2", attention_dropout=0.2)
    model.set_attn_implementation("eager")
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17, "right")
    run(model, batch)  # captured before the generator is set
    found = []
    for m in (model, original):
        torch.manual_seed(5)
        found.append([run(m, batch) for _ in range(2)])
    assert found[1][0].loss != found[1][1].loss, "dropout was off"
    for ours, own in zip(*found, strict=True):
        assert_budget(ours, own, own, batch, torch.float32)

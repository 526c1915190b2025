"""An optimised model as an ordinary transformers model: generation, files, copies, outputs, the way back."""

from __future__ import annotations

import copy
import io
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from comparing import assert_budget, assert_rewritten, make_batch, original_of, run
from torch import nn
from transformers import AutoModelForCausalLM, DynamicCache, LlamaForCausalLM

import hasten
from hasten.base.errors import ConfigError, UserError
from hasten.models.tiny import tiny_model


def pair(family: str = "llama", **overrides: Any) -> tuple[nn.Module, nn.Module]:
    """(optimised, original), same weights."""
    model = tiny_model(family, **overrides)
    original = original_of(model)
    return hasten.optimize(model, measure=False), original


def logits(model: nn.Module, ids: torch.Tensor, **more: Any) -> torch.Tensor:
    with torch.no_grad():
        return torch.as_tensor(model(input_ids=ids, **more).logits) + 0


def assert_near(a: torch.Tensor, b: torch.Tensor) -> None:
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_generate_gives_the_same_tokens_with_left_padding(family: str) -> None:
    model, original = pair(family)
    batch = make_batch(12, "left")
    arguments = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    tokens = model.eval().generate(batch.ids, attention_mask=batch.mask, **arguments)
    assert tokens.shape == (2, 20)
    assert torch.equal(tokens, original.eval().generate(batch.ids, attention_mask=batch.mask, **arguments))


def test_save_and_open_leave_no_trace(tmp_path: Path) -> None:
    model, original = pair()
    batch = make_batch(17)
    before = run(model, batch)
    model.save_pretrained(tmp_path / "optimised")
    original.save_pretrained(tmp_path / "original")
    names = [sorted(p.name for p in (tmp_path / side).iterdir()) for side in ("optimised", "original")]
    assert names[0] == names[1]
    assert "hasten" not in (tmp_path / "optimised" / "config.json").read_text()
    configs = [
        json.loads((tmp_path / side / "config.json").read_text()) for side in ("optimised", "original")
    ]
    assert configs[0] == configs[1]
    assert list(model.state_dict()) == list(original.state_dict())
    opened = AutoModelForCausalLM.from_pretrained(tmp_path / "optimised").train()
    assert opened.config._attn_implementation == original.config._attn_implementation
    own = run(opened, batch)
    assert_budget(before, own, own, batch, torch.float32)
    assert_budget(run(hasten.optimize(opened, measure=False), batch), own, own, batch, torch.float32)


def test_tied_weights_stay_one_storage(tmp_path: Path) -> None:
    model, _ = pair()
    run(model, make_batch(17))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    opened = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert opened.lm_head.weight is opened.model.embed_tokens.weight


def test_a_deep_copy_is_independent() -> None:
    model, original = pair()
    batch = make_batch(17)
    run(model, batch)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    own = run(original, batch)
    assert_budget(run(model, batch), own, own, batch, torch.float32, "the first")
    with torch.no_grad():
        original.model.layers[0].mlp.up_proj.weight.mul_(2.0)
    own = run(original, batch)
    ours = run(twin, batch)
    assert_budget(ours, own, own, batch, torch.float32, "the copy")
    assert {n for n, p in twin.named_parameters() if p.grad is not None} == set(own.gradients)
    hasten.restore(model)
    assert_budget(run(twin, batch), own, own, batch, torch.float32, "the copy after restore of the first")
    hasten.report(twin)
    with pytest.raises(UserError, match="not optimised"):
        hasten.report(model)


def test_a_pickled_model_is_an_ordinary_one() -> None:
    model, original = pair()
    batch = make_batch(17)
    run(model, batch)
    model.zero_grad()
    own = run(original, batch)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for opened in (pickle.loads(pickle.dumps(model)), torch.load(file, weights_only=False)):
        assert type(opened) is LlamaForCausalLM
        assert_budget(run(opened, batch), own, own, batch, torch.float32)


def test_restore_is_bit_equal() -> None:
    for family in ("llama", "gemma2", "bert"):
        model, original = pair(family)
        batch = make_batch(17, "right")
        run(model, batch)
        assert hasten.restore(model) is model
        ours, own = run(model, batch), run(original, batch)
        assert torch.equal(ours.logits, own.logits)
        assert ours.loss == own.loss
        assert all(torch.equal(ours.gradients[n], own.gradients[n]) for n in own.gradients)
        assert model.config._attn_implementation == original.config._attn_implementation
        assert all("forward" not in module.__dict__ for module in model.modules())
        assert not [k for k in model.__dict__ if "hasten" in k]


def test_optimising_twice_starts_afresh() -> None:
    model, original = pair()
    batch = make_batch(17)
    run(model, batch)
    hasten.optimize(model, measure=False, level=1)
    assert hasten.report(model).graphs == []
    own = run(original, batch)
    assert_budget(run(model, batch), own, own, batch, torch.float32)
    assert_rewritten(model)
    assert hasten.report(model).settings["level"] == 1
    hasten.restore(model)
    assert torch.equal(run(model, batch).logits, own.logits)


@pytest.mark.parametrize("level", [0, 1, 2, 3])
def test_every_level_is_equal(level: int) -> None:
    model = tiny_model("gemma3_text")
    original = original_of(model)
    hasten.optimize(model, measure=False, level=level)
    batch = make_batch(40, "left")
    own = run(original, batch)
    assert_budget(run(model, batch), own, own, batch, torch.float32)


def test_an_unknown_setting_names_the_nearest() -> None:
    model = tiny_model("llama")
    with pytest.raises(ConfigError, match="level"):
        hasten.optimize(model, levle=2)
    with pytest.raises(ConfigError, match="level"):
        hasten.optimize(model, level=7)
    with pytest.raises(UserError, match="a torch"):
        hasten.optimize("llama")
    assert all("forward" not in module.__dict__ for module in model.modules())


def test_a_second_model_of_the_same_class_is_untouched() -> None:
    other = tiny_model("llama")
    batch = make_batch(17)
    before = run(other, batch)
    model, _ = pair()
    run(model, batch)
    after = run(other, batch)
    assert torch.equal(before.logits, after.logits)
    assert all(torch.equal(before.gradients[n], after.gradients[n]) for n in before.gradients)
    assert all("forward" not in module.__dict__ for module in other.modules())


def test_train_and_eval_switch_back_and_forth() -> None:
    model, original = pair()
    batch = make_batch(17)
    for mode in (True, False, True):
        own = run(original.train(mode), batch)
        assert_budget(run(model.train(mode), batch), own, own, batch, torch.float32, f"train={mode}")
        assert_near(logits(model, batch.ids), logits(original, batch.ids))


def test_hidden_states_are_the_same() -> None:
    model, original = pair()
    ids = make_batch(17).ids
    ours = model(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    own = original(input_ids=ids, output_hidden_states=True, use_cache=False).hidden_states
    assert len(ours) == len(own) == 4
    for a, b in zip(ours, own, strict=True):
        assert_near(a, b)
    assert_rewritten(model)


def test_inputs_embeds_get_their_gradient() -> None:
    model, original = pair()
    embeds = torch.randn(2, 17, 64)
    gradients = []
    for m in (model, original):
        leaf = embeds.clone().requires_grad_()
        m(inputs_embeds=leaf, labels=make_batch(17).labels, use_cache=False).loss.backward()
        gradients.append(leaf.grad)
    assert gradients[1].abs().max() > 0
    assert_near(gradients[0], gradients[1])
    assert_rewritten(model)


def test_a_cache_continues_the_text() -> None:
    model, original = pair()
    ids = make_batch(20).ids
    full = logits(original, ids, use_cache=False)
    cache = DynamicCache(config=model.config)
    head = logits(model, ids[:, :15], cache=cache)
    pieces = [logits(model, ids[:, i : i + 1], cache=cache) for i in range(15, 20)]
    assert cache.get_seq_length() == 20
    assert_near(torch.cat([head, *pieces], dim=1), full)


def test_asked_for_attention_weights_the_original_blocks_run() -> None:
    model, original = pair("bloom")
    batch = make_batch(17)
    ours = model(input_ids=batch.ids, output_attentions=True, use_cache=False)
    own = original(input_ids=batch.ids, output_attentions=True, use_cache=False)
    assert len(ours.attentions) == 3
    for a, b in zip(ours.attentions, own.attentions, strict=True):
        assert_near(a, b)
    assert hasten.report(model).originals["attention weights were asked for"] == 3
    assert "attention weights were asked for" in str(hasten.report(model))


def test_the_report_reads_well_and_as_json() -> None:
    model, _ = pair()
    run(model, make_batch(17))
    report = hasten.report(model)
    text = str(report)
    assert "LlamaDecoderLayer" in text
    assert "equal within budget" in text
    assert json.loads(json.dumps(report.as_dict(), default=str))["graphs"][0]["operators"]["norm_linear"] == 2

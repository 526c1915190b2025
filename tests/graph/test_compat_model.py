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


@pytest.mark.parametrize("options", [{"num_beams": 3}, {"cache_implementation": "static"}])
@pytest.mark.parametrize("family", ["llama", "gemma3_text"])
def test_generate_in_its_other_ways(family: str, options: dict[str, Any]) -> None:
    model, original = pair(family)
    batch = make_batch(12, "left")
    arguments = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    arguments |= {"attention_mask": batch.mask, "disable_compile": True, **options}
    ours, own = (m.eval().generate(batch.ids, **arguments) for m in (model, original))
    assert torch.equal(ours, own)


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


def _forward_hook(module: nn.Module, seen: list[int]) -> Any:
    return module.register_forward_hook(lambda m, args, out: seen.append(1) or out * 1.5)


def _pre_hook(module: nn.Module, seen: list[int]) -> Any:
    return module.register_forward_pre_hook(lambda m, args: seen.append(1) or (args[0] * 1.5,))


def _backward_hook(module: nn.Module, seen: list[int]) -> Any:
    return module.register_full_backward_hook(lambda m, got, out: seen.append(1) or (got[0] * 1.5,))


@pytest.mark.parametrize("register", [_forward_hook, _pre_hook, _backward_hook])
@pytest.mark.parametrize("when", ["before optimize", "after the first step"])
def test_hooks_inside_a_block_run(register: Any, when: str) -> None:
    model = tiny_model("llama")
    original = original_of(model)
    batch = make_batch(17)
    if when == "after the first step":
        run(hasten.optimize(model, measure=False), batch)
    seen: tuple[list[int], list[int]] = ([], [])
    hooks = [register(m.model.layers[1].mlp, s) for m, s in zip((model, original), seen, strict=True)]
    if when == "before optimize":
        hasten.optimize(model, measure=False)
    own = run(original, batch)
    assert_budget(run(model, batch), own, own, batch, torch.float32)
    assert len(seen[0]) == len(seen[1]) == 1
    assert hasten.report(model).originals == {"a hook is registered inside, on a LlamaMLP": 1}
    for hook in hooks:
        hook.remove()
    own = run(original, batch)
    assert_budget(run(model, batch), own, own, batch, torch.float32, "the hook removed")
    assert len(seen[0]) == 1
    assert sum(hasten.report(model).originals.values()) == 1


def test_a_hook_on_all_modules_sees_the_same_calls() -> None:
    model, original = pair()
    batch = make_batch(17)
    run(model, batch)
    seen: list[str] = []
    hook = nn.modules.module.register_module_forward_hook(lambda m, a, o: seen.append(type(m).__name__))
    try:
        run(original, batch)
        own = list(seen)
        seen.clear()
        run(model, batch)
    finally:
        hook.remove()
    assert seen == own


@pytest.mark.parametrize("family", ["llama", "gemma2", "bert"])
def test_recorded_attention_weights_are_those_of_the_eager_model(family: str) -> None:
    model = tiny_model(family)
    model.set_attn_implementation("eager")
    original = original_of(model)
    hasten.optimize(model, measure=False)
    batch = make_batch(17, "right")
    run(model, batch)
    arguments = {"input_ids": batch.ids, "attention_mask": batch.mask, "output_attentions": True}
    ours, own = model(**arguments).attentions, original(**arguments).attentions
    assert len(ours) == len(own) == 3
    for a, b in zip(ours, own, strict=True):
        assert_near(a, b)
    run(model, batch)  # the recording is over, its hooks stay behind idle
    assert sum(hasten.report(model).originals.values()) == 3


# The original's attention has no batching rule.
@pytest.mark.filterwarnings("ignore:There is a performance drop:UserWarning")
def test_gradients_by_torch_func() -> None:
    model, original = pair()
    ids = make_batch(9).ids
    found = []
    for m in (model, original):
        weights = {name: p.detach() for name, p in m.named_parameters()}

        def loss(weights: Any, row: torch.Tensor, m: nn.Module = m) -> torch.Tensor:
            arguments = {"input_ids": row[None], "labels": row[None], "use_cache": False}
            return torch.func.functional_call(m, weights, kwargs=arguments).loss

        found.append(torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(weights, ids))
    assert found[0].keys() == found[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(found[0][name], gradient, rtol=1e-3, atol=1e-5)
    assert hasten.report(model).originals == {"inside a transform of torch.func": 3}


def test_a_layer_in_two_lists_is_restored() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layers = [nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True) for _ in range(2)]
            self.first, self.second = nn.ModuleList(layers), nn.ModuleList(layers)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in (*self.first, *self.second):
                x = layer(x)
            return x

    model = Twice()
    original = original_of(model)
    x = torch.randn(2, 5, 16)
    hasten.optimize(model, measure=False)
    assert_near(model(x), original(x))
    assert not hasten.report(model).originals
    hasten.restore(model)
    assert all("forward" not in module.__dict__ for module in model.modules())
    assert torch.equal(model(x), original(x))


@pytest.mark.parametrize("measure", [True, False])
def test_running_statistics_move_once_a_step(measure: bool) -> None:
    class Normed(nn.Module):
        def __init__(self, written_out: bool) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
            self.norm, self.written_out = nn.BatchNorm1d(16), written_out

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            n, y = self.norm, x.transpose(1, 2)
            y = (
                nn.functional.batch_norm(y, n.running_mean, n.running_var, n.weight, n.bias, self.training)
                if self.written_out
                else n(y)
            )
            return x + self.down(nn.functional.gelu(self.up(y.transpose(1, 2))))

    for written_out in (True, False):
        original = nn.Sequential(Normed(written_out), Normed(written_out))
        model = hasten.optimize(original_of(original), measure=measure)
        x = torch.randn(4, 100, 16)
        for _ in range(2):
            assert_near(model(x), original(x))
        for name, buffer in original.named_buffers():
            assert_near(model.get_buffer(name), buffer)


@pytest.mark.filterwarnings(
    "ignore::torch.jit.TracerWarning", "ignore::DeprecationWarning", "ignore::FutureWarning"
)
def test_torch_jit_trace_sees_the_original_blocks() -> None:
    class Logits(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=ids, use_cache=False).logits

    model, original = pair()
    ids = make_batch(9).ids
    traced = torch.jit.trace(Logits(model.eval()), ids, check_trace=False)
    with torch.no_grad():
        assert_near(traced(ids), original.eval()(input_ids=ids, use_cache=False).logits)

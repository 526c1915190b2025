"""The tiny models have what their families are known for."""

from __future__ import annotations

import pytest
import torch

from hasten.base.errors import ConfigError
from hasten.models import FAMILIES, MASKED_FAMILIES, tiny_model
from hasten.models.tiny import KV_HEADS, POSITIONS, TORCH_ENCODER, WINDOW


def logits_of(model: torch.nn.Module, ids: torch.Tensor) -> torch.Tensor:
    out = model(ids)
    return out if isinstance(out, torch.Tensor) else out.logits


@pytest.mark.parametrize("family", FAMILIES)
def test_runs_and_every_parameter_has_a_gradient(family: str) -> None:
    ids = torch.arange(2 * 65).reshape(2, 65) % 250 + 3
    before = torch.random.get_rng_state()
    model = tiny_model(family)
    assert torch.equal(torch.random.get_rng_state(), before)
    logits = logits_of(model, ids)
    assert logits.shape == (2, 65, 256)
    assert torch.equal(logits, logits_of(tiny_model(family), ids))
    assert not torch.equal(logits, logits_of(tiny_model(family, seed=1), ids))
    logits.square().mean().backward()
    without = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert without == []


@pytest.mark.parametrize("family", FAMILIES)
def test_causal_or_not(family: str) -> None:
    model = tiny_model(family).eval()
    ids = torch.arange(20)[None] + 3
    changed = ids.clone()
    changed[0, -1] = 99
    same = torch.equal(logits_of(model, ids)[0, :-1], logits_of(model, changed)[0, :-1])
    assert same is (family not in MASKED_FAMILIES)


@pytest.mark.parametrize("family", ["mistral", "gemma2", "gemma3_text", "phi3", "modernbert"])
def test_windows_limit_what_is_seen(family: str) -> None:
    """With one layer that slides, a token further away than the window cannot change the last logits."""
    layers = (
        {"layer_types": ["sliding_attention"]} if family in ("gemma2", "gemma3_text", "modernbert") else {}
    )
    model = tiny_model(family, num_hidden_layers=1, **layers).eval()
    far, near = 2 * WINDOW, WINDOW // 4
    ids = torch.arange(3 * WINDOW)[None] % 250 + 3
    last = logits_of(model, ids)[0, -1]
    for distance, same in ((far, True), (near, False)):
        changed = ids.clone()
        changed[0, -1 - distance] = 1
        assert torch.equal(logits_of(model, changed)[0, -1], last) is same


def test_lengths_and_grouped_keys() -> None:
    assert KV_HEADS == 2
    assert logits_of(tiny_model("llama"), torch.ones(1, 1024, dtype=torch.long)).shape[1] == 1024
    assert POSITIONS >= 1024
    assert tiny_model("llama").config.num_key_value_heads == KV_HEADS


def test_overrides_and_mistakes() -> None:
    assert tiny_model("gpt2", num_hidden_layers=5).config.n_layer == 5
    assert tiny_model(TORCH_ENCODER, num_hidden_layers=1, activation="relu", norm_first=False).training
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        tiny_model("lama")
    with pytest.raises(ConfigError, match=r"no setting 'hiden_size'.*did you mean 'hidden_size'"):
        tiny_model("llama", hiden_size=3)
    with pytest.raises(ConfigError, match="no setting 'dropot'"):
        tiny_model(TORCH_ENCODER, dropot=0.5)


def test_plain_encoder_takes_a_padding_mask() -> None:
    model = tiny_model(TORCH_ENCODER)
    ids = torch.arange(10)[None] + 3
    mask = torch.ones_like(ids)
    mask[0, 7:] = 0
    padded = model(ids, mask)
    torch.testing.assert_close(padded[0, :7], model(ids[:, :7])[0])

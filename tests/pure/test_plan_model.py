"""The shape of a model: its parameters, Hugging Face configs, and what is said of bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hasten.base.errors import ConfigError, InputError
from hasten.plan.model import ModelShape, from_config, load, preset, presets

LLAMA3_8B = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
}
DEEPSEEK_V3 = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 61,
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "num_experts_per_tok": 8,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.parametrize(
    ("config", "parameters", "active"),
    [
        (LLAMA3_8B, 8.030e9, 8.030e9),
        # DeepSeek-V3's report: 671B parameters, 37B for each token.
        (DEEPSEEK_V3, 671e9, 37.5e9),
        (
            {
                "model_type": "gpt2",
                "n_layer": 12,
                "n_embd": 768,
                "n_head": 12,
                "n_positions": 1024,
                "vocab_size": 50257,
            },
            124.4e6,
            124.4e6,
        ),
    ],
)
def test_parameters_are_those_published(config: dict[str, object], parameters: float, active: float) -> None:
    model = from_config(config)
    assert model.parameters == pytest.approx(parameters, rel=2e-3)
    assert model.active_parameters == pytest.approx(active, rel=1e-2)


def test_gpt3_has_its_parameters() -> None:
    assert preset("gpt3-175b").parameters == pytest.approx(174.6e9, rel=1e-3)


def test_every_preset_is_a_model() -> None:
    for name in presets():
        assert preset(name).parameters > 0


@pytest.mark.parametrize("field", ["num_hidden_layers", "hidden_size", "intermediate_size", "vocab_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {key: value for key, value in LLAMA3_8B.items() if key != field}
    with pytest.raises(InputError, match=field):
        from_config(config)


def test_contradictions_are_named() -> None:
    with pytest.raises(InputError, match="kv_heads = 5"):
        from_config({**LLAMA3_8B, "num_key_value_heads": 5})
    with pytest.raises(ConfigError, match="did you mean 'gpt3-175b'"):
        preset("gpt3-175")


def test_files_are_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA3_8B), encoding="utf-8")
    assert load(tmp_path).parameters == load(tmp_path / "config.json").parameters
    toml = tmp_path / "own.toml"
    toml.write_text("layers = 2\nhidden = 64\nheads = 4\ninner = 256\nvocabulary = 100\n", encoding="utf-8")
    assert load(toml) == ModelShape(name="own", layers=2, hidden=64, heads=4, inner=256, vocabulary=100)
    toml.write_text("layers = 2\nhiden = 64\n", encoding="utf-8")
    with pytest.raises(InputError, match="hid"):
        load(toml)
    with pytest.raises(InputError, match="neither a file nor a preset"):
        load("no-such-model")

"""Settings: what is wrong is named, with what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from hasten.base.config import parse_override
from hasten.base.errors import ConfigError, InputError
from hasten.train.config import RunConfig, describe_settings, load_config

BASE = {"model.id": "m", "data.path": "d"}
RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"batch.sequence_token": 3},
            ["unknown key 'batch.sequence_token'", "did you mean 'sequence_tokens'"],
        ),
        ({"levle": 1}, ["unknown key 'levle'", "did you mean 'level'"]),
        ({"lora.rank": 3}, ["unknown key 'lora.rank'", "alpha, dropout, merge, r, target_modules"]),
        ({"batch.batch_tokens": 1000}, ["1000", "512 and 1024"]),
        ({"batch.batch_tokens": 100}, ["100", "valid values are 512"]),
        (
            {"batch.batch_tokens": 3072, "batch.micro_batch_tokens": 2048},
            ["2048", "divide", "1024 and 1536"],
        ),
        ({"batch.micro_batch_tokens": 700}, ["700", "512 and 1024"]),
        ({"steps": "many"}, ["steps = 'many'", "integer"]),
        ({"steps": 0}, ["steps = 0", "greater than 0"]),
        ({"precision": "fp16"}, ["precision = 'fp16'", "'auto', 'bf16' or 'fp32'"]),
        ({"optimizer.betas": [0.9, 1.0]}, ["betas", "below 1"]),
        ({"eval.every_steps": 5}, ["validation_fraction"]),
        ({"schedule.warmup_steps": 200}, ["warmup_steps = 200", "nearest valid value is 100"]),
        ({"data.validation_fraction": 1.0}, ["data.validation_fraction = 1.0", "less than 1"]),
        ({"steps": 3, "steps.x": 1}, ["steps is a value, not a section"]),
        ({"steps": True}, ["steps = true", "truth value"]),
        ({"level": True}, ["level = true", "truth value"]),
        ({"optimizer.lr": float("inf")}, ["optimizer.lr = inf", "finite"]),
        ({"optimizer.lr": float("nan")}, ["optimizer.lr = nan"]),
        ({"optimizer.betas": [0.9]}, ["optimizer.betas lacks an entry"]),
        ({"lora.target_modules": []}, ["lora.target_modules = []", "all-linear"]),
    ],
)
def test_wrong_setting_is_named(changes: dict[str, object], words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {**BASE, **changes})
    assert "\n" not in str(caught.value)
    for word in words:
        assert word in str(caught.value)


def test_required_settings_are_named() -> None:
    with pytest.raises(ConfigError, match=r"model is not set.*data is not set"):
        load_config(None, {})


def test_file_and_overrides(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text('steps = 7\n[model]\nid = "m"\n[data]\npath = "d"\n[batch]\nsequence_tokens = 64\n')
    config = load_config(file, {"batch.batch_tokens": 256, "batch.micro_batch_tokens": 128, "steps": 9})
    assert (config.steps, config.batch.sequence_tokens) == (9, 64)
    assert (config.batch.rows, config.batch.micro_rows, config.batch.accumulation) == (4, 2, 2)
    assert config.checkpoint_folder == Path("runs/train/checkpoints")


def test_settings_survive_json() -> None:
    config = load_config(None, {**BASE, "lora.r": 4, "output.folder": "x"})
    assert RunConfig.model_validate(config.as_json()) == config


def test_frozen() -> None:
    config = load_config(None, BASE)
    with pytest.raises(ValueError, match="frozen"):
        config.steps = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("batch.batch_tokens=512", ("batch.batch_tokens", 512)),
        ("optimize = false", ("optimize", False)),
        ("data.path=some/where", ("data.path", "some/where")),
        ("optimizer.betas=[0.9, 0.99]", ("optimizer.betas", [0.9, 0.99])),
        ("data.path=a=b", ("data.path", "a=b")),
    ],
)
def test_parse_override(text: str, expected: tuple[str, object]) -> None:
    assert parse_override(text, "steps=10") == expected


@pytest.mark.parametrize("text", ["steps", "=3", ""])
def test_parse_override_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match=r"NAME=VALUE, for example steps=10"):
        parse_override(text, "steps=10")


def test_missing_file_names_the_nearest(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text("")
    with pytest.raises(InputError, match=r"no such file.*did you mean 'run.toml'"):
        load_config(tmp_path / "runn.toml")
    with pytest.raises(InputError, match="is a folder"):
        load_config(tmp_path)


def test_malformed_file(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("steps = = 3")
    with pytest.raises(InputError, match="not valid TOML"):
        load_config(file)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda path: path.stem)
def test_recipes_are_valid(recipe: Path) -> None:
    assert load_config(recipe).model.id


def test_describe_settings_names_every_setting() -> None:
    lines = describe_settings().splitlines()
    for name, field in RunConfig.model_fields.items():
        assert any(line.startswith((f"{name} = ", f"[{name}]")) for line in lines), (name, field)
    assert "sequence_tokens = 512  # tokens in one row" in lines

"""`hasten train --profile`: what it writes is the step, and the run's numbers are as without it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hasten.base.errors import ConfigError, InputError
from hasten.plan.estimate import estimate
from hasten.plan.machine import this_machine
from hasten.plan.replay import kind_of, load, replayed
from hasten.train import train
from hasten.train.config import RunConfig
from hasten.train.recorder import PROFILED, WARM_UP

Settings = Callable[..., RunConfig]


def _losses(folder: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_the_profile_is_that_of_the_run(settings: Settings, tmp_path: Path) -> None:
    file = tmp_path / "deep" / "step.json"
    plain = settings(output__folder=str(tmp_path / "plain"))
    train(plain, progress=False)
    config = settings(output__folder=str(tmp_path / "seen"))
    result = train(config, progress=False, profile=file)
    assert result.faults == ()
    assert _losses(config.output.folder) == _losses(plain.output.folder)
    found = load(file)
    assert (found.job.batch, found.job.sequence, found.layout.accumulation) == (4, 32, 2)
    assert (found.job.precision, found.job.master) == ("fp32", "fp32")
    assert (found.model.hidden, found.model.vocabulary) == (64, 258)
    rows = [json.loads(line) for line in (config.output.folder / "metrics.jsonl").read_text().splitlines()]
    assert found.step_s == min(r["step_s"] for r in rows if r["step"] > WARM_UP)
    kinds = {kind_of(name) for name in found.operators_s}
    assert {"matmul", "attention", "elementwise", "optimizer"} <= kinds
    # No operator is counted twice: together they take no longer than the profiled step.
    assert sum(found.operators_s.values()) <= found.step_s * 1.05
    machine = this_machine(tmp_path / "no cache")
    machine = machine.model_copy(update={"device": machine.device.model_copy(update={"name": found.device})})
    again = estimate(found.model, replayed(machine, found), found.layout, found.job)
    assert again.confidence == "replayed"
    assert again.step_s.value >= 0.999 * found.step_s


def test_a_run_too_short_says_how_long_is_enough(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"steps = {PROFILED}"):
        train(settings(steps=3), progress=False, profile=tmp_path / "step.json")


def test_a_place_that_cannot_be_written_is_found_before_the_run(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    config = settings()
    with pytest.raises(InputError, match="--profile"):
        train(config, progress=False, profile=tmp_path / "file" / "step.json")
    assert not (config.output.folder / "metrics.jsonl").exists()


def test_a_profile_that_cannot_be_written_loses_no_model(settings: Settings, tmp_path: Path) -> None:
    (tmp_path / "step.json").mkdir()
    config = settings(output__folder=str(tmp_path / "run"))
    result = train(config, progress=False, profile=tmp_path / "step.json")
    assert any("step.json" in fault for fault in result.faults)
    assert result.model_folder is not None
    assert (result.model_folder / "config.json").is_file()


def test_adapters_have_no_profile(settings: Settings, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="adapters"):
        train(settings(lora__r=2), progress=False, profile=tmp_path / "step.json")

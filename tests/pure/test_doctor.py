"""What `hasten doctor` says, on this machine and on made-up reports."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from hasten.base.errors import ConfigError, InputError
from hasten.base.facts import ISA_LEVELS, detect
from hasten.base.screen import Screen
from hasten.doctor import collect, explain, render
from hasten.doctor import model as probing
from hasten.models import tiny_model
from hasten.ops import buffers, native


def printed(found: dict[str, Any]) -> str:
    console = Console(width=200, file=io.StringIO())
    console.print(render(found))
    return console.file.getvalue()


@pytest.fixture(autouse=True)
def _clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HASTEN_LEVEL", "HASTEN_PRECISION", "HASTEN_MEMORY", "HASTEN_ISA", "HASTEN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)


def test_machine_versions_and_levels() -> None:
    found = collect()
    assert json.loads(json.dumps(found)) == json.loads(json.dumps(found, default=str))
    assert [row["level"] for row in found["isa"]] == list(ISA_LEVELS)
    assert sum(row["state"] == "in force" for row in found["isa"]) == 1
    assert found["machine"]["cores"]["value"] == detect().cores.value
    assert all(fact["source"] for fact in found["machine"].values())
    assert {"python", "torch", "transformers", "C library", "compiler"} <= set(found["versions"])
    assert "model" not in found
    text = printed(found)
    for word in ("Machine", "Instruction levels", found["machine"]["processor"]["value"], "buffer reuse"):
        assert word in text


def test_every_optimisation_that_is_off_says_why() -> None:
    rows = {row["name"]: row for row in collect()["optimisations"]}
    assert {row["state"] for row in rows.values()} == {"on", "off"}
    assert all(row["why"] for row in rows.values())
    assert (rows["native kernels"]["state"] == "on") is (native.state().level is not None)
    assert (rows["buffer reuse"]["state"] == "on") is not bool(buffers.refusal())


def test_sources_of_settings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HASTEN_LEVEL", "1")
    monkeypatch.setenv("HASTEN_ISA", "generic")
    monkeypatch.setenv("HASTEN_MEMORY", "50%")
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path))
    found = collect()
    rows = {row["name"]: (row["value"], row["source"]) for row in found["settings"]}
    assert rows["level"] == (1, "HASTEN_LEVEL")
    assert rows["memory"] == (0.5, "HASTEN_MEMORY")
    assert rows["isa"] == ("generic", "HASTEN_ISA")
    assert rows["cache folder"] == (str(tmp_path), "HASTEN_CACHE_DIR")
    assert rows["verify"] == (True, "default")
    states = {row["name"]: row["state"] for row in found["optimisations"]}
    assert [states[f"level {n}"] for n in (1, 2, 3)] == ["on", "off", "off"]
    assert "HASTEN_LEVEL" in printed(found)


def test_level_zero_switches_buffers_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HASTEN_LEVEL", "0")
    states = {row["name"]: row["state"] for row in collect()["optimisations"]}
    assert states["buffer reuse"] == states["level 1"] == "off"


def test_wrong_settings_and_models(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json"):
        collect(str(tmp_path))
    with pytest.raises(ConfigError, match="did you mean 'llama'"):
        collect("tiny:lama")
    monkeypatch.setenv("HASTEN_ISA", "avx9000")
    with pytest.raises(ConfigError, match="HASTEN_ISA"):
        collect()


def made_up(**changes: Any) -> dict[str, Any]:
    graph = {
        "block": "Layer",
        "state": "bf16",
        "runs": "rewritten",
        "reason": "",
        "passes": [{"name": "rotary", "declined": []}],
    }
    return {
        "settings": {"level": 3},
        "sources": {"level": "default"},
        "blocks": {"Layer": 2},
        "doors": {"attention": "on"},
        "graphs": [graph],
        "originals": {},
    } | changes


@pytest.mark.parametrize(
    ("report", "ratio", "share", "words"),
    [
        (made_up(), 1.2, 0.8, ["1.20 times as fast"]),
        (made_up(), 0.7, 0.8, ["slower (0.70", "fixed costs"]),
        (made_up(), 1.0, 0.2, ["Only 20%"]),
        (
            made_up(settings={"level": 0}, sources={"level": "HASTEN_LEVEL"}),
            1,
            0.8,
            ["level is 0 (from HASTEN_LEVEL)"],
        ),
        (made_up(blocks={}, graphs=[]), 1.0, 0.0, ["No repeated block was found"]),
        (made_up(originals={"with a key-value cache": 9}), 1, 0.8, ["9 calls", "with a key-value cache"]),
        (
            made_up(doors={"output head": "off: no linear head"}),
            1,
            0.8,
            ["output head is off: no linear head."],
        ),
        (
            made_up(graphs=[made_up()["graphs"][0] | {"runs": "original", "reason": "measured slower"}]),
            1,
            0.8,
            ["Layer [bf16] runs its original code: measured slower."],
        ),
        (
            made_up(
                graphs=[made_up()["graphs"][0] | {"passes": [{"name": "rotary", "declined": ["odd size"]}]}]
                * 2
            ),
            1,
            0.8,
            ["Left as it was, rotary: odd size."],
        ),
    ],
)
def test_answers(report: dict[str, Any], ratio: float, share: float, words: list[str]) -> None:
    answers = explain(report, ratio, share, detect({"bf16_in_hardware": True}))
    text = "\n".join(answers)
    for word in words:
        assert text.count(word) == 1, text
    loaded = native.state()
    assert answers[-1].startswith("Native kernels are loaded" if loaded.level else "No native kernel runs")
    assert loaded.reason in answers[-1]


def test_answer_without_bf16() -> None:
    answers = explain(made_up(), 1.0, 0.8, detect({"bf16_in_hardware": False}))
    assert any("multiplies in fp32 only" in answer for answer in answers)


def test_the_probe_takes_plain_modules() -> None:
    model = tiny_model("torch_encoder")
    assert probing._Probe(model, torch.ones(1, 8, dtype=torch.long), bf16=False).best() > 0
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert probing._vocabulary(model) == 256
    with pytest.raises(InputError, match="Linear has no embedding table"):
        probing._vocabulary(torch.nn.Linear(2, 2))


# Dynamo looks at the gradient of the block's input while it captures, which torch warns about.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_a_model_is_examined(capfd: pytest.CaptureFixture[str]) -> None:
    found = collect("tiny:llama")
    # At the level of file descriptors: torch's profiler writes to standard error without Python.
    assert capfd.readouterr() == ("", "")
    model = found["model"]
    assert model["fused_share"] > 0
    assert model["first_step_s"] > model["step_s"]
    assert json.dumps(found)
    assert model["plain_step_s"] > 0
    assert 0 <= model["fused_share"] <= 1
    assert model["report"]["blocks"]
    text = " ".join(printed(found).split())
    assert "Why is my model not faster?" in text
    assert all(answer in text for answer in model["answers"])
    assert model["report"]["graphs"][0]["runs"] in ("rewritten", "original")


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_progress_names_every_stage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hasten.base.screen.PLAIN_INTERVAL_S", 0.0)
    collect("tiny:gpt2", Screen())
    lines = capsys.readouterr().err.splitlines()
    assert [line.split("%")[1].split("  ")[1] for line in lines] == list(probing._STAGES)
    assert all(line.startswith("examining tiny:gpt2") for line in lines)


def test_a_folder_with_a_configuration_alone(tmp_path: Path) -> None:
    tiny_model("qwen2").config.save_pretrained(tmp_path)
    model, note = probing._open(str(tmp_path))
    assert type(model).__name__ == "Qwen2ForCausalLM"
    assert note.startswith("random")


def test_the_command(tmp_path: Path) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "hasten", "doctor", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    done = run("--json")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == {"machine", "isa", "versions", "settings", "optimisations"}
    wrong = run(str(tmp_path))
    assert wrong.returncode == 2
    assert "no config.json" in wrong.stderr
    assert "Traceback" not in wrong.stderr

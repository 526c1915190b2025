"""`hasten train`: one message and an exit code for each mistake, and signals sent from outside."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

import hasten.train.run
from hasten.base.screen import Screen
from hasten.train.checkpoint import verify
from hasten.train.command import train
from hasten.train.loop import Loop
from hasten.train.stop import Interrupted, StopSignals

APP = typer.Typer()
APP.command()(train)
START = (
    "import typer; from hasten.train.command import train; app = typer.Typer(); app.command()(train); app()"
)


@pytest.fixture
def flags(tmp_path: Path, model_folder: Path, text_folder: Path) -> list[str]:
    return [
        f"--model={model_folder}",
        f"--data={text_folder}",
        f"--output={tmp_path / 'run'}",
        f"--set=data.cache_folder={tmp_path / 'cache'}",
        "--set=output.tensorboard=false",
        "--seq=32",
        "--batch-tokens=64",
        "--precision=fp32",
        "--no-optimize",
        "--lr=0.01",
    ]


def test_a_run_by_flags_as_json(flags: list[str], tmp_path: Path) -> None:
    done = CliRunner().invoke(APP, [*flags, "--steps=3", "--json"])
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert (result["status"], result["step"], result["faults"]) == ("finished", 3, [])
    assert result["model_folder"] == str(tmp_path / "run" / "model")


def test_a_file_and_a_flag_over_it(
    flags: list[str], tmp_path: Path, model_folder: Path, text_folder: Path
) -> None:
    file = tmp_path / "run.toml"
    file.write_text(
        f'steps = 50\nprecision = "fp32"\noptimize = false\n[model]\nid = "{model_folder}"\n'
        f'[data]\npath = "{text_folder}"\ncache_folder = "{tmp_path / "cache"}"\n'
        f'[batch]\nsequence_tokens = 32\nbatch_tokens = 64\n[output]\nfolder = "{tmp_path / "run"}"\n'
    )
    done = CliRunner().invoke(APP, [str(file), "--steps", "2", "--json", "--set", "output.tensorboard=false"])
    assert (done.exit_code, json.loads(done.stdout)["steps"]) == (0, 2)


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        (["missing.toml"], "no such file: missing.toml"),
        (["--set=batch.sequence_token=3"], "did you mean 'sequence_tokens'"),
        (["--set=steps"], "give NAME=VALUE"),
        (["--batch-tokens=100"], "the nearest valid values are 96 and 128"),
        (["--data=/nowhere/at/all"], "no such file or folder"),
        (["--model=/nowhere/at/all"], "/nowhere/at/all"),
        (["--precision=fp8"], "'auto', 'bf16' or 'fp32'"),
        (["--resume=/nowhere/at/all"], "no such folder"),
        (["--seq=4096", "--batch-tokens=4096"], "context of 2048"),
    ],
)
def test_a_mistake_is_one_message_and_2(flags: list[str], extra: list[str], message: str) -> None:
    done = CliRunner().invoke(APP, [*flags, *extra])
    assert done.exit_code == 2
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1
    assert message in errors[0]
    assert "Traceback" not in done.output
    assert done.stdout == ""


def test_empty_text_is_2(flags: list[str], tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text("\n")
    done = CliRunner().invoke(APP, [*flags, f"--data={tmp_path / 'empty.txt'}"])
    assert done.exit_code == 2
    assert "no text in 1 file" in done.stderr


def test_a_damaged_checkpoint_is_1(flags: list[str], tmp_path: Path) -> None:
    assert CliRunner().invoke(APP, [*flags, "--steps=1"]).exit_code == 0
    path = tmp_path / "run" / "checkpoints" / "step-00000001"
    (path / "run.json").write_text("{}")
    done = CliRunner().invoke(APP, [*flags, "--steps=1", f"--resume={path}"])
    assert done.exit_code == 1
    assert "run.json has 2 bytes" in done.stderr
    assert "Traceback" not in done.output


def test_help_and_settings() -> None:
    shown = CliRunner().invoke(APP, ["--help"])
    assert shown.exit_code == 0
    assert "hasten train --model smollm2-135m" in shown.stdout
    listed = CliRunner().invoke(APP, ["--settings"])
    assert listed.exit_code == 0
    assert "max_grad_norm = 1.0" in listed.stdout


def test_help_does_not_load_torch() -> None:
    code = "import sys, hasten.train.command; sys.exit('torch' in sys.modules)"
    root = Path(__file__).parents[2]
    assert (
        subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(root)}).returncode
        == 0
    )


def test_second_ctrl_c_stops_at_once() -> None:
    before = signal.getsignal(signal.SIGINT)
    with StopSignals(Screen(enabled=False)) as stop:
        stop.defer()
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.received == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_before_the_steps_a_signal_raises_once(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    with StopSignals(Screen(enabled=False)) as stop:
        with pytest.raises(Interrupted) as caught:
            os.kill(os.getpid(), number)
        assert (stop.received, caught.value.exit_code) == (number, 128 + number)
        # Whatever cleans up now is not cut short by a second one.
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(number) is before


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("stage", ["open_model", "check_model", "tokenizer", "rows_of", "adapt", "Stepper"])
def test_a_signal_before_the_first_step_leaves_nothing_half_done(
    flags: list[str], tmp_path: Path, stage: str, number: signal.Signals, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*given: object, **named: object) -> None:
        if stage == "tokenizer":
            # The first call only asks for the end token; the second comes while the cache is written.
            assert len(list((tmp_path / "cache" / "tokens").glob("*.tmp"))) == 1
        os.kill(os.getpid(), number)
        pytest.fail("the signal was not acted on")

    if stage == "tokenizer":
        monkeypatch.setattr("hasten.train.data._calls", interrupted)
    else:
        monkeypatch.setattr(hasten.train.run, stage, interrupted)
    done = CliRunner().invoke(APP, [*flags, "--steps=3", "--json"])
    assert done.exit_code == 128 + number
    result = json.loads(done.stdout)
    assert (result["status"], result["signal"], result["step"]) == ("interrupted", number.name, 0)
    assert result["checkpoint"] is None
    assert not list((tmp_path / "cache").rglob("*.tmp"))
    assert [entry.name for entry in (tmp_path / "run").iterdir()] == []
    monkeypatch.undo()
    again = CliRunner().invoke(APP, [*flags, "--steps=1", "--json"])
    assert again.exit_code == 0, again.output


def test_stopped_at_once_is_130(flags: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(self: Loop) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Loop, "step", interrupted)
    done = CliRunner().invoke(APP, flags)
    assert done.exit_code == 130
    assert "stopped at once" in done.stderr


@contextmanager
def running(arguments: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[2])}
    with log.open("wb") as out:
        process = subprocess.Popen([sys.executable, "-c", START, *arguments], stderr=out, stdout=out, env=env)
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def wait_for_rows(file: Path, count: int, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + 60
    while time.monotonic() < until_s and process.poll() is None:
        if file.exists() and len(file.read_text().splitlines()) >= count:
            return
        time.sleep(0.02)
    pytest.fail("the run did not make its steps")


@pytest.mark.e2e
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_it_tokenises_acts_within_seconds(
    flags: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    text = tmp_path / "large.txt"
    text.write_text("\n".join(f"line {i} of a text that takes a while" for i in range(2_000_000)))
    log = tmp_path / "log"
    with running([*flags, f"--data={text}"], log) as process:
        until_s = time.monotonic() + 60
        while not list((tmp_path / "cache").rglob("tokens.bin")) and process.poll() is None:
            assert time.monotonic() < until_s
            time.sleep(0.02)
        process.send_signal(number)
        sent_s = time.monotonic()
        assert process.wait(timeout=30) == 128 + number, log.read_text()
        assert time.monotonic() - sent_s < 5
    assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    said = log.read_text()
    assert f"{number.name}: stopped before a step was made" in said
    assert "Traceback" not in said


@pytest.mark.e2e
def test_ctrl_c_from_outside(flags: list[str], tmp_path: Path) -> None:
    log = tmp_path / "log"
    with running([*flags, "--steps=100000", "--set=schedule.kind=constant"], log) as process:
        wait_for_rows(tmp_path / "run" / "metrics.jsonl", 3, process)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=30) == 130
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    (path,) = (tmp_path / "run" / "checkpoints").iterdir()
    assert verify(path).step == rows[-1]["step"]
    said = log.read_text()
    assert "SIGINT: finishing this step" in said
    assert f"the same command continues, or: --resume {path}" in said
    assert "Traceback" not in said

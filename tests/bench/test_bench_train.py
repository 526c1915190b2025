"""`hasten bench train` and `hasten demo` from the command line, on a tiny model."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import typer
from typer.testing import CliRunner

from hasten.base.errors import ConfigError, HastenError
from hasten.base.screen import Screen
from hasten.bench import command, report, train
from hasten.bench.command import bench
from hasten.bench.contenders import Spec
from hasten.bench.demo import demo

pytestmark = pytest.mark.e2e

demo_app = typer.Typer()
demo_app.command()(command.demo)
QUIET = Screen(enabled=False)
OUTCOME = report.Outcome(
    round=report.Round(
        open_s=0.1,
        first_forward_s=1.0,
        first_step_s=2.0,
        steps_s=[2.0, 1.0],
        losses=[3.0, 2.0],
        peak_rss_bytes=1000,
        rss_open_bytes=500,
        peak_rss_first_step_bytes=900,
    ),
    size=report.ModelSize(parameters=10, product_parameters=10, attention_width=4, sees_documents=True),
)


def _hasten(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "hasten", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240)


def test_two_contenders_from_end_to_end(tmp_path: Path):
    path = tmp_path / "report.json"
    got = _hasten(
        *("bench", "train", "--model", "tiny:llama", "--batch", "2x48", "--steps", "4"),
        *("--contenders", "eager-fp32,hasten-fp32", "--json", str(path)),
    )
    assert got.returncode == 0, got.stderr
    result = report.load(path)
    assert list(result.contenders) == ["eager-fp32", "hasten-fp32"]
    assert result.failed == {}
    assert result.agree is True, result.agreement
    for contender in result.contenders.values():
        assert contender.dtype == "float32"
        assert len(contender.losses) == 4
        assert len(contender.rounds) == 1
        assert contender.repeatable
        assert contender.tokens_per_s == pytest.approx(2 * 48 / contender.step_s)
        assert 5e7 < contender.peak_rss_bytes < 5e9
        assert 0 < contender.share_of_limit < 1
    eager, hasten = (result.contenders[name].losses for name in ("eager-fp32", "hasten-fp32"))
    assert eager == pytest.approx(hasten, rel=1e-5)
    assert eager[-1] < eager[0]
    ratio = result.ratios["hasten-fp32"]["eager-fp32"]
    steps = [result.contenders[name].step_s for name in ("eager-fp32", "hasten-fp32")]
    assert ratio.speed == pytest.approx(steps[0] / steps[1])
    assert "hasten-fp32 against eager-fp32" in got.stdout


def test_the_demo_leaves_a_report(tmp_path: Path, fast_limits: None):
    out = tmp_path / "demo"
    result, path = demo(out, 2, QUIET, model="tiny:llama", batch="2x32")
    assert path == out / "report.json"
    assert report.load(path) == result
    assert list(result.contenders) == ["eager-bf16", "hasten"]
    assert result.agree is True, result.agreement
    assert [entry.name for entry in out.iterdir()] == ["report.json"]


def test_a_signal_leaves_no_process_and_what_was_measured(tmp_path: Path):
    path, log = tmp_path / "report.json", tmp_path / "log"
    command = [
        *(sys.executable, "-m", "hasten", "bench", "train", "--model", "tiny:llama", "--batch", "1x16"),
        *("--steps", "50", "--contenders", "eager-fp32,hasten-fp32", "--json", str(path)),
    ]
    with log.open("w") as out, subprocess.Popen(command, stdout=out, stderr=out) as process:
        # The first contender's summary is said when its process has ended and the second's starts.
        while "eager-fp32: first step" not in log.read_text() and process.poll() is None:
            time.sleep(0.05)
        below: list[psutil.Process] = []
        while not below and process.poll() is None:
            below = psutil.Process(process.pid).children(recursive=True)
        process.terminate()
        assert process.wait(timeout=20) == 143, log.read_text()
    assert psutil.wait_procs(below, timeout=5)[1] == []
    result = report.load(path)
    assert list(result.contenders) == ["eager-fp32"]
    assert len(result.contenders["eager-fp32"].losses) == 50
    assert result.interrupted == report.Interruption(signal="SIGTERM", during="hasten-fp32")
    said = log.read_text()
    assert "CUT SHORT" in said
    assert "Traceback" not in said


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_before_anything_is_measured_is_one_message(
    number: signal.Signals, monkeypatch: pytest.MonkeyPatch, fast_limits: None, tmp_path: Path
):
    def killed(*arguments: object) -> report.Outcome:
        os.kill(os.getpid(), number)
        pytest.fail("the signal was not acted on")

    monkeypatch.setattr(train, "run_contender", killed)
    small = ["--model", "tiny:llama", "--batch", "1x16", "--steps", "1"]
    for arguments in (["train", *small, "--json", str(tmp_path / "a.json")], small):
        app = bench if arguments[0] == "train" else demo_app
        done = CliRunner().invoke(app, [*arguments, *(() if app is bench else ("--out", str(tmp_path)))])
        assert done.exit_code == 128 + number, done.output
        assert done.stderr.splitlines()[-1] == f"{number.name}: stopped before anything was measured"
    assert list(tmp_path.iterdir()) == []


def test_contenders_take_turns_and_one_that_fails_is_left_out(
    monkeypatch: pytest.MonkeyPatch, fast_limits: None
):
    ran: list[str] = []

    def fake(spec: Spec, folder: Path, title: str, screen: Screen, environment: None) -> report.Outcome:
        assert Path(spec.blocks_file).is_file()
        ran.append(title)
        if spec.contender == "compile-bf16" and "round 2" in title:
            raise train.ContenderError("no compiler")
        return OUTCOME

    monkeypatch.setattr(train, "run_contender", fake)
    settings = train.Settings(
        model="tiny:llama",
        batch="1x16",
        steps=2,
        rounds=3,
        contenders=("eager-bf16", "compile-bf16", "hasten"),
    )
    result = train.bench_train(settings, QUIET)
    assert [title.split()[0] for title in ran] == [
        *("eager-bf16", "compile-bf16", "hasten"),
        *("eager-bf16", "compile-bf16", "hasten"),
        *("eager-bf16", "hasten"),
    ]
    assert list(result.contenders) == ["eager-bf16", "hasten"]
    assert result.failed == {"compile-bf16": "no compiler"}
    assert len(result.contenders["hasten"].rounds) == 3


def test_a_wrong_setting_in_the_environment_is_found_first(
    monkeypatch: pytest.MonkeyPatch, fast_limits: None
):
    monkeypatch.setenv("HASTEN_LEVEL", "9")
    monkeypatch.setattr(train, "run_contender", lambda *arguments: pytest.fail("it ran"))
    small = train.Settings(model="tiny:llama", batch="1x16", steps=1, contenders=("eager-fp32", "hasten"))
    with pytest.raises(ConfigError, match="HASTEN_LEVEL"):
        train.bench_train(small, QUIET)


def test_where_nothing_finished_there_is_no_report(monkeypatch: pytest.MonkeyPatch, fast_limits: None):
    def fake(*arguments: object) -> report.Outcome:
        raise train.ContenderError("no luck")

    monkeypatch.setattr(train, "run_contender", fake)
    with pytest.raises(HastenError, match="no contender finished: eager-fp32"):
        train.bench_train(
            train.Settings(model="tiny:llama", batch="1x16", steps=1, contenders=("eager-fp32",)), QUIET
        )


def test_a_contender_without_its_package_is_left_out(monkeypatch: pytest.MonkeyPatch, fast_limits: None):
    monkeypatch.setattr(train, "find_spec", lambda name: None)
    monkeypatch.setattr(train, "run_contender", lambda *arguments: OUTCOME)
    names = ("eager-bf16", "openvino-bf16")
    settings = train.Settings("tiny:bert", "1x16", 2, contenders=names, task="infer")
    result = train.bench_train(settings, QUIET)
    assert list(result.contenders) == ["eager-bf16"]
    assert "pip install 'hasten[bench]'" in result.skipped["openvino-bf16"]
    assert result.failed == {}
    with pytest.raises(ConfigError, match="the package openvino is missing"):
        train.bench_train(settings._replace(contenders=("openvino-bf16",)), QUIET)


def test_a_contender_for_another_task_is_refused():
    settings = train.Settings("tiny:llama", "1x16", 2, contenders=("eager-bf16", "openvino-bf16"))
    with pytest.raises(ConfigError, match="'openvino-bf16' does not do task 'clm'; allowed for it: infer"):
        train.bench_train(settings, QUIET)

"""`hasten bench serve` against a small server of known behaviour."""

from __future__ import annotations

import io
import json
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from rich.console import Console
from typer.testing import CliRunner

from hasten.base.errors import ConfigError, HastenError
from hasten.base.screen import Screen
from hasten.bench.command import bench
from hasten.bench.generation.subject import open_subject
from hasten.bench.process import ContenderError
from hasten.bench.report import dump
from hasten.bench.serving import load, run, table
from hasten.bench.serving.names import CONTENDERS, Kind
from hasten.bench.serving.report import ServeReport

QUIET = Screen(enabled=False)

# Says pieces that follow from the prompt, 5 ms apart, the first after 20 ms. `mode` makes it wrong.
SERVER = """
import hashlib, json, os, signal, sys, threading, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

port, mode = int(sys.argv[1]), sys.argv[2]
if mode == "dies":
    print("no model here", flush=True)
    sys.exit(3)
signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
busy, door = [], threading.Lock()

class Handler(BaseHTTPRequestHandler):
    def log_message(self, *arguments): pass
    def do_GET(self):
        body = json.dumps({"object": "list", "data": [{"id": "fake"}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert self.path == "/v1/completions" and asked["stream"] and asked["model"] == "fake"
        with door:
            refused = mode == "refuses" and len(busy) > 0
            if not refused:
                busy.append(1)
            crossed = mode == "mixes" and len(busy) > 1
        if refused:
            self.send_response(429)
            self.end_headers()
            return
        self.send_response(200)
        self.end_headers()
        time.sleep(0.02)
        for number in range(asked["max_tokens"]):
            digest = hashlib.sha256(f"{asked['prompt']}{number}{crossed}".encode()).hexdigest()[:4]
            self.say({"choices": [{"text": digest + " ", "finish_reason": None}]})
            time.sleep(0.005)
        usage = {"completion_tokens": asked["max_tokens"], "prompt_tokens": 1}
        busy.pop()  # before the last words: whoever has read them may ask again at once
        self.say({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\\n\\n")
    def say(self, event):
        self.wfile.write(b"data: " + json.dumps(event).encode() + b"\\n\\n")
        self.wfile.flush()

ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
"""


@pytest.fixture
def fake_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Contenders `hasten` and `llama.cpp` become the server above."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "fake_server.py").write_text(SERVER)
    before = [entry for entry in sys.path if entry]
    monkeypatch.setenv("PYTHONPATH", ":".join([str(folder), *before]))
    _behave(monkeypatch)


def _behave(monkeypatch: pytest.MonkeyPatch, hasten: str = "right", llama: str = "right") -> None:
    for name, ours, mode in (("hasten", True, hasten), ("llama.cpp", False, llama)):
        kind = Kind("a fake", ours, ("fake_server", "{port}", mode), {}, (), "nothing")
        monkeypatch.setitem(CONTENDERS, name, kind)


def _bench(**changes: Any) -> ServeReport:
    settings = run.Settings(
        "tiny:llama", prompt_tokens=16, new_tokens=6, concurrency=(1, 4), requests_per_client=2
    )
    return run.bench_serve(settings._replace(**changes), QUIET)


@pytest.mark.e2e
def test_levels_ratios_and_the_end_of_the_server(fake_server: None, fast_limits: None):
    result = _bench()
    assert list(result.contenders) == ["hasten", "llama.cpp"]
    assert (result.failed, result.skipped, result.agree) == ({}, {}, True)
    ours = result.contenders["hasten"]
    assert (ours.exit_code, ours.compared, ours.different, ours.errors) == (0, 8, 0, [])
    assert [(level.requests, level.failures) for level in ours.levels.values()] == [(2, 0), (8, 0)]
    for level in ours.levels.values():
        assert level.tokens == 6 * level.requests
        assert level.tokens_per_s == pytest.approx(level.tokens / level.wall_s)
        assert 0.02 <= level.first_token_p50_s <= level.first_token_p95_s < 1
        assert 0.004 <= level.inter_token_p50_s <= level.inter_token_p95_s < 1
    assert ours.levels["4"].tokens_per_s > 1.5 * ours.levels["1"].tokens_per_s
    assert 10**6 < ours.peak_rss_bytes < 10**9
    assert ours.ready_s > 0
    ratio = result.ratios["hasten"]["llama.cpp"]["4"]
    assert ratio.tokens_per_s == pytest.approx(
        ours.levels["4"].tokens_per_s / result.contenders["llama.cpp"].levels["4"].tokens_per_s
    )
    assert ServeReport.model_validate_json(dump(result)) == result
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(table.render(result))
    text = console.export_text()
    assert "…" not in text
    assert "8 of 8 answers" in text
    # Nothing is left: the ports are in the command lines.
    alive = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    for contender in result.contenders.values():
        assert not any(" ".join(contender.command) in line for line in alive)


@pytest.mark.e2e
@pytest.mark.parametrize(("mode", "said"), [("mixes", None), ("refuses", "status 429")])
def test_a_server_that_is_wrong_gets_no_ratio(
    mode: str, said: str | None, fake_server: None, fast_limits: None, monkeypatch: pytest.MonkeyPatch
):
    _behave(monkeypatch, hasten=mode)
    result = _bench()
    ours = result.contenders["hasten"]
    assert result.agree is False
    if said is None:
        assert ours.different > 0
    else:
        assert ours.levels["4"].failures > 0
        assert any(said in error for error in ours.errors)
    assert ours.levels["1"].failures == 0
    assert result.ratios["hasten"]["llama.cpp"]["1"].tokens_per_s is None


@pytest.mark.e2e
def test_a_server_that_dies_says_why_and_stops_nobody(
    fake_server: None, fast_limits: None, monkeypatch: pytest.MonkeyPatch
):
    _behave(monkeypatch, hasten="dies")
    result = _bench(concurrency=(1,), requests_per_client=1)
    assert list(result.contenders) == ["llama.cpp"]
    assert "ended with 3" in result.failed["hasten"]
    assert "no model here" in result.failed["hasten"]
    _behave(monkeypatch, hasten="dies", llama="dies")
    with pytest.raises(HastenError, match="no contender finished"):
        _bench(concurrency=(1,), requests_per_client=1)


def test_a_server_that_never_gets_ready_is_ended(
    fake_server: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(run, "READY_TIMEOUT_S", 0.5)
    command = [sys.executable, "-c", "import time; time.sleep(1000)"]
    begin = time.perf_counter()
    with (
        QUIET.bar("x", 1) as bar,
        pytest.raises(ContenderError, match="not ready after"),
        run.server(command, load.Address("127.0.0.1", run.free_port()), tmp_path / "log", bar),
    ):
        pytest.fail("it was ready")
    assert time.perf_counter() - begin < 20
    assert not any(process.info["cmdline"] == command for process in psutil.process_iter(["cmdline"]))


def test_percentiles():
    assert load.percentile([], 0.5) == 0.0
    assert load.percentile([3.0], 0.95) == 3.0
    assert load.percentile([1.0, 2.0, 3.0], 0.5) == 2.0
    assert load.percentile(list(range(101)), 0.95) == pytest.approx(95)


def test_without_usage_the_pieces_count():
    reply = load.Reply(text="ab", begin_s=0.0, end_s=1.0, at_s=[0.5, 0.6])
    assert reply.tokens == 2
    level = load.summary([reply, load.Reply(error="no")], 2.0)
    assert (level.requests, level.failures, level.tokens, level.tokens_per_s) == (2, 1, 2, 1.0)
    assert level.first_token_p50_s == 0.5


def test_nobody_listens():
    address = load.Address("127.0.0.1", run.free_port())
    assert "ConnectionRefusedError" in str(load.complete(address, {}).error)
    with pytest.raises(OSError, match="refused"):
        load.get_json(address, "/v1/models")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"concurrency": (4, 4)}, "concurrency = 4,4"),
        ({"concurrency": (0,)}, "concurrency = 0"),
        ({"requests_per_client": 0}, "requests_per_client = 0"),
        ({"prompt_tokens": 4000}, "tiny:llama is made for 2048"),
    ],
)
def test_settings_that_do_not_work_are_found_first(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        _bench(**changes)


def test_who_cannot_run_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    subject = open_subject("tiny:llama", 0, tmp_path)
    monkeypatch.setattr(run, "find_spec", lambda name: None if name == "llama_cpp" else object())
    left, skipped = run.present(("hasten", "llama.cpp"), subject)
    assert left == ["hasten"]
    assert "it needs llama_cpp" in skipped["llama.cpp"]
    with pytest.raises(ConfigError, match="llama_cpp"):
        run.present(("llama.cpp",), subject)
    monkeypatch.setattr(run, "find_spec", lambda name: object())
    assert "reads GGUF files" in run.present(("hasten", "llama.cpp"), subject)[1]["llama.cpp"]


def test_the_command_refuses_a_list_that_is_none():
    got = CliRunner().invoke(bench, ["serve", "--concurrency", "1,x"])
    assert isinstance(got.exception, ConfigError)
    assert "concurrency = '1,x'" in str(got.exception)


@pytest.mark.parametrize("command", ["train", "generate", "serve", "ops"])
def test_help_has_an_example(command: str):
    got = CliRunner().invoke(bench, [command, "--help"])
    assert got.exit_code == 0
    assert f"hasten bench {command}" in got.output.split("xample", 1)[1]


def test_kinds_give_whole_command_lines():
    for name, kind in CONTENDERS.items():
        command = kind.command("model", 8123, 512, 2)
        assert "8123" in command, name
        assert not any("{" in part for part in command)
        json.dumps(kind.extra)

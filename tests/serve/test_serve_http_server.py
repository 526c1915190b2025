"""The server as a process: addresses, signals, metrics, the page, and the command that starts it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from http_world import MODEL, serving
from typer import Typer
from typer.testing import CliRunner

from hasten.base.errors import ConfigError
from hasten.serve.command import serve
from hasten.serve.http.server import bind, url_of

HELLO = {"model": MODEL, "messages": [{"role": "user", "content": "say hello"}]}
FOREVER = {"model": MODEL, "messages": [{"role": "user", "content": "forever"}], "stream": True}


@contextmanager
def process(drain_s: float, step_s: float = 0.0) -> Iterator[tuple[subprocess.Popen[str], str]]:
    code = f"import http_world; http_world.main({drain_s}, {step_s})"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=Path(__file__).parent, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert child.stdout is not None
        url = child.stdout.readline().strip()
        assert url, child.communicate()
        yield child, url
    finally:
        child.kill()
        child.communicate()


def lines_of(response: httpx2.Response) -> Iterator[Any]:
    for line in response.iter_lines():
        if line.startswith("data: {"):
            yield json.loads(line[6:])


def test_a_signal_ends_the_server_with_zero() -> None:
    """What can finish in time does, the rest ends with an error object, and the exit code is 0."""
    with process(drain_s=3.0, step_s=0.01) as (child, url), httpx2.Client(base_url=url, timeout=20) as client:
        short = HELLO | {"stream": True, "messages": [{"role": "user", "content": "say " + "steady " * 4}]}
        with (
            client.stream("POST", "/v1/chat/completions", json=FOREVER) as endless,
            client.stream("POST", "/v1/chat/completions", json=short) as response,
        ):
            chunks, endless_chunks = lines_of(response), lines_of(endless)
            text = next(chunks)["choices"][0]["delta"].get("content") or ""
            next(endless_chunks)
            child.send_signal(signal.SIGTERM)
            text += "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)
            last = list(endless_chunks)[-1]
        assert text == "steady " * 4
        assert last["error"]["code"] == "shutting_down"
        _, said = child.communicate(timeout=20)
        assert (child.returncode, said) == (0, "")
        with pytest.raises(httpx2.ConnectError):
            client.get("/health")


def test_a_port_in_use_and_addresses_that_are_none() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(
            ConfigError, match=f"port {port} of 127.0.0.1 is in use; give another with --port"
        ):
            bind("127.0.0.1", port)
    with pytest.raises(ConfigError, match="no address of this machine"):
        bind("203.0.113.7", 0)
    with pytest.raises(ConfigError, match="no address of this machine"):
        bind("no such host", 0)
    for host, shown in (("0.0.0.0", r"http://127\.0\.0\.1:\d+"), ("::1", r"http://\[::1\]:\d+")):
        bound = bind(host, 0)
        assert re.fullmatch(shown, url_of(bound))
        bound.close()


def test_metrics_have_the_names_that_dashboards_know() -> None:
    with serving() as world:
        for _ in range(2):
            world.http.post("/v1/chat/completions", json=HELLO | {"n": 2})
        world.http.post("/v1/chat/completions", json={})
        page = world.http.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain")
        values = dict(re.findall(r"^(hasten:\S+) (\S+)$", page.text, re.MULTILINE))
        label = f'{{model_name="{MODEL}"}}'
        assert float(values[f"hasten:num_requests_running{label}"]) == 0
        assert float(values[f"hasten:num_requests_waiting{label}"]) == 0
        assert float(values[f"hasten:kv_cache_usage_perc{label}"]) == 0
        assert float(values[f"hasten:generation_tokens_total{label}"]) == 4 * (len("hello") + 1)
        assert float(values[f"hasten:prompt_tokens_total{label}"]) > 0
        assert f"hasten:prefix_cache_queries_total{label}" in values
        assert f"hasten:prefix_cache_hits_total{label}" in values
        assert (
            float(values[f'hasten:request_success_total{{finished_reason="stop",model_name="{MODEL}"}}']) == 4
        )
        for name in (
            *("time_to_first_token_seconds", "e2e_request_latency_seconds"),
            *("request_prompt_tokens", "request_generation_tokens"),
        ):
            assert float(values[f"hasten:{name}_count{label}"]) == 4, name
        assert float(values[f"hasten:request_queue_time_seconds_count{label}"]) > 0
        assert float(values[f"hasten:inter_token_latency_seconds_count{label}"]) == 4 * len("hello")
        assert float(values[f"hasten:iteration_tokens_total_count{label}"]) > 0
        counted = 'hasten:http_requests_total{{path="/v1/chat/completions",status="{}"}}'
        assert float(values[counted.format(200)]) == 2
        assert float(values[counted.format(400)]) == 1
        openmetrics = world.http.get(
            "/metrics", headers={"accept": "application/openmetrics-text; version=1.0.0"}
        )
        assert openmetrics.headers["content-type"].startswith("application/openmetrics-text")


def test_the_page_needs_nothing_from_elsewhere() -> None:
    with serving() as world:
        page = world.http.get("/")
        assert page.headers["content-type"].startswith("text/html")
        assert "default-src 'none'" in page.headers["content-security-policy"]
        assert not re.search(r"https?://|src=|@import|url\(", page.text)
        assert "innerHTML" not in page.text
        assert "/v1/chat/completions" in page.text
        assert world.http.head("/health").status_code == 200


def test_the_official_client_comes_again_where_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's mistake is sent once; the client would send a 429 or a 500 three times."""
    with serving() as world:
        with pytest.raises(openai.BadRequestError):
            world.client(max_retries=2).completions.create(model=MODEL, prompt="x" * 3000)
        page = world.http.get("/metrics").text
        assert 'hasten:http_requests_total{path="/v1/completions",status="400"} 1.0' in page


@pytest.mark.e2e
def test_the_command_serves_a_folder(small_model_folder: Path, tmp_path: Path) -> None:
    """A real model behind the real command: greedy completions are transformers' own."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}{% endfor %}:")
    command = [
        sys.executable,
        "-m",
        "hasten",
        "serve",
        str(small_model_folder),
        "--port",
        "0",
        "--weights",
        "float32",
    ]
    command += ["--cache", "float32", "--context", "256", "--name", "tiny", "--chat-template", str(template)]
    command += ["--api-key", "sesame", "--access-log"]
    environment = os.environ | {"HASTEN_CACHE_DIR": str(tmp_path)}
    child = subprocess.Popen(command, text=True, stderr=subprocess.PIPE, env=environment)
    try:
        assert child.stderr is not None
        said = []
        while not said or not said[-1].startswith("ready: "):
            said.append(child.stderr.readline())
            assert said[-1], said
        url = re.findall(r"ready: (http://127\.0\.0\.1:\d+)", said[-1])[0]
        assert any(line.startswith("tiny: context 256 tokens") for line in said)
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="sesame", max_retries=0)
        with client:
            greedy = {"model": "tiny", "max_tokens": 12, "temperature": 0}
            answer = client.completions.create(prompt="hello there", **greedy)
            chat = client.chat.completions.create(
                model="tiny", messages=[{"role": "user", "content": "hello there"}], max_tokens=5
            )
        assert chat.usage.prompt_tokens == len("hello there:")
        tokenizer = AutoTokenizer.from_pretrained(small_model_folder)
        model = AutoModelForCausalLM.from_pretrained(small_model_folder)
        prompt = tokenizer("hello there", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            expected = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1] :]
        assert answer.choices[0].text == tokenizer.decode(expected, skip_special_tokens=True)
        child.send_signal(signal.SIGTERM)
        _, log = child.communicate(timeout=20)
        assert child.returncode == 0
        requests = [line for line in log.splitlines() if "127.0.0.1" in line]
        assert [re.findall(r'"(\S+ \S+) HTTP/1.1" (\d+)', line) for line in requests] == [
            [("POST /v1/completions", "200")],
            [("POST /v1/chat/completions", "200")],
        ]
        assert "hello" not in log
        assert "sesame" not in log
    finally:
        child.kill()
        child.communicate()


def test_without_the_extra_the_command_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hasten.serve.http.server")
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    app = Typer()
    app.command()(serve)
    result = CliRunner().invoke(app, ["smollm2-135m"])
    assert isinstance(result.exception, ConfigError)
    assert str(result.exception) == "hasten serve needs uvicorn: pip install 'hasten[serve]'"


def test_help_has_an_example() -> None:
    app = Typer()
    app.command()(serve)
    result = CliRunner().invoke(app, ["--help"])
    assert result.exit_code == 0
    for option in ("--port", "--host", "--api-key", "--max-queue", "--context", "--drain", "--embeddings"):
        assert option in result.output
    assert "hasten serve smollm2-135m" in result.output

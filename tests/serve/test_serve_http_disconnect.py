"""A client that hangs up is noticed in every state, and its blocks are free within a step."""

from __future__ import annotations

import json
import socket
import time
from typing import Any

import openai
import pytest
from http_world import END, MODEL, ScriptedRunner, World, serving, until

from hasten.serve.engine import EngineSettings
from hasten.serve.http.limits import HttpSettings, Limits


def connect(
    world: World, text: str, *, stream: bool, path: str = "/v1/chat/completions", **more: Any
) -> socket.socket:
    """A request on a bare socket, sent whole."""
    host, _, port = world.url.removeprefix("http://").partition(":")
    wanted = (
        {"prompt": text} if path == "/v1/completions" else {"messages": [{"role": "user", "content": text}]}
    )
    body = json.dumps({"model": MODEL, "stream": stream} | wanted | more).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: {host}:{port}\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(head.encode() + body)
    return connection


def running(world: World) -> int:
    return world.engine.stats().running


@pytest.mark.parametrize("stream", [True, False])
def test_while_tokens_come(stream: bool) -> None:
    with serving() as world:
        world.runner.step_s = 0.002
        connection = connect(world, "forever", stream=stream)
        assert until(lambda: world.engine.stats().generated_tokens > 3)
        connection.close()
        assert world.idle()
        steps = world.runner.steps
        assert world.engine.stats().finished == {"cancelled": 1}
        time.sleep(0.05)
        assert world.runner.steps == steps


@pytest.mark.parametrize("stream", [True, False])
def test_while_the_prompt_is_read(stream: bool) -> None:
    runner = ScriptedRunner(context_tokens=2048, blocks=64, step_tokens=16)
    with serving(runner=runner) as world:
        world.runner.step_s = 0.005
        connection = connect(world, "x" * 1500, stream=stream)
        assert until(lambda: world.runner.steps > 3)
        assert world.engine.stats().generated_tokens == 0
        connection.close()
        assert world.idle(2.0)
        # The prompt alone would take some 95 steps.
        assert world.runner.steps < 80


@pytest.mark.parametrize("stream", [True, False])
def test_while_it_waits_in_the_queue(stream: bool) -> None:
    with serving(engine_settings=EngineSettings(max_sequences=1, eos_tokens=(END,))) as world:
        world.runner.step_s = 0.002
        first = connect(world, "forever", stream=True)
        assert until(lambda: running(world) == 1)
        second = connect(world, "say late", stream=stream)
        assert until(lambda: world.engine.stats().waiting == 1)
        second.close()
        assert until(lambda: world.engine.stats().waiting == 0, 2.0)
        assert running(world) == 1
        assert world.engine.stats().finished == {"cancelled": 1}
        first.close()
        assert world.idle()


def test_within_one_step() -> None:
    """The step that runs when the client leaves is the last that has its rows."""
    with serving() as world:
        connection = connect(world, "forever", stream=True)
        assert until(lambda: world.engine.stats().generated_tokens > 3)
        world.runner.gate.clear()
        assert until(lambda: world.runner.held)
        steps = world.runner.steps
        connection.close()
        time.sleep(0.2)  # the loop notices while the step is held
        world.runner.gate.set()
        assert world.idle(2.0)
        assert world.runner.steps == steps + 1


def test_several_prompts_and_choices_leave_together() -> None:
    with serving() as world:
        world.runner.step_s = 0.002
        connection = connect(
            world, "", stream=True, path="/v1/completions", prompt=["a", "b", "c"], n=2, max_tokens=400
        )
        assert until(lambda: running(world) == 6)
        connection.close()
        assert world.idle()


def test_a_client_that_leaves_in_the_middle_of_its_body() -> None:
    with serving() as world:
        host, _, port = world.url.removeprefix("http://").partition(":")
        connection = socket.create_connection((host, int(port)), timeout=10)
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n")
        connection.sendall(b"Content-Length: 1000\r\n\r\n{")
        connection.close()
        messages = [{"role": "user", "content": "say still here"}]
        answer = world.client().chat.completions.create(model=MODEL, messages=messages)
        assert answer.choices[0].message.content == "still here"


def test_a_client_that_does_not_finish_its_body() -> None:
    with serving(HttpSettings(limits=Limits(body_s=0.1))) as world:
        host, _, port = world.url.removeprefix("http://").partition(":")
        with socket.create_connection((host, int(port)), timeout=10) as connection:
            connection.sendall(
                b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
            )
            connection.sendall(b"Content-Length: 1000\r\n\r\n{")
            answer = b""
            while piece := connection.recv(4096):
                answer += piece
        assert answer.startswith(b"HTTP/1.1 408")
        assert b"did not come within 0.1 s" in answer


def test_the_official_client_closes_its_stream() -> None:
    with serving() as world:
        world.runner.step_s = 0.002
        messages = [{"role": "user", "content": "forever"}]
        with world.client() as client:
            stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
            for _, _chunk in zip(range(5), stream, strict=False):
                pass
            stream.close()
            assert world.idle()


def test_a_silent_stream_is_kept_alive() -> None:
    with serving(HttpSettings(keep_alive_s=0.05)) as world:
        world.runner.gate.clear()
        connection = connect(world, "say now", stream=True)
        seen = b""
        while seen.count(b": still working") < 2:
            seen += connection.recv(4096)
        assert b"200 OK" in seen
        assert b"data:" not in seen
        world.runner.gate.set()
        while b"[DONE]" not in seen:
            seen += connection.recv(4096)
        connection.close()
        text = "".join(
            json.loads(line[6:])["choices"][0]["delta"].get("content") or ""
            for line in seen.decode().splitlines()
            if line.startswith("data: {")
        )
        assert text == "now"
        messages = [{"role": "user", "content": "say comments are skipped"}]
        world.runner.step_s = 0.06
        with world.client() as client:
            chunks = client.chat.completions.create(model=MODEL, messages=messages, stream=True, max_tokens=3)
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == "com"


def test_draining_finishes_what_runs_and_refuses_what_comes() -> None:
    with serving(HttpSettings(drain_s=5.0)) as world:
        world.runner.step_s = 0.01
        messages = [{"role": "user", "content": "say " + "steady " * 6}]
        with world.client() as client:
            stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
            text = next(stream).choices[0].delta.content or ""
            world.server.handle_exit(15, None)
            assert until(lambda: world.state.draining)
            text += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert text == "steady " * 6
            with pytest.raises((openai.APIConnectionError, openai.InternalServerError)):
                client.chat.completions.create(model=MODEL, messages=messages)


def test_what_does_not_end_in_time_is_ended_with_an_error_object() -> None:
    with serving(HttpSettings(drain_s=0.3)) as world:
        world.runner.step_s = 0.005
        messages = [{"role": "user", "content": "forever"}]
        with world.client() as client:
            stream = client.chat.completions.create(model=MODEL, messages=messages, stream=True)
            next(stream)
            world.server.handle_exit(15, None)
            with pytest.raises(openai.APIError, match="shutting down"):
                for _chunk in stream:
                    pass

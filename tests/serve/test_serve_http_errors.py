"""Whatever a client sends: a 2xx or a 4xx with an error object, and the server goes on."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx2
import openai
import pytest
from http_world import END, MODEL, World, serving, until
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from hasten.base.errors import ConfigError
from hasten.serve.engine import EngineSettings
from hasten.serve.http.limits import HttpSettings, Limits
from hasten.serve.http.protocol import ChatBody, CompletionBody, EmbeddingBody

CHAT = {"model": MODEL, "messages": [{"role": "user", "content": "say ok"}]}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving(HttpSettings(limits=Limits(body_bytes=20_000), drain_s=2.0)) as world:
        yield world


def post(world: World, path: str, body: Any, **headers: str) -> httpx2.Response:
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"content-type": "application/json"} | {
        name.replace("_", "-"): text for name, text in headers.items()
    }
    return world.http.post(path, content=data, headers=headers)


def error_of(response: httpx2.Response) -> dict[str, Any]:
    """The error object, whose shape is checked."""
    body = response.json()
    assert list(body) == ["error"]
    error = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str)
    assert error["message"]
    return error


@pytest.mark.parametrize(
    ("change", "param", "message"),
    [
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": None}, "messages", "array"),
        ({"messages": [{"content": "x"}]}, "messages[0].role", "required"),
        ({"messages": [{"role": "boss", "content": "x"}]}, "messages[0].role", "boss"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "5"),
        ({"messages": [{"role": "user"}]}, "messages[0].content", "required"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
            "messages[0].content[0]",
            "image_url",
        ),
        ({"temperature": "hot"}, "temperature", "hot"),
        ({"temperature": 2.5}, "temperature", "less than or equal to 2"),
        ({"temperature": True}, "temperature", "number"),
        ({"top_p": -0.1}, "top_p", "greater"),
        ({"n": 0}, "n", "greater"),
        ({"n": 1.5}, "n", "integer"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_tokens": 10**30}, "max_tokens", "less"),
        ({"seed": 2**70}, "seed", "less"),
        ({"stop": 5}, "stop", "string or a list"),
        ({"stop": "x" * 2000}, "stop", "1024"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "token ids"),
        ({"logit_bias": {"3": 1000}}, "logit_bias[3]", "100"),
        ({"top_logprobs": 3}, "top_logprobs", "logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "20"),
        ({"stream": "yes"}, "stream", "boolean"),
        ({"tools": [{"type": "search"}]}, "tools[0].type", "function"),
        ({"tool_choice": "required"}, "tool_choice", "needs tools"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "schema"),
        ({"response_format": {"type": "json_object"}}, "response_format", "not supported"),
        ({"reasoning_effort": "high"}, "reasoning_effort", "template"),
        ({"modalities": ["audio"]}, "modalities", "text only"),
        ({"store": True}, "store", "nothing is stored"),
        ({"functions": [{"name": "f"}]}, "functions", "tools"),
        ({"web_search_options": {}}, "web_search_options", "no web search"),
    ],
)
def test_a_field_that_is_wrong_is_named(
    world: World, change: dict[str, Any], param: str, message: str
) -> None:
    response = post(world, "/v1/chat/completions", CHAT | change)
    error = error_of(response)
    assert response.status_code == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == param
    assert message in error["message"]


def test_what_asks_for_nothing_is_taken(world: World) -> None:
    harmless = {
        "store": False,
        "metadata": {"a": "b"},
        "modalities": ["text"],
        "service_tier": "auto",
        "user": "u",
        "prediction": {"type": "content", "content": "x"},
        "verbosity": "medium",
        "reasoning_effort": "none",
        "stop": None,
        "tools": None,
        "stream": None,
    }
    assert post(world, "/v1/chat/completions", CHAT | harmless).status_code == 200


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"text"', b"\xff\xfe{}", b'{"a":' * 3000, b'{"n": ' + b"9" * 5000 + b"}",
     b"{}", b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"temperature": NaN}'],
)  # fmt: skip
@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/v1/embeddings"])
def test_bodies_that_are_no_request(world: World, path: str, body: bytes) -> None:
    response = post(world, path, body)
    assert response.status_code == 400
    error_of(response)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": [True] * 9_000}),
        ("/v1/completions", {"prompt": [[True]] * 9_000}),
        ("/v1/embeddings", {"input": [1.5] * 9_000}),
        ("/v1/chat/completions", {"messages": [1] * 9_000}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 9_000}]}),
        ("/v1/chat/completions", CHAT | {"logit_bias": dict.fromkeys(map(str, range(9_000)), "x")}),
        ("/v1/chat/completions", CHAT | {"tools": [1] * 9_000}),
    ],
)
def test_many_faults_make_few_complaints(path: str, body: dict[str, Any]) -> None:
    """A complaint about each of 9,000 items, or a million, would take seconds in which nobody is served."""
    kind = {"/v1/completions": CompletionBody, "/v1/embeddings": EmbeddingBody}.get(path, ChatBody)
    with pytest.raises(ValidationError) as caught:
        kind.model_validate_json(json.dumps(body))
    assert caught.value.error_count() <= 3


def test_paths_and_methods(world: World) -> None:
    for path in ("/v2", "/v1/chat", "/v1/chat/completions/", "/v1", "/favicon.ico", "/v1/models/"):
        response = world.http.get(path)
        assert response.status_code == 404, path
        error_of(response)
    response = world.http.get("/v1/completions")
    assert response.status_code == 405
    assert response.headers["allow"] == "POST"
    error_of(response)
    response = post(world, "/v1/completions", b"prompt=x", content_type="application/x-www-form-urlencoded")
    assert response.status_code == 415
    assert "application/json" in error_of(response)["message"]


def test_models(world: World) -> None:
    listed = world.client().models.list()
    assert [model.id for model in listed] == [MODEL]
    assert world.client().models.retrieve(MODEL).owned_by == "hasten"
    with pytest.raises(openai.NotFoundError) as caught:
        world.client().models.retrieve("scriptet")
    assert caught.value.code == "model_not_found"
    with pytest.raises(openai.NotFoundError, match="did you mean 'scripted'"):
        world.client().completions.create(model="scriptet", prompt="x")
    with pytest.raises(openai.BadRequestError, match="no model for embeddings"):
        world.client().embeddings.create(model=MODEL, input="x")
    without_name = post(world, "/v1/completions", {"prompt": "x"})
    assert without_name.json()["model"] == MODEL
    assert world.http.get("/v1/models").json()["data"][0]["max_model_len"] == world.runner.context_tokens


def test_the_body_has_a_limit(world: World) -> None:
    large = {"prompt": "x" * 30_000}
    response = post(world, "/v1/completions", large)
    assert response.status_code == 413
    assert error_of(response)["code"] == "body_too_large"
    pieces = iter([b'{"prompt": "', *[b"x" * 1000] * 30, b'"}'])
    response = world.http.post(
        "/v1/completions", content=pieces, headers={"content-type": "application/json"}
    )
    assert response.status_code == 413
    assert post(world, "/v1/chat/completions", CHAT).status_code == 200


def test_a_request_is_named(world: World) -> None:
    assert (
        post(world, "/v1/chat/completions", CHAT, x_request_id="mine-7").headers["x-request-id"] == "mine-7"
    )
    made = post(world, "/nowhere", {}, x_request_id="x" * 500).headers["x-request-id"]
    assert len(made) == 32
    with pytest.raises(openai.BadRequestError) as caught:
        world.client().completions.create(model=MODEL, prompt="")
    assert caught.value.request_id


def test_strict_refuses_what_is_unknown() -> None:
    with serving(HttpSettings(strict=True)) as world:
        assert post(world, "/v1/chat/completions", CHAT | {"top_k": 3}).status_code == 200
        error = error_of(post(world, "/v1/chat/completions", CHAT | {"temprature": 1}))
        assert error["param"] == "temprature"
        assert "did you mean 'temperature'" in error["message"]
        nested = CHAT | {"messages": [{"role": "user", "content": "x", "colour": "red"}]}
        assert error_of(post(world, "/v1/chat/completions", nested))["param"] == "messages.colour"


def test_the_key_opens_the_api_and_nothing_else_does() -> None:
    with serving(HttpSettings(api_keys=("sesame", "other"))) as world:
        for headers in (
            {},
            {"authorization": "Bearer wrong"},
            {"authorization": "sesame"},
            {"authorization": "Bearer"},
        ):
            response = world.http.get("/v1/models", headers=headers)
            assert response.status_code == 401
            assert error_of(response)["code"] == "invalid_api_key"
        for headers in ({"authorization": "Bearer ses\xe9me".encode("latin-1")},):
            assert world.http.get("/v1/models", headers=headers).status_code == 401
        with pytest.raises(openai.AuthenticationError):
            world.client(api_key="wrong").models.list()
        assert world.client(api_key="sesame").models.list().data[0].id == MODEL
        assert world.client(api_key="other").models.list().data[0].id == MODEL
        for path in ("/", "/health", "/metrics"):
            assert world.http.get(path).status_code == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"api_keys": ("",)}, "API key is empty"),
        ({"api_keys": ("two\nlines",)}, "no header can carry"),
        ({"allow_origins": ("https://app.example/",)}, "did you mean https://app.example?"),
        ({"allow_origins": ("app.example",)}, "a scheme and a host"),
    ],
)
def test_settings_that_would_not_do_what_they_seem_to(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        HttpSettings(**settings)


def test_pages_of_other_sites_stay_outside(world: World) -> None:
    own = post(world, "/v1/chat/completions", CHAT, origin=world.url)
    assert own.status_code == 200
    assert "access-control-allow-origin" not in own.headers
    for headers in ({"origin": "https://evil.example"}, {"origin": "null"},
                    {"origin": "http://evil.example:80", "host": "evil.example:80"}):  # fmt: skip
        response = post(world, "/v1/chat/completions", CHAT, **headers)
        assert response.status_code == 403
        assert "--allow-origin" in error_of(response)["message"]
    with serving(HttpSettings(allow_origins=("https://app.example",))) as open_world:
        response = post(open_world, "/v1/chat/completions", CHAT, origin="https://app.example")
        assert response.headers["access-control-allow-origin"] == "https://app.example"
        asked = open_world.http.options(
            "/v1/chat/completions",
            headers={
                "origin": "https://app.example",
                "access-control-request-method": "POST",
                "access-control-request-headers": "authorization, content-type",
            },
        )
        assert asked.status_code == 200


def test_a_full_queue_says_when_to_come_again() -> None:
    with serving(engine_settings=EngineSettings(max_sequences=1, max_queue=2, eos_tokens=(END,))) as world:
        world.runner.gate.clear()
        client = world.http
        with ThreadPoolExecutor(6) as threads:
            waiting = []
            for count in range(3):
                waiting.append(threads.submit(client.post, "/v1/chat/completions", json=CHAT))
                assert until(lambda count=count: sum(_counts(world)) == count + 1)
            refused = client.post("/v1/chat/completions", json=CHAT)
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert error_of(refused)["type"] == "rate_limit_error"
            streamed = client.post("/v1/chat/completions", json=CHAT | {"stream": True})
            assert streamed.status_code == 429
            world.runner.gate.set()
            assert [item.result().status_code for item in waiting] == [200] * 3
        assert world.idle()


def _counts(world: World) -> tuple[int, int]:
    stats = world.engine.stats()
    return stats.running, stats.waiting


def test_several_prompts_are_taken_together_or_not_at_all() -> None:
    with serving(engine_settings=EngineSettings(max_sequences=1, max_queue=2, eos_tokens=(END,))) as world:
        world.runner.gate.clear()
        response = post(world, "/v1/completions", {"prompt": ["a", "b", "c", "d", "e"], "max_tokens": 2})
        assert response.status_code == 429
        world.runner.gate.set()
        assert world.idle()


def test_a_fault_of_the_model_is_an_error_for_its_requests_alone() -> None:
    with serving() as world:
        world.runner.fail_on = "abcda"
        messages = [{"role": "user", "content": "forever"}]
        with pytest.raises(openai.InternalServerError) as caught:
            world.client().chat.completions.create(model=MODEL, messages=messages)
        assert caught.value.code == "generation_failed"
        chunks = world.client().chat.completions.create(model=MODEL, messages=messages, stream=True)
        text = "".join(next(chunks).choices[0].delta.content or "" for _ in range(5))
        assert text == "abcd"
        with pytest.raises(openai.APIError, match="told to fail"):
            list(chunks)
        world.runner.fail_on = None
        assert post(world, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"] == "ok"
        assert world.idle()


def test_a_schema_that_cannot_be_compiled() -> None:
    def refuse(kind: str, schema: Any) -> None:
        raise ConfigError("no such type: colour")

    with serving(grammar=refuse) as world:
        wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
        error = error_of(post(world, "/v1/chat/completions", CHAT | {"response_format": wanted}))
        assert error["param"] == "response_format.json_schema.schema"
        assert "no such type: colour" in error["message"]


def test_a_chat_without_a_template_and_one_that_it_refuses() -> None:
    with serving(template=None) as world:
        error = error_of(post(world, "/v1/chat/completions", CHAT))
        assert error["code"] == "no_chat_template"
        assert post(world, "/v1/completions", {"prompt": "x"}).status_code == 200
    refusing = "{{ raise_exception('roles must alternate') }}"
    with serving(template=refusing) as world:
        response = post(world, "/v1/chat/completions", CHAT)
        assert response.status_code == 400
        assert "roles must alternate" in error_of(response)["message"]


_LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=20),
    st.sampled_from(["user", "assistant", "function", "auto", "json_object", MODEL]),
)
_VALUES = st.recursive(
    _LEAVES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_NAMES = [
    *(
        "model",
        "messages",
        "prompt",
        "input",
        "max_tokens",
        "max_completion_tokens",
        "temperature",
        "top_p",
        "n",
    ),
    *(
        "stop",
        "seed",
        "presence_penalty",
        "frequency_penalty",
        "logit_bias",
        "stream",
        "stream_options",
        "top_k",
    ),
    *(
        "min_p",
        "repetition_penalty",
        "ignore_eos",
        "min_tokens",
        "stop_token_ids",
        "logprobs",
        "top_logprobs",
    ),
    *(
        "response_format",
        "tools",
        "tool_choice",
        "parallel_tool_calls",
        "chat_template_kwargs",
        "echo",
        "best_of",
    ),
    *(
        "suffix",
        "encoding_format",
        "dimensions",
        "functions",
        "modalities",
        "reasoning_effort",
        "verbosity",
        "extra",
    ),
]
_SOUND = st.sampled_from(
    [
        {"messages": [{"role": "user", "content": "say ok"}], "max_tokens": 3},
        {"prompt": "x", "max_tokens": 3},
        {"input": "x"},
        {},
    ]
)


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(
    path=st.sampled_from(["/v1/chat/completions", "/v1/completions", "/v1/embeddings"]),
    sound=_SOUND,
    change=st.dictionaries(st.sampled_from(_NAMES), _VALUES, max_size=4),
    cut=st.one_of(st.none(), st.integers(0, 60)),
)
def test_fuzz(
    world: World, path: str, sound: dict[str, Any], change: dict[str, Any], cut: int | None
) -> None:
    data = json.dumps(sound | change).encode()
    response = post(world, path, data if cut is None else data[:cut])
    assert response.status_code == 200 or 400 <= response.status_code < 500, response.text
    if response.status_code != 200:
        error_of(response)


def test_after_all_that_the_server_answers(world: World) -> None:
    """Stands last in the file: it looks back at the fuzz run."""
    assert world.idle()
    assert post(world, "/v1/chat/completions", CHAT).json()["choices"][0]["message"]["content"] == "ok"
    assert world.http.get("/health").json() == {"status": "ok"}

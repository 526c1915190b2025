"""Chat completions, seen through the official client: whole, streamed, asynchronous, many at once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from http_world import CHATML, END, MODEL, TOKENIZER, VOCAB, World, digest, serving
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import TypeAdapter

from hasten.serve.engine import EngineSettings
from hasten.serve.grammar import Grammars
from hasten.serve.http.messages import render_prompt
from hasten.serve.http.protocol import ChatBody
from hasten.serve.http.template import ChatTemplate

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Weather of a place",
        "parameters": {
            "type": "object",
            "properties": {"place": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["place"],
        },
    },
}


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving() as world:
        yield world


def ask(world: World, text: str, **more: Any) -> Any:
    return world.client().chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": text}], **more
    )


def prompt_of(text: str) -> str:
    return ChatTemplate(CHATML).render([{"role": "user", "content": text}])


def test_a_whole_answer(world: World) -> None:
    answer = ask(world, "hello")
    prompt = prompt_of("hello")
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.model == MODEL
    choice = answer.choices[0]
    assert choice.index == 0
    assert choice.finish_reason == "stop"
    assert choice.message.role == "assistant"
    assert choice.message.content == f"I read {digest(prompt)}."
    assert choice.message.tool_calls is None
    assert choice.logprobs is None
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(prompt).ids)
    assert answer.usage.completion_tokens == len(choice.message.content) + 1
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_a_streamed_answer_is_the_whole_one(world: World) -> None:
    chunks = list(ask(world, "say Grüße, 世界 😀!", stream=True))
    assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
    assert len({(chunk.id, chunk.created, chunk.model) for chunk in chunks}) == 1
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    assert [chunk.choices[0].finish_reason for chunk in chunks][-2:] == [None, "stop"]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == "Grüße, 世界 😀!"
    assert "\ufffd" not in "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert all(chunk.usage is None for chunk in chunks)


def test_usage_comes_once_in_a_chunk_without_choices(world: World) -> None:
    chunks = list(ask(world, "say yes", stream=True, stream_options={"include_usage": True}))
    with_usage = [chunk for chunk in chunks if chunk.usage is not None]
    assert with_usage == chunks[-1:]
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == len("yes") + 1
    long = "say yes" + " indeed" * 10
    cached = [
        list(ask(world, long, stream=True, stream_options={"include_usage": True}))[-1].usage
        for _ in range(2)
    ]
    assert [usage.prompt_tokens_details.cached_tokens for usage in cached] == [0, 64]


def test_the_shapes_are_those_of_the_official_types(world: World) -> None:
    """Every field that the official types require is there with its type; nothing is coerced."""
    body = {
        "model": MODEL,
        "messages": [{"role": "user", "content": "say hi"}],
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = world.http.post("/v1/chat/completions", json=body)
    TypeAdapter(ChatCompletion).validate_json(whole.content, strict=True)
    streamed = world.http.post("/v1/chat/completions", json=body | {"stream": True})
    assert streamed.headers["content-type"] == "text/event-stream; charset=utf-8"
    events = streamed.text.strip().split("\n\n")
    assert events[-1] == "data: [DONE]"
    for event in events[:-1]:
        TypeAdapter(ChatCompletionChunk).validate_json(event.removeprefix("data: "), strict=True)


def test_several_choices(world: World) -> None:
    answer = ask(world, "say both", n=3)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]
    assert {choice.message.content for choice in answer.choices} == {"both"}
    texts = ["", "", ""]
    ends = []
    for chunk in ask(world, "say both", n=3, stream=True):
        choice = chunk.choices[0]
        texts[choice.index] += choice.delta.content or ""
        if choice.finish_reason:
            ends.append(choice.index)
    assert texts == ["both"] * 3
    assert sorted(ends) == [0, 1, 2]


def test_length_and_stop(world: World) -> None:
    cut = ask(world, "forever", max_completion_tokens=7).choices[0]
    assert (cut.message.content, cut.finish_reason) == ("abcdabc", "length")
    assert ask(world, "forever", max_tokens=3).choices[0].message.content == "abc"
    stopped = ask(world, "say one two three", stop=["wo th", "never"]).choices[0]
    assert (stopped.message.content, stopped.finish_reason) == ("one t", "stop")
    near = "".join(
        chunk.choices[0].delta.content or "" for chunk in ask(world, "say one two", stop="two!", stream=True)
    )
    assert near == "one two"


def test_logprobs(world: World) -> None:
    answer = ask(world, "say é", logprobs=True, top_logprobs=2)
    content = answer.choices[0].logprobs.content
    assert bytes(byte for entry in content[:2] for byte in entry.bytes) == "é".encode()
    assert [len(entry.top_logprobs) for entry in content[:2]] == [2, 2]
    assert content[0].logprob == content[0].top_logprobs[0].logprob
    assert content[0].logprob > content[0].top_logprobs[1].logprob
    alone = ask(world, "say ab", logprobs=True).choices[0].logprobs.content
    assert [entry.token for entry in alone[:2]] == ["a", "b"]
    assert alone[0].top_logprobs == []
    streamed = [
        entry.token
        for chunk in ask(world, "say ab", logprobs=True, stream=True)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert streamed == [entry.token for entry in alone]


def test_parts_of_content_and_other_roles(world: World) -> None:
    answer = world.client().chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": "be brief"},
            {
                "role": "user",
                "content": [{"type": "text", "text": "first"}, {"type": "text", "text": "second"}],
            },
        ],
    )
    rendered = ChatTemplate(CHATML).render(
        [{"role": "system", "content": "be brief"}, {"role": "user", "content": "first\nsecond"}]
    )
    assert answer.choices[0].message.content == f"I read {digest(rendered)}."


def test_extra_keys_and_unknown_ones(world: World) -> None:
    extra = {
        "top_k": 5,
        "min_p": 0.0,
        "repetition_penalty": 1.1,
        "ignore_eos": False,
        "something_else": {"a": 1},
    }
    assert (
        ask(world, "say fine", extra_body=extra, seed=3, logit_bias={"5": 0.0}).choices[0].message.content
        == "fine"
    )
    assert (
        ask(world, "say aa", extra_body={"ignore_eos": True}, max_tokens=9).choices[0].finish_reason
        == "length"
    )


def test_keyword_arguments_of_the_template() -> None:
    template = "{{ messages[0].content }}{% if shout %} loud{% endif %}{{ '<|im_start|>assistant\\n' }}"
    with serving(template=template) as world:
        loud = ask(world, "x", extra_body={"chat_template_kwargs": {"shout": True}})
        assert loud.choices[0].message.content == f"I read {digest('x loud<|im_start|>assistant' + chr(10))}."
        with pytest.raises(openai.BadRequestError, match="may not set 'messages'"):
            ask(world, "x", extra_body={"chat_template_kwargs": {"messages": []}})


@pytest.mark.parametrize(
    "said",
    [
        '<tool_call>\n{"name": "weather", "arguments": {"place": "Köln"}}\n</tool_call>',
        '{"name": "weather", "parameters": {"place": "Köln"}}',
        '[{"name": "weather", "arguments": {"place": "Köln"}}]',
    ],
)
def test_a_tool_call_in_each_written_form(world: World, said: str) -> None:
    answer = ask(world, f"say {said}", tools=[WEATHER])
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content is None
    (call,) = choice.message.tool_calls
    assert call.type == "function"
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"place": "Köln"}


def test_streamed_tool_calls_have_an_index_and_a_head(world: World) -> None:
    said = "".join(
        f'<tool_call>{{"name": "weather", "arguments": {{"place": "{place}"}}}}</tool_call>'
        for place in "ABC"
    )
    calls: dict[int, dict[str, str]] = {}
    text, reasons = "", []
    for chunk in ask(world, f"say Let me look.{said}", tools=[WEATHER], stream=True):
        delta = chunk.choices[0].delta
        text += delta.content or ""
        reasons.append(chunk.choices[0].finish_reason)
        for call in delta.tool_calls or ():
            if call.id is not None:
                assert call.index == len(calls)
                assert (call.type, call.function.name) == ("function", "weather")
                calls[call.index] = {"id": call.id, "arguments": ""}
            calls[call.index]["arguments"] += call.function.arguments or ""
    assert text == "Let me look."
    assert reasons[-1] == "tool_calls"
    assert [json.loads(call["arguments"])["place"] for call in calls.values()] == ["A", "B", "C"]
    assert len({call["id"] for call in calls.values()}) == 3


def test_strict_functions_without_a_forced_call_are_noticed(world: World) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}
    body = {"messages": [{"role": "user", "content": "say x"}], "tools": [strict], "max_tokens": 1}
    for stream in (True, False):
        response = world.http.post("/v1/chat/completions", json=body | {"stream": stream})
        assert "tool_choice forces a call" in response.headers["x-hasten-notice"]
    plain = world.http.post("/v1/chat/completions", json=body | {"tools": [WEATHER]})
    assert "x-hasten-notice" not in plain.headers


def test_one_call_only_where_parallel_calls_are_off(world: World) -> None:
    said = '<tool_call>{"name": "weather", "arguments": {"place": "A"}}</tool_call>' * 3
    answer = ask(world, f"say {said}", tools=[WEATHER], parallel_tool_calls=False)
    assert len(answer.choices[0].message.tool_calls) == 1
    assert answer.choices[0].finish_reason == "tool_calls"
    assert world.idle()


def test_no_call_is_read_where_none_may_be_made(world: World) -> None:
    said = '{"name": "weather", "arguments": {}}'
    assert ask(world, f"say {said}", tools=[WEATHER], tool_choice="none").choices[0].message.content == said
    assert ask(world, f"say {said}").choices[0].message.content == said
    other = '{"name": "Bob", "age": 3}'
    assert ask(world, f"say {other}", tools=[WEATHER]).choices[0].message.content == other


def test_a_template_without_tools_gets_them_in_words(world: World) -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"place": "A"}'}}]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "Let me look.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        {"role": "user", "content": "And?"},
    ]
    body = ChatBody.model_validate_json(json.dumps({"messages": messages, "tools": [WEATHER]}))
    prompt = render_prompt(body, ChatTemplate(CHATML))
    system, user, assistant, last = prompt.split("<|im_end|>\n")[:4]
    assert system.startswith("<|im_start|>system\nBe brief.\n\n")
    assert json.dumps(WEATHER) in system
    assert user == "<|im_start|>user\nhi"
    assert assistant == (
        "<|im_start|>assistant\nLet me look.\n"
        '<tool_call>\n{"name": "weather", "arguments": {"place": "A"}}\n</tool_call>'
    )
    assert last == "<|im_start|>user\n<tool_response>\nrain\n</tool_response>\nAnd?"


class Recorder:
    """Stands for a grammar compiler; the constraint itself is that of no grammar."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    def __call__(self, kind: str, schema: Any) -> None:
        self.asked.append((kind, schema))


def test_constraints_reach_the_grammar() -> None:
    recorder = Recorder()
    with serving(grammar=recorder) as world:
        ask(world, "say {}", response_format={"type": "json_object"})
        schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
        ask(
            world,
            "say {}",
            response_format={"type": "json_schema", "json_schema": {"name": "x", "schema": schema}},
        )
        assert recorder.asked == [("json_object", None), ("json_schema", schema)]
        recorder.asked.clear()
        named = ask(
            world,
            'say {"place": "A"}',
            tools=[WEATHER],
            tool_choice={"type": "function", "function": {"name": "weather"}},
        )
        call = named.choices[0].message.tool_calls[0].function
        assert (call.name, call.arguments) == ("weather", '{"place": "A"}')
        assert recorder.asked == [("json_schema", WEATHER["function"]["parameters"])]
        recorder.asked.clear()
        ask(world, 'say [{"name": "weather", "arguments": {}}]', tools=[WEATHER], tool_choice="required")
        ((kind, forced),) = recorder.asked
        assert kind == "json_schema"
        assert forced["minItems"] == 1
        assert forced["items"]["properties"]["name"] == {"const": "weather"}
        with pytest.raises(openai.BadRequestError, match="no room for a tool call"):
            ask(world, "x", tools=[WEATHER], response_format={"type": "json_object"})


def test_a_conversation_with_tools_reaches_the_template() -> None:
    template = (
        "{% for m in messages %}{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}"
        "{% elif m.role == 'tool' %}[{{ m.tool_call_id }}: {{ m.content }}]{% else %}{{ m.content }}"
        "{% endif %}{% endfor %}{{ tools | tojson }}{{ '<|im_start|>assistant\\n' }}"
    )
    with serving(template=template) as world:
        answer = world.client().chat.completions.create(
            model=MODEL,
            messages=[
                {"role": "user", "content": "hi"},
                {
                    "role": "assistant",
                    "content": None,
                    "tool_calls": [
                        {
                            "id": "c1",
                            "type": "function",
                            "function": {"name": "weather", "arguments": '{"place":"A"}'},
                        }
                    ],
                },
                {"role": "tool", "tool_call_id": "c1", "content": "rain"},
            ],
            tools=[WEATHER],
        )
        rendered = f'hi{{"place": "A"}}[c1: rain]{json.dumps([WEATHER])}<|im_start|>assistant\n'
        assert answer.choices[0].message.content == f"I read {digest(rendered)}."


def test_constrained_answers_are_of_the_form_asked_for() -> None:
    """The model would rather say something else; only the grammar makes these answers."""
    schema = {
        "type": "object",
        "properties": {"colour": {"enum": ["red", "blue"]}, "sure": {"type": "boolean"}},
        "required": ["colour", "sure"],
        "additionalProperties": False,
    }
    names = ("paint", "describe")
    tools = [{"type": "function", "function": {"name": name, "parameters": schema}} for name in names]
    with serving(grammar=Grammars(TOKENIZER, [END], VOCAB).compile) as world:

        def check(text: str) -> None:
            value = json.loads(text)
            assert value["colour"] in ("red", "blue")
            assert isinstance(value["sure"], bool)
            assert len(value) == 2

        form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema, "strict": True}}
        for seed in range(3):
            answer = ask(world, "say no", response_format=form, seed=seed, temperature=1.5, max_tokens=200)
            assert answer.choices[0].finish_reason == "stop"
            check(answer.choices[0].message.content)
            named = {"type": "function", "function": {"name": "paint"}}
            answer = ask(world, "say no", tools=tools, tool_choice=named, seed=seed, temperature=1.5)
            call = answer.choices[0].message.tool_calls[0].function
            assert (answer.choices[0].finish_reason, call.name) == ("tool_calls", "paint")
            check(call.arguments)
            calls: dict[int, list[str]] = {}
            for chunk in ask(
                world, "say no", tools=tools, tool_choice="required", parallel_tool_calls=False, seed=seed,
                temperature=1.5, stream=True,
            ):  # fmt: skip
                assert not chunk.choices[0].delta.content
                for part in chunk.choices[0].delta.tool_calls or ():
                    calls.setdefault(part.index, []).append(part.function.name or part.function.arguments)
            assert list(calls) == [0]
            assert calls[0][0] in names
            check("".join(calls[0][1:]))
        broken = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "colour"}}}
        with pytest.raises(openai.BadRequestError, match="colour") as caught:
            ask(world, "x", response_format=broken)
        assert caught.value.param == "response_format.json_schema.schema"


@pytest.mark.parametrize(
    "settings", [{}, {"prefix_cache": False, "draft_tokens": 4}], ids=["plain", "drafts"]
)
def test_sixteen_clients_at_once_get_what_each_gets_alone(settings: dict[str, Any]) -> None:
    texts = [f"needle {number} " + "hay " * (number % 5) for number in range(16)]
    with serving(engine_settings=EngineSettings(eos_tokens=(END,), **settings)) as world:
        alone = [ask(world, text).choices[0].message.content for text in texts]
        assert len(set(alone)) == 16
        world.runner.step_s = 0.001

        async def together(stream: bool) -> list[str]:
            async with world.async_client() as client:

                async def one(text: str) -> str:
                    messages = [{"role": "user", "content": text}]
                    answer = await client.chat.completions.create(
                        model=MODEL, messages=messages, stream=stream
                    )
                    if not stream:
                        return answer.choices[0].message.content
                    return "".join([chunk.choices[0].delta.content or "" async for chunk in answer])

                return await asyncio.gather(*map(one, texts))

        before = world.runner.steps
        assert asyncio.run(together(stream=False)) == alone
        shared = world.runner.steps - before
        assert asyncio.run(together(stream=True)) == alone
        # One at a time would take a step for each token of each answer.
        assert shared < sum(map(len, alone)) / 2
        assert world.idle()

"""Reading tool calls out of text: every form, every cut, and what is no call stays text."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hasten.serve.http.protocol import ChatBody
from hasten.serve.http.tool_schema import forced_schema
from hasten.serve.http.tools import CallArguments, CallStart, ToolReader, Words

NAMES = ["weather", "add"]


def read(*pieces: str) -> tuple[str, list[tuple[str, str]]]:
    """Words, and calls with their arguments, of a text that comes in pieces."""
    reader = ToolReader(NAMES)
    found = [item for piece in pieces for item in reader.feed(piece)] + reader.finish()
    words = "".join(item.text for item in found if isinstance(item, Words))
    calls: list[tuple[str, str]] = []
    for item in found:
        if isinstance(item, CallStart):
            assert item.index == len(calls)
            calls.append((item.name, ""))
        elif isinstance(item, CallArguments):
            assert item.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + item.text)
    assert reader.calls == len(calls)
    return words, calls


CALL = '{"name": "weather", "arguments": {"place": "Köln}]", "days": [1, {"a": "\\"{"}]}}'
ARGUMENTS = '{"place": "Köln}]", "days": [1, {"a": "\\"{"}]}'


@pytest.mark.parametrize(
    ("text", "words", "calls"),
    [
        (f"<tool_call>\n{CALL}\n</tool_call>", "", [("weather", ARGUMENTS)]),
        (f"Let me see.\n<tool_call>{CALL}</tool_call>", "Let me see.\n", [("weather", ARGUMENTS)]),
        (f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL}</tool_call>", "", [("weather", ARGUMENTS)] * 2),
        (f"<tool_call>{CALL}</tool_call> Done.", " Done.", [("weather", ARGUMENTS)]),
        (f"  {CALL}", "", [("weather", ARGUMENTS)]),
        (f"<|python_tag|>{CALL}; {CALL}", "", [("weather", ARGUMENTS)] * 2),
        (f"[TOOL_CALLS] [{CALL}, {CALL}]", "", [("weather", ARGUMENTS)] * 2),
        (f"[{CALL}]", "", [("weather", ARGUMENTS)]),
        ('{"type": "function", "name": "add", "parameters": {"a": 1}}', "", [("add", '{"a": 1}')]),
        ('{"parameters": {"a": 1}, "name": "add"}', "", [("add", '{"a": 1}')]),
        ('{"name": "add", "arguments": "{\\"a\\": 1}"}', "", [("add", '{"a": 1}')]),
        ('{"name": "add"}', "", [("add", "{}")]),
        ('{"name": "add", "arguments": null}', "", [("add", "{}")]),
        ('{"name": "add", "arguments": {}, "id": 7 }', "", [("add", "{}")]),
        ('{"function": {"name": "add", "arguments": {"a": 1}}}', "", [("add", '{"a": 1}')]),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call>', "", [("other", "{}")]),
        # A text that was cut: what came of the call is passed on.
        ('{"name": "add", "arguments": {"a": 1', "", [("add", '{"a": 1')]),
    ],
)
def test_calls(text: str, words: str, calls: list[Any]) -> None:
    assert read(text) == (words, calls)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "plain words",
        "a < b and <tool",
        "<tool_call>",
        "<tool_call>soon</tool_call>",
        "<tool_call>{broken</tool_call>",
        '{"name": "Bob", "age": 3}',
        '{"name": "add", "arguments": 5}',
        '{"name": 5}',
        '{"a": 1}',
        '{"name": "add"',
        "{}",
        "[1, 2]",
        "[",
        "[note] yes",
        '[{"a": 1}]',
        "[TOOL_CALLS]",
        '{"name": "weather" "arguments": {}}',
    ],
)
def test_what_is_no_call_is_given_back(text: str) -> None:
    assert read(text) == (text, [])
    assert read(*text) == (text, [])


_PARTS = st.sampled_from(
    [CALL, f"<tool_call>{CALL}</tool_call>", "<tool_call>", "</tool_call>", *"{}[],; \n:", '"name"', '"add"',
     '{"name": "add"', "[TOOL_CALLS]", "<|python_tag|>", "words", "<tool", '"arguments": {}']
)  # fmt: skip


@settings(max_examples=300, deadline=None, derandomize=True, database=None)
@given(parts=st.lists(_PARTS, max_size=8), cuts=st.lists(st.integers(0, 400), max_size=12))
def test_the_cuts_change_nothing(parts: list[str], cuts: list[int]) -> None:
    text = "".join(parts)
    places = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[begin:end] for begin, end in itertools.pairwise(places)]
    assert read(*pieces) == read(text)
    assert read(*text) == read(text)


def body_of(tool_choice: Any, **more: Any) -> ChatBody:
    tools = [
        {
            "type": "function",
            "function": {
                "name": name,
                "parameters": {
                    "type": "object",
                    "properties": {"x": {"$ref": "#/$defs/X"}},
                    "$defs": {"X": {"type": kind}},
                },
            },
        }
        for name, kind in (("a", "string"), ("b", "integer"))
    ]
    given = {
        "messages": [{"role": "user", "content": "x"}],
        "tools": tools,
        "tool_choice": tool_choice,
    } | more
    return ChatBody.model_validate_json(json.dumps(given))


def test_schemas_that_force_a_call() -> None:
    assert forced_schema(body_of("auto")) is None
    named = forced_schema(body_of({"type": "function", "function": {"name": "b"}}))
    assert named is not None
    assert named["$defs"] == {"X": {"type": "integer"}}
    required = forced_schema(body_of("required", parallel_tool_calls=False))
    assert required is not None
    assert (required["minItems"], required["maxItems"]) == (1, 1)
    assert required["$defs"] == {"tool0.X": {"type": "string"}, "tool1.X": {"type": "integer"}}
    first = required["items"]["anyOf"][0]["properties"]
    assert first["name"] == {"const": "a"}
    assert first["arguments"]["properties"]["x"] == {"$ref": "#/$defs/tool0.X"}
    assert "$defs" not in first["arguments"]

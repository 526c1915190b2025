"""Tool calls: found in a model's text while it streams, and forced by a grammar where the request asks.

Two written forms are read. Hermes and Qwen put each call between `<tool_call>` and `</tool_call>`; Llama 3
and Mistral begin the whole answer with the object, or with a list of them, perhaps after a marker. An object
is `{"name": ..., "arguments": {...}}`; `parameters` is another name for the second key. What turns out to be
no call is given back as ordinary text, character for character.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hasten.serve.http.protocol import ChatBody, NamedChoice

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = ("<|python_tag|>", "[TOOL_CALLS]")
_SPACE = " \t\r\n"


@dataclass(frozen=True)
class Words:
    text: str


@dataclass(frozen=True)
class CallStart:
    index: int
    id: str
    name: str


@dataclass(frozen=True)
class CallArguments:
    index: int
    text: str


Piece = Words | CallStart | CallArguments


class _Object:
    """Reads one call's object; `consumed` characters belong to it. `failed` once it can be no call."""

    def __init__(self, allowed: frozenset[str] | None) -> None:
        self._allowed = allowed
        self._state = "open"
        self._key = self._value = ""
        self._depth, self._in_string, self._escaped = 0, False, False
        self._held: str | None = None
        self.name: str | None = None
        self.arguments_begun = self._arguments_read = False
        self.done = self.failed = False
        self.pieces: list[str] = []
        """Fragments of the arguments that may go out."""

    @property
    def committed(self) -> bool:
        """Whether this is a call for certain, so that its text is not needed any more."""
        return self.name is not None and (self.arguments_begun or self.done) and not self.failed

    def feed(self, text: str) -> int:
        for place, character in enumerate(text):
            self._step(character)
            if self.failed:
                return place
            if self.done:
                return place + 1
        return len(text)

    def _step(self, character: str) -> None:
        state = self._state
        if state == "value":
            self._read_value(character)
        elif state == "key":
            self._key += character
            if self._ends_string(character):
                try:
                    self._key = json.loads(self._key)
                except ValueError:
                    self.failed = True
                self._state = "colon"
        elif character in _SPACE:
            return
        elif state == "open" and character == "{":
            self._state = "first"
        elif state in ("first", "next") and character == '"':
            self._key, self._in_string, self._escaped, self._state = '"', True, False, "key"
        elif state in ("first", "comma") and character == "}":
            self._finish()
        elif state == "comma" and character == ",":
            self._state = "next"
        elif state == "colon" and character == ":":
            self._state = "begin"
        elif state == "begin":
            self._value, self._depth, self._in_string, self._escaped = "", 0, False, False
            self._state = "value"
            self._read_value(character)
        else:
            self.failed = True

    def _read_value(self, character: str) -> None:
        if not self._in_string and self._depth == 0 and self._value and character in ",}" + _SPACE:
            # A number or a word, which has no end of its own.
            self._keep_value()
            self._state = "comma"
            if not self.failed and character not in _SPACE:
                self._step(character)
            return
        self._value += character
        if self._streams():
            self.arguments_begun = True
            self.pieces.append(character)
        if self._in_string:
            closed = self._ends_string(character) and self._depth == 0
        else:
            if character == '"':
                self._in_string, self._escaped = True, False
            self._depth += (character in "{[") - (character in "}]")
            closed = character in "}]" and self._depth == 0
            self.failed |= self._depth < 0
        if closed:
            self._keep_value()
            self._state = "comma"

    def _ends_string(self, character: str) -> bool:
        if self._escaped:
            self._escaped = False
        elif character == "\\":
            self._escaped = True
        elif character == '"':
            self._in_string = False
            return True
        return False

    def _streams(self) -> bool:
        is_arguments = self._key in ("arguments", "parameters")
        return (
            is_arguments
            and self.name is not None
            and self._value.startswith("{")
            and not self._arguments_read
        )

    def _keep_value(self) -> None:
        if self._streams():
            self._arguments_read = True
            return
        try:
            value = json.loads(self._value)
        except (ValueError, RecursionError):
            self.failed = True
            return
        if self._key == "function" and isinstance(value, dict):
            self._keep_name(value.get("name"))
            self._keep_arguments(value.get("arguments", value.get("parameters", {})))
        elif self._key in ("name", "function"):
            self._keep_name(value)
        elif self._key in ("arguments", "parameters"):
            self._keep_arguments(value, self._value)

    def _keep_name(self, value: Any) -> None:
        known = isinstance(value, str) and value and (self._allowed is None or value in self._allowed)
        if not known or self.name is not None:
            self.failed = True
            return
        self.name = value

    def _keep_arguments(self, value: Any, written: str | None = None) -> None:
        if self._arguments_read:
            self.failed = True
            return
        self._arguments_read = True
        if isinstance(value, str):
            self._held = value
        elif isinstance(value, dict):
            self._held = written if written is not None else json.dumps(value, ensure_ascii=False)
        elif value is None:
            self._held = "{}"
        else:
            self.failed = True

    def _finish(self) -> None:
        if self.name is None:
            self.failed = True
            return
        if not self.arguments_begun:
            self.pieces.append(self._held if self._held is not None else "{}")
        self.done = True


class ToolReader:
    """Splits one choice's text into words and calls; the same pieces however the text is cut.

    `names`: the tools of the request. A bare object is a call only if it names one of them; between the tags
    any name is passed on, for the client to answer.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._buffer = ""
        self._state = "begin"
        self._object: _Object | None = None
        self._raw = ""
        """What was read since the last certain point, given back if no call comes of it."""
        self._tagged = False
        self._announced = False
        self.calls = 0
        """Calls that are complete or, at the end of a cut text, begun."""

    def feed(self, text: str) -> list[Piece]:
        self._buffer += text
        pieces: list[Piece] = []
        while self._buffer and self._advance(pieces, last=False):
            pass
        return _joined(pieces)

    def finish(self) -> list[Piece]:
        """What is left when the text has ended."""
        pieces: list[Piece] = []
        while self._advance(pieces, last=True):
            pass
        if self._state == "object" and self._announced:
            self.calls += 1
        else:
            rest = self._raw + self._buffer
            if not (self._state == "after" and not rest.strip()):
                pieces.append(Words(rest))
        self._raw = self._buffer = ""
        self._state = "lost"
        return _joined(pieces)

    def _lost(self, pieces: list[Piece], last: bool) -> bool:
        self._buffer = ""
        return False

    def _advance(self, pieces: list[Piece], last: bool) -> bool:
        """One step; False where more text is needed."""
        return {
            "begin": self._begin,
            "words": self._words,
            "tag": self._open_object,
            "object": self._read_object,
            "after": self._after,
            "lost": self._lost,
        }[self._state](pieces, last)

    def _begin(self, pieces: list[Piece], last: bool) -> bool:
        """At the start of the answer: a tag, a bare object, a marker before it, or words."""
        text = self._buffer.lstrip(_SPACE)
        if not text:
            return False
        if marker := next((marker for marker in _MARKERS if text.startswith(marker)), None):
            return self._take(len(self._buffer) - len(text) + len(marker), "tag", tagged=False)
        if text[0] == "{" or (text[0] == "[" and text[1:].lstrip(_SPACE).startswith("{")):
            return self._take(0, "tag", tagged=False)
        undecided = text[0] == "[" and not text[1:].strip(_SPACE)
        if not last and (undecided or any(word.startswith(text) for word in (*_MARKERS, _OPEN))):
            return False
        if text.startswith(_OPEN):
            return self._take(len(self._buffer) - len(text) + len(_OPEN), "tag", tagged=True)
        self._state = "words"
        return True

    def _take(self, count: int, state: str, tagged: bool) -> bool:
        self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]
        self._state, self._tagged = state, tagged
        return True

    def _words(self, pieces: list[Piece], last: bool) -> bool:
        place = self._buffer.find(_OPEN)
        if place >= 0:
            pieces.append(Words(self._buffer[:place]))
            self._buffer = self._buffer[place:]
            return self._take(len(_OPEN), "tag", tagged=True)
        held = 0 if last else _overlap(self._buffer, _OPEN)
        pieces.append(Words(self._buffer[: len(self._buffer) - held]))
        self._buffer = self._buffer[len(self._buffer) - held :]
        return False

    def _open_object(self, pieces: list[Piece], last: bool) -> bool:
        """Before an object: spaces, and one bracket of a list."""
        text = self._buffer.lstrip(_SPACE)
        if not text:
            return False
        if text[0] == "[" and "[" not in self._raw.replace("[TOOL_CALLS]", ""):
            return self._take(len(self._buffer) - len(text) + 1, "tag", self._tagged)
        if text[0] != "{":
            return self._give_back(pieces)
        self._object, self._announced = _Object(None if self._tagged else self._names), False
        self._state = "object"
        return True

    def _give_back(self, pieces: list[Piece]) -> bool:
        pieces.append(Words(self._raw))
        self._raw = ""
        self._state = "words"
        return True

    def _read_object(self, pieces: list[Piece], last: bool) -> bool:
        if not self._buffer:
            return False
        read = self._object
        if read is None:
            return False
        count = read.feed(self._buffer)
        self._raw += self._buffer[:count]
        self._buffer = self._buffer[count:]
        if read.committed:
            if not self._announced:
                self._announced = True
                pieces.append(CallStart(self.calls, f"call_{secrets.token_hex(12)}", read.name or ""))
            self._raw = ""
            pieces.extend(CallArguments(self.calls, text) for text in read.pieces)
            read.pieces.clear()
        if read.failed:
            if self._announced:
                # Its head is with the client already; the rest is not text for a person.
                self.calls += 1
                self._state = "lost"
                return True
            return self._give_back(pieces)
        if read.done:
            self.calls += 1
            self._state = "after"
            return True
        return False

    def _after(self, pieces: list[Piece], last: bool) -> bool:
        """After a call: its closing tag or bracket, another call, or words."""
        text = self._buffer.lstrip(_SPACE)
        if not text:
            return False
        if text.startswith(_CLOSE):
            self._buffer = text[len(_CLOSE) :]
            return True
        if text.startswith(_OPEN):
            self._buffer = text
            return self._take(len(_OPEN), "tag", tagged=True)
        if text[0] in ",;]" and not self._tagged:
            self._buffer = text[1:]
            return True
        if text[0] == "{":
            self._buffer = text
            self._state = "tag"
            return True
        if not last and any(tag.startswith(text) for tag in (_OPEN, _CLOSE)):
            return False
        self._state = "words"
        return True


def _overlap(text: str, word: str) -> int:
    """The length of the longest end of `text` that begins `word`."""
    return next(
        (size for size in range(min(len(text), len(word) - 1), 0, -1) if word.startswith(text[-size:])), 0
    )


def _joined(pieces: list[Piece]) -> list[Piece]:
    """Neighbours of one kind as one, and none empty."""
    joined: list[Piece] = []
    for piece in pieces:
        before = joined[-1] if joined else None
        if isinstance(piece, Words) and isinstance(before, Words):
            joined[-1] = Words(before.text + piece.text)
        elif (
            isinstance(piece, CallArguments)
            and isinstance(before, CallArguments)
            and piece.index == before.index
        ):
            joined[-1] = CallArguments(piece.index, before.text + piece.text)
        elif isinstance(piece, CallStart) or piece.text:
            joined.append(piece)
    return joined


class NamedReader:
    """`tool_choice` names the function: a grammar makes the whole answer its arguments."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.calls = 0

    def feed(self, text: str) -> list[Piece]:
        if not text:
            return []
        pieces: list[Piece] = [CallArguments(0, text)]
        if self.calls == 0:
            pieces.insert(0, CallStart(0, f"call_{secrets.token_hex(12)}", self._name))
            self.calls = 1
        return pieces

    def finish(self) -> list[Piece]:
        return []


Reader = ToolReader | NamedReader


def reader_of(body: ChatBody) -> Reader | None:
    """What reads one choice of this request; None where no tool may be called."""
    if not body.uses_tools:
        return None
    if isinstance(body.tool_choice, NamedChoice):
        return NamedReader(body.tool_choice.function.name)
    return ToolReader([tool.function.name for tool in body.tools or ()])


def forced_schema(body: ChatBody) -> dict[str, Any] | None:
    """The JSON schema of the whole answer, where `tool_choice` is `required` or names a function."""
    parameters = {
        tool.function.name: tool.function.parameters or {"type": "object", "properties": {}}
        for tool in body.tools or ()
    }
    if isinstance(body.tool_choice, NamedChoice):
        return parameters[body.tool_choice.function.name]
    if body.tool_choice != "required":
        return None
    definitions: dict[str, Any] = {}
    calls = []
    for number, (name, schema) in enumerate(parameters.items()):
        calls.append(
            {
                "type": "object",
                "properties": {
                    "name": {"const": name},
                    "arguments": _moved(schema, f"tool{number}", definitions),
                },
                "required": ["name", "arguments"],
                "additionalProperties": False,
            }
        )
    most = {"maxItems": 1} if body.parallel_tool_calls is False else {}
    items = calls[0] if len(calls) == 1 else {"anyOf": calls}
    return {"type": "array", "minItems": 1, **most, "items": items} | (
        {"$defs": definitions} if definitions else {}
    )


def _moved(schema: dict[str, Any], prefix: str, definitions: dict[str, Any]) -> dict[str, Any]:
    """`schema` for a place inside another one: its definitions go to the root under names of their own."""

    def rewrite(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                key: _moved_reference(item, prefix)
                if key == "$ref" and isinstance(item, str)
                else rewrite(item)
                for key, item in value.items()
            }
        return [rewrite(item) for item in value] if isinstance(value, list) else value

    for group in ("$defs", "definitions"):
        for name, item in (schema.get(group) or {}).items():
            definitions[f"{prefix}.{name}"] = rewrite(item)
    return rewrite({key: value for key, value in schema.items() if key not in ("$defs", "definitions")})


def _moved_reference(reference: str, prefix: str) -> str:
    for group in ("#/$defs/", "#/definitions/"):
        if reference.startswith(group):
            return f"#/$defs/{prefix}.{reference.removeprefix(group)}"
    return reference

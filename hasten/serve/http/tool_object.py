"""One tool call as a JSON object that comes character by character."""

from __future__ import annotations

import json
from typing import Any

SPACE = " \t\r\n"


class CallObject:
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
        elif character in SPACE:
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
        if not self._in_string and self._depth == 0 and self._value and character in ",}" + SPACE:
            # A number or a word, which has no end of its own.
            self._keep_value()
            self._state = "comma"
            if not self.failed and character not in SPACE:
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

"""Tool calls, found in a model's text while it streams.

Two written forms are read. Hermes and Qwen put each call between `<tool_call>` and `</tool_call>`; Llama 3
and Mistral begin the whole answer with the object, or with a list of them, perhaps after a marker. An object
is `{"name": ..., "arguments": {...}}`; `parameters` is another name for the second key. What turns out to be
no call is given back as ordinary text, character for character.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass

from hasten.serve.http.protocol import ChatBody, NamedChoice
from hasten.serve.http.tool_object import SPACE, CallObject

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_MARKERS = ("<|python_tag|>", "[TOOL_CALLS]")


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


class ToolReader:
    """Splits one choice's text into words and calls; the same pieces however the text is cut.

    `names`: the tools of the request. A bare object is a call only if it names one of them; between the tags
    any name is passed on, for the client to answer.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._buffer = ""
        self._state = "begin"
        self._object: CallObject | None = None
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
        text = self._buffer.lstrip(SPACE)
        if not text:
            return False
        if marker := next((marker for marker in _MARKERS if text.startswith(marker)), None):
            return self._take(len(self._buffer) - len(text) + len(marker), "tag", tagged=False)
        if text[0] == "{" or (text[0] == "[" and text[1:].lstrip(SPACE).startswith("{")):
            return self._take(0, "tag", tagged=False)
        undecided = text[0] == "[" and not text[1:].strip(SPACE)
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
        text = self._buffer.lstrip(SPACE)
        if not text:
            return False
        if text[0] == "[" and "[" not in self._raw.replace("[TOOL_CALLS]", ""):
            return self._take(len(self._buffer) - len(text) + 1, "tag", self._tagged)
        if text[0] != "{":
            return self._give_back(pieces)
        self._object, self._announced = CallObject(None if self._tagged else self._names), False
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
        text = self._buffer.lstrip(SPACE)
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

"""Log-probabilities in the two shapes of the API."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Sequence
from typing import Any

from hasten.serve.sampling import Sampled

# JSON has no infinity; this is what OpenAI gives for a token that cannot come.
_LEAST = -9999.0


class ChatLogprobs:
    """`choices[].logprobs` of chat: a list of entries, one a token."""

    def __init__(self, bytes_of: Callable[[int], bytes], top: int) -> None:
        self._bytes_of, self._top = bytes_of, top

    def __call__(self, sampled: Sequence[Sampled]) -> dict[str, Any]:
        return {"content": [self._entry(item) for item in sampled], "refusal": None}

    def _entry(self, item: Sampled) -> dict[str, Any]:
        top = [self._token(token, logprob) for token, logprob in item.top[: self._top]]
        return self._token(item.token, item.logprob) | {"top_logprobs": top}

    def _token(self, token: int, logprob: float | None) -> dict[str, Any]:
        data = self._bytes_of(token)
        return {"token": data.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(data)}


class CompletionLogprobs:
    """`choices[].logprobs` of completions: four parallel lists. One object for each choice, since
    `text_offset` counts on from where the last piece ended."""

    def __init__(self, bytes_of: Callable[[int], bytes], top: int) -> None:
        self._bytes_of, self._top, self._offset = bytes_of, top, 0
        self._reader = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def prompt(self, first: int, others: Sequence[Sampled], echo: str) -> dict[str, Any]:
        """The lists of an echoed prompt; nothing says how likely its first token was, which may be a mark of
        the tokenizer's own that is not in the text.
        """
        lists = self([Sampled(first)])
        lists["token_logprobs"] = lists["top_logprobs"] = [None]
        if not echo.startswith(lists["tokens"][0]):
            self._offset = 0
        for name, values in self(others).items():
            lists[name] = lists[name] + values
        return lists

    def __call__(self, sampled: Sequence[Sampled]) -> dict[str, Any]:
        lists: dict[str, list[Any]] = {
            "text_offset": [],
            "token_logprobs": [],
            "tokens": [],
            "top_logprobs": [],
        }
        for item in sampled:
            data = self._bytes_of(item.token)
            lists["text_offset"].append(self._offset)
            lists["token_logprobs"].append(_finite(item.logprob))
            lists["tokens"].append(_name(data))
            top = {_name(self._bytes_of(token)): _finite(logprob) for token, logprob in item.top[: self._top]}
            lists["top_logprobs"].append(top)
            self._offset += len(self._reader.decode(data))
        return lists


def _name(data: bytes) -> str:
    """A token as text; part of a character is written as its bytes, so that two of them stay two keys."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def _finite(logprob: float | None) -> float:
    return _LEAST if logprob is None else max(float(logprob), _LEAST)

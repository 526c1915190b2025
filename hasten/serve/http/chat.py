"""`POST /v1/chat/completions`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse, Response

from hasten.serve.http import tools
from hasten.serve.http.errors import bad_request
from hasten.serve.http.generation import Generation, compile_grammar, encode, room, sampling
from hasten.serve.http.logprobs import ChatLogprobs
from hasten.serve.http.messages import render_prompt
from hasten.serve.http.protocol import ChatBody
from hasten.serve.http.responses import DONE, EventStream, event, unless_gone
from hasten.serve.http.state import State, TextModel
from hasten.serve.http.tool_schema import forced_schema
from hasten.serve.stream import Delta, Request


async def chat(state: State, body: ChatBody, http: HttpRequest) -> Response:
    """The answer, whole or as a stream."""
    body.check(state.settings.limits)
    model = state.text_model(body.model)
    headers = _notices(body)
    if body.stream:
        answer = await _start(state, model, body, http)
        return EventStream(answer.events(), answer.cancel, state.settings.keep_alive_s, headers)

    async def work() -> dict[str, Any]:
        return await (await _start(state, model, body, http)).whole()

    return JSONResponse(await unless_gone(http, work()), headers=headers)


def _notices(body: ChatBody) -> dict[str, str]:
    """Headers that say what the answer does not promise.

    Common libraries set `strict` on every function, so a 400 would keep them all out; but where the model
    chooses between words and calls, no grammar holds it to the schema.
    """
    is_free = body.uses_tools and body.tool_choice in (None, "auto")
    if is_free and any(tool.function.strict for tool in body.tools or ()):
        return {"x-hasten-notice": "strict is only kept where tool_choice forces a call"}
    return {}


async def _start(state: State, model: TextModel, body: ChatBody, http: HttpRequest) -> _Answer:
    template = model.template
    if template is None:
        raise bad_request(
            f"{model.id!r} has no chat template; use /v1/completions, or start the server with "
            "--chat-template FILE",
            "messages",
            "no_chat_template",
        )
    prompt = await asyncio.to_thread(lambda: encode(model, render_prompt(body, template), False))
    most_name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    max_tokens = room(
        model, len(prompt), body.most_tokens, None, most_name if body.most_tokens else "messages"
    )
    top = (body.top_logprobs or 0) if body.logprobs else None
    grammar = await _grammar(model, body)
    params = sampling(model, body, max_tokens=max_tokens, logprobs=top, grammar=grammar)
    request = Request(prompt_tokens=prompt, params=params, request_id=http.state.request_id)
    generation = Generation(state, model, [request])
    return _Answer(body, model, generation, ChatLogprobs(model.bytes_of, top or 0))


async def _grammar(model: TextModel, body: ChatBody) -> Any:
    wanted = body.response_format.type if body.response_format is not None else "text"
    forced = forced_schema(body) if body.uses_tools else None
    if wanted != "text" and body.uses_tools:
        raise bad_request(
            f"response_format {wanted!r} leaves no room for a tool call; give tool_choice: none, or no tools",
            "response_format",
        )
    if forced is not None:
        return await compile_grammar(model, "json_schema", forced, "tools")
    if wanted == "json_object":
        return await compile_grammar(model, "json_object", None, "response_format")
    if wanted == "json_schema" and body.response_format is not None:
        described = body.response_format.json_schema
        schema = described.schema_ if described is not None else None
        return await compile_grammar(model, "json_schema", schema, "response_format.json_schema.schema")
    return None


@dataclass
class _Choice:
    """One choice of a whole answer as it grows."""

    content: list[str] = field(default_factory=list)
    calls: list[dict[str, Any]] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    finish_reason: str = "stop"

    def add(self, delta: dict[str, Any]) -> None:
        if text := delta.get("content"):
            self.content.append(text)
        for call in delta.get("tool_calls", ()):
            if "id" in call:
                function = {"name": call["function"]["name"], "arguments": ""}
                self.calls.append({"id": call["id"], "type": "function", "function": function})
            else:
                self.calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]

    def message(self) -> dict[str, Any]:
        text = "".join(self.content)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": text or (None if self.calls else ""),
            "refusal": None,
        }
        return message | ({"tool_calls": self.calls} if self.calls else {})


class _Answer:
    def __init__(
        self, body: ChatBody, model: TextModel, generation: Generation, logprobs: ChatLogprobs
    ) -> None:
        self._body, self._generation = body, generation
        self._logprobs = logprobs if body.logprobs else None
        count = body.n or 1
        self._readers = [tools.reader_of(body) for _ in range(count)]
        self._ended = [False] * count
        self._head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion.chunk",
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": None,
        }

    def cancel(self) -> None:
        self._generation.cancel()

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a stream: for each choice a role, its text or calls, its end; then usage if asked."""
        tail = {"usage": None} if self._body.include_usage else {}
        begun = [False] * len(self._ended)
        async with aclosing(self._steps()) as steps:
            async for number, delta, logprobs, reason in steps:
                if not begun[number]:
                    begun[number] = True
                    first = {"role": "assistant", "content": "", "refusal": None}
                    yield event(self._chunk(number, first, None, None) | tail)
                if delta or logprobs is not None:
                    delta = delta or {"content": ""}
                    yield event(self._chunk(number, delta, logprobs, None) | tail)
                if reason is not None:
                    yield event(self._chunk(number, {}, None, reason) | tail)
        if self._body.include_usage:
            yield event(self._head | {"choices": [], "usage": self._generation.usage()})
        yield DONE

    def _chunk(self, number: int, delta: dict[str, Any], logprobs: Any, reason: str | None) -> dict[str, Any]:
        choice = {"index": number, "delta": delta, "logprobs": logprobs, "finish_reason": reason}
        return self._head | {"choices": [choice]}

    async def whole(self) -> dict[str, Any]:
        choices = [_Choice() for _ in self._ended]
        async with aclosing(self._steps()) as steps:
            async for number, delta, logprobs, reason in steps:
                choices[number].add(delta)
                if logprobs is not None:
                    choices[number].logprobs += logprobs["content"]
                if reason is not None:
                    choices[number].finish_reason = reason
        shown = [
            {
                "index": number,
                "message": choice.message(),
                "logprobs": {"content": choice.logprobs, "refusal": None} if self._logprobs else None,
                "finish_reason": choice.finish_reason,
            }
            for number, choice in enumerate(choices)
        ]
        return self._head | {"object": "chat.completion", "choices": shown, "usage": self._generation.usage()}

    async def _steps(self) -> AsyncGenerator[tuple[int, dict[str, Any], Any, str | None]]:
        """Choice number, what is new of its message, its log-probabilities, and its finish reason once."""
        async with aclosing(self._generation.deltas()) as deltas:
            async for number, delta in deltas:
                if self._ended[number]:
                    continue
                pieces, reason = self._read(number, delta)
                logprobs = self._logprobs(delta.logprobs) if self._logprobs and delta.logprobs else None
                for piece in pieces[:-1]:
                    yield number, piece, None, None
                yield number, pieces[-1] if pieces else {}, logprobs, reason
                if all(self._ended):
                    break

    def _read(self, number: int, delta: Delta) -> tuple[list[dict[str, Any]], str | None]:
        reader = self._readers[number]
        reason: str | None = delta.finish_reason
        if reader is None:
            self._ended[number] = reason is not None
            return ([{"content": delta.text}] if delta.text else []), reason
        pieces = reader.feed(delta.text)
        if reason is not None:
            pieces += reader.finish()
        elif (
            self._body.parallel_tool_calls is False and isinstance(reader, tools.ToolReader) and reader.calls
        ):
            # One call was asked for and it is whole; what follows would be a second one.
            reason = "stop"
        if reason is not None:
            self._ended[number] = True
            if reader.calls and reason == "stop":
                reason = "tool_calls"
        if self._body.parallel_tool_calls is False:
            pieces = [piece for piece in pieces if isinstance(piece, tools.Words) or piece.index == 0]
        return [_as_delta(piece) for piece in pieces], reason


def _as_delta(piece: tools.Piece) -> dict[str, Any]:
    if isinstance(piece, tools.Words):
        return {"content": piece.text}
    if isinstance(piece, tools.CallStart):
        function = {"name": piece.name, "arguments": ""}
        return {
            "tool_calls": [{"index": piece.index, "id": piece.id, "type": "function", "function": function}]
        }
    return {"tool_calls": [{"index": piece.index, "function": {"arguments": piece.text}}]}

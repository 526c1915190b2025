"""`POST /v1/completions`: the older API, text in and text out."""

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

from hasten.serve.http.errors import bad_request
from hasten.serve.http.generation import Generation, check_tokens, encode, room, sampling, usage_object
from hasten.serve.http.logprobs import CompletionLogprobs
from hasten.serve.http.protocol import CompletionBody
from hasten.serve.http.responses import DONE, EventStream, event, unless_gone
from hasten.serve.http.state import State, TextModel
from hasten.serve.stream import Request

_DEFAULT_TOKENS = 16


async def complete(state: State, body: CompletionBody, http: HttpRequest) -> Response:
    """The answers, whole or as a stream."""
    body.check(state.settings.limits)
    model = state.text_model(body.model)
    if body.stream:
        answer = await _start(state, model, body, http)
        return EventStream(answer.events(), answer.cancel, state.settings.keep_alive_s)

    async def work() -> dict[str, Any]:
        return await (await _start(state, model, body, http)).whole()

    return JSONResponse(await unless_gone(http, work()))


async def _start(state: State, model: TextModel, body: CompletionBody, http: HttpRequest) -> _Answer:
    prompts = body.prompts(state.settings.limits)
    top = body.logprobs
    # Log-probabilities of the prompt come with a token, which is left out if none is wanted.
    scored = bool(body.echo) and top is not None
    requests, echoes = [], []
    for place, prompt in enumerate(prompts):
        where = "prompt" if len(prompts) == 1 else f"prompt[{place}]"
        tokens = await asyncio.to_thread(encode, model, prompt, True) if isinstance(prompt, str) else prompt
        if not tokens:
            raise bad_request(f"{where} is empty", where)
        check_tokens(model, tokens, where)
        max_tokens = room(
            model, len(tokens), body.max_tokens, _DEFAULT_TOKENS, "max_tokens" if body.max_tokens else where
        )
        echoes.append(
            (prompt if isinstance(prompt, str) else model.tokenizer.decode(prompt)) if body.echo else ""
        )
        if max_tokens or scored:
            params = sampling(
                model,
                body,
                max_tokens=max_tokens or 1,
                logprobs=top,
                prompt_logprobs=top if scored else None,
            )
            requests.append(Request(prompt_tokens=tokens, params=params, request_id=http.state.request_id))
        else:
            requests.append(Request(prompt_tokens=tokens))
    generation = Generation(state, model, requests) if body.max_tokens != 0 or scored else None
    return _Answer(body, model, generation, echoes, [list(request.prompt_tokens) for request in requests])


@dataclass
class _Choice:
    """One choice of a whole answer as it grows."""

    text: list[str] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str = "length"

    def add_logprobs(self, lists: dict[str, list[Any]]) -> None:
        if self.logprobs is None:
            self.logprobs = lists
            return
        for name, values in lists.items():
            self.logprobs[name] += values


class _Answer:
    """`generation` is None where only the prompt is wanted back (`max_tokens: 0` with `echo`) and nothing is
    to be said of it."""

    def __init__(
        self,
        body: CompletionBody,
        model: TextModel,
        generation: Generation | None,
        echoes: list[str],
        prompts: list[list[int]],
    ) -> None:
        self._body, self._generation, self._prompts = body, generation, prompts
        self._echoes = [echo for echo in echoes for _ in range(body.n or 1)]
        top = body.logprobs
        self._logprobs = (
            None if top is None else [CompletionLogprobs(model.bytes_of, top) for _ in self._echoes]
        )
        self._head = {
            "id": f"cmpl-{uuid.uuid4().hex}",
            "object": "text_completion",
            "created": int(time.time()),
            "model": model.id,
            "system_fingerprint": None,
        }

    def cancel(self) -> None:
        if self._generation is not None:
            self._generation.cancel()

    async def events(self) -> AsyncGenerator[bytes]:
        """The chunks of a stream; the prompt, where it is echoed, is the first of its choice."""
        tail = {"usage": None} if self._body.include_usage else {}
        async with aclosing(self._steps()) as steps:
            async for number, text, logprobs, reason in steps:
                if text or logprobs is not None or reason is not None:
                    choice = {"index": number, "text": text, "logprobs": logprobs, "finish_reason": reason}
                    yield event(self._head | {"choices": [choice]} | tail)
        if self._body.include_usage:
            yield event(self._head | {"choices": [], "usage": self._usage()})
        yield DONE

    async def whole(self) -> dict[str, Any]:
        choices = [_Choice() for _ in self._echoes]
        async with aclosing(self._steps()) as steps:
            async for number, text, logprobs, reason in steps:
                choices[number].text.append(text)
                if logprobs is not None:
                    choices[number].add_logprobs(logprobs)
                if reason is not None:
                    choices[number].finish_reason = reason
        shown = [
            {
                "index": number,
                "text": "".join(choice.text),
                "logprobs": choice.logprobs,
                "finish_reason": choice.finish_reason,
            }
            for number, choice in enumerate(choices)
        ]
        return self._head | {"choices": shown, "usage": self._usage()}

    async def _steps(self) -> AsyncGenerator[tuple[int, str, dict[str, list[Any]] | None, str | None]]:
        """Choice number, new text, its log-probabilities, and the finish reason once."""
        scored = bool(self._body.echo) and self._logprobs is not None
        for number, echo in enumerate(self._echoes):
            if not scored and (echo or self._generation is None):
                yield number, echo, None, "length" if self._generation is None else None
        if self._generation is None:
            return
        async with aclosing(self._generation.deltas()) as deltas:
            async for number, delta in deltas:
                lists = self._logprobs[number] if self._logprobs else None
                if scored and lists and delta.prompt_logprobs is not None:
                    prompt = self._prompts[number // (self._body.n or 1)]
                    only = self._body.max_tokens == 0
                    said = lists.prompt(prompt[0], delta.prompt_logprobs, self._echoes[number])
                    yield number, self._echoes[number], said, "length" if only else None
                if self._body.max_tokens == 0:
                    continue
                logprobs = lists(delta.logprobs) if lists and delta.logprobs else None
                yield number, delta.text, logprobs, delta.finish_reason

    def _usage(self) -> dict[str, Any]:
        if self._generation is None or self._body.max_tokens == 0:
            return usage_object(sum(len(prompt) for prompt in self._prompts), 0, 0)
        return self._generation.usage()

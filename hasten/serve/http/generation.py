"""From a checked body to the engine's streams, and from their deltas to one sequence of them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

from hasten.base.errors import HastenError, UserError
from hasten.serve.http.errors import ApiError, bad_request, draining
from hasten.serve.http.protocol import GenerationBody
from hasten.serve.http.state import State, TextModel
from hasten.serve.sampling import SamplingParams
from hasten.serve.stream import Delta, Request, Stream

if TYPE_CHECKING:
    from hasten.serve.stream import Usage

SAMPLED = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "seed",
    "logit_bias",
    "ignore_eos",
    "min_tokens",
)


def encode(model: TextModel, text: str, add_special_tokens: bool) -> list[int]:
    """Tokens of a text. For another thread than the event loop's: texts can be long."""
    return model.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids


def check_tokens(model: TextModel, tokens: Sequence[int], param: str) -> None:
    """Token ids that a client wrote itself."""
    if outside := next((token for token in tokens if not 0 <= token < model.vocab_size), None):
        raise bad_request(f"{param}: token {outside} is not among 0 to {model.vocab_size - 1}", param)


def room(model: TextModel, prompt_tokens: int, most: int | None, default: int | None, param: str) -> int:
    """How many tokens the answer may have; a 400 where prompt and answer cannot both fit."""
    left = model.context_tokens - prompt_tokens
    if left < 1 or (most is not None and most > left):
        answer = "" if most is None else f" and {most} for the answer"
        raise bad_request(
            f"this model's context is {model.context_tokens} tokens, but the request needs {prompt_tokens} "
            f"for the prompt{answer}; shorten the prompt or ask for fewer tokens",
            param,
            "context_length_exceeded",
        )
    return most if most is not None else min(left, default or left)


def sampling(
    model: TextModel,
    body: GenerationBody,
    *,
    max_tokens: int,
    logprobs: int | None,
    prompt_logprobs: int | None = None,
    grammar: Any = None,
) -> SamplingParams:
    """The request's sampling settings over the model's own."""
    given: dict[str, Any] = {"temperature": 1.0} | dict(model.defaults)
    given |= {name: value for name in SAMPLED if (value := getattr(body, name)) is not None}
    if given.get("top_k") == -1:
        given["top_k"] = 0
    for token in given.get("logit_bias") or ():
        if token >= model.vocab_size:
            raise bad_request(
                f"logit_bias: token {token} is not among 0 to {model.vocab_size - 1}", "logit_bias"
            )
    if (given.get("min_tokens") or 0) > max_tokens:
        raise bad_request(
            f"min_tokens: at most max_tokens, {max_tokens}, got {given['min_tokens']}", "min_tokens"
        )
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            n=body.n or 1,
            stop=tuple(body.stop),
            stop_tokens=tuple(body.stop_token_ids or ()),
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            **given,
        )
    except UserError as error:
        raise bad_request(str(error)) from error


async def compile_grammar(model: TextModel, kind: str, schema: Mapping[str, Any] | None, param: str) -> Any:
    """A constraint on the answer, compiled off the event loop."""
    if model.grammar is None:
        raise bad_request(f"{param} is not supported for this model", param, "unsupported_parameter")
    try:
        return await asyncio.to_thread(model.grammar, kind, schema)
    except UserError as error:
        raise bad_request(f"{param}: {error}", param, "invalid_schema") from error


class Generation:
    """The streams of one HTTP request, one for each prompt; choice `i` of prompt `p` has number `p n + i`.

    Submitting is all or nothing. Raises what the engine raises: a full queue, a stopped engine, a prompt that
    is too long.
    """

    def __init__(self, state: State, model: TextModel, requests: Sequence[Request]) -> None:
        self._state = state
        self._streams: list[Stream] = []
        self.usages: list[Usage] = []
        self.generated_tokens = 0
        if state.draining:
            raise draining()
        try:
            for request in requests:
                self._streams.append(model.engine.submit(request))
        except HastenError:
            self.cancel()
            raise
        self._choices = self._streams[0].choices

    def cancel(self) -> None:
        for stream in self._streams:
            stream.cancel()

    async def deltas(self) -> AsyncGenerator[tuple[int, Delta]]:
        """Pairs of choice number and delta as they come; cancels what is left when it is closed.

        Raises ApiError for a choice that failed or was stopped by the server.
        """
        try:
            if len(self._streams) == 1:
                async for delta in self._streams[0]:
                    yield self._taken(0, delta)
            else:
                async with aclosing(_merged(self._streams)) as merged:
                    async for number, delta in merged:
                        yield self._taken(number, delta)
        finally:
            self.cancel()

    def _taken(self, stream: int, delta: Delta) -> tuple[int, Delta]:
        self.generated_tokens += len(delta.tokens)
        if delta.usage is not None:
            self.usages.append(delta.usage)
        if delta.finish_reason == "cancelled" or (delta.finish_reason == "error" and self._state.draining):
            raise draining()
        if delta.finish_reason == "error":
            raise ApiError(500, delta.error or "the model failed on this request", code="generation_failed")
        return stream * self._choices + delta.index, delta

    def usage(self) -> dict[str, Any]:
        """OpenAI's usage object for the whole request, as far as it came."""
        prompt = sum(stream.prompt_tokens for stream in self._streams)
        cached = sum(usage.cached_tokens for usage in self.usages)
        return usage_object(prompt, self.generated_tokens, cached)


def usage_object(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


async def _merged(streams: Sequence[Stream]) -> AsyncGenerator[tuple[int, Delta]]:
    """Deltas of several streams in the order in which they come."""
    arrived: asyncio.Queue[tuple[int, Delta] | None] = asyncio.Queue()

    async def forward(number: int, stream: Stream) -> None:
        try:
            async for delta in stream:
                arrived.put_nowait((number, delta))
        finally:
            arrived.put_nowait(None)

    tasks = [asyncio.create_task(forward(number, stream)) for number, stream in enumerate(streams)]
    try:
        open_streams = len(tasks)
        while open_streams:
            item = await arrived.get()
            if item is None:
                open_streams -= 1
            else:
                yield item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

"""The older completions API through the official client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import openai
import pytest
from http_world import MODEL, TOKENIZER, World, next_token, serving
from openai.types import Completion
from pydantic import TypeAdapter


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with serving() as world:
        yield world


def complete(world: World, prompt: Any, **more: Any) -> Any:
    return world.client().completions.create(model=MODEL, prompt=prompt, **more)


def expected(prompt: str, count: int) -> str:
    tokens = TOKENIZER.encode(prompt).ids
    before = len(tokens)
    for _ in range(count):
        tokens.append(next_token(tokens))
    return TOKENIZER.decode(tokens[before:])


def test_text_in_text_out(world: World) -> None:
    answer = complete(world, "once", max_tokens=5)
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == expected("once", 5)
    assert answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (4, 5)
    assert len(complete(world, "once").choices[0].text) == 16
    raw = world.client().completions.with_raw_response.create(model=MODEL, prompt="once", logprobs=2)
    TypeAdapter(Completion).validate_json(raw.content, strict=True)


def test_prompts_of_every_kind(world: World) -> None:
    texts = ["first", "second one"]
    answer = complete(world, texts, max_tokens=4, n=2)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    assert [choice.text for choice in answer.choices] == [
        expected(text, 4) for text in texts for _ in range(2)
    ]
    tokens = TOKENIZER.encode("first").ids
    assert complete(world, tokens, max_tokens=4).choices[0].text == expected("first", 4)
    assert complete(world, [tokens, tokens], max_tokens=4).choices[1].text == expected("first", 4)


def test_streams(world: World) -> None:
    texts = {0: "", 1: ""}
    chunks = list(
        complete(world, ["a", "b"], max_tokens=6, stream=True, stream_options={"include_usage": True})
    )
    for chunk in chunks[:-1]:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == {0: expected("a", 6), 1: expected("b", 6)}
    assert chunks[-1].choices == []
    assert chunks[-1].usage.completion_tokens == 12


def test_echo(world: World) -> None:
    assert complete(world, "abc", max_tokens=3, echo=True).choices[0].text == "abc" + expected("abc", 3)
    only = complete(world, ["abc", "de"], max_tokens=0, echo=True)
    assert [choice.text for choice in only.choices] == ["abc", "de"]
    assert only.usage.completion_tokens == 0
    assert only.usage.prompt_tokens == 5
    streamed = "".join(
        chunk.choices[0].text for chunk in complete(world, "abc", max_tokens=3, echo=True, stream=True)
    )
    assert streamed == "abc" + expected("abc", 3)
    tokens = TOKENIZER.encode("abc").ids
    assert complete(world, tokens, max_tokens=1, echo=True).choices[0].text == "abc" + expected("abc", 1)


def test_logprobs(world: World) -> None:
    lists = complete(world, "abc", max_tokens=3, logprobs=2).choices[0].logprobs
    text = expected("abc", 3)
    assert "".join(lists.tokens) == text
    assert lists.text_offset == [0, 1, 2]
    assert [len(top) for top in lists.top_logprobs] == [2, 2, 2]
    assert [max(top.values()) for top in lists.top_logprobs] == lists.token_logprobs
    streamed = [
        offset
        for chunk in complete(world, "abc", max_tokens=3, logprobs=0, stream=True)
        if chunk.choices[0].logprobs
        for offset in chunk.choices[0].logprobs.text_offset
    ]
    assert streamed == [0, 1, 2]


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_of_an_echoed_prompt(world: World, max_tokens: int, stream: bool) -> None:
    """What evaluations ask for: how likely each token of a given text is."""
    prompt = "a text that is asked about twice " * 5  # more rows than a step gives logits for
    tokens = TOKENIZER.encode(prompt).ids
    said = complete(world, prompt, max_tokens=max_tokens, logprobs=2, echo=True, stream=stream)
    lists: dict[str, list[Any]] = {
        name: [] for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    }
    text = ""
    for part in said if stream else [said]:
        text += part.choices[0].text
        if part.choices[0].logprobs:
            for name, values in lists.items():
                values += getattr(part.choices[0].logprobs, name)
    assert text == prompt + expected(prompt, max_tokens)
    assert "".join(lists["tokens"]) == text
    assert lists["text_offset"] == list(range(len(tokens) + max_tokens))
    assert lists["token_logprobs"][0] is lists["top_logprobs"][0] is None
    # The scripted model gives its own choice a logit of 12, the next two tokens 6 and 3, all others 0.
    total = np.log(np.exp([12.0, 6.0, 3.0]).sum() + TOKENIZER.get_vocab_size() - 3)
    for place in range(1, len(tokens)):
        distance = (tokens[place] - next_token(tokens[:place])) % TOKENIZER.get_vocab_size()
        own = {0: 12.0, 1: 6.0, 2: 3.0}.get(distance, 0.0) - total
        assert lists["token_logprobs"][place] == pytest.approx(own, abs=1e-4)
        assert sorted(lists["top_logprobs"][place].values()) == pytest.approx(
            [6 - total, 12 - total], abs=1e-4
        )
    if not stream:
        assert (said.usage.prompt_tokens, said.usage.completion_tokens) == (len(tokens), max_tokens)


def test_echoed_prompts_together(world: World) -> None:
    alone = [
        complete(world, text, max_tokens=2, logprobs=1, echo=True).choices[0] for text in ("one", "x", "two!")
    ]
    both = complete(world, ["one", "x", "two!"], max_tokens=2, logprobs=1, echo=True, n=2)
    for choice in both.choices:
        assert choice.logprobs == alone[choice.index // 2].logprobs
        assert choice.text == alone[choice.index // 2].text


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"best_of": 3}, "best_of"),
        ({"suffix": "end"}, "suffix"),
        ({"max_tokens": 0}, "needs echo"),
        ({"logprobs": 6}, "at most 5"),
        ({"n": 17}, "at most 16"),
        ({"stop": ["a", "b", "c", "d", "e"]}, "at most 4"),
        ({"stop": [""]}, "1 to 1024 characters"),
        ({"extra_body": {"min_tokens": 9}, "max_tokens": 4}, "min_tokens"),
        ({"logit_bias": {"900": 1}}, "900"),
        ({"stream_options": {"include_usage": True}}, "needs stream"),
    ],
)
def test_what_cannot_be_done_is_said(world: World, more: dict[str, Any], message: str) -> None:
    with pytest.raises(openai.BadRequestError, match=message):
        complete(world, "x", **more)


@pytest.mark.parametrize(
    "prompt", ["", [], [[]], [300], [-1], [1, 999999], ["a", ""], [["a"]], [1, "a"], None, 5]
)
def test_prompts_that_are_none(world: World, prompt: Any) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        complete(world, prompt)
    assert caught.value.param.startswith("prompt")


def test_the_edge_of_the_context(world: World) -> None:
    most = world.runner.context_tokens
    assert complete(world, "x" * (most - 1), max_tokens=1).choices[0].finish_reason == "length"
    assert complete(world, "x" * (most - 5)).usage.completion_tokens == 5
    for length in (most, most + 1, 10 * most):
        with pytest.raises(openai.BadRequestError, match=rf"{most} tokens.*{length}") as caught:
            complete(world, "x" * length, max_tokens=1)
        assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="for the answer") as caught:
        complete(world, "x" * (most - 5), max_tokens=6)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "max_tokens")
    assert complete(world, "next", max_tokens=3).choices[0].text == expected("next", 3)

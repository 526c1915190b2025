"""Answers of a given form: what random sampling under a grammar writes, and what is refused."""

from __future__ import annotations

import json
import random
import re
import sys
from functools import cache
from typing import Any

import jsonschema
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from hasten.base.errors import ConfigError, GrammarError
from hasten.serve.grammar import Grammar, Grammars, Matcher
from hasten.serve.sampling import Sampler, SamplingParams, sample

EOS, TURN = 1, 2
PADDED = 700
"""Logits are often wider than the vocabulary."""


@cache
def tokenizer() -> Tokenizer:
    """BPE over bytes, of a few hundred tokens."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    texts = [
        '{"name": "value", "count": 12.5, "list": [true, false, null]},\n    "other": "text"',
        random.__doc__ or "",
    ]
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        special_tokens=["<s>", "</s>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    made.train_from_iterator(texts * 20, trainer)
    return made


@cache
def grammars() -> Grammars:
    return Grammars(tokenizer(), [EOS, TURN], PADDED)


def allowed(matcher: Matcher) -> list[int]:
    bits = np.unpackbits(matcher.mask().view(np.uint8), bitorder="little")
    return np.flatnonzero(bits[:PADDED]).tolist()


def write(grammar: Grammar, seed: int, most: int = 400, **options: Any) -> str | None:
    """What a model of random logits writes; None if it has not ended after `most` tokens."""
    generator = np.random.default_rng(seed)
    sampler = Sampler(SamplingParams(seed=seed, grammar=grammar, **options), [1], PADDED, eos=[EOS, TURN])
    for step in range(most):
        logits = generator.standard_normal((1, PADDED)).astype(np.float32) * 2
        # A model that comes to an end: quotes, brackets and ends grow likely.
        logits[0, [EOS, TURN, *(tokenizer().token_to_id(c) for c in '"]}')]] += step / 10
        (drawn,) = sample(logits, [0], [sampler])
        sampler.accept(drawn.token)
        if drawn.token in (EOS, TURN):
            assert sampler.matcher is not None
            assert sampler.matcher.complete
            return tokenizer().decode(sampler.output)
    return None


SCHEMAS: dict[str, dict[str, Any]] = {
    "object": {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    },
    "choices": {"enum": ["red", "gr\u00fcn", 3, None, {"a": [1]}]},
    "nested": {
        "$defs": {"point": {"type": "array", "items": {"type": "number"}, "minItems": 2, "maxItems": 3}},
        "type": "object",
        "properties": {
            "points": {"type": "array", "items": {"$ref": "#/$defs/point"}, "maxItems": 3},
            "kind": {"anyOf": [{"const": "line"}, {"type": "boolean"}]},
            "id": {"type": "string", "pattern": "^[a-f]{4}-[0-9]+$"},
        },
        "required": ["points", "kind", "id"],
        "additionalProperties": False,
    },
}


@pytest.mark.parametrize("name", SCHEMAS)
@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"top_k": 5, "top_p": 0.9}], ids=str)
def test_what_is_written_is_of_the_schema(name: str, options: dict[str, Any]) -> None:
    texts = [write(grammars().json_schema(SCHEMAS[name]), seed, **options) for seed in range(8)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 7
    for text in ended:
        jsonschema.validate(json.loads(text), SCHEMAS[name])
    assert len(set(ended)) > 1


def test_any_object() -> None:
    texts = [write(grammars().json_object(), seed) for seed in range(10)]
    ended = [text for text in texts if text is not None]
    assert len(ended) >= 8
    assert all(isinstance(json.loads(text), dict) for text in ended)


@pytest.mark.parametrize("pattern", [r"[a-z]{3}-\d{2,4}", r"(yes|no), (sir|madam)[.!]?", r"\u00fc+", "^a$"])
def test_regex(pattern: str) -> None:
    texts = {write(grammars().regex(pattern), seed) for seed in range(10)}
    assert None not in texts
    assert all(re.fullmatch(pattern, text or "") for text in texts)


def test_choice() -> None:
    texts = ["a b", 'c"\\d\n\u00fc', "</s>", "x-y|z*", "a b"]
    found = {write(grammars().choice(texts), seed) for seed in range(60)}
    assert found == set(texts)


@given(schema=st.recursive(
    st.sampled_from([{"type": "integer"}, {"type": "boolean"}, {"enum": ["a", "\u20ac"]}, {"type": "null"}]),
    lambda inner: st.one_of(
        st.builds(lambda a: {"type": "array", "items": a, "maxItems": 2}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(
            lambda a, b: {"type": "object", "properties": {"x": a, "y\n": b}, "required": ["x"],
                          "additionalProperties": False},
            inner, inner,
        ),
    ),
    max_leaves=5,
), seed=st.integers(0, 1000))  # fmt: skip
@settings(max_examples=25, deadline=None)
def test_schemas_of_any_form(schema: dict[str, Any], seed: int) -> None:
    text = write(grammars().json_schema(schema), seed)
    if text is not None:
        jsonschema.validate(json.loads(text), schema)


def test_white_space_between_parts() -> None:
    def accepts(text: str) -> bool:
        matcher = grammars().json_schema(SCHEMAS["object"]).matcher()
        try:
            for token in tokenizer().encode(text).ids:
                matcher.accept(token)
        except GrammarError:
            return False
        return matcher.complete

    assert accepts('{"name": "x", "age": 1}')
    assert accepts('{"name":"x","age":1}')
    assert accepts('{\n    "name": "x",\n    "age": 1\n}')
    assert not accepts('{\n\n"name": "x", "age": 1}')
    assert not accepts('{"name":  "x", "age": 1}')


# Matchers.


def test_tokens_behind_the_end_are_counted() -> None:
    """The library counts an end that it needs, and none behind it."""
    for grammar, text in ((grammars().regex("ab"), "ab"), (grammars().regex("[ab]+"), "ab")):
        matcher = grammar.matcher()
        before = [allowed(matcher)]
        tokens = tokenizer().encode(text).ids
        for token in [*tokens, EOS, TURN, EOS]:
            matcher.accept(token)
            before.append(allowed(matcher))
        assert before[-1] == [EOS, TURN]
        assert matcher.finished
        for back in (1, 2, 3, len(tokens) + 3):
            other = matcher.fork()
            other.rollback(back)
            assert allowed(other) == before[-1 - back]


def test_a_fork_goes_its_own_way() -> None:
    matcher = grammars().regex("[a-z]+[0-9]").matcher()
    a, one = (tokenizer().token_to_id(c) for c in "a1")
    matcher.accept(a)
    other = matcher.fork()
    other.accept(one)
    assert (other.finished, matcher.finished) == (True, False)
    assert a in allowed(matcher)
    assert allowed(other) == [EOS, TURN]


def test_tokens_that_may_not_follow() -> None:
    a, b = (tokenizer().token_to_id(c) for c in "ab")
    for token in (b, -1, PADDED, EOS):
        with pytest.raises(GrammarError, match=f"does not allow token {token} here"):
            grammars().regex("a").matcher().accept(token)
    matcher = grammars().regex("a").matcher()
    matcher.accept(a)
    with pytest.raises(GrammarError, match="the text has ended"):
        matcher.accept(a)
    with pytest.raises(GrammarError, match="cannot take 5 tokens back"):
        matcher.rollback(5)


def test_padding_is_never_allowed() -> None:
    assert max(allowed(grammars().regex(".*").matcher())) < tokenizer().get_vocab_size()


def test_min_tokens_and_a_grammar() -> None:
    """A text that may end is not ended early; one that must end is."""
    text = write(grammars().regex("[ab]*"), 1, min_tokens=12)
    assert text is not None
    assert len(tokenizer().encode(text).ids) >= 11
    assert write(grammars().regex("a"), 1, min_tokens=12) == "a"


# Compiling.


def test_compiled_once() -> None:
    schema = {"type": "object", "properties": {"once": {"type": "integer"}}}
    first = grammars().json_schema(schema)
    assert grammars().json_schema(json.dumps(schema)) is first
    assert grammars().compile("json_schema", schema) is first
    assert grammars().compile("json_object") is grammars().json_object()
    assert grammars().choice(["a"]) is not grammars().regex("a")
    assert repr(first) == "Grammar(json_schema)"


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        ("json_schema", {"type": "strin"}, "json_schema cannot be compiled: Invalid type: strin"),
        ("json_schema", {"not": {"type": "string"}}, 'cannot be compiled: Unimplemented keys: ["not"]'),
        (
            "json_schema",
            {"$ref": "#/nowhere"},
            "json_schema cannot be compiled: Pointer '/nowhere' does not exist",
        ),
        ("json_schema", {"$ref": "http://localhost/x"}, "json_schema cannot be compiled: Resource"),
        ("json_schema", False, "json_schema is false, which nothing satisfies: allowed is an object or true"),
        (
            "json_schema",
            {"anyOf": []},
            "json_schema cannot be compiled: Unsatisfiable schema: anyOf is empty",
        ),
        ("json_schema", "{", "json_schema is no JSON: "),
        ("json_schema", "[1]", "json_schema is list: allowed is an object or true"),
        ("json_schema", None, "json_schema is NoneType: allowed is an object"),
        ("regex", "(a", "error: unclosed group"),
        ("regex", "a(?=b)", "look-around, including look-ahead and look-behind, is not supported"),
        ("regex", r"[^\s\S]", "regex matches no text"),
        ("regex", "", "regex = '': allowed is a text that is not empty"),
        ("choice", [], "choice = []: allowed is a list of texts"),
        ("choice", ["a", ""], "allowed is a list of texts that are not empty"),
        ("choice", "ab", "choice = 'ab': allowed is a list of texts"),
        ("yaml", "a", "grammar 'yaml' does not exist; allowed: choice, json_object, json_schema, regex"),
    ],
    ids=str,
)
def test_what_cannot_be_compiled(kind: str, value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        grammars().compile(kind, value)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not re.search("<state>|start:", str(raised.value))


def test_tokens_that_end_an_answer() -> None:
    with pytest.raises(ConfigError, match="eos is empty"):
        Grammars(tokenizer(), [])
    with pytest.raises(ConfigError, match="eos has token 700: allowed are 0 to 699"):
        Grammars(tokenizer(), [700], PADDED)
    with pytest.raises(ConfigError, match="this tokenizer cannot be used"):
        Grammars(tokenizer(), [1], 50).json_object()


def test_truncation_and_padding_of_the_tokenizer() -> None:
    cut = Tokenizer.from_str(tokenizer().to_str())
    cut.enable_truncation(2)
    cut.enable_padding(length=8)
    matcher = Grammars(cut, [EOS]).regex("a long text of many tokens").matcher()
    for token in tokenizer().encode("a long text of many tokens").ids:
        matcher.accept(token)
    assert matcher.complete
    assert cut.truncation is not None


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(ConfigError, match=r"need the library llguidance: pip install 'hasten\[serve\]'"):
        Grammars(tokenizer(), [EOS]).json_object()

"""Answers of a given form: JSON of a schema, any JSON object, a regular expression, or one of some texts.

The work is llguidance's: a grammar over the tokenizer's tokens says after each token which ones may follow. A
grammar is compiled once for a tokenizer; each answer has a matcher of its own. Library and grammar are loaded
on first use, so that a server without constraints pays for neither.
"""

from __future__ import annotations

import json
import re
import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.base.errors import ConfigError, GrammarError, nearest

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from tokenizers import Tokenizer

KINDS = ("json_schema", "json_object", "regex", "choice")
MOST_KEPT = 64
"""Compiled grammars that are kept, the least recently used of more is dropped."""
# Between the parts of JSON: nothing, a space, or a new line with its indentation. A model that may write
# white space for ever sometimes does.
_SPACE = r"( |\n[ \t]{0,40})"


class Grammars:
    """Compiles constraints for one tokenizer; may be called from several threads."""

    def __init__(self, tokenizer: Tokenizer, eos: Sequence[int], vocab_size: int | None = None) -> None:
        """`eos`: tokens that end an answer, the usual one first; `vocab_size`: of the logits, where it is
        larger than the tokenizer's.

        Raises:
            ConfigError: there is no token that ends an answer, or one is outside the vocabulary.
        """
        self.vocab_size = vocab_size or tokenizer.get_vocab_size()
        if not eos:
            raise ConfigError(
                "eos is empty: an answer of a given form must be able to end; name at least one token"
            )
        for token in eos:
            if not 0 <= token < self.vocab_size:
                raise ConfigError(f"eos has token {token}: allowed are 0 to {self.vocab_size - 1}")
        self._tokenizer, self._eos = tokenizer, list(dict.fromkeys(eos))
        self._guided: LLTokenizer | None = None
        self._known: OrderedDict[str, Grammar] = OrderedDict()
        self._lock = threading.Lock()

    def json_schema(self, schema: Mapping[str, Any] | str | bool) -> Grammar:
        """JSON that the schema accepts, with at most a space or a new line and its indentation between two
        parts.

        Raises:
            ConfigError: it is no schema, or has a part that cannot be enforced; the message names it.
        """
        if isinstance(schema, str):
            try:
                schema = json.loads(schema)
            except ValueError as error:
                raise ConfigError(f"json_schema is no JSON: {error}") from None
        if schema is True:
            schema = {}
        if not isinstance(schema, Mapping):
            given = "false, which nothing satisfies" if schema is False else type(schema).__name__
            raise ConfigError(f"json_schema is {given}: allowed is an object or true")
        return self._compiled("json_schema", json.dumps(schema))

    def json_object(self) -> Grammar:
        """Any JSON object."""
        return self._compiled("json_object", '{"type": "object"}')

    def regex(self, pattern: str) -> Grammar:
        """Text that the expression matches from end to end: Rust's syntax, without look-around and back
        references; \\d is one of the ten digits.

        Raises:
            ConfigError: it is no regular expression, or matches nothing.
        """
        if not isinstance(pattern, str) or not pattern:
            raise ConfigError(f"regex = {pattern!r}: allowed is a text that is not empty")
        return self._compiled("regex", pattern)

    def choice(self, texts: Sequence[str]) -> Grammar:
        """One of the texts.

        Raises:
            ConfigError: there is none, or one is empty.
        """
        if isinstance(texts, str) or not texts or not all(isinstance(text, str) and text for text in texts):
            raise ConfigError(f"choice = {texts!r}: allowed is a list of texts that are not empty")
        return self._compiled("choice", "|".join(re.escape(text) for text in dict.fromkeys(texts)))

    def compile(self, kind: str, value: Any = None) -> Grammar:
        """The grammar of `kind`, one of `KINDS`, and what it takes.

        Raises:
            ConfigError: there is no such kind, or as the method of that name.
        """
        if kind == "json_object":
            return self.json_object()
        if kind not in KINDS:
            raise ConfigError(f"grammar {kind!r} does not exist; {nearest(kind, KINDS)}")
        return getattr(self, kind)(value)  # type: ignore[no-any-return]

    def _compiled(self, kind: str, text: str) -> Grammar:
        key = f"{kind} {text}"
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
            tokenizer = self._tokens()
        grammar = Grammar(_start_of(kind, text, tokenizer), kind, self.vocab_size, frozenset(self._eos))
        with self._lock:
            self._known[key] = grammar
            if len(self._known) > MOST_KEPT:
                self._known.popitem(last=False)
        return grammar

    def _tokens(self) -> LLTokenizer:
        if self._guided is None:
            try:
                from llguidance import LLTokenizer
            except ImportError as error:
                raise ConfigError(
                    "answers of a given form need the library llguidance: "
                    f"pip install 'hasten[serve]' ({error})"
                ) from None
            text = self._tokenizer.to_str()
            if (
                self._tokenizer.truncation or self._tokenizer.padding
            ):  # of batches; a text here is a whole one
                text = json.dumps(json.loads(text) | {"truncation": None, "padding": None})
            try:
                self._guided = LLTokenizer(text, self.vocab_size, self._eos)
            except ValueError as error:
                raise ConfigError(
                    f"this tokenizer cannot be used for answers of a given form: {error}"
                ) from None
        return self._guided


def _start_of(kind: str, text: str, tokenizer: LLTokenizer) -> LLMatcher:
    """A matcher at the beginning of an answer."""
    from llguidance import LLMatcher, LLParserLimits, regex_to_lark

    if kind in ("regex", "choice"):
        grammar = LLMatcher.grammar_from_lark(f"start: /{regex_to_lark(text, 'd')}/")
    else:
        grammar = LLMatcher.grammar_from_json_schema(text, overrides={"whitespace_pattern": _SPACE})
    start = LLMatcher(tokenizer, grammar, log_level=0, limits=LLParserLimits(verbose_errors=False))
    if start.is_error():
        raise ConfigError(f"{kind} cannot be compiled: {_said(start)}")
    start.compute_bitmask()  # some that nothing can match are found only now
    if start.is_error():
        raise ConfigError(f"{kind} matches no text that this tokenizer can write: {_said(start)}")
    return start


def _said(matcher: LLMatcher) -> str:
    """The library's error in one line."""
    # Behind these it shows its own state, and the grammar that it made of the constraint.
    said = re.split(r"\n<|\n +1 \|", matcher.get_error(), maxsplit=1)[0]
    return " ".join(said.split())[:400]


class Grammar:
    """A compiled constraint: `matcher()` starts an answer."""

    def __init__(self, start: LLMatcher, kind: str, vocab_size: int, eos: frozenset[int]) -> None:
        self.kind, self.vocab_size, self.eos = kind, vocab_size, eos
        self._start = start

    def __repr__(self) -> str:
        return f"Grammar({self.kind})"

    def matcher(self) -> Matcher:
        """At the beginning of an answer."""
        return Matcher(self._start.deep_copy(), self)


class Matcher:
    """How far one answer is in its grammar."""

    def __init__(self, inner: LLMatcher, grammar: Grammar, ends: int = 0) -> None:
        self._inner, self._grammar = inner, grammar
        self._ends = ends  # tokens behind the end of the text, of which the library keeps no count
        self._words = np.zeros((grammar.vocab_size + 31) // 32, np.int32)
        self._current = False

    @property
    def finished(self) -> bool:
        """Whether nothing but a token that ends the answer may follow."""
        return bool(self._inner.is_stopped())

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""
        return bool(self._inner.is_accepting())

    def mask(self) -> np.ndarray:
        """int32 [ceil(V / 32)]: bit i % 32 of word i / 32 says whether token i may follow; holds until the
        next call of another method.

        Raises:
            GrammarError: the constraint is too large to go on with.
        """
        if not self._current:
            self._inner.unsafe_compute_mask_ptr(self._words.ctypes.data, self._words.nbytes)
            self._check("the grammar cannot go on")
            self._current = True
        return self._words

    def accept(self, token: int) -> None:
        """Goes on behind the token.

        Raises:
            GrammarError: it may not follow here; the matcher is of no more use.
        """
        if self.finished:
            if token not in self._grammar.eos:
                raise GrammarError(f"the grammar does not allow token {token} here: the text has ended")
            self._ends += 1
            return
        self._current = False
        if not 0 <= token < self._grammar.vocab_size or not self._inner.consume_token(token):
            raise GrammarError(f"the grammar does not allow token {token} here: {_said(self._inner)}")

    def rollback(self, count: int) -> None:
        """Takes the last `count` tokens back.

        Raises:
            GrammarError: there are not so many.
        """
        behind = min(count, self._ends)
        self._ends -= behind
        if count == behind:
            return
        self._current = False
        self._inner.rollback(count - behind)
        self._check(f"the grammar cannot take {count} tokens back")

    def fork(self) -> Matcher:
        """A matcher in the same state that goes its own way."""
        return Matcher(self._inner.deep_copy(), self._grammar, self._ends)

    def _check(self, what: str) -> None:
        if self._inner.is_error():
            raise GrammarError(f"{what}: {_said(self._inner)}")

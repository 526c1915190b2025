"""Tokens to text while they come: characters and stop strings that are incomplete are held back.

`tokenizers.Tokenizer.decode` of all tokens is the meaning; here the same text comes piece by piece, at a cost
for each token that does not grow with the answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

REPLACEMENT = "\ufffd"
# Tokens that are decoded again with each new one: enough that the first of them does not change how the last
# is read (a leading space that a decoder strips, a character of four one-byte tokens).
_MOST_TOKENS = 16
# Which of them may stay when there are too many. Several lengths are tried, because the first kept token must
# begin a character: in a run of single bytes characters take 2, 3 or 4 tokens.
_KEPT_TOKENS = (8, 6, 5, 7, 4)


class Detokenizer:
    """Text of one sequence, token by token.

    A replacement character is given out only when it cannot become another character any more: bytes that
    begin a character wait for the next token."""

    def __init__(
        self, tokenizer: Tokenizer, prompt_tokens: Sequence[int] = (), skip_special_tokens: bool = True
    ):
        """The last tokens of the prompt are read along, so that the text continues the prompt's (a space
        between the two is kept); their own text is not given out."""
        self._decode = tokenizer.decode
        self._skip = skip_special_tokens
        self._tokens = list(prompt_tokens[-_KEPT_TOKENS[0] :])
        prompt = self._read() if self._tokens else ""
        self._shown = len(prompt.rstrip(REPLACEMENT))
        self._prompt_cut = prompt if prompt.endswith(REPLACEMENT) else ""
        """The prompt's text where it ends within a character, which is the answer's if that completes it."""

    def _read(self) -> str:
        return self._decode(self._tokens, skip_special_tokens=self._skip)

    def push(self, token: int) -> str:
        """The text that this token completes; often empty in the middle of a character."""
        self._tokens.append(token)
        text = self._read()
        complete = text.rstrip(REPLACEMENT) if text.endswith(REPLACEMENT) else text
        # Less can be complete than before: some decoders show a whole run of bytes as replacement characters
        # until its last character is there.
        new = self._new(complete)
        if len(self._tokens) > _MOST_TOKENS and self._shown == len(text):
            self._forget(text)
        return new

    def _forget(self, text: str) -> None:
        for kept in _KEPT_TOKENS:
            tokens = self._tokens[-kept:]
            tail = self._decode(tokens, skip_special_tokens=self._skip)
            if tail and text.endswith(tail):
                self._tokens, self._shown = tokens, len(tail)
                return

    def flush(self) -> str:
        """What was held back, at the end of the sequence."""
        return self._new(self._read()) if self._tokens else ""

    def _new(self, text: str) -> str:
        if self._prompt_cut and len(text) > self._shown:
            if text.startswith(self._prompt_cut):
                self._shown = len(self._prompt_cut)
            self._prompt_cut = ""
        new = text[self._shown :]
        self._shown = max(self._shown, len(text))
        return new


class StopStrings:
    """Finds the first stop string in text that comes in pieces; how it is cut into pieces changes nothing.

    The first is the one that ends first; of those that end together, the longest.
    """

    def __init__(self, stops: Sequence[str]):
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Text that can be given out, and whether a stop string was found: its text and all after it are
        gone."""
        if not self._stops:
            return text, False
        text = self._held + text
        found = [(at + len(stop), at) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self._held = ""
            return text[: min(found)[1]], True
        held = max(_overlap(text, stop) for stop in self._stops)
        cut = len(text) - held
        self._held = text[cut:]
        return text[:cut], False

    def flush(self) -> str:
        """The beginning of a stop string that never came whole."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(stop) - 1, len(text)), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


class TextOutput:
    """Detokenisation, then stop strings: the text of one choice."""

    def __init__(self, detokenizer: Detokenizer | None, stops: Sequence[str] = ()):
        """Without a detokenizer all text is empty."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)

    def push(self, token: int, may_stop: bool = True) -> tuple[str, bool]:
        """Text to give out, and whether a stop string ended it. `may_stop` False: stop strings are not
        sought."""
        if self._detokenizer is None:
            return "", False
        text = self._detokenizer.push(token)
        return self._stops.push(text) if may_stop else (text, False)

    def flush(self) -> str:
        """The rest, when the sequence ends for another reason than a stop string."""
        if self._detokenizer is None:
            return ""
        text, found = self._stops.push(self._detokenizer.flush())
        return text if found else text + self._stops.flush()


class TokenBytes:
    """The bytes that a token stands for, which may be part of a character (the API gives them with
    logprobs)."""

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        decoder = tokenizer.decoder
        self._byte_level = decoder is not None and b'"ByteLevel"' in decoder.__getstate__()
        self._byte_of = _byte_of_symbol()

    def __call__(self, token: int) -> bytes:
        """Empty for a number that is no token."""
        piece = self._tokenizer.id_to_token(token)
        if piece is None:
            return b""
        if self._byte_level:
            values = [self._byte_of.get(symbol) for symbol in piece]
            # A token that was added to the vocabulary is written as it is.
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else piece.encode()
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes([int(piece[3:5], 16)])
        return piece.replace("\u2581", " ").encode()


def _byte_of_symbol() -> dict[str, int]:
    """The alphabet of byte-level BPE: printable Latin-1 stands for itself, the others follow from U+0100
    on."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    others = [byte for byte in range(256) if byte not in printable]
    return {
        **{chr(byte): byte for byte in printable},
        **{chr(256 + place): byte for place, byte in enumerate(others)},
    }

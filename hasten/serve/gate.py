"""How far a model in another format is from the same model as it was, on a text: the gate before it serves.

For each token of the text the two models' distributions of the next one are compared:

    KL = sum_v p_v (log p_v - log q_v)      p of the original, q of the other, natural logarithm
    perplexity = exp(mean of -log p(the token that follows))
    top-1 agreement = share of places where both find the same token most likely
"""

from __future__ import annotations

import hashlib
import itertools
import math
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ConfigError, GateError, InputError

Logits = Callable[[Tensor], Tensor]
"""Token ids int64 [T] -> logits, floating point [T, vocabulary]: row t is what follows tokens 0 .. t."""

MAX_PERPLEXITY_RATIO = 1.05
_TAIL = 0.999
# Rows whose distributions are compared at a time; a vocabulary of 50,000 makes each 200 kB.
_ROWS = 128
_MIN_TOKENS = 16
_PIECE_TOKENS = 512
_MIN_CHARACTERS = 1500


@dataclass(frozen=True)
class Gate:
    """The distance between two models on a text. KL in nats."""

    tokens: int
    """Places that were compared."""
    mean_kl: float
    tail_kl: float
    """99.9 % of the places have a KL of at most this."""
    top1_agreement: float
    perplexity: float
    """Of the original."""
    perplexity_ratio: float
    """Of the other, over the original's."""
    what: str = "this format"

    def refuse(self, max_perplexity_ratio: float = MAX_PERPLEXITY_RATIO) -> None:
        """Raises GateError if the perplexity ratio is above the limit or is no number.

        Raises ConfigError for a limit below 1.
        """
        if not max_perplexity_ratio >= 1:
            raise ConfigError(
                f"max perplexity ratio {max_perplexity_ratio}; allowed: 1 and more, for example 1.05"
            )
        if self.perplexity_ratio <= max_perplexity_ratio:
            return
        raise GateError(
            f"{self.what} makes the perplexity {self.perplexity_ratio:.4f} times that of the original on "
            f"{self.tokens} tokens; the limit is {max_perplexity_ratio:g}. Choose more bits "
            "(4.5, int8, bfloat16), let them learn from the original (int4:200, or more steps), or allow it: "
            f"--max-perplexity-ratio {self._above():g}"
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        return (
            f"perplexity {self.perplexity:.3f} x {self.perplexity_ratio:.4f}, mean KL {self.mean_kl:.5f}, "
            f"99.9 % of places below {self.tail_kl:.4f}, top-1 agreement {self.top1_agreement:.2%} "
            f"({self.tokens} tokens)"
        )

    def _above(self) -> float:
        """The ratio, rounded up to a hundredth."""
        ratio = self.perplexity_ratio
        return math.ceil(ratio * 100) / 100 if math.isfinite(ratio) else ratio


def compare(original: Logits, other: Logits, chunks: Sequence[Tensor], what: str = "this format") -> Gate:
    """Both models on the same chunks of a text, one chunk at a time.

    Args:
        original, other: from token ids to logits; each chunk is a sequence of its own.
        chunks: int64 [T], T of 2 or more; the last token of each is only predicted.
        what: what messages call the other model, e.g. `int4`.

    Raises:
        InputError: fewer than 16 places to compare, or vocabularies that differ.
    """
    places = sum(max(0, chunk.numel() - 1) for chunk in chunks)
    if places < _MIN_TOKENS:
        raise InputError(
            f"a text of {places} places says nothing of a model; at least {_MIN_TOKENS} are needed"
        )
    divergences: list[Tensor] = []
    losses = torch.zeros(2, dtype=torch.float64)
    agreed = 0
    for chunk in chunks:
        if chunk.numel() < 2:
            continue
        first, second = original(chunk), other(chunk)
        if first.shape != second.shape:
            raise InputError(f"logits {list(first.shape)} and {list(second.shape)} are not of the same model")
        following = chunk[1:].long()
        for begin in range(0, following.numel(), _ROWS):
            rows = slice(begin, min(begin + _ROWS, following.numel()))
            p, q = (torch.log_softmax(logits[rows].float(), dim=-1) for logits in (first, second))
            # Differences of small terms: summed in float64, and never below zero but by rounding.
            divergences.append((p.exp() * (p - q)).sum(-1, dtype=torch.float64).clamp_min(0))
            target = following[rows].unsqueeze(1)
            losses -= torch.stack([x.gather(1, target).sum(dtype=torch.float64) for x in (p, q)])
            agreed += int((p.argmax(-1) == q.argmax(-1)).sum())
    kl = torch.cat(divergences)
    mean = losses / places
    return Gate(
        places,
        float(kl.mean()),
        float(kl.quantile(_TAIL)),
        agreed / places,
        _exponential(float(mean[0])),
        _exponential(float(mean[1] - mean[0])),
        what,
    )


def model_logits(model: torch.nn.Module) -> Logits:
    """The logits of a transformers model, without gradients."""

    def logits(tokens_T: Tensor) -> Tensor:
        with torch.no_grad():
            return model(input_ids=tokens_T.unsqueeze(0), use_cache=False).logits[0]  # type: ignore[no-any-return]

    return logits


def default_text(part: int = 0, parts: int = 2) -> Iterator[str]:
    """Documents of Python's own standard library, prose and programs in turn, for measuring a model.

    The library is split into `parts` without a document in common, so that what chose a format is not what
    judges it. Prose: the language reference that `help()` shows, in pieces of one topic.
    """
    root = Path(sysconfig.get_path("stdlib"))
    prose = (text for name, text in _topics().items() if _belongs(name, part, parts))
    files = sorted(root.glob("*.py"), key=lambda file: hashlib.sha256(file.name.encode()).digest())
    source = (_read(file) for file in files if _belongs(file.name, part, parts))
    for pair in itertools.zip_longest(prose, source, fillvalue=""):
        yield from (text for text in pair if len(text) >= _MIN_CHARACTERS)


def text_chunks(
    encode: Callable[[str], Sequence[int]],
    texts: Iterator[str],
    chunks: int = 8,
    chunk_tokens: int = _PIECE_TOKENS,
    first_token: int | None = None,
    of_each: int = 1,
) -> list[Tensor]:
    """Token ids of the beginnings of texts: `chunks` of them, int64 [chunk_tokens] at most.

    `first_token`: put before each text, where the model expects one (the tokenizer's bos) and `encode` puts
    none. `of_each`: most chunks of one text, one after the other; those behind the first are always full.
    """
    found: list[Tensor] = []
    for text in texts:
        # A token has three to four characters of such texts; what is cut off need not be encoded.
        ids = list(encode(text[: 8 * chunk_tokens * of_each]))
        if first_token is not None and ids[:1] != [first_token]:
            ids.insert(0, first_token)
        for begin in range(0, chunk_tokens * of_each, chunk_tokens):
            part = ids[begin : begin + chunk_tokens]
            if len(part) >= (chunk_tokens if begin else min(chunk_tokens, 2 * _MIN_TOKENS)):
                found.append(torch.tensor(part))
            if len(found) == chunks:
                return found
    return found


def piece_tokens(model: Any) -> int:
    """Tokens of a piece of text for a transformers model: 512, or as many as it has positions for."""
    longest = getattr(model.config.get_text_config(), "max_position_embeddings", None) or 0
    return min(_PIECE_TOKENS, int(longest)) if longest > 0 else _PIECE_TOKENS


def model_chunks(model: Any, tokenizer: Any, part: int, chunks: int = 8, of_each: int = 1) -> list[Tensor]:
    """`text_chunks` of `default_text(part)` for a transformers model, as long as it can read them."""
    first, tokens = tokenizer.bos_token_id, piece_tokens(model)

    def encode(text: str) -> list[int]:
        # A text of many pieces is longer than the model reads: no warning about it.
        return list(tokenizer.encode(text, verbose=False))

    return text_chunks(encode, default_text(part), chunks, tokens, first, of_each)


def _exponential(number: float) -> float:
    try:
        return math.exp(number)
    except OverflowError:
        return math.inf


def _belongs(name: str, part: int, parts: int) -> bool:
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:4], "big") % parts == part


def _topics() -> dict[str, str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # a Python without its documentation
        return {}
    return dict(sorted(topics.items(), key=lambda item: hashlib.sha256(item[0].encode()).digest()))


def _read(file: Path) -> str:
    return file.read_text(encoding="utf-8", errors="replace")

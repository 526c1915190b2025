"""From documents to rows of tokens, with documents kept apart, in an order that one integer describes.

N tokens in all, S tokens a row, R rows, B rows in a batch.

Documents are laid end to end in one stream that is tokenised once and kept in the cache. With packing, row r
is the S tokens from r*S on; a document that a row's end cuts goes on in the next row as a document of its
own, which also covers every document longer than a row. Positions restart at 0 with each document, and no
token is asked to predict the first token of the next document.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hasten.base.cache import cache_folder
from hasten.base.errors import HastenError, InputError
from hasten.base.screen import Screen
from hasten.train.config import DataSection
from hasten.train.text import Document, Source, documents, find_source

IGNORE = -100
# Texts go to the tokenizer in calls of about this many characters: enough to use all cores, small enough for
# a progress bar and for a token limit that is not overshot by much work.
CALL_CHARS = 1 << 19
# One text above this many characters is handed over in parts cut after a line end; its tokens stay one
# document.
PART_CHARS = 1 << 20
CACHE_VERSION = 1


class Batch(NamedTuple):
    """Rows for one forward pass; int64 [B, S] each."""

    input_ids: torch.Tensor
    labels: torch.Tensor
    """`input_ids`, and -100 for what is not predicted: a document's first token, padding. Not shifted."""
    position_ids: torch.Tensor | None
    """Restart at 0 with each document; None where each row holds one document."""
    tokens: int
    """Tokens that are not padding."""


@dataclass(frozen=True)
class TokenStream:
    """Tokenised documents end to end."""

    tokens: np.ndarray
    """[N] uint16 or uint32"""
    starts: np.ndarray
    """[D] int64: the first token of each document"""
    fingerprint: str
    """sha256 of the tokens and the starts"""
    reached_limit: bool = False
    """True if `max_tokens` ended it."""

    def longer_than(self, sequence_tokens: int) -> int:
        """How many documents have more tokens than a row."""
        lengths = np.diff(np.append(self.starts, len(self.tokens)))
        return int((lengths > sequence_tokens).sum())

    def split(self, validation_fraction: float) -> tuple[TokenStream, TokenStream]:
        """The stream for training and the last `validation_fraction` of the tokens for evaluation."""
        cut = len(self.tokens) - round(len(self.tokens) * validation_fraction)
        head = self.starts[self.starts < cut]
        tail = self.starts[self.starts >= cut] - cut
        if cut < len(self.tokens) and (not len(tail) or tail[0] != 0):
            tail = np.insert(tail, 0, 0)
        return (
            TokenStream(self.tokens[:cut], head, self.fingerprint, self.reached_limit),
            TokenStream(self.tokens[cut:], tail, self.fingerprint, self.reached_limit),
        )


def load_tokens(data: DataSection, tokenizer: Any, *, screen: Screen | None = None) -> TokenStream:
    """Tokenises the text of a data section, or takes it from the cache.

    The cache key covers the files (names, sizes, times), the tokenizer and the limit.

    Raises:
        InputError: the path is missing, a file is malformed, or there is no text at all.
        HastenError: the cache cannot be written, for example because the disk is full.
    """
    screen = screen or Screen(enabled=False)
    source = find_source(data)
    prefix, suffix = _document_ends(tokenizer)
    key = hashlib.sha256(
        json.dumps(
            [CACHE_VERSION, source.key(), _tokenizer_hash(tokenizer), prefix, suffix, data.max_tokens]
        ).encode()
    ).hexdigest()[:32]
    folder = cache_folder(data.cache_folder).value / "tokens" / key
    stream = _from_cache(folder)
    if stream is None:
        _tokenise(data, source, tokenizer, prefix, suffix, folder, screen)
        stream = _from_cache(folder)
        if stream is None:
            raise InputError(
                f"the tokens just written to {folder} are gone or damaged; is another program cleaning it?"
            )
    return stream


class Rows:
    """Rows of S tokens over a stream."""

    def __init__(
        self, stream: TokenStream, sequence_tokens: int, *, packing: bool = True, pad_id: int = 0
    ) -> None:
        self.stream = stream
        self.sequence_tokens = sequence_tokens
        self.packing = packing
        self.pad_id = pad_id
        N, S = len(stream.tokens), sequence_tokens
        if packing:
            self._first_R = np.arange(0, N, S)
            self._count_R = np.minimum(N - self._first_R, S)
        else:
            lengths_D = np.diff(np.append(stream.starts, N))
            pieces_D = -(-lengths_D // S)
            document_R = np.repeat(np.arange(len(lengths_D)), pieces_D)
            piece_R = np.arange(len(document_R)) - np.repeat(np.cumsum(pieces_D) - pieces_D, pieces_D)
            self._first_R = stream.starts[document_R] + piece_R * S
            self._count_R = np.minimum(lengths_D[document_R] - piece_R * S, S)

    def __len__(self) -> int:
        return len(self._first_R)

    def predicted(self, row: int) -> int:
        """How many tokens of a row are predicted: all but the first of each of its documents."""
        first, count = int(self._first_R[row]), int(self._count_R[row])
        begun = np.searchsorted(self.stream.starts, [first + 1, first + count])
        return count - 1 - int(begun[1] - begun[0])

    def batch(self, rows: np.ndarray | list[int]) -> Batch:
        """The rows with these numbers. What a row lacks is padding, a document that nothing predicts."""
        S = self.sequence_tokens
        ids_BS = np.full((len(rows), S), self.pad_id, dtype=np.int64)
        labels_BS = np.full((len(rows), S), IGNORE, dtype=np.int64)
        positions_BS = np.zeros((len(rows), S), dtype=np.int64)
        for b, row in enumerate(rows):
            first, count = int(self._first_R[row]), int(self._count_R[row])
            at = np.arange(first, first + count)
            document = np.searchsorted(self.stream.starts, at, side="right") - 1
            position = at - np.maximum(self.stream.starts[document], first)
            ids_BS[b, :count] = self.stream.tokens[first : first + count]
            labels_BS[b, :count] = np.where(position == 0, IGNORE, ids_BS[b, :count])
            positions_BS[b, :count] = position
            positions_BS[b, count:] = np.arange(S - count)
        positions = torch.from_numpy(positions_BS) if self.packing else None
        tokens = int(self._count_R[np.asarray(rows)].sum())
        return Batch(torch.from_numpy(ids_BS), torch.from_numpy(labels_BS), positions, tokens)


class Order:
    """The order in which a run sees its rows: every row once an epoch, each epoch in an order of its own.

    Whatever has been consumed is told by one integer, so a resumed run continues exactly where it was.
    """

    def __init__(self, rows: int, seed: int) -> None:
        self.rows = rows
        self.seed = seed

    def take(self, consumed: int, count: int) -> np.ndarray:
        """The `count` row numbers that follow after `consumed` rows; int64 [count]."""
        at = np.arange(consumed, consumed + count)
        epochs = at // self.rows
        return np.concatenate(
            [
                permutation(self.rows, self.seed, int(epoch))[at[epochs == epoch] % self.rows]
                for epoch in np.unique(epochs)
            ]
        )


@lru_cache(maxsize=2)
def permutation(count: int, seed: int, epoch: int) -> np.ndarray:
    """A permutation of `range(count)`, int64 [count]: the order of hashes of (seed, epoch, index).

    Written out, because a library's generator may change its stream between versions and a resumed run may
    not. Hash: splitmix64 (Steele, Lea and Flood, 2014).
    """
    start = _splitmix(_splitmix(np.uint64(seed)) ^ np.uint64(epoch))
    keys = _splitmix(np.arange(count, dtype=np.uint64) ^ start)
    order = np.argsort(keys, kind="stable")
    order.flags.writeable = False
    return order


def shifted_labels(labels_BS: torch.Tensor) -> torch.Tensor:
    """[B, S] int64: labels moved so that t holds what the logits at t predict; the last column is -100."""
    return torch.nn.functional.pad(labels_BS[:, 1:], (0, 1), value=IGNORE)


def _splitmix(value: Any) -> Any:
    with np.errstate(over="ignore"):
        mixed = value + np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))


def _document_ends(tokenizer: Any) -> tuple[list[int], list[int]]:
    """Token ids put before and after each document: what the tokenizer itself adds, and an end token."""
    bare = _ids(tokenizer, ["a"], special=False)[0]
    whole = _ids(tokenizer, ["a"], special=True)[0]
    at = next((i for i in range(len(whole)) if whole[i : i + len(bare)] == bare), 0)
    prefix, suffix = whole[:at], whole[at + len(bare) :]
    end = tokenizer.eos_token_id
    if end is not None and end not in suffix:
        suffix = [*suffix, end]
    return prefix, suffix


def _ids(tokenizer: Any, texts: list[str], *, special: bool = False) -> list[list[int]]:
    encoded = tokenizer(
        texts,
        add_special_tokens=special,
        return_attention_mask=False,
        return_token_type_ids=False,
        verbose=False,
    )
    return list(encoded["input_ids"])


def _tokenizer_hash(tokenizer: Any) -> str:
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = backend.to_str() if backend is not None else json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{type(tokenizer).__name__}\0{text}".encode()).hexdigest()


def _parts(text: str) -> Iterator[str]:
    """The text in parts of at most PART_CHARS, cut after a line end where there is one."""
    at = 0
    while len(text) - at > PART_CHARS:
        cut = text.rfind("\n", at, at + PART_CHARS) + 1
        cut = cut if cut > at else at + PART_CHARS
        yield text[at:cut]
        at = cut
    yield text[at:]


def _calls(texts: Iterator[Document]) -> Iterator[tuple[list[str], list[int], int]]:
    """Groups of parts for one tokenizer call: (parts, number of the document of each, bytes read so far)."""
    parts: list[str] = []
    owners: list[int] = []
    chars = read_bytes = 0
    for number, document in enumerate(texts):
        read_bytes += document.read_bytes
        for part in _parts(document.text):
            parts.append(part)
            owners.append(number)
            chars += len(part)
            if chars >= CALL_CHARS:
                yield parts, owners, read_bytes
                parts, owners, chars = [], [], 0
    if parts:
        yield parts, owners, read_bytes


def _tokenise(
    data: DataSection,
    source: Source,
    tokenizer: Any,
    prefix: list[int],
    suffix: list[int],
    folder: Path,
    screen: Screen,
) -> None:
    dtype = np.dtype(np.uint16 if len(tokenizer) <= 1 << 16 else np.uint32)
    limit = data.max_tokens
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:8]}.tmp")
    starts: list[int] = []
    written, current = 0, -1
    digest = hashlib.sha256()
    try:
        # Inside the try: an interrupt may come between any two lines, and no folder may stay.
        try:
            temporary.mkdir(parents=True)
        except OSError as error:
            raise InputError(
                f"cannot make {folder.parent}, where tokenised text is kept: {error.strerror}; set "
                "data.cache_folder or HASTEN_CACHE_DIR"
            ) from error
        with (
            (temporary / "tokens.bin").open("wb") as out,
            screen.bar("tokenise", limit or source.total_bytes) as bar,
        ):

            def put(ids: list[int]) -> None:
                nonlocal written
                kept = ids if limit is None else ids[: limit - written]
                raw = np.asarray(kept, dtype=dtype).tobytes()
                digest.update(raw)
                out.write(raw)
                written += len(kept)

            for parts, owners, read_bytes in _calls(documents(source)):
                for owner, ids in zip(owners, _ids(tokenizer, parts), strict=True):
                    if owner != current:
                        if current >= 0:
                            put(suffix)
                        starts.append(written)
                        put(prefix)
                        current = owner
                    put(ids)
                bar.update(written if limit else read_bytes, f"{written:,} tokens")
                if written == limit:
                    break
            if current >= 0:
                put(suffix)
            out.flush()
            os.fsync(out.fileno())
        if not written:
            raise InputError(
                f"data.path = {data.path!r}: no text in {len(source.files)} file(s); every document is empty"
                + (f" (field {data.field!r})" if source.files[0].suffix in (".jsonl", ".parquet") else "")
            )
        starts_D = np.asarray([start for start in starts if start < written], dtype=np.int64)
        np.save(temporary / "starts.npy", starts_D)
        digest.update(starts_D.tobytes())
        meta = {
            "version": CACHE_VERSION,
            "tokens": written,
            "documents": len(starts_D),
            "dtype": dtype.name,
            "fingerprint": digest.hexdigest(),
            "reached_limit": written == limit,
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1))
        _publish(temporary, folder)
    except OSError as error:
        raise HastenError(
            f"tokenised text cannot be written to {folder.parent}: {error.strerror or error}; free some "
            "space, or set data.cache_folder or HASTEN_CACHE_DIR"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _publish(temporary: Path, folder: Path) -> None:
    """Renames into place; what lies there already was found damaged, or another process was faster."""
    if folder.exists() and _from_cache(folder) is None:
        shutil.rmtree(folder)
    try:
        temporary.rename(folder)
    except OSError:
        if _from_cache(folder) is None:
            raise


def _from_cache(folder: Path) -> TokenStream | None:
    """The stream of a cache folder, or None if it is not there or not whole."""
    try:
        meta = json.loads((folder / "meta.json").read_text())
        dtype = np.dtype(meta["dtype"])
        if (folder / "tokens.bin").stat().st_size != meta["tokens"] * dtype.itemsize:
            return None
        tokens = np.memmap(folder / "tokens.bin", dtype=dtype, mode="r")
        starts = np.load(folder / "starts.npy")
        if len(starts) != meta["documents"]:
            return None
        return TokenStream(tokens, starts, meta["fingerprint"], bool(meta["reached_limit"]))
    except (OSError, ValueError, KeyError):
        return None

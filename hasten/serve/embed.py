"""Sentence embeddings: an encoder, pooled and normalised as the model's own folder says.

A folder made by sentence-transformers names its modules in `modules.json`: the encoder, pooling, and perhaps
normalisation. An encoder's folder without that file gets mean pooling and normalisation. The forward runs
through `hasten.optimize` in one thread of its own, several requests together in a batch.
"""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hasten.base.errors import (
    ContextError,
    EngineStopped,
    InputError,
    QueueFull,
    ServeError,
    first_line,
    nearest,
)

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_POOLING = ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken")
_OLD_POOLING = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}


@dataclass(frozen=True)
class SentenceConfig:
    """How a folder turns token vectors into one. `prompt` stands before every text."""

    encoder: Path
    pooling: tuple[str, ...] = ("mean",)
    normalise: bool = True
    most_tokens: int | None = None
    prompt: str = ""
    may_truncate: bool = False
    """Whether the model is trained so that the first components alone are an embedding (Matryoshka)."""


def read_sentence_config(folder: Path) -> SentenceConfig:
    """Reads a folder's settings.

    Raises InputError for a damaged file and for a module that is not known here.
    """
    modules = _json(folder / "modules.json", [])
    general = _json(folder / "config_sentence_transformers.json", {})
    named = general.get("default_prompt_name")
    prompt = (general.get("prompts") or {}).get(named, "") if named else ""
    matryoshka = general.get("matryoshka_dimensions") or general.get("truncate_dim")
    if not modules:
        return SentenceConfig(folder, prompt=prompt, may_truncate=bool(matryoshka))
    encoder, normalise = folder, False
    pooling: tuple[str, ...] = ("mean",)
    for module in modules:
        kind, place = str(module.get("type", "")).rpartition(".")[2], folder / str(module.get("path", ""))
        if kind == "Transformer":
            encoder = place
        elif kind == "Pooling":
            pooling = _pooling(_json(place / "config.json", {}), place)
        elif kind == "Normalize":
            normalise = True
        else:
            raise InputError(
                f"{folder} has a module {kind!r}; {nearest(kind, ('Transformer', 'Pooling', 'Normalize'))}"
            )
    settings = _json(encoder / "sentence_bert_config.json", {})
    return SentenceConfig(
        encoder, pooling, normalise, settings.get("max_seq_length"), prompt, may_truncate=bool(matryoshka)
    )


def _pooling(settings: Mapping[str, Any], place: Path) -> tuple[str, ...]:
    given = settings.get("pooling_mode") or [
        name for key, name in _OLD_POOLING.items() if settings.get(key, False)
    ]
    modes = (given,) if isinstance(given, str) else tuple(given) or ("mean",)
    for mode in modes:
        if mode not in _POOLING:
            raise InputError(f"{place / 'config.json'}: pooling {mode!r}; {nearest(str(mode), _POOLING)}")
    return modes


def _json(path: Path, default: Any) -> Any:
    if not path.is_file():
        return default
    try:
        value = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is damaged: {error}") from error
    if type(value) is not type(default):
        raise InputError(f"{path} holds no {'list' if isinstance(default, list) else 'object'}")
    return value


def pool(hidden_BSD: Any, mask_BS: Any, modes: Sequence[str], normalise: bool) -> Any:
    """One vector for each row of `hidden_BSD` (torch, [B, S, D]); `mask_BS` is 1 for real tokens.

    Several modes stand one after the other, in the order of the sentence-transformers library. fp32.
    """
    import torch

    x_BSD = hidden_BSD.float()
    m_BS1 = mask_BS.unsqueeze(-1).to(x_BSD.dtype)
    count_B1 = m_BS1.sum(1).clamp_min(1e-9)
    parts = []
    for mode in sorted(modes, key=_POOLING.index):
        if mode == "cls":
            parts.append(x_BSD[:, 0])
        elif mode == "max":
            parts.append(x_BSD.masked_fill(m_BS1 == 0, float("-inf")).amax(1))
        elif mode == "lasttoken":
            last_B = mask_BS.sum(1).clamp_min(1) - 1
            parts.append(x_BSD[torch.arange(len(x_BSD)), last_B])
        elif mode == "weightedmean":
            w_BS1 = m_BS1 * torch.arange(1, x_BSD.shape[1] + 1, dtype=x_BSD.dtype)[None, :, None]
            parts.append((x_BSD * w_BS1).sum(1) / w_BS1.sum(1).clamp_min(1e-9))
        else:
            divisor = count_B1 if mode == "mean" else count_B1.sqrt()
            parts.append((x_BSD * m_BS1).sum(1) / divisor)
    vectors_BD = torch.cat(parts, 1)
    return torch.nn.functional.normalize(vectors_BD, dim=1) if normalise else vectors_BD


@dataclass
class _Job:
    """One request: its texts as tokens, longest last; `left` are the indices that are not done."""

    tokens: list[list[int]]
    future: Future[np.ndarray]
    left: deque[int]
    vectors: list[np.ndarray | None] = field(default_factory=list)


class Embedder:
    """A model for embeddings and the thread that runs it.

    `forward(ids [B, S] int64, mask [B, S] int64) -> [B, D] fp32`, numpy. `submit` gives a future; cancelling
    it drops what has not run yet.
    """

    def __init__(
        self,
        name: str,
        tokenizer: Tokenizer,
        forward: Callable[[np.ndarray, np.ndarray], np.ndarray],
        dimensions: int,
        most_tokens: int,
        *,
        prompt: str = "",
        may_truncate: bool = False,
        batch_tokens: int = 4096,
        max_queue_tokens: int = 1 << 20,
    ) -> None:
        self.id, self.created = name, int(time.time())
        self.dimensions, self.most_tokens, self.may_truncate = dimensions, most_tokens, may_truncate
        self._tokenizer, self._forward, self._prompt = tokenizer, forward, prompt
        self._batch_tokens, self._max_queue_tokens = batch_tokens, max_queue_tokens
        self._changed = threading.Condition()
        self._jobs: deque[_Job] = deque()
        self._queued_tokens = 0
        self._stopped = False
        self._thread = threading.Thread(target=self._main, name="hasten-embed", daemon=True)
        self._thread.start()

    def encode(self, inputs: Sequence[str | list[int]]) -> list[list[int]]:
        """Texts as tokens, special tokens and prompt included; token lists are taken as they are.

        Raises:
            ContextError: an input is longer than the model reads.
            InputError: a number that is no token.
        """
        texts = [self._prompt + item for item in inputs if isinstance(item, str)]
        encoded = iter(self._tokenizer.encode_batch(texts))
        tokens = [next(encoded).ids if isinstance(item, str) else item for item in inputs]
        size = self._tokenizer.get_vocab_size()
        for index, ids in enumerate(tokens):
            if len(ids) > self.most_tokens:
                raise ContextError(
                    f"input[{index}] has {len(ids)} tokens; {self.id!r} reads at most {self.most_tokens}"
                )
            if any(not 0 <= token < size for token in ids):
                raise InputError(f"input[{index}] has a token that is not among 0 to {size - 1}")
        return tokens

    def submit(self, tokens: list[list[int]]) -> Future[np.ndarray]:
        """Vectors [len(tokens), dimensions] fp32 in the future, in the order given.

        Raises:
            QueueFull: too many tokens wait already.
            EngineStopped: after `stop`.
        """
        job = _Job(tokens, Future(), deque(sorted(range(len(tokens)), key=lambda index: len(tokens[index]))))
        job.vectors = [None] * len(tokens)
        count = sum(map(len, tokens))
        with self._changed:
            if self._stopped:
                raise EngineStopped("the server is shutting down")
            if self._queued_tokens and self._queued_tokens + count > self._max_queue_tokens:
                raise QueueFull(f"{self._queued_tokens} tokens wait to be embedded; try again later")
            self._queued_tokens += count
            self._jobs.append(job)
            self._changed.notify()
        return job.future

    def stop(self, drain_s: float = 0.0) -> None:
        """Takes no more requests, lets the waiting ones run for `drain_s`, and fails the rest."""
        with self._changed:
            self._stopped = True
            self._changed.notify()
            self._changed.wait_for(lambda: not self._jobs, drain_s)
            rest = list(self._jobs)
            self._jobs.clear()
            self._changed.notify()
        for job in rest:
            if job.future.set_running_or_notify_cancel():
                job.future.set_exception(EngineStopped("the server is shutting down"))
        self._thread.join()

    def _main(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._jobs or self._stopped)
                if not self._jobs:
                    return
                batch = self._next_batch()
            if batch:
                self._run(batch)
            with self._changed:
                for job in [job for job in self._jobs if not job.left or job.future.done()]:
                    self._jobs.remove(job)
                    self._queued_tokens -= sum(map(len, job.tokens))
                if not self._jobs:
                    self._queued_tokens = 0
                    self._changed.notify_all()

    def _next_batch(self) -> list[tuple[_Job, int]]:
        """Texts of all jobs in turn, so that a large request does not hold up a small one."""
        batch: list[tuple[_Job, int]] = []
        longest = 0
        waiting = [job for job in self._jobs if not job.future.cancelled()]
        while waiting:
            for job in list(waiting):
                if not job.left:
                    waiting.remove(job)
                    continue
                length = max(longest, len(job.tokens[job.left[0]]))
                if batch and length * (len(batch) + 1) > self._batch_tokens:
                    return batch
                longest = length
                batch.append((job, job.left.popleft()))
        return batch

    def _run(self, batch: list[tuple[_Job, int]]) -> None:
        length = max(len(job.tokens[index]) for job, index in batch)
        ids_BS = np.zeros((len(batch), length), np.int64)
        mask_BS = np.zeros((len(batch), length), np.int64)
        for row, (job, index) in enumerate(batch):
            tokens = job.tokens[index]
            ids_BS[row, : len(tokens)] = tokens
            mask_BS[row, : len(tokens)] = 1
        try:
            vectors_BD = self._forward(ids_BS, mask_BS)
        except (RuntimeError, ValueError, IndexError) as error:
            # The thread serves others too: this batch's requests fail, with the reason.
            for job in {id(job): job for job, _ in batch}.values():
                job.left.clear()
                if job.future.set_running_or_notify_cancel():
                    job.future.set_exception(ServeError(f"the model failed: {first_line(error)}"))
            return
        for (job, index), vector in zip(batch, vectors_BD, strict=True):
            job.vectors[index] = vector
        for job in {id(job): job for job, _ in batch}.values():
            if not job.left and not job.future.done() and job.future.set_running_or_notify_cancel():
                job.future.set_result(np.stack([vector for vector in job.vectors if vector is not None]))


def open_embedder(
    model: str | Path, name: str | None = None, cache_dir: str | Path | None = None
) -> Embedder:
    """Opens a sentence model: a preset (`minilm-l6`), or the folder of an encoder.

    Raises InputError where there is none, where it is damaged, and for a module that is not known here.
    """
    from hasten.base.cache import cache_folder
    from hasten.models.presets import SENTENCE_PRESETS, fetch_folder

    text = str(model)
    folder = Path(model).expanduser()
    if text in SENTENCE_PRESETS and not folder.exists():
        folder = fetch_folder(text, SENTENCE_PRESETS[text], cache_folder(cache_dir).value)
    elif not folder.is_dir():
        raise InputError(f"{text!r} is no folder and no sentence model ({nearest(text, SENTENCE_PRESETS)})")
    config = read_sentence_config(folder)
    encoder, width, positions = _open_encoder(config.encoder)
    tokenizer = _open_tokenizer(config.encoder if (config.encoder / "tokenizer.json").is_file() else folder)
    most = min(size for size in (config.most_tokens, positions) if size is not None)
    return Embedder(
        name or (text if text in SENTENCE_PRESETS else folder.resolve().name),
        tokenizer,
        _forward_of(encoder, config),
        width * len(config.pooling),
        most,
        prompt=config.prompt,
        may_truncate=config.may_truncate,
    )


def _open_tokenizer(folder: Path) -> Tokenizer:
    from tokenizers import Tokenizer

    file = folder / "tokenizer.json"
    if not file.is_file():
        raise InputError(f"{folder} has no tokenizer.json")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises nothing more special
        raise InputError(f"{file} is damaged: {error}") from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def _open_encoder(folder: Path) -> tuple[Any, int, int | None]:
    """The encoder, optimised, with its width and its number of positions."""
    from safetensors import SafetensorError
    from transformers import AutoConfig, AutoModel

    from hasten.graph.api import optimize
    from hasten.models.bars import late_bars

    try:
        with late_bars():
            config = AutoConfig.from_pretrained(folder)
            model, loading = AutoModel.from_pretrained(folder, config=config, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
        raise InputError(f"cannot open {folder}: {first_line(error)}") from error
    missing = sorted(name for name in loading["missing_keys"] if "pooler" not in name)
    if missing:
        raise InputError(f"{folder} lacks the weights {', '.join(missing[:5])}")
    return optimize(model.eval()), config.hidden_size, getattr(config, "max_position_embeddings", None)


def _forward_of(encoder: Any, config: SentenceConfig) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    import torch

    def forward(ids_BS: np.ndarray, mask_BS: np.ndarray) -> np.ndarray:
        mask = torch.from_numpy(mask_BS)
        with torch.no_grad():
            hidden_BSD = encoder(input_ids=torch.from_numpy(ids_BS), attention_mask=mask).last_hidden_state
            return pool(hidden_BSD, mask, config.pooling, config.normalise).numpy()

    return forward

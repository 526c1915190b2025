"""llama.cpp through the C functions of llama-cpp-python.

Its Python class answers one prompt at a time and adds Python's time to every token; the C functions take
several sequences in one batch, and a greedy step costs an argmax.
"""

from __future__ import annotations

import ctypes
import math
import time
from typing import Any

from hasten.base.errors import HastenError
from hasten.bench.generation.names import About, Answer, Spec

BATCH_TOKENS = 512
"""llama.cpp's own default for a physical batch."""


class LlamaCpp:
    """A GGUF file, and a context for as many sequences as were asked for last."""

    def __init__(self, spec: Spec) -> None:
        import llama_cpp

        if spec.gguf is None:
            raise HastenError("llama.cpp reads GGUF files only")
        self.about = About()
        self._c: Any = llama_cpp
        self._spec = spec
        # Kept for as long as the library may call it: without it every tensor is printed.
        self._silence = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._silence, ctypes.c_void_p(0))
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(
            spec.gguf.encode(), llama_cpp.llama_model_default_params()
        )
        if not self._model:
            raise HastenError(f"llama.cpp cannot open {spec.gguf}")
        self._vocabulary = int(llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model)))
        self._batch = llama_cpp.llama_batch_init(BATCH_TOKENS, 0, 1)
        self._context: Any = None
        self._sequences = 0
        self._open(1)

    def prepare(self, prompts: list[list[int]], new_tokens: int) -> None:
        """A context for so many sequences."""
        self._open(len(prompts))

    def answer(self, prompts: list[list[int]], new_tokens: int, logprobs: bool) -> list[Answer]:
        """See `Engine`. Prompts one after the other, then a step for all sequences at a time."""
        self._open(len(prompts))
        c = self._c
        c.llama_memory_clear(c.llama_get_memory(self._context), True)
        answers = [Answer() for _ in prompts]
        for sequence, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            for begin in range(0, len(prompt), BATCH_TOKENS):
                chunk = prompt[begin : begin + BATCH_TOKENS]
                self._decode(
                    [(token, begin + at, sequence) for at, token in enumerate(chunk)], all_rows=False
                )
            self._take(answer, len(chunk) - 1, logprobs)
        for step in range(new_tokens - 1):
            rows = [
                (answer.tokens[-1], len(prompts[sequence]) + step, sequence)
                for sequence, answer in enumerate(answers)
            ]
            self._decode(rows, all_rows=True)
            for row, answer in enumerate(answers):
                self._take(answer, row, logprobs)
        return answers

    def where(self, prompt: list[int], new_tokens: int) -> None:
        """The library does not tell."""

    def close(self) -> None:
        """Frees what the library holds."""
        c = self._c
        c.llama_batch_free(self._batch)
        c.llama_free(self._context)
        c.llama_model_free(self._model)

    def _open(self, sequences: int) -> None:
        """A context that holds `sequences` of the spec's length."""
        if sequences == self._sequences:
            return
        c = self._c
        if self._context is not None:
            c.llama_free(self._context)
        settings = c.llama_context_default_params()
        settings.n_ctx = self._spec.context_tokens * sequences
        settings.n_seq_max = sequences
        settings.n_batch = settings.n_ubatch = BATCH_TOKENS
        settings.n_threads = settings.n_threads_batch = self._spec.threads
        self._context = c.llama_init_from_model(self._model, settings)
        if not self._context:
            raise HastenError(f"llama.cpp makes no context of {settings.n_ctx} tokens")
        self._sequences = sequences

    def _decode(self, rows: list[tuple[int, int, int]], all_rows: bool) -> None:
        """One call for rows of (token, position, sequence); logits of all rows, or of the last."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for row, (token, position, sequence) in enumerate(rows):
            batch.token[row] = token
            batch.pos[row] = position
            batch.n_seq_id[row] = 1
            batch.seq_id[row][0] = sequence
            batch.logits[row] = all_rows or row == len(rows) - 1
        status = self._c.llama_decode(self._context, batch)
        if status != 0:
            raise HastenError(f"llama_decode gave {status} for {len(rows)} tokens")

    def _take(self, answer: Answer, row: int, logprobs: bool) -> None:
        """The best token of a row of the last call."""
        import numpy as np

        pointer = self._c.llama_get_logits_ith(self._context, row)
        logits = np.ctypeslib.as_array(pointer, shape=(self._vocabulary,))
        token = int(logits.argmax())
        answer.tokens.append(token)
        answer.at_s.append(time.perf_counter())
        if logprobs:
            shifted = logits.astype(np.float64) - float(logits[token])
            answer.logprobs.append(-math.log(float(np.exp(shifted).sum())))

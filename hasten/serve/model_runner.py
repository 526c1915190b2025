"""Serves a model that has no program, through its ordinary forward pass.

The blocks hold tokens, not keys: a step reads each sequence back through its table and gives the model what
its last cache has not seen. So sharing, forks and preemption work as they do over a real cache.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from hasten.serve.runner import BLOCK_TOKENS, Group, Step

_KEPT_CACHES = 8


class ModelRunner:
    """The `Runner` of a transformers model in eval mode."""

    def __init__(
        self, model: Any, context_tokens: int, blocks: int, step_tokens: int, step_logits: int
    ) -> None:
        self._model = model
        self.vocab_size = int(model.config.get_text_config().vocab_size)
        self.context_tokens, self.step_tokens, self.step_logits = context_tokens, step_tokens, step_logits
        self.groups = (Group(None, blocks),)
        # transformers renames the argument in 5.x; the old name warns where the new one is there.
        accepted = inspect.signature(type(model).forward).parameters
        self._cache_name = "cache" if "cache" in accepted else "past_key_values"
        self._held = np.zeros((blocks, BLOCK_TOKENS), np.int32)
        self._caches: OrderedDict[tuple[int, ...], Any] = OrderedDict()
        """Tokens -> the cache after them, the latest last."""

    def run(self, step: Step) -> np.ndarray:
        """fp32 logits [wanted rows, vocab]."""
        table = step.tables[0]
        logits = np.zeros((len(step.wanted), self.vocab_size), np.float32)
        for sequence, (first, last) in enumerate(zip(step.starts[:-1], step.starts[1:], strict=True)):
            places = step.positions[first:last]
            self._held[table[sequence, places // BLOCK_TOKENS], places % BLOCK_TOKENS] = step.tokens[
                first:last
            ]
            length = int(places[-1]) + 1
            blocks = table[sequence, : -(-length // BLOCK_TOKENS)]
            tokens = self._held[blocks].reshape(-1)[:length]
            rows = [i for i, row in enumerate(step.wanted) if first <= row < last]
            out = self._forward(tokens.tolist(), int(places[0]))
            for i in rows:
                logits[i] = out[step.wanted[i] - first]
        return logits

    def _forward(self, tokens: list[int], start: int) -> np.ndarray:
        """Logits of the tokens from `start` on."""
        known = tuple(tokens[:start])
        cache = self._caches.pop(known, None)
        begin = start if cache is not None else 0
        with torch.inference_mode():
            given = {self._cache_name: cache}
            out = self._model(input_ids=torch.tensor([tokens[begin:]]), use_cache=True, **given)
        if (kept := getattr(out, self._cache_name, None)) is not None:
            self._caches[tuple(tokens)] = kept
        while len(self._caches) > _KEPT_CACHES:
            self._caches.popitem(last=False)
        return out.logits[0, start - begin :].float().numpy()  # type: ignore[no-any-return]

    def copy_blocks(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        """Copies whole blocks (source, target), in order."""
        for source, target in pairs:
            self._held[target] = self._held[source]

"""Tiny models as programs, and runners driven by hand: one table a sequence, blocks in order."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from hasten.graph.whole import capture_whole
from hasten.ops.panels import FLOAT32, Format, Panels
from hasten.serve.link import CacheSettings, Linked
from hasten.serve.lowering import lower
from hasten.serve.native_runner import NativeRunner
from hasten.serve.program import Program
from hasten.serve.runner import Step
from hasten.serve.weights import ModelSource

CONTEXT = 256


def program_of(model: Any, context_tokens: int = CONTEXT) -> Program:
    """The program of a transformers model."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    vocabulary = model.config.get_text_config().vocab_size
    return lower(capture_whole(model), lambda name: parameters[name].detach(), vocabulary, context_tokens)


def runner_of(
    model: Any,
    form: Format = FLOAT32,
    cache: str = "float32",
    *,
    step_tokens: int = 128,
    step_logits: int = 128,
    blocks: int = 64,
) -> NativeRunner:
    """A native runner of a model whose matrices are all stored in one format."""
    program = program_of(model)
    source = ModelSource(model)
    panels: list[Panels] = [source.panels(use.weight, form) for use in program.matrices]
    settings = CacheSettings(cache, tuple(blocks for _ in program.windows()))
    return NativeRunner(Linked(program, panels, settings, step_tokens, step_logits))


class ByHand:
    """Sequences over a runner, each with a fixed part of every group's blocks."""

    def __init__(self, runner: Any, sequences: int = 1, blocks_each: int = 8) -> None:
        self.runner, self.blocks_each = runner, blocks_each
        self.lengths = [0] * sequences

    def feed(self, tokens: dict[int, list[int]], every: bool = True) -> np.ndarray:
        """Logits of all rows, or of each sequence's last, after one step with new tokens."""
        flat, positions, starts, wanted, tables = [], [], [0], [], []
        for sequence, new in tokens.items():
            begin = self.lengths[sequence]
            flat += new
            positions += range(begin, begin + len(new))
            starts.append(len(flat))
            wanted += range(starts[-2], starts[-1]) if every else [starts[-1] - 1]
            self.lengths[sequence] += len(new)
            # Scattered on purpose: neighbours in a sequence are no neighbours in the pool.
            tables.append([sequence + i * len(self.lengths) for i in range(self.blocks_each)])
        table = np.array(tables, np.int32)
        step = Step(
            *(np.array(given, np.int32) for given in (flat, positions, starts)),
            tuple(table.copy() for _ in self.runner.groups),
            np.array(wanted, np.int32),
        )
        return self.runner.run(step).copy()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        """`count` tokens of sequence 0 behind a prompt."""
        token, found = int(self.feed({0: prompt}, every=False)[0].argmax()), []
        for _ in range(count):
            found.append(token)
            token = int(self.feed({0: [token]}, every=False)[0].argmax())
        return found


def logits_of(model: Any, tokens: list[int]) -> np.ndarray:
    """[T, V] of the model itself."""
    with torch.no_grad():
        return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float().numpy()

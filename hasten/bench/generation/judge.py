"""Plain PyTorch in fp32 says how good each contender's tokens are: `python -m hasten.bench.generation.judge`.

Greedy answers of two right programs part as soon as two tokens are nearly equal, and everything after that
differs. So each answer is read by the judge token by token: given the same tokens before it, how far is the
token from the best one? A right program is never far, wherever the answers part; a wrong one is at once.
"""

from __future__ import annotations

import inspect
import json
import sys
from dataclasses import asdict, dataclass
from typing import Any

from hasten.bench.child import Emit, work


@dataclass(frozen=True)
class Sequence:
    """A prompt and an answer, both tokens."""

    prompt: list[int]
    tokens: list[int]


@dataclass(frozen=True)
class Scored:
    """What the judge says of each token of an answer: natural logarithms of probabilities."""

    logprobs: list[float]
    """Of the token that was chosen."""
    best: list[float]
    """Of the most probable one."""


def dump(model: str, sequences: list[Sequence]) -> str:
    """What the process of the judge reads."""
    return json.dumps({"model": model, "sequences": [asdict(sequence) for sequence in sequences]})


def load(text: str) -> list[Scored]:
    """What it wrote."""
    return [Scored(**entry) for entry in json.loads(text)]


def score(model: Any, sequence: Sequence) -> Scored:
    """One forward pass over prompt and answer; `model` is a causal language model in fp32."""
    import torch

    wanted = len(sequence.tokens)
    ids = torch.tensor([sequence.prompt + sequence.tokens])
    settings: dict[str, Any] = {"use_cache": False}
    if "logits_to_keep" in inspect.signature(model.forward).parameters:
        settings["logits_to_keep"] = wanted + 1
    with torch.no_grad():
        # The last position predicts what comes after the answer.
        logits = model(input_ids=ids, **settings).logits[0, -wanted - 1 : -1]
    logprobs_NV = logits.float().log_softmax(-1)
    chosen = logprobs_NV.gather(1, torch.tensor(sequence.tokens)[:, None])[:, 0]
    return Scored(chosen.tolist(), logprobs_NV.max(-1).values.tolist())


def run(text: str, emit: Emit) -> str:
    """Opens the model and reads every sequence.

    Raises:
        InputError: the model cannot be opened.
    """
    from hasten.models import open_model

    task = json.loads(text)
    model = open_model(task["model"]).model.eval()
    found = []
    for number, entry in enumerate(task["sequences"]):
        found.append(score(model, Sequence(**entry)))
        emit(event="answered", done=number + 1)
    return json.dumps([asdict(scored) for scored in found])


if __name__ == "__main__":
    sys.exit(work(sys.argv[1:], run))

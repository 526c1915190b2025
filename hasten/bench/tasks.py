"""What a step of the bench is: train a causal model, train a masked one, or run the encoder.

| task | a step | labels | what is compared |
|---|---|---|---|
| `clm` | forward, backward, optimizer | every next token | the loss |
| `mlm` | the same | 15 % of the tokens (Devlin et al. 2019) | the loss |
| `infer` | forward without head and gradients, weights in the run's dtype | none | a probe's loss |

The probe of `infer` is a fixed random linear classifier on the last hidden states, outside the time that is
measured: a number that moves with every element of the output.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
import torch.nn.functional as F

from hasten.base.errors import ConfigError, nearest

Task = Literal["clm", "mlm", "infer"]
TASKS: tuple[str, ...] = get_args(Task)

IGNORE = -100
_MASKED_SHARE = 0.15
# Of the tokens that are to be predicted: replaced by the mask token, by any token; the rest stay as they are.
_REPLACED, _RANDOM = 0.8, 0.1
_PROBE_CLASSES = 64
_EXACT_ROWS = 64
_ROUNDING = 1e-4


def check_task(name: str) -> Task:
    """The task of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in TASKS:
        raise ConfigError(f"task = {name!r}: unknown; {nearest(name, TASKS)}")
    return name  # type: ignore[return-value]


def mask_tokens(
    input_ids: np.ndarray, mask_token: int, vocabulary: int, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, labels) of masked language modelling for ids [rows, tokens]; each row has a label at least."""
    generator = np.random.default_rng(seed)
    chosen = generator.random(input_ids.shape) < _MASKED_SHARE
    chosen[:, 0] |= ~chosen.any(axis=1)
    kind = generator.random(input_ids.shape)
    inputs = np.where(chosen & (kind < _REPLACED), mask_token, input_ids)
    random = chosen & (kind >= _REPLACED) & (kind < _REPLACED + _RANDOM)
    inputs = np.where(random, generator.integers(0, vocabulary, input_ids.shape), inputs)
    return inputs, np.where(chosen, input_ids, IGNORE)


def loss_rounding(loss: float, logits: torch.Tensor, labels: torch.Tensor, task: Task) -> float | None:
    """loss minus the cross-entropy of logits [B, S, V] in float64: what computing it in float32 lost.

    None where they are further apart than rounding explains: such a model's loss has other terms.

    torch's float32 kernel adds V exponentials in a few running sums, and drops those below half a unit of the
    sum's last place: over the 49,152 words of SmolLM2 its losses are 0.8e-5 too low with AVX-512 and 1.7e-5
    with AVX2, whose vectors hold half the sums.
    """
    if task == "clm":
        logits, labels = logits[:, :-1], labels[:, 1:]
    rows, expected = logits.flatten(0, 1), labels.flatten()
    kept = expected != IGNORE
    rows, expected = rows[kept], expected[kept]
    parts = zip(rows.split(_EXACT_ROWS), expected.split(_EXACT_ROWS), strict=True)
    total = sum(float(F.cross_entropy(x.double(), y, reduction="sum")) for x, y in parts)
    exact = total / max(1, expected.numel())
    return loss - exact if abs(loss - exact) <= _ROUNDING * abs(exact) else None


def probe_loss(hidden: torch.Tensor, input_ids: torch.Tensor) -> float:
    """Cross-entropy of a fixed random classifier: hidden [B, S, H], the labels are the ids modulo 64."""
    width = hidden.shape[-1]
    generator = torch.Generator().manual_seed(width)
    probe = torch.randn(width, _PROBE_CLASSES, generator=generator) * width**-0.5
    logits = hidden.detach().float().reshape(-1, width) @ probe
    return float(F.cross_entropy(logits, input_ids.reshape(-1) % _PROBE_CLASSES))

"""What is asked of a row of logits; `reference.py` says what it means."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass

import numpy as np

COLDEST = 1e-5
"""Temperatures below it take the likeliest token."""

NOT_FINITE = -1
NONE_LEFT = -2


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The numbers that change probabilities before a token is drawn; the defaults change nothing."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0


@dataclass(frozen=True)
class Rule(Shaping):
    """How one row is sampled; the defaults change nothing.

    Attributes:
        seed, position: of the generator, each taken modulo 2^64.
        history: int32 [n, 2], a token of prompt or output and how often the output has it; a count below 0 is
            a token taken back.
        bias: tokens int32 [m] and what is added to their logits, float32 [m].
        mask: int32 [ceil(V / 32)]; bit i % 32 of word i / 32 is set where token i is allowed.
        top: how many of the most likely tokens to list; None: no log-probability either.
    """

    seed: int = 0
    position: int = 0
    _: KW_ONLY
    history: np.ndarray | None = None
    bias: tuple[np.ndarray, np.ndarray] | None = None
    mask: np.ndarray | None = None
    top: int | None = None

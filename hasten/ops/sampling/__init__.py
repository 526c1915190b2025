"""Tokens drawn from rows of logits, after penalties, masks, temperature, top-k, top-p and min-p.

Unlike the other operators these stand in no graph: they are plain functions that end in a kernel or, where
there is none, in the reference. `reference.py` is the meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
import torch
from torch import Tensor

from hasten.base.errors import ShapeError
from hasten.ops import native
from hasten.ops.sampling import reference
from hasten.ops.sampling.reference import NONE_LEFT, NOT_FINITE, Rule

__all__ = [
    "NONE_LEFT",
    "NOT_FINITE",
    "Column",
    "Lists",
    "Rule",
    "Samples",
    "argmax",
    "numbers",
    "sample",
    "table",
]


class Column(IntEnum):
    """The 64-bit words of a row of the table; HISTORY, BIAS and MASK count in `Lists`, -1 is none, and from
    TEMPERATURE on they are bits of float64."""

    ROW = 0
    SEED = 1
    POSITION = 2
    TOP_K = 3
    HISTORY = 4
    HISTORY_SIZE = 5
    BIAS = 6
    MASK = 7
    TOP = 8
    TEMPERATURE = 9
    TOP_P = 10
    MIN_P = 11
    REPETITION = 12
    PRESENCE = 13
    FREQUENCY = 14


@dataclass
class Lists:
    """The tensors that rows of a table name: see `Rule`. A history may be longer than a row says."""

    histories: list[Tensor]
    bias_ids: list[Tensor]
    bias_values: list[Tensor]
    masks: list[Tensor]


@dataclass(frozen=True)
class Samples:
    """One entry for each row of the table, L in all.

    Attributes:
        tokens: int64 [L]; NOT_FINITE where a logit is NaN or +infinity, NONE_LEFT where no token is allowed.
        logprobs: float32 [L, 1 + n] of the token and of the n most likely ones; n is the most that a row asks
            for, and nothing is written behind what a row asks for. [L, 0] if no row asks.
        top_tokens: int64 [L, n]; -1 where a row has no more.
        probabilities: float32 [L, V] that the tokens were drawn from; [0, V] unless asked for.
    """

    tokens: Tensor
    logprobs: Tensor
    top_tokens: Tensor
    probabilities: Tensor


def argmax(logits: Tensor, rows: Sequence[int]) -> Tensor:
    """int64 [L]: the largest of each of L rows of float32 logits [R, V], at ties the lowest.

    NOT_FINITE for a row with NaN or +infinity, NONE_LEFT for one of -infinity alone.

    Raises:
        ShapeError: the logits are not float32 [R, V].
        IndexError: a row is outside [0, R).
    """
    _check(logits)
    if not native.refusal(logits):
        return torch.ops.hasten_cpu.argmax(logits, rows)  # type: ignore[no-any-return]
    coldest = Rule(temperature=0.0)
    return torch.tensor(
        [reference.sample(_row(logits, row), coldest).token for row in rows], dtype=torch.int64
    )


def sample(logits: Tensor, table: Tensor, lists: Lists, probabilities: bool = False) -> Samples:
    """Draws a token for each row of the table, rows spread over the threads.

    Args:
        logits: contiguous float32 [R, V]; not changed.
        table: contiguous int64 [L, len(Column)], made of `numbers`; Column.ROW says which logits.
        lists: what the table names.
        probabilities: also return what the tokens were drawn from.

    Raises:
        ShapeError: the logits are not float32 [R, V].
        IndexError, RuntimeError: a row, list or token is out of range, or a list has another form.
    """
    _check(logits)
    if not native.refusal(logits):
        return Samples(
            *torch.ops.hasten_cpu.sample(
                logits, table, lists.histories, lists.bias_ids, lists.bias_values, lists.masks, probabilities
            )
        )
    words = table.numpy()
    most = int(words[:, Column.TOP].max(initial=-1))
    L, V = table.shape[0], logits.shape[1]
    tokens = torch.empty(L, dtype=torch.int64)
    logprobs = torch.full((L, 1 + most), -torch.inf)
    top_tokens = torch.full((L, max(0, most)), -1)
    drawn_from = torch.empty((L if probabilities else 0, V))
    for i in range(L):
        drawn = reference.sample(_row(logits, int(words[i, Column.ROW])), rule(words[i], lists))
        tokens[i] = drawn.token
        if probabilities:
            drawn_from[i] = drawn.probabilities
        if drawn.logprob is None:
            continue
        logprobs[i, 0] = drawn.logprob
        for place, (token, logprob) in enumerate(drawn.top):
            top_tokens[i, place], logprobs[i, 1 + place] = token, logprob
    return Samples(tokens, logprobs, top_tokens, drawn_from)


def numbers(rule: Rule) -> np.ndarray:
    """int64 [len(Column)]: a rule as a row of the table that names no list and row 0 of the logits."""
    words = np.full(len(Column), -1, np.int64)
    words[Column.ROW] = words[Column.HISTORY_SIZE] = 0
    words[Column.SEED] = signed(rule.seed)
    words[Column.POSITION] = signed(rule.position)
    words[Column.TOP_K] = rule.top_k
    if rule.top is not None:
        words[Column.TOP] = rule.top
    words.view(np.float64)[Column.TEMPERATURE :] = (
        rule.temperature,
        rule.top_p,
        rule.min_p,
        rule.repetition_penalty,
        rule.presence_penalty,
        rule.frequency_penalty,
    )
    return words


def table(rules: Sequence[Rule]) -> tuple[Tensor, Lists]:
    """The table and lists of rules for rows 0, 1, .. of the logits."""
    words = np.zeros((len(rules), len(Column)), np.int64)
    lists = Lists([], [], [], [])
    for i, one in enumerate(rules):
        words[i] = numbers(one)
        words[i, Column.ROW] = i
        if one.history is not None:
            words[i, Column.HISTORY], words[i, Column.HISTORY_SIZE] = len(lists.histories), len(one.history)
            lists.histories.append(one.history)
        if one.bias is not None:
            words[i, Column.BIAS] = len(lists.bias_ids)
            lists.bias_ids.append(one.bias[0])
            lists.bias_values.append(one.bias[1])
        if one.mask is not None:
            words[i, Column.MASK] = len(lists.masks)
            lists.masks.append(one.mask)
    return torch.from_numpy(words), lists


def rule(words: np.ndarray, lists: Lists) -> Rule:
    """The rule that a row of the table [len(Column)] means."""
    history, bias, mask = (int(words[column]) for column in (Column.HISTORY, Column.BIAS, Column.MASK))
    real = words.view(np.float64)
    return Rule(
        seed=int(words[Column.SEED]),
        position=int(words[Column.POSITION]),
        temperature=float(real[Column.TEMPERATURE]),
        top_k=int(words[Column.TOP_K]),
        top_p=float(real[Column.TOP_P]),
        min_p=float(real[Column.MIN_P]),
        repetition_penalty=float(real[Column.REPETITION]),
        presence_penalty=float(real[Column.PRESENCE]),
        frequency_penalty=float(real[Column.FREQUENCY]),
        history=lists.histories[history].view(-1, 2)[: int(words[Column.HISTORY_SIZE])]
        if history >= 0
        else None,
        bias=(lists.bias_ids[bias], lists.bias_values[bias]) if bias >= 0 else None,
        mask=lists.masks[mask] if mask >= 0 else None,
        top=int(words[Column.TOP]) if words[Column.TOP] >= 0 else None,
    )


def signed(word: int) -> int:
    """An integer modulo 2^64 as the int64 of the same bits."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def _check(logits: Tensor) -> None:
    if (
        logits.dim() != 2
        or logits.dtype != torch.float32
        or not logits.shape[1]
        or not logits.is_contiguous()
    ):
        raise ShapeError(
            "sampling takes contiguous float32 logits [rows, vocabulary]; "
            f"got {logits.dtype} {list(logits.shape)} with strides {list(logits.stride())}"
        )


def _row(logits: Tensor, row: int) -> Tensor:
    if not 0 <= row < logits.shape[0]:
        raise IndexError(f"sampling: row {row} of {logits.shape[0]}")
    return logits[row]

"""Tokens drawn from rows of logits, after penalties, masks, temperature, top-k, top-p and min-p.

Unlike the other operators these stand in no graph: they are plain functions of numpy arrays that end in a
kernel or, where there is none, in the reference, which alone needs torch. `reference.py` is the meaning.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from hasten.base.errors import ShapeError
from hasten.ops import level
from hasten.ops.memory import address
from hasten.ops.sampling.rule import NONE_LEFT, NOT_FINITE, Rule

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
    """The arrays that rows of a table name: see `Rule`. A history may be longer than a row says."""

    histories: list[np.ndarray]
    bias_ids: list[np.ndarray]
    bias_values: list[np.ndarray]
    masks: list[np.ndarray]


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

    tokens: np.ndarray
    logprobs: np.ndarray
    top_tokens: np.ndarray
    probabilities: np.ndarray


def argmax(logits: np.ndarray, rows: Sequence[int]) -> np.ndarray:
    """int64 [L]: the largest of each of L rows of float32 logits [R, V], at ties the lowest.

    NOT_FINITE for a row with NaN or +infinity, NONE_LEFT for one of -infinity alone.

    Raises:
        ShapeError: the logits are not float32 [R, V].
        IndexError: a row is outside [0, R).
    """
    _check_logits(logits)
    if level.refusal():
        words = np.tile(numbers(Rule(temperature=0.0)), (len(rows), 1))
        words[:, Column.ROW] = rows
        return sample(logits, words, Lists([], [], [], [])).tokens
    tokens = np.empty(len(rows), np.int64)
    wanted = np.array(rows, np.int64)
    level.doors().argmax(
        address(logits), *logits.shape, address(wanted), len(tokens), level.threads(), address(tokens)
    )
    return tokens


def sample(logits: np.ndarray, table: np.ndarray, lists: Lists, probabilities: bool = False) -> Samples:
    """Draws a token for each row of the table, rows spread over the threads.

    Args:
        logits: contiguous float32 [R, V]; not changed.
        table: contiguous int64 [L, len(Column)], made of `numbers`; Column.ROW says which logits.
        lists: what the table names.
        probabilities: also return what the tokens were drawn from.

    Raises:
        ShapeError: logits, table or a list have another type or shape.
        IndexError, RuntimeError: a row, list or token is out of range.
    """
    _check_logits(logits)
    _check("the table", table, np.int64, (len(table), len(Column)))
    L, V = len(table), logits.shape[1]
    most = int(table[:, Column.TOP].max(initial=-1))
    found = Samples(
        np.empty(L, np.int64),
        np.empty((L, 1 + most), np.float32),
        np.empty((L, max(0, most)), np.int64),
        np.empty((L if probabilities else 0, V), np.float32),
    )
    words = _Words(lists, V)
    if level.refusal():
        return _slowly(logits, table, lists, found)
    level.doors().sample(
        address(logits), *logits.shape, address(table), L, address(words.words), most, level.threads(),
        address(found.tokens), address(found.logprobs), address(found.top_tokens),
        address(found.probabilities) if probabilities else 0,
    )  # fmt: skip
    return found


class _Words:
    """`Lists` of serving.cpp, with what its words point to."""

    def __init__(self, lists: Lists, V: int) -> None:
        for history in lists.histories:
            _check("a history", history, np.int32, (len(history), 2))
        if len(lists.bias_ids) != len(lists.bias_values):
            raise ShapeError(
                f"sampling: {len(lists.bias_values)} biases for {len(lists.bias_ids)} lists of tokens"
            )
        for ids, values in zip(lists.bias_ids, lists.bias_values, strict=True):
            _check("a bias's tokens", ids, np.int32, (len(ids),))
            _check("a bias", values, np.float32, (len(ids),))
        for mask in lists.masks:
            _check("a mask", mask, np.int32, (-(-V // 32),))
        self._lists = lists
        addresses = [
            np.array([address(one) for one in given], np.int64)
            for given in (lists.histories, lists.bias_ids, lists.bias_values, lists.masks)
        ]
        sizes = [
            np.array([len(one) for one in given], np.int64) for given in (lists.histories, lists.bias_ids)
        ]
        self._kept = [addresses[0], sizes[0], *addresses[1:3], sizes[1], addresses[3]]
        counts = [len(lists.histories), len(lists.bias_ids), len(lists.masks)]
        self.words = np.array([*counts, *map(address, self._kept)], np.int64)


def _slowly(logits: np.ndarray, table: np.ndarray, lists: Lists, found: Samples) -> Samples:
    """Fills `found` by the reference, row by row."""
    import torch

    from hasten.ops.sampling import reference

    found.logprobs[:], found.top_tokens[:] = -np.inf, -1
    for i, words in enumerate(table):
        row = int(words[Column.ROW])
        if not 0 <= row < len(logits):
            raise IndexError(f"sampling: row {row} of {len(logits)}")
        drawn = reference.sample(torch.tensor(logits[row]), rule(words, lists))
        found.tokens[i] = drawn.token
        if len(found.probabilities):
            found.probabilities[i] = drawn.probabilities
        if drawn.logprob is None:
            continue
        found.logprobs[i, 0] = drawn.logprob
        for place, (token, logprob) in enumerate(drawn.top):
            found.top_tokens[i, place], found.logprobs[i, 1 + place] = token, logprob
    return found


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


def table(rules: Sequence[Rule]) -> tuple[np.ndarray, Lists]:
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
    return words, lists


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
        history=lists.histories[history][: int(words[Column.HISTORY_SIZE])] if history >= 0 else None,
        bias=(lists.bias_ids[bias], lists.bias_values[bias]) if bias >= 0 else None,
        mask=lists.masks[mask] if mask >= 0 else None,
        top=int(words[Column.TOP]) if words[Column.TOP] >= 0 else None,
    )


def signed(word: int) -> int:
    """An integer modulo 2^64 as the int64 of the same bits."""
    word &= 2**64 - 1
    return word - 2**64 if word >= 2**63 else word


def _check_logits(logits: np.ndarray) -> None:
    formed = logits.ndim == 2 and logits.dtype == np.float32 and logits.flags.c_contiguous
    if not formed or not 0 < logits.shape[1] < 2**31:
        raise ShapeError(
            "sampling takes contiguous float32 logits [rows, vocabulary]; "
            f"got {logits.dtype} {list(logits.shape)} with strides {list(logits.strides)}"
        )


def _check(what: str, array: np.ndarray, dtype: type, shape: tuple[int, ...]) -> None:
    if array.dtype != dtype or array.shape != shape or not array.flags.c_contiguous:
        raise ShapeError(
            f"sampling: {what} is contiguous {np.dtype(dtype)} {list(shape)}; "
            f"got {array.dtype} {list(array.shape)}"
        )

"""Drafts from the sequence itself (prompt lookup): where its last tokens stood before, what followed may
follow again. A draft's tokens go through the model as rows of one step; those that the model itself would
have chosen are kept, so the output is the same as without drafts.

Saxena, Prompt Lookup Decoding (2023). How many tokens are worth drafting: the j-th is kept with probability
p^j, so it pays while p^j is above the share of a step's time that one more row takes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

# Before anything is measured: drafts are taken as likely, and a row as this share of a step.
_FIRST_ACCEPTANCE = 0.6
_FIRST_ROW_SHARE = 0.15
_MEMORY = 0.85  # weight of what was known before a new draft is judged
_FIRST_PAUSE_TOKENS = 16
_LONGEST_PAUSE_TOKENS = 1024


class _Lookup:
    """How well runs of `length` tokens foretell what follows."""

    def __init__(self, length: int):
        self.length = length
        self.acceptance = _FIRST_ACCEPTANCE
        self.paused_until = 0
        self.pause_tokens = _FIRST_PAUSE_TOKENS

    def worth(self, row_share: float, most: int) -> int:
        """How many tokens to draft; at least one, or nothing would be learnt."""
        if self.acceptance >= 0.999:
            return most
        return min(most, max(1, int(math.log(row_share) / math.log(max(self.acceptance, 1e-6)))))


class PromptLookup:
    """Drafts for one sequence. The last three tokens are looked up first, then two; each kind stops by
    itself where its drafts are refused, and tries again after a pause that doubles."""

    def __init__(self, tokens: Sequence[int], most_tokens: int):
        """`most_tokens`: longest draft."""
        self._most = most_tokens
        self._lookups = (_Lookup(3), _Lookup(2))
        self._used: _Lookup | None = None
        self._tokens = np.empty(2 * len(tokens) + 64, np.int32)
        self._count = 0
        self._read(tokens)

    def _read(self, tokens: Sequence[int]) -> None:
        count = len(tokens)
        if count > len(self._tokens):
            self._tokens = np.resize(self._tokens, 2 * count)
        self._tokens[self._count : count] = tokens[self._count : count]
        self._count = count

    def _find(self) -> tuple[int, int]:
        """For the last three and the last two tokens the place behind where they stood before, or -1."""
        count = self._count
        if count < 3:
            return -1, -1
        tokens = self._tokens[:count]
        places = 2 + np.flatnonzero((tokens[1:-1] == tokens[-1]) & (tokens[:-2] == tokens[-2]))
        if not places.size:
            return -1, -1
        longer = places[(places > 2) & (tokens[places - 3] == tokens[-3])]
        return int(longer[-1]) if longer.size else -1, int(places[-1])

    def draft(self, tokens: Sequence[int], most: int, row_share: float | None) -> list[int]:
        """Tokens that may follow `tokens`, which extend those of the last call; at most `most`.

        `row_share`: time of one more row as a share of the step's time for one token, in (0, 1]; None: not
        known.
        """
        self._used = None
        count = len(tokens)
        if all(count < lookup.paused_until for lookup in self._lookups):
            return []
        self._read(tokens)
        for lookup, at in zip(self._lookups, self._find(), strict=True):
            if at < 0 or count < lookup.paused_until:
                continue
            share = _FIRST_ROW_SHARE if row_share is None else row_share
            wanted = min(most, lookup.worth(share, self._most))
            self._used = lookup
            draft = self._tokens[at : min(at + wanted, count)].tolist()
            # A run that overlaps the end goes on with the draft itself.
            for place in range(wanted - len(draft)):
                draft.append(draft[place])
            return draft
        return []

    def judge(self, count: int, drafted: int, accepted: int, row_share: float | None) -> None:
        """Tells how many of the last draft's tokens were kept; `count`: tokens of the sequence now."""
        lookup = self._used
        if lookup is None or drafted == 0:
            return
        # Only tokens up to the first refusal were judged.
        for kept in [True] * accepted + [False] * (accepted < drafted):
            lookup.acceptance = _MEMORY * lookup.acceptance + (1 - _MEMORY) * kept
        share = _FIRST_ROW_SHARE if row_share is None else row_share
        if lookup.acceptance > share:
            if accepted:
                lookup.pause_tokens = _FIRST_PAUSE_TOKENS
            return
        lookup.paused_until = count + lookup.pause_tokens
        lookup.pause_tokens = min(2 * lookup.pause_tokens, _LONGEST_PAUSE_TOKENS)


class RowCost:
    """What one more row costs, from the times of steps that only decode: a line through (rows, seconds), in
    which older steps count for less."""

    def __init__(self) -> None:
        self._weight = 0.0
        self._rows = self._seconds = self._rows_rows = self._rows_seconds = 0.0

    def add(self, rows: int, seconds: float) -> None:
        """One step of `rows` rows took `seconds`."""
        fade = 0.98
        self._weight = fade * self._weight + 1
        self._rows = fade * self._rows + rows
        self._seconds = fade * self._seconds + seconds
        self._rows_rows = fade * self._rows_rows + rows * rows
        self._rows_seconds = fade * self._rows_seconds + rows * seconds

    def share(self, sequences: int) -> float | None:
        """Time of one more row over the time for one token of a step of `sequences` rows; None: not known
        yet, which it is while all steps had the same number of rows."""
        if self._weight < 4:
            return None
        spread = self._rows_rows - self._rows * self._rows / self._weight
        if spread < 0.05 * self._weight:
            return None
        slope = (self._rows_seconds - self._rows * self._seconds / self._weight) / spread
        step = (self._seconds - slope * self._rows) / self._weight + slope * sequences
        if step <= 0:
            return None
        return min(1.0, max(0.01, slope * sequences / step))

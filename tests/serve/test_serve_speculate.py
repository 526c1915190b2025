"""Drafts from the sequence itself."""

from __future__ import annotations

import pytest

from hasten.serve.speculate import PromptLookup, RowCost


def test_what_followed_before_is_drafted() -> None:
    lookup = PromptLookup([5, 1, 2, 3, 4, 9, 8], 4)
    assert lookup.draft([5, 1, 2, 3, 4, 9, 8, 1, 2, 3], 2, 0.1) == [4, 9]


def test_the_last_occurrence_wins_and_three_tokens_come_before_two() -> None:
    lookup = PromptLookup([], 1)
    assert lookup.draft([1, 2, 3, 7, 0, 2, 3, 8, 5, 1, 2, 3], 1, 0.1) == [7]
    assert lookup.draft([1, 2, 3, 7, 0, 2, 3, 8, 5, 1, 2, 3, 6, 2, 3], 1, 0.1) == [6]


def test_a_repetition_is_drafted_beyond_the_end() -> None:
    lookup = PromptLookup([], 8)
    for _ in range(60):
        lookup._lookups[0].acceptance = 1.0
    assert lookup.draft([4, 5, 6, 4, 5, 6], 8, 0.1) == [4, 5, 6, 4, 5, 6, 4, 5]


def test_nothing_known_gives_no_draft() -> None:
    lookup = PromptLookup([1, 2, 3], 4)
    assert lookup.draft([1, 2, 3], 4, None) == []
    assert lookup.draft([1], 4, None) == []


def test_no_more_than_asked_for() -> None:
    lookup = PromptLookup([7] * 20, 8)
    assert len(lookup.draft([7] * 20, 1, 0.01)) == 1
    assert lookup.draft([7] * 20, 8, 0.01) == [7] * len(lookup.draft([7] * 20, 8, 0.01))


@pytest.mark.parametrize("share", [None, 0.05, 0.5, 1.0])
def test_refused_drafts_become_rare(share: float | None) -> None:
    tokens = [1, 2, 3] * 3
    lookup = PromptLookup(tokens, 7)
    drafted = 0
    for count in range(2000):
        draft = lookup.draft(tokens, 7, share)
        drafted += len(draft)
        # What follows is never what followed before, yet every run is known.
        tokens += [100 + count, 1, 2, 3]
        lookup.judge(len(tokens), len(draft), 0, share)
    assert 0 < drafted < 120


def test_kept_drafts_become_longer() -> None:
    tokens = [1, 2, 3, 4, 5]
    lookup = PromptLookup(tokens, 6)
    lengths = []
    while len(tokens) < 300:
        draft = lookup.draft(tokens, 6, 0.2)
        lengths.append(len(draft))
        kept = [1 + (len(tokens) + place) % 5 for place in range(len(draft))]
        assert draft == kept[: len(draft)]
        tokens += [*kept, 1 + (len(tokens) + len(kept)) % 5]
        lookup.judge(len(tokens), len(draft), len(draft), 0.2)
    assert lengths[:3] == [0, 0, 3]
    assert lengths[-1] == 6


def test_a_pause_ends_and_a_success_shortens_the_next() -> None:
    lookup = PromptLookup([1, 2] * 6, 4)
    kind = lookup._lookups[0]
    kind.acceptance = 0.01
    assert len(lookup.draft([1, 2] * 6, 4, 0.2)) == 1  # a try
    lookup.judge(12, 1, 0, 0.2)
    assert kind.paused_until > 12
    kind.paused_until, kind.acceptance = 0, 0.5
    lookup.draft([1, 2] * 6, 4, 0.2)
    lookup.judge(13, 2, 2, 0.2)
    assert kind.pause_tokens == 16


def test_the_cost_of_a_row_is_found() -> None:
    cost = RowCost()
    assert cost.share(1) is None
    for number in range(40):
        rows = 1 + number % 4
        cost.add(rows, 0.010 + 0.002 * rows)
    assert cost.share(1) == pytest.approx(0.002 / 0.012, rel=1e-3)
    assert cost.share(4) == pytest.approx(0.008 / 0.018, rel=1e-3)


def test_equal_steps_tell_nothing_of_a_row() -> None:
    cost = RowCost()
    for _ in range(50):
        cost.add(3, 0.01)
    assert cost.share(3) is None


def test_a_long_answer_is_looked_up_whole() -> None:
    lookup = PromptLookup([9, 8, 7, 6], 3)
    tokens = [9, 8, 7, 6, *(10 + number for number in range(500))]
    for count in range(5, len(tokens), 3):
        assert lookup.draft(tokens[:count], 3, None) == []
    assert lookup.draft([*tokens, 9, 8, 7], 3, None) == [6, 10, 11]

"""Pipeline schedules by simulation, beside their closed forms."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hasten.plan.schedule import order, simulate


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("stages", "micro"), [(1, 5), (2, 2), (4, 4), (4, 16), (8, 64), (3, 100)])
def test_even_stages_have_the_bubble_of_the_formula(schedule: str, stages: int, micro: int) -> None:
    # GPipe (arXiv 1811.06965) and 1F1B: (m + p - 1) (f + b).
    run = simulate(schedule, stages, 1, micro, [1.0] * stages, [2.0] * stages)  # type: ignore[arg-type]
    assert run.seconds == pytest.approx(3.0 * (micro + stages - 1))
    assert run.busy == pytest.approx((3.0 * micro,) * stages)


@pytest.mark.parametrize(("stages", "virtual", "micro"), [(4, 2, 8), (4, 3, 16), (8, 6, 64), (2, 5, 40)])
def test_interleaving_divides_the_bubble(stages: int, virtual: int, micro: int) -> None:
    # arXiv 2104.04473 section 2.2.2: the bubble is (p - 1) (f + b) / v.
    chunks = stages * virtual
    run = simulate("interleaved", stages, virtual, micro, [1.0 / virtual] * chunks, [2.0 / virtual] * chunks)
    assert run.seconds == pytest.approx(3.0 * micro + 3.0 * (stages - 1) / virtual)


def test_zero_bubble_is_shorter_and_does_the_same_work() -> None:
    # ZB-H1 (arXiv 2401.10241) with f = b = w: the bubble is (p - 1) (f + b - w), a third of 1F1B's.
    plain = simulate("1f1b", 4, 1, 16, [1.0] * 4, [2.0] * 4)
    zero = simulate("zero_bubble", 4, 1, 16, [1.0] * 4, [2.0] * 4)
    assert zero.busy == pytest.approx(plain.busy)
    assert 3.0 * 16 + 3.0 <= zero.seconds < plain.seconds - 3.0


def test_the_slowest_stage_sets_the_pace() -> None:
    run = simulate("1f1b", 4, 1, 200, [1.0, 1.0, 1.5, 1.0], [2.0, 2.0, 3.0, 2.0])
    assert 200 * 4.5 < run.seconds < 200 * 4.5 + 3 * 3.0 + 1e-9


@settings(max_examples=40, deadline=None)
@given(
    stages=st.integers(2, 5),
    virtual=st.integers(1, 3),
    micro=st.integers(20, 60),
    seed=st.lists(st.floats(0.5, 2.0), min_size=15, max_size=15),
)
@example(stages=3, virtual=2, micro=27, seed=[1.5, 1.0, 1.375, 1.75, 1.0, 1.6875] + [1.0] * 9)
def test_a_long_step_is_what_its_whole_simulation_says(
    stages: int, virtual: int, micro: int, seed: list[float]
) -> None:
    micro -= micro % stages
    chunks = stages * virtual
    forward, backward = seed[:chunks], [2 * t for t in seed[:chunks]]
    schedule = "interleaved" if virtual > 1 else "1f1b"
    short = simulate(schedule, stages, virtual, micro, forward, backward, 0.1)  # type: ignore[arg-type]
    whole = simulate(schedule, stages, virtual, micro, forward, backward, 0.1, timeline=True)  # type: ignore[arg-type]
    assert short.seconds == pytest.approx(whole.seconds, rel=0.01)
    assert short.busy == pytest.approx(whole.busy)


@pytest.mark.parametrize(
    ("schedule", "virtual"), [("1f1b", 1), ("gpipe", 1), ("interleaved", 2), ("zero_bubble", 1)]
)
def test_bars_do_not_overlap_and_keep_their_order(schedule: str, virtual: int) -> None:
    stages, micro = 4, 8
    chunks = stages * virtual
    run = simulate(schedule, stages, virtual, micro, [1.0] * chunks, [2.0] * chunks, 0.25, timeline=True)  # type: ignore[arg-type]
    for stage in range(stages):
        mine = sorted((b for b in run.bars if b.stage == stage), key=lambda b: b.start)
        assert all(a.end <= b.start + 1e-9 for a, b in pairwise(mine))
    ends = {(b.kind, b.micro, b.chunk * stages + b.stage): b for b in run.bars}
    for m in range(micro):
        for place in range(1, chunks):
            assert ends["forward", m, place].start >= ends["forward", m, place - 1].end + 0.25 - 1e-9
            assert ends["backward", m, place - 1].start >= ends["backward", m, place].end + 0.25 - 1e-9


@pytest.mark.parametrize(("virtual", "micro"), [(1, 7), (2, 8), (2, 10), (3, 6)])
def test_each_stage_does_everything_once(virtual: int, micro: int) -> None:
    for stage in range(4):
        ops = order("interleaved" if virtual > 1 else "1f1b", 4, virtual, micro, stage)
        assert len(ops) == len(set(ops)) == 2 * virtual * micro

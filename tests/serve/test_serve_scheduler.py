"""Which rows run: the scheduler and the steps of the engine, without threads, against the fake model
alone.
"""

from __future__ import annotations

from collections.abc import Sequence as Items
from typing import Any

import numpy as np
import pytest
from fake_model import VOCAB, FakeRunner, FakeSampling, Sampler, SamplingParams, alone, alone_sampled
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hasten.serve.blocks import BlockManager
from hasten.serve.observe import Observer
from hasten.serve.runner import Group, Step
from hasten.serve.scheduler import Scheduler
from hasten.serve.sequence import Sequence, State
from hasten.serve.steps import Job, Steps
from hasten.serve.stream import Completion, Request, Stream
from hasten.serve.text import TextOutput


class Bench:
    """Steps over a fake runner, with what arrives and leaves between them decided by the test."""

    def __init__(
        self,
        runner: FakeRunner,
        max_sequences: int = 8,
        prefill_tokens: int | None = None,
        draft_tokens: int = 0,
        prefix_cache: bool = True,
    ):
        self.runner = runner
        self.blocks = BlockManager(runner.groups, runner.context_tokens, runner.copy_blocks, prefix_cache)
        self.scheduler = Scheduler(runner, self.blocks, max_sequences, prefill_tokens, draft_tokens)
        # What is drafted must not depend on how busy the machine is.
        self.scheduler.row_cost.share = lambda sequences: 0.1  # type: ignore[method-assign]
        self.queued = 0
        self.steps = Steps(runner, self.scheduler, FakeSampling, Observer(), draft_tokens, self._leave)
        self.arrivals = 0

    def _leave(self) -> None:
        self.queued -= 1

    def add(self, prompt: Items[int], max_tokens: int | None = 8, salt: str = "", **options: Any) -> Stream:
        params = SamplingParams(max_tokens=max_tokens, **options)
        stream = Stream(
            Request(prompt), params.n, len(prompt), lambda stream: self.steps.end(stream, "cancelled")
        )
        self.arrivals += 1
        sequences = []
        for index in range(params.n):
            sampler = Sampler(params, prompt, VOCAB, choice=index)
            item = Sequence(stream, index, prompt, params, sampler, TextOutput(None), salt)
            item.stop_tokens = frozenset(params.stop_tokens)
            item.arrival = (self.arrivals, index)
            sequences.append(item)
        sequences[0].followers = sequences[1:]
        self.queued += 1
        self.steps.add(Job(stream, sequences))
        return stream

    def run(self, most: int = 3000) -> None:
        for _ in range(most):
            if not self.steps.jobs:
                break
            self.steps.step()
            self.check()
        assert not self.steps.jobs, "requests are left"
        assert [pool.held for pool in self.blocks.pools] == [0] * len(self.blocks.pools)
        assert self.queued == 0
        assert not self.scheduler.running
        assert not self.scheduler.waiting

    def check(self) -> None:
        """Nobody shares a slot that will be written; pools count right."""
        running = self.scheduler.running
        assert running == sorted(running, key=lambda item: item.arrival)
        assert len(running) <= self.scheduler.max_sequences
        for group, pool in enumerate(self.blocks.pools):
            holders = [0] * pool.count
            for item in running:
                table = item.tables[group]
                for block in table.blocks[table.first : table.end].tolist():
                    holders[block] += 1
            assert holders == pool.holders
        for item in self.scheduler.waiting:
            assert item.state is State.QUEUED
            assert item.computed == 0


def collected(stream: Stream) -> list[Completion]:
    completions = [Completion(index) for index in range(stream.choices)]
    for delta in stream:
        assert delta.error is None
        completions[delta.index].add(delta)
    return completions


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def test_one_sequence() -> None:
    bench = Bench(FakeRunner())
    stream = bench.add(prompt(0, 100), 12)
    bench.run()
    (completion,) = collected(stream)
    assert completion.tokens == alone(prompt(0, 100), 12, [None])
    assert completion.finish_reason == "length"
    assert completion.usage is not None
    assert completion.usage[:3] == (100, 12, 0)
    # 64 rows, 36 rows, then one for each token but the last.
    assert bench.runner.rows == [64, 36] + [1] * 11


@pytest.mark.parametrize("length", [1, 31, 32, 33, 63, 64, 65, 128, 511])
def test_prompts_at_the_edges(length: int) -> None:
    bench = Bench(FakeRunner())
    stream = bench.add(prompt(1, length), 40)
    bench.run()
    assert collected(stream)[0].tokens == alone(prompt(1, length), min(40, 512 - length), [None])


def test_decodes_come_before_prompts() -> None:
    bench = Bench(FakeRunner(step_tokens=32))
    early = bench.add(prompt(0, 5), 30)
    bench.steps.step()
    late = bench.add(prompt(1, 100), 5)
    for _ in range(4):
        bench.steps.step()
    assert bench.runner.rows == [5, 32, 32, 32, 8]
    bench.run()
    assert collected(early)[0].tokens == alone(prompt(0, 5), 30, [None])
    assert collected(late)[0].tokens == alone(prompt(1, 100), 5, [None])


def test_prompt_rows_beside_decodes_are_bounded() -> None:
    bench = Bench(FakeRunner(step_tokens=64), prefill_tokens=10)
    bench.add(prompt(0, 64), 4)
    bench.steps.step()
    bench.add(prompt(1, 40), 4)
    bench.run()
    assert bench.runner.rows[:5] == [64, 11, 11, 11, 10]


def test_prompts_run_in_order_and_share_a_step() -> None:
    bench = Bench(FakeRunner(step_tokens=64))
    streams = [bench.add(prompt(number, 40), 3) for number in range(3)]
    bench.run()
    # 40 + 24; the first decodes: 1 + 16 + 40; then all decode or end.
    assert bench.runner.rows[:2] == [64, 57]
    for number, stream in enumerate(streams):
        assert collected(stream)[0].tokens == alone(prompt(number, 40), 3, [None])


def test_no_more_run_than_allowed() -> None:
    bench = Bench(FakeRunner(step_logits=2), max_sequences=8)
    streams = [bench.add(prompt(number, 10), 6) for number in range(5)]
    bench.run()
    assert max(bench.runner.rows) <= 20
    for number, stream in enumerate(streams):
        assert collected(stream)[0].tokens == alone(prompt(number, 10), 6, [None])


def test_the_youngest_loses_its_blocks() -> None:
    # 8 blocks: two sequences of 90 + 60 tokens need 10.
    bench = Bench(FakeRunner(groups=[Group(None, 8)], context_tokens=256), prefix_cache=False)
    first = bench.add(prompt(0, 90), 60)
    second = bench.add(prompt(1, 90), 60)
    bench.run()
    assert bench.scheduler.preemptions == 1
    assert collected(first)[0].tokens == alone(prompt(0, 90), 60, [None])
    assert collected(second)[0].tokens == alone(prompt(1, 90), 60, [None])


def test_a_preempted_sequence_keeps_its_place() -> None:
    bench = Bench(FakeRunner(groups=[Group(None, 8)], context_tokens=256), prefix_cache=False)
    streams = [bench.add(prompt(number, 90), 60, temperature=1.0, seed=number) for number in range(4)]
    order: list[int] = []
    while bench.steps.jobs:
        before = set(bench.steps.jobs)
        bench.steps.step()
        bench.check()
        order += [streams.index(stream) for stream in before - set(bench.steps.jobs)]
    assert order == [0, 1, 2, 3]
    assert bench.scheduler.preemptions > 0
    for number, stream in enumerate(streams):
        params = SamplingParams(temperature=1.0, seed=number)
        assert collected(stream)[0].tokens == alone_sampled(prompt(number, 90), params, [None], 60)


def test_nobody_starts_who_would_lose_its_blocks_again() -> None:
    bench = Bench(FakeRunner(groups=[Group(None, 8)], context_tokens=256), prefix_cache=False)
    first = bench.add(prompt(0, 90), 60)
    second = bench.add(prompt(1, 150), 20)
    tries = 0
    inner = bench.blocks.start

    def start(item: Sequence) -> None:
        nonlocal tries
        tries += 1
        inner(item)

    bench.blocks.start = start  # type: ignore[method-assign]
    bench.run()
    assert bench.scheduler.preemptions == 0
    assert tries < 6, "the same question again while nothing has changed"
    assert collected(first)[0].tokens == alone(prompt(0, 90), 60, [None])
    assert collected(second)[0].tokens == alone(prompt(1, 150), 20, [None])


def test_prompts_that_started_too_early_take_blocks_from_younger_ones() -> None:
    bench = Bench(FakeRunner(groups=[Group(None, 8)], context_tokens=256, step_tokens=40), prefix_cache=False)
    bench.scheduler._has_room = lambda sequence: True  # type: ignore[method-assign]
    streams = [bench.add(prompt(number, 200), 10) for number in range(2)]
    bench.steps.step()
    first, second = (bench.steps.jobs[stream].sequences[0] for stream in streams)
    bench.scheduler.waiting.remove(second)
    second.state = State.PREFILL
    bench.blocks.start(second)
    bench.scheduler.running.append(second)
    second.computed = bench.blocks.grow(second, 190)
    assert bench.blocks.pools[0].available == 0
    second.computed = 0
    bench.run()
    assert first.arrival < second.arrival
    assert bench.scheduler.preemptions == 1
    for number, stream in enumerate(streams):
        assert collected(stream)[0].tokens == alone(prompt(number, 200), 10, [None])


def test_choices_count_before_they_run() -> None:
    bench = Bench(FakeRunner(), max_sequences=3)
    streams = [bench.add(prompt(number, 20), 10, n=2) for number in range(3)]
    bench.run()
    for number, stream in enumerate(streams):
        for completion in collected(stream):
            assert completion.tokens == alone(prompt(number, 20), 10, [None])


def test_a_draft_is_cut_where_blocks_end() -> None:
    class Eager:
        def draft(self, tokens: list[int], most: int, share: float | None) -> list[int]:
            return [0] * most

        def judge(self, *judged: object) -> None:
            pass

    runner = FakeRunner(groups=[Group(None, 5)], context_tokens=160, step_tokens=160, step_logits=160)
    bench = Bench(runner, draft_tokens=64)
    streams = [bench.add(prompt(number, 30), 60) for number in range(2)]
    bench.steps.step()
    for item in bench.scheduler.running:
        item.lookup = Eager()  # type: ignore[assignment]
    bench.steps.step()
    # Each has one block of 32 tokens; for its draft the first takes two more, the second the last.
    assert runner.rows == [60, 59 + 34]
    bench.run()
    for number, stream in enumerate(streams):
        assert collected(stream)[0].tokens == alone(prompt(number, 30), 60, [None])


def test_a_known_beginning_is_not_computed_again() -> None:
    bench = Bench(FakeRunner())
    beginning = prompt(0, 64)
    for number in range(3):
        stream = bench.add(beginning + prompt(number, 10), 4)
        bench.run()
        (completion,) = collected(stream)
        assert completion.tokens == alone(beginning + prompt(number, 10), 4, [None])
        assert completion.usage is not None
        assert completion.usage.cached_tokens == (64 if number else 0)
    assert bench.runner.rows == [64, 10, 1, 1, 1, 10, 1, 1, 1, 10, 1, 1, 1]


def test_an_answer_is_known_in_the_next_turn() -> None:
    bench = Bench(FakeRunner())
    first = bench.add(prompt(0, 30), 40)
    bench.run()
    said = collected(first)[0].tokens
    second = bench.add([*prompt(0, 30), *said, *prompt(1, 5)], 4)
    bench.run()
    (completion,) = collected(second)
    assert completion.usage is not None
    assert completion.usage.cached_tokens == 64
    assert completion.tokens == alone([*prompt(0, 30), *said, *prompt(1, 5)], 4, [None])


@pytest.mark.parametrize("length", [20, 32, 40, 96])
def test_choices_share_the_prompt(length: int) -> None:
    bench = Bench(FakeRunner())
    stream = bench.add(prompt(3, length), 20, n=3, temperature=2.0, seed=5)
    bench.run()
    completions = collected(stream)
    for index, completion in enumerate(completions):
        params = SamplingParams(temperature=2.0, seed=5)
        assert completion.tokens == alone_sampled(prompt(3, length), params, [None], 20, choice=index)
    assert len({tuple(completion.tokens) for completion in completions}) == 3
    assert sum(rows for rows in bench.runner.rows) == length + 3 * 19
    usages = [completion.usage for completion in completions if completion.usage is not None]
    assert [usage[:2] for usage in usages] == [(length, 60)]
    assert bench.runner.copies == (2 if length % 32 else 0)


def test_a_stop_token_ends_the_answer() -> None:
    said = alone(prompt(4, 20), 30, [None])
    stop = said[7]
    first = said.index(stop)
    for least in (0, first, first + 1):
        bench = Bench(FakeRunner())
        stream = bench.add(prompt(4, 20), 30, stop_tokens=(stop,), min_tokens=least)
        bench.run()
        (completion,) = collected(stream)
        expected = next(
            (place for place, token in enumerate(said) if token == stop and place >= least), len(said) - 1
        )
        assert completion.tokens == said[: expected + 1]
        assert completion.finish_reason == ("stop" if said[expected] == stop else "length")


WINDOWS: list[list[int | None]] = [[None], [None, 40], [7], [None, 33, 64], [100]]


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
def test_windows(windows: list[int | None]) -> None:
    groups = [Group(window, 14 if window is None else 10) for window in windows]
    bench = Bench(FakeRunner(groups=groups, context_tokens=400))
    streams = [bench.add(prompt(number, 150 + number), 60) for number in range(3)]
    bench.run()
    for number, stream in enumerate(streams):
        assert collected(stream)[0].tokens == alone(prompt(number, 150 + number), 60, windows)


def test_a_long_prompt_in_a_pool_as_small_as_its_window() -> None:
    bench = Bench(FakeRunner(groups=[Group(40, 3)], context_tokens=400, step_tokens=400))
    stream = bench.add(prompt(0, 300), 50)
    bench.run()
    assert collected(stream)[0].tokens == alone(prompt(0, 300), 50, [40])


@pytest.mark.parametrize("windows", WINDOWS, ids=str)
@pytest.mark.parametrize("draft_tokens", [1, 3, 7])
def test_drafts_change_nothing(windows: list[int | None], draft_tokens: int) -> None:
    groups = [Group(window, 40) for window in windows]
    bench = Bench(FakeRunner(groups=groups, context_tokens=400), draft_tokens=draft_tokens)
    streams = [bench.add(prompt(number, 40 + 11 * number), 70) for number in range(3)]
    bench.run()
    for number, stream in enumerate(streams):
        assert collected(stream)[0].tokens == alone(prompt(number, 40 + 11 * number), 70, windows)
    assert bench.steps.accepted_tokens > 0
    assert bench.steps.drafted_tokens > bench.steps.accepted_tokens
    assert sum(bench.runner.rows) > bench.steps.generated_tokens
    assert len(bench.runner.rows) < 3 * 70


@pytest.mark.parametrize("wrong", range(6))
def test_a_draft_refused_at_any_place(wrong: int) -> None:
    said = alone(prompt(5, 40), 70, [None, 40])

    class Script:
        """Drafts what the model will say, with one wrong token."""

        def __init__(self) -> None:
            self.judged: list[tuple[int, int]] = []

        def draft(self, tokens: list[int], most: int, share: float | None) -> list[int]:
            right = said[len(tokens) - 40 :][: min(most, 5)]
            return [(token + 1) % VOCAB if place == wrong else token for place, token in enumerate(right)]

        def judge(self, count: int, drafted: int, accepted: int, share: float | None) -> None:
            self.judged.append((drafted, accepted))

    bench = Bench(FakeRunner(groups=[Group(None, 40), Group(40, 40)]), draft_tokens=5)
    stream = bench.add(prompt(5, 40), 70)
    script = Script()
    bench.steps.step()
    bench.scheduler.running[0].lookup = script  # type: ignore[assignment]
    bench.run()
    (completion,) = collected(stream)
    assert completion.tokens == said
    assert completion.finish_reason == "length"
    whole = [accepted for drafted, accepted in script.judged if drafted == 5]
    assert set(whole) == {min(wrong, 5)}


def test_drafts_end_at_a_stop_token() -> None:
    base = prompt(6, 30)
    said = alone(base, 200, [None])
    for stop in set(said[20:40]):
        bench = Bench(FakeRunner(), draft_tokens=7)
        stream = bench.add(base, 200, stop_tokens=(stop,))
        bench.run()
        assert collected(stream)[0].tokens == alone(base, 200, [None], stops=(stop,))


def test_drafts_and_seeds() -> None:
    bench = Bench(FakeRunner(), draft_tokens=5)
    streams = [bench.add(prompt(number, 40), 60, temperature=0.5, seed=number) for number in range(3)]
    bench.run()
    for number, stream in enumerate(streams):
        params = SamplingParams(temperature=0.5, seed=number)
        assert collected(stream)[0].tokens == alone_sampled(prompt(number, 40), params, [None], 60)
    assert bench.steps.accepted_tokens > 0


def test_cancel_in_every_state() -> None:
    bench = Bench(FakeRunner(step_tokens=32), max_sequences=3)
    decoding = bench.add(prompt(0, 10), 50)
    bench.steps.step()
    prefill = bench.add(prompt(1, 200), 50, n=2)
    bench.steps.step()
    queued = bench.add(prompt(2, 50), 50)
    bench.steps.step()
    states = [bench.steps.jobs[stream].sequences[0].state for stream in (decoding, prefill, queued)]
    assert states == [State.DECODE, State.PREFILL, State.QUEUED]
    for stream in (queued, prefill, decoding):
        stream.cancel()
        assert stream not in bench.steps.jobs
        reasons = [delta.finish_reason for delta in stream if delta.finish_reason]
        assert reasons == ["cancelled"] * stream.choices
        stream.cancel()  # does nothing
    bench.run()
    assert bench.steps.finished == {"cancelled": 4}


def test_a_failing_step_ends_its_sequences_only() -> None:
    runner = FakeRunner(step_tokens=32)
    bench = Bench(runner, max_sequences=2)
    first, second, third = (bench.add(prompt(number, 20), 10) for number in range(3))
    bench.steps.step()
    runner.failures[1] = RuntimeError("out of luck")
    bench.steps.step()
    for stream in (first, second):
        last = list(stream)[-1]
        assert last.finish_reason == "error"
        assert last.error == "the model failed: RuntimeError: out of luck"
    bench.run()
    assert collected(third)[0].tokens == alone(prompt(2, 20), 10, [None])


def test_bad_logits_end_one_sequence_only() -> None:
    class Broken(FakeRunner):
        def run(self, step: Step) -> np.ndarray:
            logits = super().run(step)
            if self.steps == 3:
                logits[1] = np.nan
            return logits

    bench = Bench(Broken())
    streams = [bench.add(prompt(number, 20), 10) for number in range(3)]
    bench.run()
    assert list(streams[1])[-1].error == "ValueError: logits are not numbers"
    for number in (0, 2):
        assert collected(streams[number])[0].tokens == alone(prompt(number, 20), 10, [None])


event = st.one_of(
    st.tuples(
        st.just("add"),
        st.integers(0, 3),  # which beginning
        st.integers(0, 120),  # how much of it
        st.integers(1, 40),  # tokens of its own
        st.integers(1, 50),  # most tokens
        st.integers(1, 3),  # choices
        st.booleans(),  # seeded or greedy
    ),
    st.tuples(st.just("cancel"), st.integers(0, 20)),
    st.tuples(st.just("step"), st.integers(1, 12)),
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    events=st.lists(event, min_size=1, max_size=18),
    windows=st.sampled_from(WINDOWS),
    blocks=st.integers(7, 24),
    step_tokens=st.integers(3, 80),
    step_logits=st.integers(3, 12),
    draft_tokens=st.sampled_from([0, 0, 4]),
    prefix_cache=st.booleans(),
    prefill_tokens=st.sampled_from([None, 7]),
)
def test_every_sequence_says_what_it_says_alone(
    events: list[tuple[Any, ...]],
    windows: list[int | None],
    blocks: int,
    step_tokens: int,
    step_logits: int,
    draft_tokens: int,
    prefix_cache: bool,
    prefill_tokens: int | None,
) -> None:
    runner = FakeRunner(
        groups=[Group(window, blocks) for window in windows],
        context_tokens=230,
        step_tokens=step_tokens,
        step_logits=step_logits,
    )
    bench = Bench(runner, 6, prefill_tokens, draft_tokens, prefix_cache)
    context = bench.blocks.context_tokens
    beginnings = [prompt(seed, 120) for seed in range(4)]
    streams: list[tuple[Stream, list[int], int, int, bool]] = []
    cancelled: set[Stream] = set()
    for number, (kind, *values) in enumerate(events):
        if kind == "add":
            which, shared, own, most, choices, seeded = values
            tokens = (beginnings[which][:shared] + prompt(100 + number, own))[: context - 1]
            options = {"temperature": 0.7, "seed": 10 * number} if seeded else {}
            stream = bench.add(tokens, most, n=min(choices, bench.scheduler.max_sequences), **options)
            streams.append((stream, tokens, most, number, seeded))
        elif kind == "cancel" and streams:
            stream = streams[values[0] % len(streams)][0]
            if stream in bench.steps.jobs:
                cancelled.add(stream)
                stream.cancel()
        elif kind == "step":
            for _ in range(values[0]):
                bench.steps.step()
                bench.check()
    bench.run()
    for stream, tokens, most, number, seeded in streams:
        for completion in collected(stream):
            count = min(most, context - len(tokens))
            if seeded:
                params = SamplingParams(temperature=0.7, seed=10 * number)
                expected = alone_sampled(tokens, params, windows, count, completion.index)
            else:
                expected = alone(tokens, count, windows)
            if stream in cancelled and completion.finish_reason == "cancelled":
                assert completion.tokens == expected[: len(completion.tokens)]
            else:
                assert completion.tokens == expected
                assert completion.finish_reason == "length"

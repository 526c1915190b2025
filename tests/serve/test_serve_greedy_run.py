"""Several greedy steps in one call give the tokens that one step at a time gives, and end where those end."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
from programs import CONTEXT, ByHand, runner_of

from hasten.base.errors import ServeError, ShapeError
from hasten.models import tiny_model
from hasten.ops import native
from hasten.serve import scheduler
from hasten.serve.engine import Engine, EngineSettings
from hasten.serve.runner import GreedyRunner, Step
from hasten.serve.sampling import SamplingParams
from hasten.serve.stream import Completion, Request

pytestmark = pytest.mark.skipif(native.state().level is None, reason=native.state().reason)

BLOCKS = 40


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 250, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


class Counted:
    """A runner, and how long its runs were; with `alone` one that has none."""

    def __init__(self, runner: Any, alone: bool = False) -> None:
        self._runner, self.counts = runner, []
        for name in ("vocab_size", "context_tokens", "step_tokens", "step_logits", "groups", "copy_blocks"):
            setattr(self, name, getattr(runner, name))
        self.run = runner.run
        if not alone:
            self.run_greedy = self._counted

    def _counted(self, step: Step, count: int, interrupt: Any = None) -> np.ndarray:
        chosen = self._runner.run_greedy(step, count, interrupt)
        self.counts.append(len(chosen))
        return chosen


@pytest.fixture(scope="module", params=["llama", "mistral", "gpt2"])
def runner(request: pytest.FixtureRequest) -> Any:
    torch.manual_seed(0)
    return runner_of(tiny_model(request.param).eval(), blocks=BLOCKS)


def answers(runner: Any, wanted: list[tuple[list[int], SamplingParams]], **settings: Any) -> list[Completion]:
    with Engine(runner, settings=EngineSettings(**settings)) as engine:
        streams = [engine.submit(Request(prompt_tokens=tokens, params=params)) for tokens, params in wanted]
        return [stream.collect()[0] for stream in streams]


def greedy(count: int, **further: Any) -> SamplingParams:
    return SamplingParams(max_tokens=count, temperature=0, **further)


WANTED = [
    (prompt_of(5, 1), greedy(60)),
    (prompt_of(33, 2), greedy(1)),
    (prompt_of(64, 3), greedy(2)),
    (prompt_of(31, 4), greedy(37)),
]


def test_tokens_are_those_of_one_step_at_a_time(runner: Any) -> None:
    counted, alone = Counted(runner), Counted(runner, alone=True)
    assert isinstance(counted, GreedyRunner)
    assert not isinstance(alone, GreedyRunner)
    found, expected = answers(counted, WANTED), answers(alone, WANTED)
    assert [(f.tokens, f.finish_reason) for f in found] == [(e.tokens, e.finish_reason) for e in expected]
    assert [len(f.tokens) for f in found] == [60, 1, 2, 37]
    assert max(counted.counts) > 1


def test_a_stop_token_ends_an_answer_within_a_run(runner: Any) -> None:
    (whole,) = answers(Counted(runner, alone=True), WANTED[:1])
    for place in (1, 4, 9, 20):
        stop = whole.tokens[place]
        first = whole.tokens.index(stop)
        (found,) = answers(Counted(runner), [(WANTED[0][0], greedy(60, stop_tokens=(stop,)))])
        assert (found.tokens, found.finish_reason) == (whole.tokens[: first + 1], "stop")
        assert found.usage is not None
        assert found.usage.completion_tokens == first + 1


def test_the_end_of_the_context_ends_a_run(runner: Any) -> None:
    tokens = prompt_of(CONTEXT - 13)
    found = [answers(Counted(runner, alone), [(tokens, greedy(500))])[0] for alone in (False, True)]
    assert found[0].tokens == found[1].tokens
    assert found[0].finish_reason == "length"
    assert len(found[0].tokens) == 13


def test_what_ran_behind_a_stop_is_no_cached_prefix(runner: Any) -> None:
    """The prefix cache holds what was given out, so a longer prompt finds nothing else."""
    (whole,) = answers(Counted(runner, alone=True), WANTED[:1])
    stop = whole.tokens[29]
    with Engine(Counted(runner)) as engine:
        first = engine.submit(Request(prompt_tokens=WANTED[0][0], params=greedy(60, stop_tokens=(stop,))))
        told = first.collect()[0].tokens
        longer = [*WANTED[0][0], *told, *prompt_of(20, 9)]
        found = engine.submit(Request(prompt_tokens=longer, params=greedy(9))).collect()[0].tokens
    assert found == answers(Counted(runner, alone=True), [(longer, greedy(9))], prefix_cache=False)[0].tokens


def test_blocks_that_are_short_shorten_runs_and_change_nothing(runner: Any) -> None:
    """So many sequences that some lose their blocks and are computed anew."""
    wanted = [(prompt_of(100, seed), greedy(90)) for seed in range(12)]
    found = answers(Counted(runner), wanted)
    expected = [answers(Counted(runner, alone=True), [one])[0] for one in wanted]
    assert [f.tokens for f in found] == [e.tokens for e in expected]


@pytest.mark.parametrize(
    "further", [{"temperature": 0.8, "seed": 3}, {"logprobs": 2}, {"presence_penalty": 0.5}]
)
def test_what_needs_a_look_at_logits_runs_step_by_step(runner: Any, further: dict[str, Any]) -> None:
    counted = Counted(runner)
    params = SamplingParams(max_tokens=20, **({"temperature": 0} | further))
    found = answers(counted, [(WANTED[0][0], params)])
    expected = answers(Counted(runner, alone=True), [(WANTED[0][0], params)])
    assert [f.tokens for f in found] == [e.tokens for e in expected]
    assert not counted.counts


def test_runs_are_no_longer_than_anybody_waits_for(runner: Any) -> None:
    """A slow step runs alone."""
    counted = Counted(runner)
    run = counted.run

    def slow(step: Step) -> np.ndarray:
        time.sleep(scheduler._RUN_S)
        return run(step)

    counted.run = slow
    answers(counted, [(WANTED[0][0], greedy(12))])
    assert not counted.counts


def test_runs_end_where_more_sequences_join_than_were_timed() -> None:
    """A step of many sequences takes longer than one of few did: nobody waits for eight of the former."""
    torch.manual_seed(0)
    runner = runner_of(tiny_model("llama").eval(), blocks=200)
    counted = Counted(runner)
    runs: list[tuple[int, int]] = []
    step_s = 0.001

    def run(step: Step) -> np.ndarray:
        time.sleep(step_s * (len(step.starts) - 1))
        return runner.run(step)

    def run_greedy(step: Step, count: int, interrupt: Any = None) -> np.ndarray:
        time.sleep(step_s * (len(step.starts) - 1) * count)
        runs.append((len(step.starts) - 1, count))
        return runner.run_greedy(step, count, interrupt)

    counted.run, counted.run_greedy = run, run_greedy
    with Engine(counted) as engine:
        first = engine.submit(Request(prompt_tokens=prompt_of(4), params=greedy(150)))
        next(first)
        others = [
            engine.submit(Request(prompt_tokens=prompt_of(4, seed), params=greedy(12))) for seed in range(24)
        ]
        for stream in (*others, first):
            stream.collect()
    assert any(count > 1 for _, count in runs)
    assert all(sequences * count * step_s <= scheduler._RUN_S for sequences, count in runs), runs


def test_a_cancelled_answer_ends_within_a_run(runner: Any) -> None:
    counted = Counted(runner)
    inner = counted.run_greedy

    def slow(step: Step, count: int, interrupt: Any = None) -> np.ndarray:
        time.sleep(0.02)
        return inner(step, count, interrupt)

    counted.run_greedy = slow
    with Engine(counted) as engine:
        stream = engine.submit(Request(prompt_tokens=prompt_of(5), params=greedy(200)))
        next(stream)
        stream.cancel()
        reasons = [delta.finish_reason for delta in stream]
        assert reasons[-1] == "cancelled"
        deadline = time.monotonic() + 10
        while engine.stats().pools[0].held and time.monotonic() < deadline:
            time.sleep(0.01)
        assert engine.stats().pools[0].held == 0


@pytest.mark.parametrize("ask", ["cancel", "submit", "stop"])
def test_a_run_ends_with_the_step_in_which_somebody_asks(runner: Any, ask: str) -> None:
    counted, inner, asked = Counted(runner), [], []
    engine = Engine(counted, settings=EngineSettings())
    first = engine.submit(Request(prompt_tokens=prompt_of(5), params=greedy(200)))

    def interrupted(step: Step, count: int, interrupt: Any = None) -> np.ndarray:
        if not asked:  # as another thread would while the first step runs
            asked.append(count)
            if ask == "cancel":
                first.cancel()
            elif ask == "submit":
                inner.append(engine.submit(Request(prompt_tokens=prompt_of(6), params=greedy(3))))
            else:
                with engine._changed:
                    engine._notify()
        return counted._counted(step, count, interrupt)

    counted.run_greedy = interrupted
    reasons = [delta.finish_reason for delta in first]
    engine.stop()
    assert asked[0] > 1
    assert counted.counts[0] == 1
    assert reasons[-1] == ("cancelled" if ask == "cancel" else "length")
    assert all(len(stream.collect()[0].tokens) == 3 for stream in inner)


def test_a_row_without_a_token_says_why_and_the_others_go_on() -> None:
    """A cache with a NaN behind the first sequence's prompt, as an overflow would leave it."""
    torch.manual_seed(0)
    runner = runner_of(tiny_model("llama").eval(), blocks=BLOCKS)
    expected = answers(Counted(runner, alone=True), [(prompt_of(5, 1), greedy(40))], prefix_cache=False)[0]
    counted = Counted(runner)
    inner = counted._counted

    def poisoned(step: Step, count: int, interrupt: Any = None) -> np.ndarray:
        if len(counted.counts) == 2:
            for row, block in enumerate(step.tables[0][:, 0]):
                if step.positions[row] > 60:  # the long one
                    runner._linked.cache[0].reshape(BLOCKS, -1)[block].fill(np.nan)
        return inner(step, count, interrupt)

    counted.run_greedy = poisoned
    with Engine(counted, settings=EngineSettings(prefix_cache=False)) as engine:
        bad = engine.submit(Request(prompt_tokens=prompt_of(70, 2), params=greedy(40)))
        good = engine.submit(Request(prompt_tokens=prompt_of(5, 1), params=greedy(40)))
        assert good.collect()[0].tokens == expected.tokens
        with pytest.raises(ServeError, match="NaN or \\+infinity"):
            bad.collect()


def test_a_run_of_the_runner_by_hand_and_what_it_refuses(runner: Any) -> None:
    prompt = prompt_of(30, 5)
    expected = ByHand(runner).greedy(prompt, 9)
    first = int(ByHand(runner).feed({0: prompt}, every=False)[0].argmax())
    table = np.arange(8, dtype=np.int32)[None]
    tables = tuple(table.copy() for _ in runner.groups)

    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)

    step = Step(ints(first), ints(30), ints(0, 1), tables, ints(0))
    assert first == expected[0]
    assert runner.run_greedy(step, 8)[:, 0].tolist() == expected[1:]
    with pytest.raises(ShapeError, match="room for 256 positions"):
        runner.run_greedy(Step(ints(1), ints(250), ints(0, 1), tables, ints(0)), 8)
    with pytest.raises(ShapeError, match="one row a sequence"):
        runner.run_greedy(Step(ints(1, 2), ints(30, 31), ints(0, 2), tables, ints(1)), 2)

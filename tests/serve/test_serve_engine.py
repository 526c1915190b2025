"""The engine from outside: threads, streams, errors, metrics."""

from __future__ import annotations

import asyncio
import queue
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from fake_model import (
    VOCAB,
    FakeRunner,
    FakeSampling,
    HeldRunner,
    InstantRunner,
    SamplingParams,
    alone,
    alone_sampled,
)
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hasten.base.errors import ConfigError, ContextError, EngineStopped, InputError, QueueFull, ServeError
from hasten.serve.engine import Delta, Engine, EngineSettings, Observer, Request, Stream
from hasten.serve.runner import Group, Runner, Step


class GatedRunner(FakeRunner):
    """Runs a step only when it is let."""

    def __init__(self, **options: object):
        super().__init__(**options)  # type: ignore[arg-type]
        self.gate = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def run(self, step: Step) -> np.ndarray:
        self.entered.release()
        assert self.gate.acquire(timeout=100)
        return super().run(step)

    def let(self, steps: int = 1000) -> None:
        self.gate.release(steps)

    def wait(self) -> None:
        """Until the engine stands inside a step."""
        assert self.entered.acquire(timeout=100)


Make = Callable[..., Engine]


@pytest.fixture
def make() -> Iterator[Make]:
    engines: list[Engine] = []

    def build(
        runner: Runner | None = None,
        tokenizer: Tokenizer | None = None,
        observer: Observer | None = None,
        **settings: object,
    ) -> Engine:
        engine = Engine(
            runner or FakeRunner(),
            tokenizer,
            EngineSettings(**settings),  # type: ignore[arg-type]
            observer,
            FakeSampling,
        )
        engines.append(engine)
        return engine

    yield build
    for engine in engines:
        if isinstance(engine.runner, GatedRunner):
            engine.runner.let()
        engine.stop()
        assert not engine._thread.is_alive()


def prompt(seed: int, length: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


def request(which: int, length: int = 20, **params: object) -> Request:
    return Request(prompt(which, length), params=SamplingParams(**params))  # type: ignore[arg-type]


def idle(engine: Engine) -> bool:
    stats = engine.stats()
    return stats.running == stats.waiting == 0 and all(pool.held == 0 for pool in stats.pools)


def soon(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 100
    while not condition():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.001)


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(
        models.BPE(vocab={symbol: place for place, symbol in enumerate(alphabet)}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def test_a_stream_gives_each_token(make: Make) -> None:
    deltas = list(make().submit(request(0, max_tokens=10)))
    assert [delta.tokens for delta in deltas] == [(token,) for token in alone(prompt(0, 20), 10, [None])]
    assert [delta.finish_reason for delta in deltas] == [None] * 9 + ["length"]
    usage = deltas[-1].usage
    assert usage is not None
    assert usage[:3] == (20, 10, 0)
    assert 0 <= usage.queue_s <= usage.first_token_s <= usage.total_s < 300
    assert all(delta.usage is None and delta.logprobs is None for delta in deltas[:-1])


def test_logprobs_come_with_their_tokens(make: Make) -> None:
    (completion,) = make().submit(request(0, max_tokens=5, logprobs=0)).collect()
    assert [sampled.token for sampled in completion.logprobs] == completion.tokens
    assert [sampled.logprob for sampled in completion.logprobs] == [0, -1, -2, -3, -4]


def test_many_threads_get_their_own_answers(make: Make) -> None:
    engine = make(FakeRunner(groups=[Group(None, 40), Group(40, 40)]), draft_tokens=3)
    answers: dict[int, list[int]] = {}

    def ask(seed: int) -> None:
        shared = prompt(99, 33)
        (completion,) = engine.submit(
            Request([*shared, *prompt(seed, 5)], params=SamplingParams(max_tokens=12))
        ).collect()
        answers[seed] = completion.tokens

    threads = [threading.Thread(target=ask, args=(seed,)) for seed in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(100)
    assert answers == {seed: alone([*prompt(99, 33), *prompt(seed, 5)], 12, [None, 40]) for seed in range(16)}
    assert idle(engine)
    assert engine.stats().prefix_hit_tokens > 0


def test_coroutines(make: Make) -> None:
    engine = make()

    async def ask(seed: int) -> tuple[list[int], int]:
        deltas = [delta async for delta in engine.submit(request(seed, max_tokens=8))]
        return [token for delta in deltas for token in delta.tokens], len(deltas)

    async def main() -> list[tuple[list[int], int]]:
        return await asyncio.gather(*(ask(seed) for seed in range(8)))

    for seed, (tokens, count) in enumerate(asyncio.run(main())):
        assert tokens == alone(prompt(seed, 20), 8, [None])
        assert count == 8


def test_a_coroutine_collects(make: Make) -> None:
    engine = make()

    async def main() -> list[int]:
        (completion,) = await engine.submit(request(1, max_tokens=4)).acollect()
        return completion.tokens

    assert asyncio.run(main()) == alone(prompt(1, 20), 4, [None])


def test_a_loop_that_is_gone_cancels(make: Make) -> None:
    runner = GatedRunner()
    engine = make(runner)
    stream = engine.submit(request(0, max_tokens=100))

    async def wait_in_vain() -> None:
        await asyncio.wait_for(anext(stream), 0.05)

    with pytest.raises(TimeoutError):
        asyncio.run(wait_in_vain())
    runner.let()
    soon(lambda: idle(engine))
    assert engine.stats().finished == {"cancelled": 1}


def test_text_comes_with_tokens(make: Make) -> None:
    tokenizer = byte_tokenizer()
    engine = make(FakeRunner(vocab_size=256), tokenizer)
    stream = engine.submit(Request(prompt="Once upon a time", params=SamplingParams(max_tokens=30)))
    assert stream.prompt_tokens == 16
    (completion,) = stream.collect()
    assert completion.text == tokenizer.decode(completion.tokens)
    assert len(completion.tokens) == 30


class Speaker(InstantRunner):
    """Says a given text, one byte a token."""

    def __init__(self, tokenizer: Tokenizer, text: str, **options: object):
        super().__init__(vocab_size=257, **options)
        self.say = tokenizer.encode(text).ids
        self.start = 0

    def run(self, step: Step) -> np.ndarray:
        logits = np.zeros((len(step.wanted), 257), np.float32)
        for place, row in enumerate(step.wanted):
            said = int(step.positions[row]) - self.start
            logits[place, self.say[said] if said < len(self.say) else 256] = 1
        self.steps += 1
        return logits


@pytest.mark.parametrize(
    ("stop", "text", "reason", "tokens"),
    [
        (("worl",), "Hello ", "stop", 10),
        (("xyz", "o"), "Hell", "stop", 5),
        (("world!?",), "Hello world!", "stop", 13),
        ((), "Hello world!", "stop", 13),
    ],
)
@pytest.mark.parametrize("draft_tokens", [0, 4])
def test_stop_strings(
    make: Make, stop: tuple[str, ...], text: str, reason: str, tokens: int, draft_tokens: int
) -> None:
    tokenizer = byte_tokenizer()
    engine = make(Speaker(tokenizer, "Hello world!"), tokenizer, eos_tokens=(256,), draft_tokens=draft_tokens)
    (completion,) = engine.submit(Request(prompt="a", params=SamplingParams(stop=stop))).collect()
    assert (completion.text, completion.finish_reason, len(completion.tokens)) == (text, reason, tokens)


def test_held_text_comes_when_the_length_is_reached(make: Make) -> None:
    tokenizer = byte_tokenizer()
    engine = make(Speaker(tokenizer, "Hello world!"), tokenizer)
    params = SamplingParams(stop=("lo world",), max_tokens=7)
    deltas = list(engine.submit(Request(prompt="a", params=params)))
    assert [delta.text for delta in deltas] == ["H", "e", "", "l", "", "", "lo w"]
    assert deltas[-1].finish_reason == "length"


def test_ignoring_the_end(make: Make) -> None:
    tokenizer = byte_tokenizer()
    engine = make(Speaker(tokenizer, "Hi"), tokenizer, eos_tokens=(256,))
    (completion,) = engine.submit(
        Request(prompt="a", params=SamplingParams(ignore_eos=True, max_tokens=5))
    ).collect()
    assert completion.tokens[2:] == [256] * 3
    assert completion.finish_reason == "length"


def test_speculation_says_the_same_text(make: Make) -> None:
    tokenizer = byte_tokenizer()
    text = "the cat and the dog and the cat and the bird and the dog"
    engine = make(Speaker(tokenizer, text), tokenizer, eos_tokens=(256,), draft_tokens=7)
    # What is drafted must not depend on how busy the machine is.
    engine._scheduler.row_cost.share = lambda sequences: 0.1  # type: ignore[method-assign]
    deltas = list(engine.submit(Request(prompt="a", params=SamplingParams())))
    assert "".join(delta.text for delta in deltas) == text
    usage = deltas[-1].usage
    assert usage is not None
    assert usage.drafted_tokens >= usage.accepted_tokens > 5
    assert len(deltas) == len(text) + 1 - usage.accepted_tokens


@pytest.mark.parametrize("steps", [0, 1, 3])
def test_cancel_frees_the_blocks_within_one_step(make: Make, steps: int) -> None:
    runner = GatedRunner(step_tokens=32)
    engine = make(runner)
    stream = engine.submit(request(0, 50, max_tokens=100))
    runner.wait()
    for _ in range(steps):
        runner.let(1)
        runner.wait()
    other = engine.submit(request(1, 30, max_tokens=3))
    stream.cancel()
    runner.let(1)
    runner.wait()  # the next step stands; the cancelled one has no part in it
    assert engine.stats().running == 1
    assert engine.stats().pools[0].held == 1
    assert list(stream)[-1].finish_reason == "cancelled"
    runner.let()
    assert other.collect()[0].tokens == alone(prompt(1, 30), 3, [None])


def test_cancel_in_the_queue(make: Make) -> None:
    runner = GatedRunner()
    engine = make(runner, max_sequences=1)
    first = engine.submit(request(0, max_tokens=2))
    runner.wait()
    second = engine.submit(request(1))
    assert engine.stats().waiting == 1
    second.cancel()
    runner.let()
    assert [delta.finish_reason for delta in second] == ["cancelled"]
    assert first.collect()[0].tokens == alone(prompt(0, 20), 2, [None])
    soon(lambda: idle(engine))


def test_leaving_a_stream_cancels_it(make: Make) -> None:
    engine = make()
    with engine.submit(request(0, max_tokens=400)) as stream:
        next(stream)
    soon(lambda: idle(engine))
    assert engine.stats().finished == {"cancelled": 1}
    with engine.submit(request(0, max_tokens=2)) as stream:
        list(stream)
    assert engine.stats().finished == {"cancelled": 1, "length": 1}


def test_a_full_queue(make: Make) -> None:
    runner = GatedRunner()
    engine = make(runner, max_sequences=1, max_queue=2)
    first = engine.submit(request(0, max_tokens=1))
    runner.wait()
    waiting = [engine.submit(request(seed, max_tokens=1)) for seed in (1, 2)]
    with pytest.raises(QueueFull, match=r"2 requests wait already \(max_queue = 2\)"):
        engine.submit(request(3))
    waiting[0].cancel()
    runner.let()
    first.collect()
    waiting[1].collect()
    assert engine.submit(request(3, max_tokens=1)).collect()[0].tokens == alone(prompt(3, 20), 1, [None])


def test_prompts_that_cannot_be_served(make: Make) -> None:
    engine = make(FakeRunner(context_tokens=64))
    for length in (64, 65, 640):
        with pytest.raises(
            ContextError, match=rf"the prompt has {length} tokens, but the context is 64 tokens"
        ):
            engine.submit(request(0, length))
    with pytest.raises(InputError, match="no tokens"):
        engine.submit(Request([]))
    with pytest.raises(InputError, match=f"prompt token {VOCAB}: the model knows 0 to {VOCAB - 1}"):
        engine.submit(Request([1, VOCAB]))
    with pytest.raises(InputError, match="prompt token -1"):
        engine.submit(Request([-1]))
    with pytest.raises(InputError, match="no tokenizer"):
        engine.submit(Request(prompt="text"))
    with pytest.raises(ConfigError, match="n = 17: at most 16"):
        engine.submit(request(0, n=17))
    (completion,) = engine.submit(request(0, 63)).collect()
    assert completion.tokens == alone(prompt(0, 63), 1, [None])
    assert completion.finish_reason == "length"


class Touched(FakeRunner):
    """Notes which blocks it is told to take the memory of, and which it has run."""

    def __init__(self) -> None:
        super().__init__(groups=(Group(None, 64), Group(40, 64)))
        self.touched: list[tuple[int, int]] = []
        self.used: set[tuple[int, int]] = set()

    def touch(self, group: int, block: int) -> None:
        assert (group, block) not in self.used
        self.touched.append((group, block))

    def run(self, step: Step) -> np.ndarray:
        for group, table in enumerate(step.tables):
            self.used |= {(group, int(block)) for block in table.ravel() if block >= 0}
        return super().run(step)


def test_memory_of_the_next_prompt_is_taken_while_nobody_waits(make: Make) -> None:
    runner = Touched()
    engine = make(runner)
    ahead = -(-runner.step_tokens // 32)

    def known(blocks: int) -> bool:
        return set(runner.touched) | runner.used == {(g, b) for g in (0, 1) for b in range(blocks)}

    soon(lambda: known(ahead))
    engine.submit(
        Request([token % 7 + 1 for token in range(70)], params=SamplingParams(max_tokens=3))
    ).collect()
    held = len({block for group, block in runner.used if group == 0})
    soon(lambda: known(held + ahead))
    assert len(set(runner.touched)) == len(runner.touched)


def test_settings_out_of_range() -> None:
    with pytest.raises(ConfigError, match="max_queue = 0: must be at least 1"):
        EngineSettings(max_queue=0)


def test_the_cache_bounds_the_context(make: Make) -> None:
    engine = make(FakeRunner(groups=[Group(None, 2)], context_tokens=512))
    assert engine.context_tokens == 64
    (completion,) = engine.submit(request(0, 20)).collect()
    assert len(completion.tokens) == 44


def test_a_failing_step_leaves_the_engine_usable(make: Make, caplog: pytest.LogCaptureFixture) -> None:
    runner = FakeRunner()
    runner.failures[2] = RuntimeError("no memory")
    engine = make(runner)
    stream = engine.submit(request(0))
    with pytest.raises(ServeError, match="the model failed: RuntimeError: no memory"):
        stream.collect()
    assert "a step of the model failed" in caplog.text
    assert idle(engine)
    assert engine.submit(request(0, max_tokens=9)).collect()[0].tokens == alone(prompt(0, 20), 9, [None])


def test_failures_between_which_steps_succeed(make: Make) -> None:
    runner = FakeRunner()
    runner.failures = {step: RuntimeError("now and then") for step in (0, 2, 4, 6, 8)}
    engine = make(runner)
    for _ in range(5):
        assert list(engine.submit(request(0, max_tokens=1)))[-1].finish_reason == "error"
        assert engine.submit(request(0, max_tokens=1)).collect()[0].tokens == alone(prompt(0, 20), 1, [None])


def test_a_runner_that_keeps_failing_stops_the_engine(make: Make) -> None:
    runner = GatedRunner()
    runner.failures = {step: RuntimeError("broken") for step in range(3)}
    engine = make(runner, max_sequences=1)
    streams = [engine.submit(request(seed)) for seed in range(5)]
    runner.let()
    for stream in streams:
        last = list(stream)[-1]
        assert last.finish_reason == "error"
        assert "broken" in (last.error or "")
    with pytest.raises(EngineStopped, match=r"it cannot go on after an error \(RuntimeError: broken\)"):
        engine.submit(request(0))
    assert engine.stats().stopped is not None


def test_stopping_finishes_what_runs(make: Make) -> None:
    runner = GatedRunner()
    engine = make(runner)
    stream = engine.submit(request(0, max_tokens=5))
    runner.wait()
    stopper = threading.Thread(target=engine.stop, args=(20.0,))
    stopper.start()
    soon(lambda: engine.stats().stopped is not None)
    with pytest.raises(EngineStopped, match="it was stopped"):
        engine.submit(request(1))
    runner.let()
    assert stream.collect()[0].tokens == alone(prompt(0, 20), 5, [None])
    stopper.join(100)
    assert not stopper.is_alive()


def test_stopping_ends_what_takes_too_long(make: Make) -> None:
    runner = GatedRunner()
    engine = make(runner, max_sequences=1)
    streams = [engine.submit(request(seed)) for seed in range(2)]
    runner.wait()
    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    soon(lambda: engine.stats().stopped is not None)
    runner.let()
    for stream in streams:
        last = list(stream)[-1]
        assert last.finish_reason == "error"
        assert last.error == "the engine was stopped before the answer was complete"
    stopper.join(100)
    assert idle(engine)
    streams[0].cancel()
    engine.stop()


def test_an_idle_engine_does_nothing(make: Make) -> None:
    engine = make()
    engine.submit(request(0, max_tokens=2)).collect()
    taken = 0
    inner = engine._take

    def count() -> bool:
        nonlocal taken
        taken += 1
        return inner()

    engine._take = count  # type: ignore[method-assign]
    time.sleep(0.1)
    assert taken <= 1


class Recorder(Observer):
    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.counts: list[int] = []
        self.ends: list[tuple[str, int, int]] = []
        self.rows: list[int] = []

    def started(self, queue_s: float) -> None:
        self.calls["started"] += 1
        assert 0 <= queue_s < 300

    def first_token(self, since_submitted_s: float) -> None:
        self.calls["first"] += 1
        assert 0 < since_submitted_s < 300

    def tokens(self, since_last_s: float, count: int) -> None:
        self.counts.append(count)
        assert 0 <= since_last_s < 300

    def finished(self, reason: str, total_s: float, prompt_tokens: int, completion_tokens: int) -> None:
        self.ends.append((reason, prompt_tokens, completion_tokens))

    def step(self, rows: int, sequences: int, duration_s: float) -> None:
        self.rows.append(rows)


def test_metrics(make: Make) -> None:
    recorder = Recorder()
    engine = make(observer=recorder)
    engine.submit(request(0, 70, max_tokens=5, n=2)).collect()
    engine.submit(request(0, 70, max_tokens=3)).collect()
    engine.stop()
    assert recorder.calls == {"started": 2, "first": 3}
    assert sum(recorder.counts) == 4 + 4 + 2
    assert recorder.ends == [("length", 70, 5), ("length", 70, 5), ("length", 70, 3)]
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.generated_tokens) == (140, 13)
    assert (stats.prefix_query_tokens, stats.prefix_hit_tokens) == (140, 64)
    assert stats.finished == {"length": 3}
    assert stats.step_rows == sum(recorder.rows) == 70 + 8 + 6 + 2
    assert stats.steps == len(recorder.rows)
    assert 0 < stats.runner_s < stats.busy_s


def test_an_observer_that_fails_says_so(make: Make) -> None:
    class Bad(Observer):
        def step(self, rows: int, sequences: int, duration_s: float) -> None:
            raise KeyError("metric")

    engine = make(observer=Bad())
    assert list(engine.submit(request(0)))[-1].error == "the engine stopped: KeyError: 'metric'"
    with pytest.raises(EngineStopped, match="metric"):
        engine.submit(request(0))


def test_seeds_give_the_same_whatever_else_runs(make: Make) -> None:
    runner = HeldRunner(groups=[Group(None, 12)])
    engine = make(runner)
    params = {"temperature": 1.0, "seed": 3, "max_tokens": 40}
    quiet = engine.submit(request(0, 60, **params)).collect()[0].tokens
    runner.let.clear()
    others = [engine.submit(request(seed, 60, max_tokens=40)) for seed in range(1, 5)]
    stream = engine.submit(request(0, 60, **params))
    runner.let.set()
    busy = stream.collect()[0].tokens
    for other in others:
        other.collect()
    assert engine.stats().preemptions > 0
    assert quiet == busy == alone_sampled(prompt(0, 60), SamplingParams(temperature=1.0, seed=3), [None], 40)


def test_deltas_of_a_stream_end(make: Make) -> None:
    stream = make().submit(request(0, max_tokens=1))
    assert isinstance(next(stream), Delta)
    assert stream.finished
    assert list(stream) == []

    async def empty(stream: Stream) -> list[Delta]:
        return [delta async for delta in stream]

    assert asyncio.run(empty(stream)) == []


def test_the_engine_imports_no_torch() -> None:
    script = (
        "import sys, hasten.serve.engine; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_delta_that_comes_while_a_coroutine_falls_asleep() -> None:
    stream = Stream(Request([1]), 1, 1, lambda stream: None)

    class Late(queue.SimpleQueue):  # type: ignore[type-arg]
        """What another thread puts right after the consumer has looked."""

        def get_nowait(self) -> Delta:
            if self.empty():
                self.put(Delta("late", finish_reason="stop"))
                raise queue.Empty
            return super().get_nowait()

    stream._deltas = Late()

    async def main() -> list[str]:
        return [delta.text async for delta in stream]

    assert asyncio.run(asyncio.wait_for(main(), 5)) == ["late"]


class Countdown:
    """A grammar that is finished after so many tokens."""

    def __init__(self, left: int):
        self.left = left

    def matcher(self) -> Countdown:
        return Countdown(self.left)

    def accept(self, token: int) -> None:
        if self.left == 0:
            raise ServeError("nothing may follow")
        self.left -= 1

    @property
    def finished(self) -> bool:
        return self.left == 0


@pytest.mark.parametrize("draft_tokens", [0, 7])
def test_the_end_of_a_grammar_ends_the_answer(make: Make, draft_tokens: int) -> None:
    engine = make(draft_tokens=draft_tokens)
    for left in range(1, 30):
        (completion,) = engine.submit(request(0, 40, grammar=Countdown(left))).collect()
        assert completion.tokens == alone(prompt(0, 40), left, [None])
        assert completion.finish_reason == "stop"

"""The engine with the real samplers and grammars, over the fake model."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator

import numpy as np
import pytest
from fake_model import HeldRunner, logits_of
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from hasten.serve.engine import Completion, Engine, EngineSettings, Request
from hasten.serve.runner import Group, Step
from hasten.serve.sampling import SamplingParams

VOCAB = 257
EOS = 256


def prompt(which: int, length: int = 40) -> list[int]:
    return np.random.default_rng(which).integers(0, 256, length).tolist()


def byte_tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: place for place, symbol in enumerate(alphabet)} | {"<end>": EOS}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


@pytest.fixture
def engine() -> Iterator[Engine]:
    with build() as engine:
        yield engine


def build(blocks: int = 64, **settings: object) -> Engine:
    runner = HeldRunner(groups=[Group(None, blocks)], vocab_size=VOCAB)
    return Engine(runner, byte_tokenizer(), EngineSettings(eos_tokens=(EOS,), **settings))  # type: ignore[arg-type]


def ask(engine: Engine, which: int = 0, **params: object) -> list[Completion]:
    return engine.submit(Request(prompt(which), params=SamplingParams(**params))).collect()  # type: ignore[arg-type]


def test_greedy(engine: Engine) -> None:
    (completion,) = ask(engine, temperature=0, max_tokens=20, ignore_eos=True)
    assert completion.tokens == alone_of_all(prompt(0), 20)
    assert completion.logprobs == []


def alone_of_all(tokens: list[int], count: int) -> list[int]:
    said = list(tokens)
    for _ in range(count):
        said.append(int(np.argmax(logits_of([said], len(said) - 1, VOCAB))))
    return said[len(tokens) :]


OPTIONS = [
    {"temperature": 0.0},
    {"temperature": 0.7, "top_p": 0.9},
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 0.5, "repetition_penalty": 1.3, "min_p": 0.01},
    {"temperature": 0.0, "presence_penalty": 0.7, "frequency_penalty": 0.4},
    {"temperature": 0.8, "logprobs": 3, "logit_bias": {5: 2.0}},
    {"temperature": 0.0, "min_tokens": 12},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_seeds_give_the_same_alone_and_among_others(options: dict[str, object]) -> None:
    params = {"ignore_eos": "min_tokens" not in options, "seed": 7, "max_tokens": 30, **options}
    with build() as engine:
        quiet = ask(engine, **params)
    # Drafts, and one block too few for both, so that the younger loses its own.
    with build(blocks=5, draft_tokens=4) as engine:
        engine.runner.let.clear()  # type: ignore[attr-defined]
        other = engine.submit(Request(prompt(1), params=SamplingParams(max_tokens=40, ignore_eos=True)))
        stream = engine.submit(Request(prompt(0), params=SamplingParams(**params)))  # type: ignore[arg-type]
        engine.runner.let.set()  # type: ignore[attr-defined]
        busy = stream.collect()
        other.collect()
        assert engine.stats().preemptions > 0 or not params["ignore_eos"]
    assert [completion.tokens for completion in busy] == [completion.tokens for completion in quiet]
    assert [completion.logprobs for completion in busy] == [completion.logprobs for completion in quiet]


def test_a_prompt_is_scored_the_same_alone_and_among_others() -> None:
    """In parts, behind a cached beginning, with further choices, after a preemption: each token once."""
    params = {"max_tokens": 30, "temperature": 0, "ignore_eos": True, "prompt_logprobs": 2, "seed": 3}
    tokens = prompt(0)
    logits = [logits_of([tokens[: row + 1]], row, VOCAB).astype(np.float64) for row in range(len(tokens) - 1)]
    expected = [row - np.log(np.exp(row).sum()) for row in logits]
    with build() as engine:
        plain = ask(engine, **{**params, "prompt_logprobs": None})
        assert plain[0].prompt_logprobs is None
        known = ask(engine, n=2, **params)  # the beginning is cached now
    runner = HeldRunner(groups=[Group(None, 5)], vocab_size=VOCAB, step_logits=7)
    with Engine(runner, byte_tokenizer(), EngineSettings(eos_tokens=(EOS,), draft_tokens=4)) as engine:
        runner.let.clear()
        other = engine.submit(Request(prompt(1), params=SamplingParams(max_tokens=40, ignore_eos=True)))
        stream = engine.submit(Request(tokens, params=SamplingParams(**params)))  # type: ignore[arg-type]
        runner.let.set()
        busy = stream.collect()
        other.collect()
        assert engine.stats().preemptions > 0
    for completion in (*known, *busy):
        scores = completion.prompt_logprobs
        assert scores is not None
        assert [score.token for score in scores] == tokens[1:]
        for score, row in zip(scores, expected, strict=True):
            assert score.logprob == pytest.approx(row[score.token], abs=1e-4)
            best = np.sort(row)[::-1][:2]
            assert [value for _, value in score.top] == pytest.approx(best.tolist(), abs=1e-4)
        assert completion.tokens == plain[0].tokens


def test_a_prompt_of_one_token_has_no_scores(engine: Engine) -> None:
    params = SamplingParams(max_tokens=2, prompt_logprobs=0)
    (completion,) = engine.submit(Request([7], params=params)).collect()
    assert completion.prompt_logprobs == ()


def test_choices_differ_and_repeat(engine: Engine) -> None:
    first = ask(engine, n=3, seed=11, temperature=1.5, max_tokens=15)
    second = ask(engine, n=3, seed=11, temperature=1.5, max_tokens=15)
    assert [completion.tokens for completion in first] == [completion.tokens for completion in second]
    assert len({tuple(completion.tokens) for completion in first}) == 3
    assert ask(engine, seed=11, temperature=1.5, max_tokens=15)[0].tokens == first[0].tokens


def test_without_a_seed_answers_differ(engine: Engine) -> None:
    answers = {tuple(ask(engine, temperature=2.0, max_tokens=12)[0].tokens) for _ in range(4)}
    assert len(answers) == 4


def test_logprobs(engine: Engine) -> None:
    (completion,) = ask(engine, temperature=0, max_tokens=6, logprobs=4, ignore_eos=True)
    assert len(completion.logprobs) == len(completion.tokens) == 6
    said = prompt(0)
    for token, sampled in zip(completion.tokens, completion.logprobs, strict=True):
        logits = logits_of([said], len(said) - 1, VOCAB).astype(np.float64)
        expected = logits - math.log(np.exp(logits).sum())
        assert sampled.token == token
        assert sampled.logprob == pytest.approx(expected[token], abs=1e-5)
        assert [other for other, _ in sampled.top] == np.argsort(-expected, kind="stable")[:4].tolist()
        said.append(token)


@pytest.mark.parametrize("draft_tokens", [0, 5])
def test_an_answer_of_a_schema(draft_tokens: int) -> None:
    pytest.importorskip("llguidance")
    from hasten.serve.grammar import Grammars

    schema = {
        "type": "object",
        "properties": {"name": {"enum": ["ab", "abc"]}, "ok": {"type": "boolean"}},
        "required": ["name", "ok"],
        "additionalProperties": False,
    }
    with build(draft_tokens=draft_tokens) as engine:
        assert engine.tokenizer is not None
        grammar = Grammars(engine.tokenizer, [EOS], VOCAB).json_schema(schema)
        for seed in range(4):
            (completion,) = ask(engine, grammar=grammar, temperature=1.0, seed=seed, max_tokens=200)
            assert completion.finish_reason in ("stop", "length")
            if completion.finish_reason == "stop":
                value = json.loads(completion.text)
                assert value["name"] in ("ab", "abc")
                assert isinstance(value["ok"], bool)
        assert engine.stats().finished["stop"] > 0


def test_a_row_that_is_not_a_number_ends_one_answer() -> None:
    class Broken(HeldRunner):
        broken = False

        def run(self, step: Step) -> np.ndarray:
            logits = super().run(step)
            if len(logits) > 1 and not self.broken:
                self.broken = True
                logits[1] = np.nan
            return logits

    runner = Broken(vocab_size=VOCAB)
    runner.let.clear()
    with Engine(runner, None, EngineSettings()) as engine:
        params = SamplingParams(temperature=0, max_tokens=10)
        streams = [engine.submit(Request(prompt(which, 10), params=params)) for which in range(3)]
        runner.let.set()
        ends = [list(stream)[-1] for stream in streams]
    assert sorted(end.finish_reason or "" for end in ends) == ["error", "length", "length"]
    assert any("NaN" in (end.error or "") for end in ends)

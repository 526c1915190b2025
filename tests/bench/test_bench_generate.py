"""`hasten bench generate`: engines, judge, processes, and the command from end to end, on tiny models."""

from __future__ import annotations

import dataclasses
import json
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from hasten.base.errors import ConfigError, HastenError, InputError
from hasten.base.screen import Screen
from hasten.bench.command import bench
from hasten.bench.generation import judge, measure, report, run, table
from hasten.bench.generation.engines import Hasten, Transformers
from hasten.bench.generation.names import REST, About, Answer, Spec
from hasten.bench.generation.subject import BITS, gguf_file, open_subject, prompts_of
from hasten.models import open_model
from hasten.ops import native

QUIET = Screen(enabled=False)


def _spec(contender: str, model: Path, prompts: list[list[int]], **changes: Any) -> Spec:
    values: dict[str, Any] = {
        "contender": contender,
        "model": str(model),
        "gguf": None,
        "weights": "float32",
        "prompts": prompts,
        "streams": [],
        "new_tokens": 6,
        "threads": 1,
        "context_tokens": 64,
        "started_at": time.time(),
    }
    return Spec(**(values | changes))


def _prompts(count: int, tokens: int = 12) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(3, 250, (count, tokens), generator=generator).tolist()


def _greedy(model: Any, prompt: list[int], new_tokens: int) -> tuple[list[int], list[float]]:
    ids, logprobs = torch.tensor([prompt]), []
    with torch.no_grad():
        for _ in range(new_tokens):
            row = model(input_ids=ids).logits[0, -1].log_softmax(-1)
            logprobs.append(float(row.max()))
            ids = torch.cat([ids, row.argmax().reshape(1, 1)], dim=1)
    return ids[0, len(prompt) :].tolist(), logprobs


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of bytes, whose end tokens are all that it ever says."""
    folder = tmp_path_factory.mktemp("subject")
    path = Path(open_subject("tiny:llama", 0, folder).path)
    model = open_model(path).model
    said = {token for prompt in _prompts(3) for token in _greedy(model, prompt, 6)[0]}
    settings = json.loads((path / "generation_config.json").read_text())
    (path / "generation_config.json").write_text(json.dumps(settings | {"eos_token_id": sorted(said)}))
    return path


def test_transformers_answers_are_greedy_and_end_tokens_end_nothing(model_folder: Path):
    engine = Transformers(_spec("eager-fp32", model_folder, []))
    model = open_model(model_folder).model
    assert model.generation_config.eos_token_id
    prompts = _prompts(3)
    expected = [_greedy(model, prompt, 6) for prompt in prompts]
    (alone,) = engine.answer([prompts[0]], 6, logprobs=True)
    assert (alone.tokens, alone.logprobs) == (expected[0][0], pytest.approx(expected[0][1], abs=1e-5))
    assert alone.at_s == sorted(alone.at_s)
    together = engine.answer(prompts, 6, logprobs=False)
    assert [answer.tokens for answer in together] == [tokens for tokens, _ in expected]
    assert all(len(answer.at_s) == 6 and not answer.logprobs for answer in together)


@pytest.mark.skipif(native.state().level is None, reason="there are no native kernels")
def test_hasten_answers_as_plain_torch(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Through the engine as it is; end tokens end nothing, alone and together."""
    monkeypatch.setenv("HASTEN_CACHE_DIR", str(tmp_path))
    engine = Hasten(_spec("hasten-fp32", model_folder, []))
    model = open_model(model_folder).model
    prompts = _prompts(3)
    expected = [_greedy(model, prompt, 6) for prompt in prompts]
    (alone,) = engine.answer([prompts[0]], 6, logprobs=True)
    # Keys and values are kept in bf16.
    assert alone.tokens == expected[0][0]
    assert alone.logprobs == pytest.approx(expected[0][1], abs=2e-2)
    engine.prepare(prompts, 6)
    together = engine.answer(prompts, 6, logprobs=False)
    assert [answer.tokens for answer in together] == [tokens for tokens, _ in expected]
    assert engine.about.note is None
    assert engine.about.weight_bytes is not None
    assert engine.about.weight_bytes >= 4 * sum(p.numel() for p in model.parameters() if p.dim() > 1)
    where = engine.where(prompts[1], 6)
    assert where is not None
    prefill, decode = where["prefill"], where["decode"]
    assert prefill.keys() == decode.keys()
    assert {REST, "attend", "linear"} <= prefill.keys()
    assert all(seconds >= 0 for seconds in (*prefill.values(), *decode.values()))
    assert 0 < sum(decode.values()) < 60
    engine.close()


@pytest.mark.skipif(find_spec("llama_cpp") is None, reason="llama-cpp-python is not installed")
def test_llama_cpp_answers_as_plain_torch(tiny_gguf: tuple[Path, Any]):
    from hasten.bench.generation.llama import LlamaCpp

    path, model = tiny_gguf
    prompts = _prompts(3)
    engine = LlamaCpp(_spec("llama.cpp", path, prompts, gguf=str(path), weights="stored"))
    expected = [_greedy(model, prompt, 6) for prompt in prompts]
    (alone,) = engine.answer([prompts[0]], 6, logprobs=True)
    # Keys and values are kept in fp16.
    assert alone.tokens == expected[0][0]
    assert alone.logprobs == pytest.approx(expected[0][1], abs=1e-2)
    for prompt in (prompts, prompts[:1]):
        got = engine.answer(prompt, 6, logprobs=False)
        assert [answer.tokens for answer in got] == [tokens for tokens, _ in expected[: len(prompt)]]
    engine.close()


def test_the_judge_finds_greedy_tokens_best_and_others_not(model_folder: Path):
    model = open_model(model_folder).model
    prompt = _prompts(1)[0]
    tokens, logprobs = _greedy(model, prompt, 6)
    scored = judge.score(model, judge.Sequence(prompt, tokens))
    assert scored.best == pytest.approx(logprobs, abs=1e-5)
    assert scored.logprobs == scored.best
    wrong = [*tokens[:3], (tokens[3] + 1) % 256, *tokens[4:]]
    other = judge.score(model, judge.Sequence(prompt, wrong))
    assert other.logprobs[:3] == pytest.approx(logprobs[:3], abs=1e-5)
    assert other.best[3] > other.logprobs[3]
    text = judge.run(judge.dump(str(model_folder), [judge.Sequence(prompt, tokens)]), lambda **event: None)
    assert judge.load(text)[0] == scored


class FakeEngine:
    """Answers after known waits: 30 ms to the first token, 10 ms a token; streams begin 20 ms apart."""

    def __init__(self, spec: Spec) -> None:
        self.about = About(80, "a fake")
        self.prepared: list[int] = []

    def prepare(self, prompts: list[list[int]], new_tokens: int) -> None:
        self.prepared.append(len(prompts))

    def answer(self, prompts: list[list[int]], new_tokens: int, logprobs: bool) -> list[Answer]:
        assert len(prompts) == 1 or len(prompts) in self.prepared
        begin = time.perf_counter()
        return [
            Answer(
                list(range(new_tokens)),
                [begin + 0.03 + 0.02 * stream + 0.01 * token for token in range(new_tokens)],
                [-0.5] * new_tokens if logprobs else [],
            )
            for stream in range(len(prompts))
        ]

    def close(self) -> None:
        pass


def test_what_a_process_measures(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "open_engine", FakeEngine)
    events: list[dict[str, Any]] = []
    prompts = _prompts(6)
    spec = _spec(
        "hasten", Path(), prompts[:3], streams=[prompts[3:]], new_tokens=11, started_at=time.time() - 5
    )
    got = report.Round.model_validate(measure.run(spec, lambda **event: events.append(event)))
    for single in got.runs:
        assert single.first_token_s == pytest.approx(0.03, abs=0.01)
        assert single.decode_s == pytest.approx(0.1)
    assert got.start_to_first_token_s == pytest.approx(5.03, abs=0.5)
    (streams,) = got.streams
    assert streams.first_token_s == pytest.approx(0.05, abs=0.01)
    assert streams.last_first_token_s == pytest.approx(0.07, abs=0.01)
    # Of the last stream's first token to the first one's last: 60 ms, 6 tokens in each stream.
    assert streams.decode_tokens_per_s == pytest.approx(300, rel=0.17)
    assert streams.tokens_per_s == pytest.approx(33 / 0.17, rel=0.1)
    assert len(got.tokens) == 6
    assert got.logprobs == [-0.5] * 11
    assert (got.held_weight_bytes, got.note) == (80, "a fake")
    assert [event["event"] for event in events] == ["opened", *["answered"] * 4]


def test_streams_that_never_run_together_have_no_rate():
    answers = [Answer([1, 2], [1.0, 2.0]), Answer([1, 2], [3.0, 4.0])]
    assert measure._together(0.0, answers)["decode_tokens_per_s"] is None


def test_a_spec_survives_its_file():
    spec = _spec("hasten", Path("x"), _prompts(2), streams=[_prompts(2)])
    assert Spec.load(spec.dump()) == spec


def test_the_subject_knows_what_a_step_reads(tmp_path: Path, tiny_gguf: tuple[Path, Any]):
    subject = open_subject("tiny:mistral", 0, tmp_path)
    # Two KV heads of 16 channels in three layers that see 32 tokens back.
    assert subject.cache_values(10) == 3 * 2 * 2 * 16 * 10
    assert subject.cache_values(1000) == 3 * 2 * 2 * 16 * 32
    assert subject.cache_bytes("float32", 10) == 2 * subject.cache_bytes("int4", 10) == 4 * 1920
    assert subject.cache_bytes("stored", 10, "int8") == subject.cache_values(10)
    assert subject.cache_bytes("int8", 10) == 2 * subject.cache_values(10)
    assert subject.weight_bytes("bfloat16") == 2 * subject.size.product_parameters
    assert subject.weight_bytes("int8") == int(subject.size.product_parameters * BITS["int8"] / 8)
    with pytest.raises(ValueError, match="GGUF"):
        subject.weight_bytes("stored")
    assert (open_model(subject.path).tokenizer("ab")["input_ids"]) == subject.tokenizer("ab")["input_ids"]

    path, model = tiny_gguf
    stored = open_subject(str(path), 0, tmp_path)
    assert (subject.tied, stored.tied) == (False, False)
    assert open_subject("tiny:llama", 0, tmp_path / "tied").tied
    assert stored.gguf == gguf_file(str(path)) == str(path)
    # The head of this one is not its table of embeddings, and the table is not read.
    assert stored.weight_bytes("stored") == 4 * stored.size.product_parameters
    assert stored.head_parameters == model.lm_head.weight.numel()


def test_prompts_are_pieces_of_the_text_one_after_the_other(tmp_path: Path, text_folder: Path):
    subject = open_subject("tiny:llama", 0, tmp_path)
    first, second = prompts_of(subject, str(text_folder), [5, 7], QUIET)
    (both,) = prompts_of(subject, str(text_folder), [12], QUIET)
    assert (len(first), len(second)) == (5, 7)
    assert first + second == both
    with pytest.raises(InputError, match="fewer than the 100,000"):
        prompts_of(subject, str(text_folder), [100_000], QUIET)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"new_tokens": 1}, "new_tokens = 1"),
        ({"repeats": 0}, "repeats = 0"),
        ({"streams": (8,)}, "streams = 8: give 1 and"),
        ({"streams": (1, 0)}, "streams = 1,0"),
        ({"streams": (1, 8, 8)}, "name each number once"),
        ({"longest_context": True, "contenders": ("hasten",)}, "add eager-bf16"),
    ],
)
def test_settings_that_do_not_work_are_found_first(changes: dict[str, Any], message: str):
    with pytest.raises(ConfigError, match=message):
        run.bench_generate(run.Settings()._replace(**changes), QUIET)


def test_a_model_for_something_else_is_refused(tmp_path: Path):
    for name in ("tiny:bert", "bert-large-random"):
        with pytest.raises(ConfigError, match="masked"):
            open_subject(name, 0, tmp_path)
    settings = run.Settings("tiny:llama", prompt_tokens=2040, new_tokens=16, contenders=("eager-fp32",))
    with pytest.raises(ConfigError, match="take 2056 tokens; tiny:llama is made for 2048"):
        run.bench_generate(settings, QUIET)


def test_who_cannot_run_is_left_out_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    subject = open_subject("tiny:llama", 0, tmp_path)
    monkeypatch.setattr(run, "find_spec", lambda name: None)
    left, skipped = run.present(("eager-bf16", "llama.cpp"), subject)
    assert left == ["eager-bf16"]
    assert "hasten.bench.llama_build" in skipped["llama.cpp"]
    monkeypatch.setattr(run, "find_spec", lambda name: object())
    assert "reads GGUF files" in run.present(("eager-bf16", "llama.cpp"), subject)[1]["llama.cpp"]
    assert run.present(("llama.cpp",), subject._replace(gguf="a.gguf")) == (["llama.cpp"], {})
    with pytest.raises(ConfigError, match="reads GGUF files"):
        run.present(("llama.cpp",), subject)


def test_weights_are_what_the_model_and_the_machine_allow():
    assert run.weights_of("hasten", True, True) == ("stored", None)
    assert run.weights_of("hasten", False, True)[0] == "int4"
    assert run.weights_of("eager-bf16", True, True) == ("bfloat16", None)
    weights, note = run.weights_of("eager-bf16", True, False)
    assert weights == "float32"
    assert note is not None
    assert run.weights_of("hasten-bf16", True, False) == ("bfloat16", None)


@pytest.mark.e2e
def test_the_command_from_end_to_end(tmp_path: Path, fast_limits: None):
    path = tmp_path / "report.json"
    command = [
        *(
            "generate",
            "--model",
            "tiny:llama",
            "--prompt-tokens",
            "24",
            "--new-tokens",
            "8",
            "--repeats",
            "1",
        ),
        *("--rounds", "1", "--streams", "1,3", "--contenders", "eager-fp32,eager-bf16", "--json", str(path)),
        "--where",
    ]
    got = CliRunner().invoke(bench, command)
    assert got.exit_code == 0, got.output
    result = report.load(path)
    assert list(result.contenders) == ["eager-fp32", "eager-bf16"]
    assert (result.failed, result.skipped, result.interrupted) == ({}, {}, None)
    plain = result.contenders["eager-fp32"]
    assert plain.where is None
    assert (plain.weights, plain.repeatable, len(plain.rounds)) == ("float32", True, 1)
    assert [len(tokens) for tokens in plain.tokens] == [8] * 5
    around = plain.rounds[0].limits
    assert around is not None
    assert around.read_bytes_per_s <= result.limits.read_bytes_per_s
    assert plain.weight_bytes == 4 * result.workload.size.product_parameters
    assert plain.share_of_bound == pytest.approx(
        plain.decode_tokens_per_s * (plain.weight_bytes + plain.cache_bytes) / around.read_bytes_per_s
    )
    assert plain.start_to_first_token_s > plain.first_token_s
    assert plain.streams["3"].decode_tokens_per_s == pytest.approx(
        plain.streams_gain["3"] * plain.decode_tokens_per_s
    )
    agreement = {entry.contender: entry for entry in result.agreement}
    assert agreement["eager-fp32"].agree
    assert agreement["eager-fp32"].judged_tokens == 5 * 8  # every answer is read
    assert agreement["eager-fp32"].regret_mean < 1e-5
    assert agreement["eager-fp32"].logprob_difference_mean < 1e-5
    assert result.agree is agreement["eager-bf16"].agree
    assert "answers" in got.stdout
    assert "Traceback" not in got.stderr
    assert table.markdown(result).count("| `eager-") == 2


def test_a_contender_that_fails_does_not_stop_the_others(
    tmp_path: Path, fast_limits: None, monkeypatch: pytest.MonkeyPatch
):
    def fake(contest: Any, name: str, title: str) -> report.Round:
        if name == "hasten":
            raise run.ContenderError("no luck")
        return report.Round(
            open_s=1.0,
            start_to_first_token_s=2.0,
            runs=[{"first_token_s": 0.1, "decode_s": 0.2}] * 2,
            streams=[],
            peak_rss_bytes=1000,
            tokens=[[5] * 8] * 2,
            logprobs=[],
        )

    monkeypatch.setattr(run, "_run", fake)
    monkeypatch.setattr(
        run, "run_child", lambda module, spec, folder, seen: judge.run(spec, lambda **event: None)
    )
    settings = run.Settings("tiny:llama", 24, 8, 1, 1, contenders=("eager-fp32", "hasten", "hasten-bf16"))
    result = run.bench_generate(settings, QUIET)
    assert result.failed == {"hasten": "no luck"}
    assert list(result.contenders) == ["eager-fp32", "hasten-bf16"]
    # A token said over and over is not what the model would say.
    assert result.agree is False
    assert result.ratios["hasten-bf16"]["eager-fp32"].decode is None
    assert "no speed-up is given" in table.markdown(result)


def test_answers_that_are_cut_short_are_an_error(monkeypatch: pytest.MonkeyPatch):
    """The engine of hasten is asked through its own classes; one that stops early is not measured."""

    @dataclasses.dataclass
    class Delta:
        tokens: tuple[int, ...]
        logprobs: tuple[Any, ...] | None = None
        error: str | None = None

    class Engine:
        def submit(self, request: dict[str, Any]) -> list[Delta]:
            assert request["params"]["ignore_eos"]
            return [Delta((1, 2)), Delta((), error="out of memory")]

    engine = Hasten.__new__(Hasten)
    engine._engine, engine._request, engine._params, engine._errors = Engine(), dict, dict, []
    assert engine.answer([[1], [2]], 2, logprobs=False)[1].tokens == [1, 2]
    with pytest.raises(HastenError, match="hasten gave 2 tokens of 3: out of memory"):
        engine.answer([[1]], 3, logprobs=False)


def test_where_the_time_goes_is_a_table():
    shown = table._where_table(
        "hasten", {"prefill": {"linear": 0.3, REST: 0.1}, "decode": {"linear": 0.001, REST: 0.003}}
    )
    cells = [list(column.cells) for column in shown.columns]
    assert cells[0] == [REST, "linear"]
    assert cells[1] == ["100.00", "300.00"]
    assert cells[4] == ["75.0%", "25.0%"]

"""`hasten bench generate`: the contenders in turn, the judge after them, then the report."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hasten.base.config import make_config
from hasten.base.errors import ConfigError
from hasten.base.facts import Facts, detect
from hasten.base.screen import Screen
from hasten.bench import train
from hasten.bench.generation import compare, judge
from hasten.bench.generation.context import BUDGET_TOKENS, longest_context
from hasten.bench.generation.names import CONTENDERS, DEFAULT, Spec
from hasten.bench.generation.report import GenerateReport, LongestContext, Round, Workload
from hasten.bench.generation.subject import Subject, open_subject, prompts_of
from hasten.bench.process import ContenderError, Turns, run_child, take_turns
from hasten.bench.report import Interruption, Limits
from hasten.train.stop import Interrupted

MEASURE = "hasten.bench.generation.measure"
PROBE_NEW_TOKENS = 8
JUDGED = 16
"""Most answers of a contender that the judge reads: in few bits one is fifty times as far off as another."""
_WITHOUT_BF16 = {"bfloat16": "float32"}


class Settings(NamedTuple):
    """What `bench_generate` runs; the defaults are those of the command line."""

    model: str = "smollm2-135m"
    prompt_tokens: int = 512
    new_tokens: int = 128
    repeats: int = 2
    rounds: int = 2
    streams: tuple[int, ...] = (1,)
    contenders: tuple[str, ...] = DEFAULT
    data: str = "python-stdlib"
    seed: int = 0
    longest_context: bool = False
    where: bool = False
    """Also where hasten's time goes, by operation."""


class _Contest(NamedTuple):
    """What the processes of all contenders share."""

    settings: Settings
    subject: Subject
    singles: list[list[int]]
    groups: list[list[list[int]]]
    weights: dict[str, str]
    notes: dict[str, str]
    threads: int
    folder: Path
    screen: Screen

    @property
    def environment(self) -> dict[str, str]:
        """As many threads for one as for all."""
        return {"OMP_NUM_THREADS": str(self.threads)}


def bench_generate(settings: Settings, screen: Screen) -> GenerateReport:
    """Measures the limits again and again, runs every contender in every round and the judge, and puts the
    report together.

    The contenders take turns as `take_turns` says. One that cannot run here is named in `skipped`.

    Raises:
        UserError: a setting, the model or the text is not usable; found before anything is measured.
        HastenError: no contender finished.
        Interrupted: a signal came before any contender finished.
    """
    check(settings)
    facts = detect()
    before = train.machine(facts)
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as folder_name:
        contest = _prepare(settings, facts, Path(folder_name), screen)
        names, skipped = present(settings.contenders, contest.subject)
        for name, reason in skipped.items():
            screen.warn(f"{name} is left out: {reason}")
        bf16 = facts.default_dtype().value == "bf16"
        limit = now = train.measure_limits(bf16, screen)

        def turn(name: str, number: int, title: str) -> Round:
            # A shared machine is not the same for minutes: what it can do is asked around every turn.
            nonlocal limit, now
            outcome, before = _run(contest, name, title), now
            now = train.measure_limits(bf16, screen)
            limit = limit.better(now)
            return outcome.model_copy(update={"limits": before.better(now)})

        turns = take_turns(names, settings.rounds, turn, screen)
        judged: dict[str, list[judge.Scored]] = {}
        longest = None
        if turns.interruption is None:
            stage = "the judge"
            try:
                judged = _judge(contest, turns, screen)
                if settings.longest_context:
                    stage = "the longest context"
                    longest = _longest_context(contest, list(turns.outcomes), screen)
            except Interrupted as stopped:
                turns = turns._replace(interruption=Interruption(signal=str(stopped), during=stage))
    return _report(contest, before, turns, skipped, judged, longest, limit)


def check(settings: Settings) -> None:
    """What can be said of the settings alone.

    Raises:
        ConfigError: a number that does not work, or a wrong HASTEN_* variable.
    """
    for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("repeats", 1), ("rounds", 1)):
        value = getattr(settings, name)
        if value < least:
            raise ConfigError(f"{name} = {value}: must be {least} at least")
    if 1 not in settings.streams or min(settings.streams) < 1:
        raise ConfigError(
            f"streams = {','.join(map(str, settings.streams))}: give 1 and, behind it, how many streams run "
            "together, e.g. 1,8"
        )
    if len(set(settings.streams)) < len(settings.streams):
        raise ConfigError(f"streams = {','.join(map(str, settings.streams))}: name each number once")
    if settings.longest_context and not any(_is_plain(name) for name in settings.contenders):
        raise ConfigError(
            "longest_context: its budget is the memory of a plain contender; add eager-bf16 to the contenders"
        )
    if any(CONTENDERS[name].engine == "hasten" for name in settings.contenders):
        make_config()  # A wrong HASTEN_* variable is found here and not by each contender.


def present(names: tuple[str, ...], subject: Subject) -> tuple[list[str], dict[str, str]]:
    """(contenders that can run, reason by the name of those that cannot).

    Raises:
        ConfigError: none can run.
    """
    skipped = {}
    for name in names:
        if CONTENDERS[name].engine != "llama.cpp":
            continue
        if find_spec("llama_cpp") is None:
            skipped[name] = (
                "the package llama-cpp-python is missing; 'python -m hasten.bench.llama_build' says how to "
                "build it"
            )
        elif subject.gguf is None:
            skipped[name] = f"it reads GGUF files, and {subject.name} is none"
    left = [name for name in names if name not in skipped]
    if not left:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    return left, skipped


def weights_of(name: str, gguf: bool, bf16: bool) -> tuple[str, str | None]:
    """(format of the weights that a contender gets, why it is not what its name says or None)."""
    kind = CONTENDERS[name]
    if kind.weights == "stored" and not gguf:
        return "int4", "4 bits: the model is no GGUF file"
    if kind.engine in ("eager", "compile") and not bf16 and kind.weights in _WITHOUT_BF16:
        return _WITHOUT_BF16[kind.weights], "fp32: this processor has no bf16 in hardware"
    return kind.weights, None


def _is_plain(name: str) -> bool:
    return CONTENDERS[name].engine == "eager"


def _prepare(settings: Settings, facts: Facts, folder: Path, screen: Screen) -> _Contest:
    screen.note(f"opening {settings.model} for its sizes and its tokenizer")
    subject = open_subject(settings.model, settings.seed, folder)
    longest = settings.prompt_tokens + settings.new_tokens
    if longest > subject.context_tokens:
        raise ConfigError(
            f"prompt and answer take {longest} tokens; {settings.model} is made for {subject.context_tokens}"
        )
    groups = [count for count in settings.streams if count > 1]
    count = 1 + settings.repeats + sum(groups)
    prompts = prompts_of(subject, settings.data, [settings.prompt_tokens] * count, screen)
    singles, rest = prompts[: 1 + settings.repeats], prompts[1 + settings.repeats :]
    together = []
    for size in groups:
        together.append(rest[:size])
        rest = rest[size:]
    bf16 = facts.default_dtype().value == "bf16"
    found = {name: weights_of(name, subject.gguf is not None, bf16) for name in settings.contenders}
    return _Contest(
        settings=settings,
        subject=subject,
        singles=singles,
        groups=together,
        weights={name: weights for name, (weights, _) in found.items()},
        notes={name: note for name, (_, note) in found.items() if note},
        threads=facts.cores.value,
        folder=folder,
        screen=screen,
    )


def _spec(contest: _Contest, name: str, **changes: Any) -> Spec:
    settings = contest.settings
    values: dict[str, Any] = {
        "contender": name,
        "model": contest.subject.path,
        "gguf": contest.subject.gguf,
        "weights": contest.weights[name],
        "prompts": contest.singles,
        "streams": contest.groups,
        "new_tokens": settings.new_tokens,
        "threads": contest.threads,
        "context_tokens": settings.prompt_tokens + settings.new_tokens,
        "where": settings.where,
    }
    return Spec(**(values | changes), started_at=time.time())


def _run(contest: _Contest, name: str, title: str) -> Round:
    total = len(contest.singles) + sum(len(group) for group in contest.groups)
    with contest.screen.bar(title, total) as bar:
        bar.update(0, "opening the model")

        def seen(event: Mapping[str, Any]) -> None:
            bar.update(event.get("done", 0), f"first token after {event['seconds']:.2f} s")

        text = run_child(MEASURE, _spec(contest, name).dump(), contest.folder, seen, contest.environment)
    measured = Round.model_validate_json(text)
    warm = measured.runs[-1]
    rate = (contest.settings.new_tokens - 1) / warm.decode_s
    contest.screen.note(
        f"{title}: first token {measured.start_to_first_token_s:.1f} s after the start, warm "
        f"{warm.first_token_s:.2f} s, then {rate:.1f} tokens/s, peak {measured.peak_rss_bytes / 1e9:.2f} GB"
    )
    return measured


def _judge(contest: _Contest, turns: Turns[Round], screen: Screen) -> dict[str, list[judge.Scored]]:
    """Scored answers by contender, all of the first round and spread over it, the cold one first."""
    prompts = contest.singles + [prompt for group in contest.groups for prompt in group]
    most = min(JUDGED, len(prompts))
    which = sorted({round(i * (len(prompts) - 1) / max(1, most - 1)) for i in range(most)})
    pairs = [(name, at) for name in turns.outcomes for at in which]
    sequences = [judge.Sequence(prompts[at], turns.outcomes[name][0].tokens[at]) for name, at in pairs]
    try:
        with screen.bar("plain PyTorch in fp32 reads the answers", len(sequences)) as bar:
            text = run_child(
                "hasten.bench.generation.judge",
                judge.dump(contest.subject.path, sequences),
                contest.folder,
                lambda event: bar.update(event["done"]),
            )
    except ContenderError as failure:
        turns.failed["judge"] = str(failure)
        screen.warn(f"the judge failed, so no speed-up is given: {failure}")
        return {}
    found: dict[str, list[judge.Scored]] = {}
    for (name, _), scored in zip(pairs, judge.load(text), strict=True):
        found.setdefault(name, []).append(scored)
    return found


def _longest_context(contest: _Contest, names: list[str], screen: Screen) -> LongestContext | None:
    budget_of = next((name for name in names if _is_plain(name)), None)
    if budget_of is None:
        screen.warn("longest context: the plain contender did not finish, so there is no budget")
        return None
    longest = contest.subject.context_tokens
    (text,) = prompts_of(contest.subject, contest.settings.data, [longest], screen)

    def probe(name: str, tokens: int) -> int:
        spec = _spec(
            contest,
            name,
            prompts=[text[: tokens - PROBE_NEW_TOKENS]],
            streams=[],
            new_tokens=PROBE_NEW_TOKENS,
            context_tokens=tokens,
        )
        with screen.bar(f"{name} with a context of {tokens} tokens", 1) as bar:
            bar.update(0, "reading the prompt")
            found = json.loads(
                run_child(MEASURE, spec.dump(), contest.folder, lambda event: None, contest.environment)
            )
        peak = int(found["peak_rss_bytes"])
        screen.note(f"{name}: context of {tokens} tokens, peak {peak / 1e9:.3f} GB")
        return peak

    try:
        return longest_context(names, budget_of, longest, probe, budget_tokens=min(BUDGET_TOKENS, longest))
    except ContenderError as failure:
        screen.warn(f"longest context: not measured: {failure}")
        return None


def _report(
    contest: _Contest,
    before: dict[str, Any],
    turns: Turns[Round],
    skipped: dict[str, str],
    judged: dict[str, list[judge.Scored]],
    longest: LongestContext | None,
    limit: Limits,
) -> GenerateReport:
    settings, subject = contest.settings, contest.subject
    middle = settings.prompt_tokens + settings.new_tokens // 2
    contenders = {}
    for name, rounds in turns.outcomes.items():
        weights = contest.weights[name]
        sizes = compare.Sizes(
            settings.prompt_tokens,
            settings.new_tokens,
            subject.prefill_flops(settings.prompt_tokens),
            # What a contender holds is what it reads, but for a table of embeddings of its own.
            (rounds[0].held_weight_bytes if subject.tied else None) or subject.weight_bytes(weights),
            subject.cache_bytes(weights, middle, CONTENDERS[name].cache),
        )
        text = subject.tokenizer.decode(rounds[0].tokens[0])
        contenders[name] = compare.summarise(
            CONTENDERS[name], weights, contest.notes.get(name) or rounds[0].note, rounds, sizes, limit, text
        )
    agreed = compare.agreements(contenders, judged)
    return GenerateReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["hasten", *sys.argv[1:]]),
        machine=before,
        versions=train.versions(),
        workload=Workload(
            model=settings.model,
            file=Path(subject.gguf).name if subject.gguf else None,
            size=subject.size,
            data=settings.data,
            prompt_tokens=settings.prompt_tokens,
            new_tokens=settings.new_tokens,
            repeats=settings.repeats,
            rounds=settings.rounds,
            streams=list(settings.streams),
            cache_values=subject.cache_values(middle),
            prefill_flops=subject.prefill_flops(settings.prompt_tokens),
        ),
        limits=limit,
        contenders=contenders,
        failed=turns.failed,
        skipped=skipped,
        interrupted=turns.interruption,
        ratios=compare.ratios(contenders, agreed),
        agree=all(entry.agree for entry in agreed) if agreed else None,
        agreement=agreed,
        longest_context=longest,
    )

"""`hasten bench serve`: each server in turn under the same load over HTTP, then the report."""

from __future__ import annotations

import os
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from hasten.base.errors import ConfigError
from hasten.base.facts import detect
from hasten.base.screen import Bar, Screen
from hasten.bench import train
from hasten.bench.child import child
from hasten.bench.generation.subject import Subject, open_subject, prompts_of
from hasten.bench.memory import peak_resident_bytes
from hasten.bench.process import ContenderError, event_of, last_lines, take_turns
from hasten.bench.serving.load import Address, Reply, get_json, run_level
from hasten.bench.serving.names import CONTENDERS, DEFAULT, Kind
from hasten.bench.serving.report import Contender, Level, Ratio, ServeReport, Workload

READY_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 60.0
_POLL_S = 0.05
_SHOWN_ERRORS = 5
# Tokens of a text are not the same again once they were text: the context has room for some more.
_SPARE_TOKENS = 64


class Settings(NamedTuple):
    """What `bench_serve` runs; the defaults are those of the command line."""

    model: str = "smollm2-135m"
    prompt_tokens: int = 256
    new_tokens: int = 64
    concurrency: tuple[int, ...] = (1, 4, 16)
    requests_per_client: int = 2
    contenders: tuple[str, ...] = DEFAULT
    data: str = "python-stdlib"
    seed: int = 0


class Server(NamedTuple):
    """A server that runs and has said that it is ready."""

    address: Address
    pid: int
    model: str
    """The id that it lists."""
    ready_s: float
    wait: Callable[[], int]
    """Waits for its end and gives the exit code."""


def bench_serve(settings: Settings, screen: Screen) -> ServeReport:
    """Starts each server in turn, asks it at every level of concurrency, and puts the report together.

    Every prompt is new to the server when it is timed. Afterwards the prompts that were asked for by several
    clients at once are asked for again, one at a time, and the answers compared. A server that cannot run
    here is named in `skipped`.

    Raises:
        UserError: a setting, the model or the text is not usable; found before anything is measured.
        HastenError: no server finished.
        Interrupted: a signal came before any server finished.
    """
    check(settings)
    facts = detect()
    before = train.machine(facts)
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as folder_name:
        folder = Path(folder_name)
        screen.note(f"opening {settings.model} for its sizes and its tokenizer")
        subject = open_subject(settings.model, settings.seed, folder)
        names, skipped = present(settings.contenders, subject)
        for name, reason in skipped.items():
            screen.warn(f"{name} is left out: {reason}")
        levels = _texts(settings, subject, screen)
        limit = train.measure_limits(facts.default_dtype().value == "bf16", screen)

        def run(name: str, number: int, title: str) -> Contender:
            return _run(settings, subject, CONTENDERS[name], levels, facts.cores.value, folder, title, screen)

        turns = take_turns(names, 1, run, screen)
    contenders = {name: found[0] for name, found in turns.outcomes.items()}
    return ServeReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["hasten", *sys.argv[1:]]),
        machine=before,
        versions=train.versions(),
        workload=Workload(
            model=settings.model,
            file=Path(subject.gguf).name if subject.gguf else None,
            data=settings.data,
            prompt_tokens=settings.prompt_tokens,
            new_tokens=settings.new_tokens,
            concurrency=list(settings.concurrency),
            requests_per_client=settings.requests_per_client,
        ),
        limits=limit,
        contenders=contenders,
        failed=turns.failed,
        skipped=skipped,
        interrupted=turns.interruption,
        ratios=ratios(contenders),
        agree=all(_right(contender) for contender in contenders.values()),
    )


def check(settings: Settings) -> None:
    """What can be said of the settings alone.

    Raises:
        ConfigError: a number that does not work.
    """
    for name, least in (("prompt_tokens", 1), ("new_tokens", 2), ("requests_per_client", 1)):
        value = getattr(settings, name)
        if value < least:
            raise ConfigError(f"{name} = {value}: must be {least} at least")
    numbers = settings.concurrency
    if not numbers or min(numbers) < 1 or len(set(numbers)) < len(numbers):
        raise ConfigError(
            f"concurrency = {','.join(map(str, numbers))}: give numbers of clients, each once, e.g. 1,4,16"
        )


def present(names: tuple[str, ...], subject: Subject) -> tuple[list[str], dict[str, str]]:
    """(servers that can run, reason by the name of those that cannot).

    Raises:
        ConfigError: none can run.
    """
    skipped = {}
    for name in names:
        kind = CONTENDERS[name]
        missing = [package for package in kind.packages if find_spec(package) is None]
        if missing:
            skipped[name] = f"it needs {', '.join(missing)}: pip install '{kind.install}'"
        elif kind.gguf_only and subject.gguf is None:
            skipped[name] = f"it reads GGUF files, and {subject.name} is none"
    left = [name for name in names if name not in skipped]
    if not left:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    return left, skipped


def ratios(contenders: Mapping[str, Contender]) -> dict[str, dict[str, dict[str, Ratio]]]:
    """Each of hasten's servers against each other one, level by level."""
    table: dict[str, dict[str, dict[str, Ratio]]] = {}
    for name, ours in contenders.items():
        for base, other in contenders.items():
            if base == name or not CONTENDERS[name].ours or CONTENDERS[base].ours:
                continue
            right = _right(ours) and _right(other)
            table.setdefault(name, {})[base] = {
                clients: _ratio(level, other.levels[clients], right) for clients, level in ours.levels.items()
            }
    return table


def _ratio(ours: Level, base: Level, right: bool) -> Ratio:
    def over(a: float, b: float) -> float | None:
        return a / b if right and b > 0 else None

    return Ratio(
        tokens_per_s=over(ours.tokens_per_s, base.tokens_per_s),
        first_token_p50=over(ours.first_token_p50_s, base.first_token_p50_s),
        inter_token_p50=over(ours.inter_token_p50_s, base.inter_token_p50_s),
    )


def _right(contender: Contender) -> bool:
    return contender.different == 0 and all(level.failures == 0 for level in contender.levels.values())


def _texts(settings: Settings, subject: Subject, screen: Screen) -> dict[int, list[str]]:
    """By number of clients: the prompts of that level, as text; no two begin alike."""
    longest = settings.prompt_tokens + settings.new_tokens + _SPARE_TOKENS
    if longest > subject.context_tokens:
        raise ConfigError(
            f"prompt and answer take up to {longest} tokens; {settings.model} is made for "
            f"{subject.context_tokens}"
        )
    counts = [clients * settings.requests_per_client for clients in settings.concurrency]
    prompts = prompts_of(subject, settings.data, [settings.prompt_tokens] * sum(counts), screen)
    texts = iter([subject.tokenizer.decode(prompt, skip_special_tokens=True) for prompt in prompts])
    return {
        clients: [next(texts) for _ in range(count)]
        for clients, count in zip(settings.concurrency, counts, strict=True)
    }


def _run(
    settings: Settings,
    subject: Subject,
    kind: Kind,
    texts: Mapping[int, list[str]],
    threads: int,
    folder: Path,
    title: str,
    screen: Screen,
) -> Contender:
    port = free_port()
    context = settings.prompt_tokens + settings.new_tokens + _SPARE_TOKENS
    command = kind.command(subject.gguf or subject.path, port, context, threads)
    total = sum(map(len, texts.values())) + 1
    with (
        screen.bar(title, total) as bar,
        server(command, Address("127.0.0.1", port), folder / "server.txt", bar) as running,
    ):
        levels, asked = {}, []
        errors: list[str] = []
        done = 0
        for clients, prompts in texts.items():
            bar.update(done, f"{clients} clients", line=True)
            bodies = [_body(settings, kind, running.model, prompt) for prompt in prompts]
            replies, found = run_level(running.address, bodies, clients)
            levels[str(clients)] = Level(**found._asdict())
            errors += [reply.error for reply in replies if reply.error is not None]
            screen.note(
                f"{title}: {clients} clients, {found.tokens_per_s:.1f} tokens/s, first token "
                f"{found.first_token_p50_s:.2f} s (p95 {found.first_token_p95_s:.2f} s)"
            )
            if clients > 1:
                asked += [pair for pair in zip(bodies, replies, strict=True) if pair[1].error is None]
            done += len(prompts)
        peak = peak_resident_bytes(running.pid)
        bar.update(done, "the same prompts one at a time")
        different = _different(running.address, asked)
        os.kill(running.pid, signal.SIGTERM)
        code = running.wait()
    return Contender(
        description=kind.description,
        # Names, not places: a report says nothing of this machine's folders.
        command=[Path(word).name if Path(word).is_absolute() else word for word in command],
        ready_s=running.ready_s,
        peak_rss_bytes=peak,
        exit_code=code,
        levels=levels,
        compared=len(asked),
        different=different,
        errors=errors[:_SHOWN_ERRORS],
    )


def _body(settings: Settings, kind: Kind, model: str, prompt: str) -> dict[str, Any]:
    return {
        "model": model,
        "prompt": prompt,
        "max_tokens": settings.new_tokens,
        "temperature": 0,
        **kind.extra,
    }


def _different(address: Address, asked: list[tuple[dict[str, Any], Reply]]) -> int:
    if not asked:
        return 0
    again, _ = run_level(address, [body for body, _ in asked], 1)
    return sum(alone.text != reply.text for alone, (_, reply) in zip(again, asked, strict=True))


@contextmanager
def server(command: list[str], address: Address, log_file: Path, bar: Bar) -> Iterator[Server]:
    """Starts a server and waits until it lists its models; leaving the block waits for its end.

    Raises:
        ContenderError: it ended, or did not get ready in time; with the last lines that it printed.
    """
    begin = time.perf_counter()
    host = [sys.executable, "-m", "hasten.bench.serving.host", *command]
    with (
        log_file.open("w", encoding="utf-8") as log,
        child(host, log, os.environ | {"PYTHONUNBUFFERED": "1"}) as process,
    ):
        bar.update(0, "starting the server")
        pid = _pid(process, log_file)
        model = None
        while model is None:
            if process.poll() is not None:
                said = "\n".join(last_lines(log_file))
                raise ContenderError(f"the server ended with {process.returncode}\n{said}")
            if time.perf_counter() - begin > READY_TIMEOUT_S:
                raise ContenderError(f"the server was not ready after {READY_TIMEOUT_S:.0f} s")
            time.sleep(_POLL_S)
            try:
                model = str(get_json(address, "/v1/models")["data"][0]["id"])
            except (OSError, LookupError):
                continue

        def wait() -> int:
            try:
                return process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired as error:
                raise ContenderError(
                    f"the server did not end within {STOP_TIMEOUT_S:.0f} s of SIGTERM"
                ) from error

        yield Server(address, pid, model, time.perf_counter() - begin, wait)


def _pid(process: subprocess.Popen[str], log_file: Path) -> int:
    for line in process.stdout or ():
        event = event_of(line)
        if event.get("event") == "started":
            return int(event["pid"])
    said = "\n".join(last_lines(log_file))
    raise ContenderError(f"the server could not be started\n{said}")


def free_port() -> int:
    """A port of this machine that nothing listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])

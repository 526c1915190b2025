"""`hasten bench train`: the contenders in turn, each in a process of its own, never two at once."""

from __future__ import annotations

import json
import os
import platform
import shlex
import sys
import tempfile
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import hasten
from hasten.base.config import make_config
from hasten.base.errors import ConfigError, HastenError
from hasten.base.facts import Facts, detect
from hasten.base.screen import Bar, Screen
from hasten.bench import compare, limits, report
from hasten.bench.child import child
from hasten.bench.contenders import CONTENDERS, DEFAULT, EVENT, Spec
from hasten.bench.tasks import check_task
from hasten.bench.workload import is_masked, make_blocks, parse_batch, save_blocks
from hasten.train.stop import Interrupted
from hasten.train.tuning import tune_once

PACKAGES = ("torch", "transformers", "numpy")
LAST_LINES = 15


class Settings(NamedTuple):
    """What `bench_train` runs; the defaults are those of the command line."""

    model: str = "smollm2-135m"
    batch: str = "2x512"
    steps: int = 10
    rounds: int = 1
    contenders: tuple[str, ...] = DEFAULT
    data: str = "python-stdlib"
    learning_rate: float = 1e-4
    seed: int = 0
    prompt: str | None = None
    new_tokens: int = 40
    task: str = "clm"
    tune: bool = False
    """Measure which native kernels lose to torch, if this machine has no table of that yet."""


class ContenderError(HastenError):
    """A contender's process did not hand back a result; carries the reason that the report prints."""


def bench_train(settings: Settings, screen: Screen) -> report.BenchReport:
    """Measures the limits, then runs every contender in every round, and puts the report together.

    With several rounds the contenders take turns (A B C A B C), so that a machine that slows down slows all.
    A contender that fails is named in `failed` and does not stop the others. A signal that arrives after a
    contender finished (see `StopSignals`) ends the bench, and the report holds what finished before it.

    Raises:
        UserError: a setting, the model or the text is not usable; found before anything is measured.
        HastenError: no contender finished.
        Interrupted: the signal came before any contender finished.
    """
    batch, sequence_tokens = parse_batch(settings.batch)
    check_model_and_task(settings.model, settings.task)
    if any(CONTENDERS[name].engine == "hasten" for name in settings.contenders):
        make_config()  # A wrong HASTEN_* variable is found here and not by each contender.
    facts = detect()
    bf16 = facts.default_dtype().value == "bf16"
    before = machine(facts)
    blocks = make_blocks(
        settings.model, settings.data, settings.steps, batch, sequence_tokens, settings.seed, screen
    )
    if not bf16:
        screen.note(f"every contender runs in fp32: {facts.default_dtype().source}")
    if settings.tune and any(CONTENDERS[name].engine == "hasten" for name in settings.contenders):
        tune_once(screen)
    limit = measure_limits(bf16, screen)
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as folder_name:
        folder = Path(folder_name)
        save_blocks(blocks, folder / "blocks.npz", settings.task)
        outcomes, failed, interruption = _rounds(settings, batch, bf16, folder, screen)
    if not outcomes:
        raise HastenError(f"no contender finished: {', '.join(failed)} failed as said above")

    size = next(iter(outcomes.values()))[0].size
    tokens = batch * sequence_tokens
    causal = not is_masked(settings.model)
    keys = blocks.visible_keys_per_step(batch, size.sees_documents, causal)
    flops = compare.flops_per_step(size, tokens, keys, settings.task)
    contenders = {
        name: compare.summarise(
            CONTENDERS[name], bf16, [outcome.round for outcome in found], tokens, flops, limit
        )
        for name, found in outcomes.items()
    }
    agreed = compare.agreements(contenders, tokens)
    return report.BenchReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["hasten", *sys.argv[1:]]),
        machine=before,
        versions=versions(),
        workload=report.Workload(
            model=settings.model,
            task=settings.task,
            size=size,
            data=settings.data,
            batch=batch,
            sequence_tokens=sequence_tokens,
            tokens_per_step=tokens,
            documents=blocks.documents,
            steps=settings.steps,
            rounds=settings.rounds,
            learning_rate=settings.learning_rate,
            seed=settings.seed,
            flops_per_step=flops,
            visible_keys_per_step=keys,
            prompt=settings.prompt,
        ),
        limits=limit,
        contenders=contenders,
        failed=failed,
        interrupted=interruption,
        ratios=compare.ratios(contenders, agreed),
        agree=all(entry.agree for entry in agreed) if agreed else None,
        agreement=agreed,
    )


def check_model_and_task(model: str, task: str) -> None:
    """Whether the model can do the task.

    Raises:
        ConfigError: an unknown task, or one for the other kind of model.
    """
    check_task(task)
    if (task == "mlm") != is_masked(model) and task != "infer":
        kind, fits = ("a masked", "mlm or infer") if is_masked(model) else ("a causal", "clm or infer")
        raise ConfigError(f"task = {task!r}: {model} is {kind} language model; allowed: {fits}")


def _rounds(
    settings: Settings, batch: int, bf16: bool, folder: Path, screen: Screen
) -> tuple[dict[str, list[report.Outcome]], dict[str, str], report.Interruption | None]:
    outcomes: dict[str, list[report.Outcome]] = {}
    failed: dict[str, str] = {}
    for number in range(settings.rounds):
        for name in settings.contenders:
            if name in failed:
                continue
            spec = Spec(
                contender=name,
                model=settings.model,
                task=settings.task,
                blocks_file=str(folder / "blocks.npz"),
                batch=batch,
                steps=settings.steps,
                learning_rate=settings.learning_rate,
                seed=settings.seed,
                bf16=bf16,
                prompt=settings.prompt,
                new_tokens=settings.new_tokens,
            )
            title = name if settings.rounds == 1 else f"{name} (round {number + 1} of {settings.rounds})"
            try:
                outcome = run_contender(spec, folder, title, screen)
                outcomes.setdefault(name, []).append(outcome)
            except ContenderError as failure:
                # One round that failed makes the contender's median meaningless.
                outcomes.pop(name, None)
                failed[name] = str(failure)
                screen.warn(f"{name} failed: {failure}")
            except Interrupted as stopped:
                if not any(outcomes.values()):
                    raise
                return outcomes, failed, report.Interruption(signal=str(stopped), during=title)
    return outcomes, failed, None


def run_contender(spec: Spec, folder: Path, title: str, screen: Screen) -> report.Outcome:
    """Runs one contender in a process of its own and waits for it, with a progress bar.

    Raises:
        ContenderError: the process ended without a result; the message is its own, or its last lines.
    """
    spec_file, out_file, log_file = (folder / name for name in ("spec.json", "out.json", "stderr.txt"))
    spec_file.write_text(spec.model_dump_json(), encoding="utf-8")
    out_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", "hasten.bench.contender", str(spec_file), str(out_file)]
    # Inductor's cache starts empty in each bench: its first step is then a cold one, as for the others.
    environment = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "PYTHONUNBUFFERED": "1"}
    message = None
    with (
        log_file.open("w", encoding="utf-8") as log,
        screen.bar(title, spec.steps) as bar,
        child(command, log, environment) as process,
    ):
        bar.update(0, "opening the model")
        for line in process.stdout or ():
            event = _event(line)
            if event.get("event") == "failed":
                message = str(event["message"])
            _show(bar, event, spec.steps)
    if process.returncode != 0 or not out_file.exists():
        tail = log_file.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]
        raise ContenderError(message or "\n".join([f"its process ended with {process.returncode}", *tail]))
    outcome = report.Outcome.model_validate_json(out_file.read_text(encoding="utf-8"))
    seconds = outcome.round.steps_s
    screen.note(
        f"{title}: first step {seconds[0]:.1f} s, then {min(seconds[1:] or seconds):.2f} to "
        f"{max(seconds[1:] or seconds):.2f} s a step, loss {outcome.round.losses[0]:.4f} to "
        f"{outcome.round.losses[-1]:.4f}, peak {outcome.round.peak_rss_bytes / 1e9:.2f} GB"
    )
    return outcome


def _event(line: str) -> dict[str, Any]:
    """The event in a line of a contender's output; {} for anything else that was printed there."""
    if not line.startswith("{"):
        return {}
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return dict(value.get(EVENT, {})) if isinstance(value, dict) else {}


def _show(bar: Bar, event: dict[str, Any], steps: int) -> None:
    kind = event.get("event")
    if kind == "opened":
        bar.update(0, "first step (capture and compilation included)")
    elif kind == "step":
        bar.update(
            event["step"],
            f"{event['seconds']:.2f} s a step, loss {event['loss']:.4f}",
            line=event["step"] == 1,
        )
    elif kind == "continuing":
        bar.update(steps, "continuing the prompt")


def measure_limits(bf16: bool, screen: Screen) -> report.Limits:
    """The limits of this machine, with a progress bar."""
    import torch

    dtypes = (torch.float32, torch.bfloat16) if bf16 else (torch.float32,)
    total = limits.stages(dtypes)
    with screen.bar("limits of this machine", total) as bar:
        done = iter(range(total))
        return limits.measure(dtypes, advance=lambda what: bar.update(next(done), what))


def machine(facts: Facts) -> dict[str, Any]:
    """The entries of `facts` that a reader of the report needs, as JSON values; sizes in bytes."""
    import psutil

    return {
        "processor": facts.processor.value,
        "architecture": facts.architecture.value,
        "cores": facts.cores.value,
        "memory_bytes": facts.memory_bytes.value,
        "memory_limit_bytes": facts.memory_limit_bytes.value,
        "last_level_cache_bytes": max((cache.size_bytes for cache in facts.caches.value), default=None),
        "isa": facts.isa.value,
        "bf16_in_hardware": facts.bf16_in_hardware.value,
        "bf16_reason": facts.bf16_in_hardware.source,
        "system": platform.platform(),
        "load_before": psutil.getloadavg()[0],
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide the numbers."""
    found = {"hasten": hasten.__version__, "python": platform.python_version()}
    return found | {name: metadata.version(name) for name in PACKAGES}

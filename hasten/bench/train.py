"""`hasten bench train`: the contenders in turn, each in a process of its own, never two at once."""

from __future__ import annotations

import contextlib
import platform
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import hasten
from hasten.base.config import make_config
from hasten.base.errors import ConfigError
from hasten.base.facts import Facts, detect
from hasten.base.screen import Bar, Screen
from hasten.bench import compare, levels, limits, report
from hasten.bench.contenders import CONTENDERS, DEFAULT, Spec
from hasten.bench.process import ContenderError, run_child, take_turns
from hasten.bench.tasks import check_task
from hasten.bench.workload import is_masked, make_blocks, parse_batch, save_blocks
from hasten.train.tuning import tune_once

__all__ = ["ContenderError", "Settings", "bench_train", "run_contender"]

PACKAGES = ("torch", "transformers", "numpy")
OPTIONAL_PACKAGES = ("openvino", "llama-cpp-python")


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
    where: bool = False
    """Also where the time of a step goes; see `hasten.bench.where`."""
    level: str | None = None
    """The instruction level that hasten and torch are limited to; see `hasten.bench.levels`."""


def bench_train(settings: Settings, screen: Screen) -> report.BenchReport:
    """Measures the limits, then runs every contender in every round, and puts the report together.

    The contenders take turns as `take_turns` says. One whose package is missing is named in `skipped`.

    Raises:
        UserError: a setting, the model or the text is not usable; found before anything is measured.
        HastenError: no contender finished.
        Interrupted: the signal came before any contender finished.
    """
    batch, sequence_tokens = parse_batch(settings.batch)
    check_model_and_task(settings.model, settings.task)
    names, skipped = _present(settings)
    if any(CONTENDERS[name].engine == "hasten" for name in settings.contenders):
        make_config()  # A wrong HASTEN_* variable is found here and not by each contender.
    facts = detect()
    bf16, bf16_reason = levels.has_bf16(settings.level, facts)
    before = machine(facts)
    for name, reason in skipped.items():
        screen.warn(f"{name} is left out: {reason}")
    blocks = make_blocks(
        settings.model, settings.data, settings.steps, batch, sequence_tokens, settings.seed, screen
    )
    if not bf16:
        screen.note(f"every contender runs in fp32: {bf16_reason}")
    if settings.tune and any(CONTENDERS[name].engine == "hasten" for name in settings.contenders):
        tune_once(screen)
    limit = measure_limits(bf16, screen)
    with tempfile.TemporaryDirectory(prefix="hasten-bench-") as folder_name:
        folder = Path(folder_name)
        save_blocks(blocks, folder / "blocks.npz", settings.task)
        environment = levels.environment(settings.level) if settings.level else None

        def run(name: str, number: int, title: str) -> report.Outcome:
            return run_contender(
                _spec(settings, name, batch, bf16, folder), folder, title, screen, environment
            )

        outcomes, failed, interruption = take_turns(names, settings.rounds, run, screen)

    size = next(iter(outcomes.values()))[0].size
    tokens = batch * sequence_tokens
    causal = not is_masked(settings.model)
    keys = blocks.visible_keys_per_step(batch, size.sees_documents, causal)
    flops = compare.flops_per_step(size, tokens, keys, settings.task)
    contenders = {
        name: compare.summarise(
            CONTENDERS[name], bf16, [outcome.round for outcome in found], tokens, flops, limit, bf16_reason
        )
        for name, found in outcomes.items()
    }
    agreed = compare.agreements(contenders, tokens)
    return report.BenchReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["hasten", *sys.argv[1:]]),
        machine=before,
        versions=versions(),
        level=settings.level,
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
        skipped=skipped,
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


def _present(settings: Settings) -> tuple[list[str], dict[str, str]]:
    """(contenders that can run, reason by the name of those that cannot).

    Raises:
        ConfigError: a contender that does not do the task, or none that can run.
    """
    skipped = {}
    for name in settings.contenders:
        kind = CONTENDERS[name]
        if settings.task not in kind.tasks:
            raise ConfigError(
                f"contender {name!r} does not do task {settings.task!r}; allowed for it: "
                f"{', '.join(kind.tasks)}"
            )
        if kind.engine == "openvino" and find_spec("openvino") is None:
            skipped[name] = "the package openvino is missing: pip install 'hasten[bench]'"
        elif kind.engine == "openvino" and settings.level is not None:
            skipped[name] = "it cannot be limited to an instruction level"
    names = [name for name in settings.contenders if name not in skipped]
    if not names:
        raise ConfigError("; ".join(f"{name}: {reason}" for name, reason in skipped.items()))
    return names, skipped


def _spec(settings: Settings, name: str, batch: int, bf16: bool, folder: Path) -> Spec:
    return Spec(
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
        where=settings.where,
    )


def bench_levels(settings: Settings, names: Sequence[str], screen: Screen) -> levels.LevelsReport:
    """`bench_train` at each of the levels, one after the other; a signal ends it after the level it hit.

    Raises: as `bench_train`.
    """
    reports: dict[str, report.BenchReport] = {}
    for name in names:
        screen.note(f"level {name}")
        # A table of choices belongs to one level, and measuring one here would measure this process's.
        reports[name] = bench_train(settings._replace(level=name, tune=False), screen)
        if reports[name].interrupted is not None:
            break
    return levels.LevelsReport(
        environment={name: levels.environment(name) for name in reports}, reports=reports
    )


def run_contender(
    spec: Spec, folder: Path, title: str, screen: Screen, environment: Mapping[str, str] | None = None
) -> report.Outcome:
    """Runs one contender in a process of its own and waits for it, with a progress bar.

    `environment`: variables that are set for it alone.

    Raises:
        ContenderError: the process ended without a result; the message is its own, or its last lines.
    """
    with screen.bar(title, spec.steps) as bar:
        bar.update(0, "opening the model")
        text = run_child(
            "hasten.bench.contender",
            spec.model_dump_json(),
            folder,
            lambda event: _show(bar, event, spec.steps),
            environment,
        )
    outcome = report.Outcome.model_validate_json(text)
    seconds = outcome.round.steps_s
    screen.note(
        f"{title}: first step {seconds[0]:.1f} s, then {min(seconds[1:] or seconds):.2f} to "
        f"{max(seconds[1:] or seconds):.2f} s a step, loss {outcome.round.losses[0]:.4f} to "
        f"{outcome.round.losses[-1]:.4f}, peak {outcome.round.peak_rss_bytes / 1e9:.2f} GB"
    )
    return outcome


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
    elif kind == "profiling":
        bar.update(steps, "where the time goes")


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
    found |= {name: metadata.version(name) for name in PACKAGES}
    for name in OPTIONAL_PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[name] = metadata.version(name)
    return found

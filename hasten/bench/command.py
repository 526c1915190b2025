"""The commands `demo`, `bench train` and `bench ops`. torch is imported when one runs, not for its help.

Exit codes: 0 done; 1 a contender failed, or another fault; 2 a mistake in what was asked for; 130 stopped by
Ctrl-C, 143 by SIGTERM, with what was measured before it in the report.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from hasten.bench.contenders import CONTENDERS, DEFAULT, parse

if TYPE_CHECKING:
    from hasten.base.screen import Screen
    from hasten.bench.report import BenchReport, Interruption

bench = typer.Typer(
    name="bench",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure training or single operators against plain PyTorch.\n\n"
    "Examples: [bold]hasten bench train --steps 10[/bold], [bold]hasten bench ops --op rms_norm[/bold]",
)

_JSON = typer.Option(
    "--json", help="Write the report to this file; - prints it instead of the table.", metavar="FILE"
)
_STDOUT = Path("-")
_NO_TUNE = Annotated[
    bool, typer.Option("--no-tune", help="Do not measure, on first use, where torch beats a native kernel.")
]


def demo(
    out: Annotated[Path, typer.Option(help="Folder for report.json.")] = Path("runs/demo"),
    steps: Annotated[int, typer.Option(min=1, help="Training steps of each of the two.")] = 20,
    model: Annotated[
        str, typer.Option(help="Another model: an id, a folder, a GGUF file, or tiny:llama.")
    ] = "smollm2-135m",
    batch: Annotated[str, typer.Option(help="Rows x tokens of a step.")] = "2x512",
    data: Annotated[str, typer.Option(help="Another text: a file or a folder.")] = "python-stdlib",
    no_tune: _NO_TUNE = False,
    json: Annotated[bool, typer.Option("--json", help="Print the report instead of the table.")] = False,
) -> None:
    """Fine-tune a real model twice on the same text, plain and with hasten, and compare.

    Example: [bold]hasten demo --steps 20 --out runs/demo[/bold]
    """
    with _measuring() as screen:
        from hasten.bench.demo import demo as run

        report, path = run(out, steps, screen, model=model, batch=batch, data=data, tune=not no_tune)
    _show_train(report, print_json=json)
    typer.echo(f"report: {path}", err=True)
    raise typer.Exit(_exit_code(report.interrupted, bool(report.failed)))


@bench.command()
def train(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, a hub id, a folder, a GGUF file, tiny:FAMILY[:SETTING=N,...], random:FOLDER, "
            "bert-large-random."
        ),
    ] = "smollm2-135m",
    batch: Annotated[str, typer.Option(help="Rows x tokens of a step.")] = "2x512",
    steps: Annotated[int, typer.Option(min=1, help="Steps of each contender in each round.")] = 10,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often the contenders take turns; medians over all.")
    ] = 1,
    contenders: Annotated[
        str, typer.Option(help=f"Comma-separated, in the order they run: {', '.join(CONTENDERS)}.")
    ] = ",".join(DEFAULT),
    data: Annotated[str, typer.Option(help="python-stdlib, or a file or folder of text.")] = "python-stdlib",
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Constant learning rate.")] = 1e-4,
    seed: Annotated[int, typer.Option(min=0, help="Of random weights and of the order of the rows.")] = 0,
    task: Annotated[
        str, typer.Option(help="clm: train a causal model; mlm: train a masked one; infer: forward alone.")
    ] = "clm",
    no_tune: _NO_TUNE = False,
    json: Annotated[Path | None, _JSON] = None,
) -> None:
    """Train the same model on the same tokens with each contender, in turn and in separate processes.

    Example: [bold]hasten bench train --contenders eager-bf16,hasten --rounds 3 --json report.json[/bold]
    """
    names = parse(contenders)
    with _measuring() as screen:
        from hasten.bench import report as reports
        from hasten.bench.train import Settings, bench_train

        if json is not None and json != _STDOUT:
            reports.check_writable(json)
        settings = Settings(
            model, batch, steps, rounds, names, data, learning_rate, seed, task=task, tune=not no_tune
        )
        report = bench_train(settings, screen)
        if json is not None and json != _STDOUT:
            reports.save(report, json)
    _show_train(report, print_json=json == _STDOUT)
    raise typer.Exit(_exit_code(report.interrupted, bool(report.failed)))


@bench.command()
def ops(
    op: Annotated[str | None, typer.Option(help="Only this operator; without it, all.")] = None,
    case: Annotated[str | None, typer.Option(help="Only this case of the operator.")] = None,
    every: Annotated[
        bool, typer.Option("--every", help="Every shape of the cases, not only the sizes of real models.")
    ] = False,
    seconds: Annotated[float, typer.Option(min=0.0, help="Time spent on each measurement.")] = 0.3,
    no_tune: _NO_TUNE = False,
    json: Annotated[Path | None, _JSON] = None,
) -> None:
    """Time each operator against plain torch doing the same in the same dtype.

    Example: [bold]hasten bench ops --op rms_norm --json ops.json[/bold]
    """
    with _measuring() as screen:
        from hasten.bench import ops as operators
        from hasten.bench import report as reports

        if json is not None and json != _STDOUT:
            reports.check_writable(json)
        report = operators.bench_ops(op, case, seconds, screen, every=every, tune=not no_tune)
        if json is not None and json != _STDOUT:
            operators.save(report, json)
    if json == _STDOUT:
        typer.echo(operators.dump(report), nl=False)
    else:
        from rich.console import Console

        Console().print(operators.render(report))
    raise typer.Exit(_exit_code(report.interrupted, failed=False))


@contextmanager
def _measuring() -> Iterator[Screen]:
    """Ctrl-C and SIGTERM end what runs, its processes included; before any result with one message."""
    from hasten.base.screen import Screen
    from hasten.train.stop import Interrupted, StopSignals

    screen = Screen()
    try:
        with StopSignals(screen):
            yield screen
    except Interrupted as stopped:
        typer.echo(f"{stopped}: stopped before anything was measured", err=True)
        raise typer.Exit(stopped.exit_code) from None


def _exit_code(interrupted: Interruption | None, failed: bool) -> int:
    if interrupted is not None:
        return 128 + signal.Signals[interrupted.signal]
    return 1 if failed else 0


def _show_train(report: BenchReport, *, print_json: bool) -> None:
    from rich.console import Console

    from hasten.bench import report as reports
    from hasten.bench import table

    if print_json:
        typer.echo(reports.dump(report), nl=False)
    else:
        Console().print(table.render(report))

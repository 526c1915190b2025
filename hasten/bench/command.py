"""The commands `demo` and `bench train|generate|serve|quality|ops`; torch is imported when one runs.

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

from hasten.base.errors import ConfigError
from hasten.bench.contenders import CONTENDERS, DEFAULT, parse
from hasten.bench.generation import names as generation
from hasten.bench.serving import names as serving

if TYPE_CHECKING:
    from pydantic import BaseModel
    from rich.console import RenderableType

    from hasten.base.screen import Screen
    from hasten.bench.report import BenchReport, Interruption
    from hasten.bench.train import Settings

bench = typer.Typer(
    name="bench",
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Measure training, generation, serving or single operators against the usual alternatives.\n\n"
    "Examples: [bold]hasten bench train --steps 10[/bold], [bold]hasten bench generate --streams 1,8[/bold], "
    "[bold]hasten bench ops --op rms_norm[/bold]",
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
    levels: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated instruction levels, e.g. avx2,avx512: the whole bench at each of them, "
            "torch limited as hasten is. Measures no table of choices."
        ),
    ] = None,
    where: Annotated[
        bool,
        typer.Option(
            "--where",
            help="Also where the time of a step goes, by operator: one more step under the profiler.",
        ),
    ] = False,
    no_tune: _NO_TUNE = False,
    json: Annotated[Path | None, _JSON] = None,
) -> None:
    """Train the same model on the same tokens with each contender, in turn and in separate processes.

    Examples: [bold]hasten bench train --contenders eager-bf16,hasten --rounds 3 --json report.json[/bold],
    [bold]hasten bench train --levels avx2,avx512 --contenders eager-fp32,hasten-fp32[/bold],
    [bold]hasten bench train --model bert-large-random --task infer --batch 8x128
    --contenders eager-bf16,openvino-bf16,hasten[/bold]
    """
    names = parse(contenders)
    with _measuring() as screen:
        from hasten.bench.train import Settings, bench_train

        _check_writable(json)
        settings = Settings(
            model,
            batch,
            steps,
            rounds,
            names,
            data,
            learning_rate,
            seed,
            task=task,
            tune=not no_tune,
            where=where,
        )
        if levels is not None:
            code = _train_levels(settings, levels, json, screen)
            raise typer.Exit(code)
        report = bench_train(settings, screen)
        _save(report, json)
    _show_train(report, print_json=json == _STDOUT)
    raise typer.Exit(_exit_code(report.interrupted, bool(report.failed)))


@bench.command()
def generate(
    model: Annotated[
        str,
        typer.Option(
            help="smollm2-135m, a hub id, a folder, a GGUF file, tiny:FAMILY[:SETTING=N,...], random:FOLDER."
        ),
    ] = "smollm2-135m",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 512,
    new_tokens: Annotated[
        int, typer.Option(min=2, help="Tokens of each answer; end tokens are ignored.")
    ] = 128,
    repeats: Annotated[int, typer.Option(min=1, help="Warm prompts of each process, after a cold one.")] = 2,
    rounds: Annotated[
        int, typer.Option(min=1, help="How often the contenders take turns; medians over all.")
    ] = 2,
    streams: Annotated[
        str, typer.Option(help="1, and how many prompts are also answered together, e.g. 1,8.")
    ] = "1",
    contenders: Annotated[
        str,
        typer.Option(help=f"Comma-separated, in the order they run: {', '.join(generation.CONTENDERS)}."),
    ] = ",".join(generation.DEFAULT),
    data: Annotated[str, typer.Option(help="python-stdlib, or a file or folder of text.")] = "python-stdlib",
    longest_context: Annotated[
        bool,
        typer.Option(
            "--longest-context",
            help="Also the longest context within the memory that the plain contender needs for 512 tokens.",
        ),
    ] = False,
    where: Annotated[
        bool, typer.Option("--where", help="Also where hasten's time goes, by operation of its program.")
    ] = False,
    json: Annotated[Path | None, _JSON] = None,
) -> None:
    """Continue the same prompts greedily with each contender, in turn and in separate processes.

    Examples: [bold]hasten bench generate --streams 1,8 --json report.json[/bold],
    [bold]hasten bench generate --contenders eager-bf16,hasten --longest-context[/bold]
    """
    names = parse(contenders, generation.CONTENDERS)
    counts = _numbers("streams", streams)
    with _measuring() as screen:
        from hasten.bench import report as reports
        from hasten.bench.generation import table
        from hasten.bench.generation.run import Settings, bench_generate

        _check_writable(json)
        settings = Settings(
            model,
            prompt_tokens,
            new_tokens,
            repeats,
            rounds,
            counts,
            names,
            data,
            longest_context=longest_context,
            where=where,
        )
        report = bench_generate(settings, screen)
        _save(report, json)
    _show(reports.dump(report) if json == _STDOUT else table.render(report))
    raise typer.Exit(_exit_code(report.interrupted, bool(report.failed)))


@bench.command()
def serve(
    model: Annotated[
        str, typer.Option(help="smollm2-135m, a hub id, a folder, a GGUF file, tiny:FAMILY, random:FOLDER.")
    ] = "smollm2-135m",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.")] = 256,
    new_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.")] = 64,
    concurrency: Annotated[
        str, typer.Option(help="Comma-separated numbers of clients that ask at once.")
    ] = "1,4,16",
    requests_per_client: Annotated[int, typer.Option(min=1, help="Requests of each client.")] = 2,
    contenders: Annotated[
        str, typer.Option(help=f"Comma-separated, in the order they run: {', '.join(serving.CONTENDERS)}.")
    ] = ",".join(serving.DEFAULT),
    data: Annotated[str, typer.Option(help="python-stdlib, or a file or folder of text.")] = "python-stdlib",
    json: Annotated[Path | None, _JSON] = None,
) -> None:
    """Put servers under the same load over HTTP: tokens/s, time to the first token, time between tokens.

    Example: [bold]hasten bench serve --concurrency 1,4,16 --json serve.json[/bold]
    """
    names = parse(contenders, serving.CONTENDERS)
    clients = _numbers("concurrency", concurrency)
    with _measuring() as screen:
        from hasten.bench import report as reports
        from hasten.bench.serving import table
        from hasten.bench.serving.run import Settings, bench_serve

        _check_writable(json)
        settings = Settings(model, prompt_tokens, new_tokens, clients, requests_per_client, names, data)
        report = bench_serve(settings, screen)
        _save(report, json)
    _show(reports.dump(report) if json == _STDOUT else table.render(report))
    raise typer.Exit(_exit_code(report.interrupted, bool(report.failed)))


@bench.command()
def quality(
    model: Annotated[
        str, typer.Option(help="smollm2-135m, a hub id, a folder or a GGUF file.")
    ] = "smollm2-135m",
    formats: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated WEIGHTS or WEIGHTS+CACHE, as generate's --weights and --cache take them; "
            "a number is bits a weight. Without it, from bfloat16 down to int4, and int8 caches."
        ),
    ] = None,
    json: Annotated[Path | None, _JSON] = None,
) -> None:
    """Hold formats of weights and cache against the model in float32: bytes, perplexity, KL, agreement.

    Example: [bold]hasten bench quality --formats bfloat16,stored+int8,4.5 --json quality.json[/bold]
    """
    with _measuring() as screen:
        from hasten.bench import quality as qualities
        from hasten.bench import report as reports

        wanted = qualities.parse_formats(formats)
        _check_writable(json)
        report = qualities.bench_quality(model, wanted, screen)
        _save(report, json)
    _show(reports.dump(report) if json == _STDOUT else qualities.render(report))
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

        _check_writable(json)
        report = operators.bench_ops(op, case, seconds, screen, every=every, tune=not no_tune)
        _save(report, json)
    _show(reports.dump(report) if json == _STDOUT else operators.render(report))
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


def _check_writable(json: Path | None) -> None:
    """Before a long run: whether its report can be written where it is to go."""
    from hasten.bench.report import check_writable

    if json is not None and json != _STDOUT:
        check_writable(json)


def _save(report: BaseModel, json: Path | None) -> None:
    from hasten.bench.report import save

    if json is not None and json != _STDOUT:
        save(report, json)


def _show(what: str | RenderableType) -> None:
    """A report's JSON as it is, or its table."""
    if isinstance(what, str):
        typer.echo(what, nl=False)
        return
    from rich.console import Console

    Console().print(what)


def _show_train(report: BenchReport, *, print_json: bool) -> None:
    from hasten.bench import report as reports
    from hasten.bench import table

    _show(reports.dump(report) if print_json else table.render(report))


def _train_levels(settings: Settings, names: str, json: Path | None, screen: Screen) -> int:
    """The bench at each level, shown and written; the exit code."""
    from hasten.base.facts import detect
    from hasten.bench import levels, table
    from hasten.bench import report as reports
    from hasten.bench.train import bench_levels

    report = bench_levels(settings, levels.parse_levels(names, detect()), screen)
    _save(report, json)
    if json == _STDOUT:
        _show(reports.dump(report))
    else:
        for entry in report.reports.values():
            _show(table.render(entry))
    last = list(report.reports.values())[-1]
    return _exit_code(last.interrupted, any(entry.failed for entry in report.reports.values()))


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """`"1,8"` as numbers.

    Raises:
        ConfigError: something else.
    """
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(
            f"{name} = {text!r}: give whole numbers with commas between them, e.g. 1,8"
        ) from None

"""The command line: `hasten COMMAND` or `python -m hasten COMMAND`.

Thin on purpose. Naming the commands and printing their list imports no room and no torch; a command's own
module is imported when that command is called. Exit codes: 0 done, 1 something failed, 2 the user's mistake.
"""

from __future__ import annotations

import importlib
import sys
from typing import Annotated, Any, NamedTuple

import typer
from typer.core import TyperGroup

import hasten
from hasten.base.errors import HastenError, UserError


class _Entry(NamedTuple):
    summary: str
    module: str
    attribute: str


_COMMANDS = {
    "demo": _Entry(
        "Fine-tune a real model twice, plain and with hasten, and compare.", "hasten.bench.command", "demo"
    ),
    "train": _Entry("Train or fine-tune a model from a TOML file or flags.", "hasten.train.command", "train"),
    "generate": _Entry(
        "Continue a prompt with a model, as fast as this machine reads it.",
        "hasten.serve.generate",
        "generate",
    ),
    "serve": _Entry(
        "Serve a model behind the OpenAI API, with a chat page.", "hasten.serve.command", "serve"
    ),
    "plan": _Entry(
        "Predict memory and time of a training run without a device, and find its best layout.",
        "hasten.plan.command",
        "plan",
    ),
    "calibrate": _Entry(
        "Measure this machine in under two minutes, for hasten plan.", "hasten.plan.calibrate", "calibrate"
    ),
    "bench": _Entry(
        "Measure training, generation, serving or single operators against the peers.",
        "hasten.bench.command",
        "bench",
    ),
    "doctor": _Entry("What this machine has, and why a model is not faster.", "hasten.__main__", "_doctor"),
}


class _LazyGroup(TyperGroup):
    """A group that knows its commands' names and summaries, and imports a command when it is called."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        name, command, rest = super().resolve_command(ctx, args)
        if name in _COMMANDS:
            command = _load(name)
        return name, command, rest


def _load(name: str) -> Any:
    entry = _COMMANDS[name]
    target = _doctor if name == "doctor" else getattr(importlib.import_module(entry.module), entry.attribute)
    if isinstance(target, typer.Typer):
        return typer.main.get_command(target)
    single = typer.Typer(add_completion=False, rich_markup_mode="rich")
    single.command(name=name)(target)
    return typer.main.get_command(single)


app = typer.Typer(
    cls=_LazyGroup,
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)


def _placeholder() -> None:
    """Stands for a command in the list; `_LazyGroup` puts the real one in its place."""


for _name, _entry in _COMMANDS.items():
    app.command(name=_name, help=_entry.summary)(_placeholder)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hasten {hasten.__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version and exit.", callback=_print_version, is_eager=True),
    ] = False,
) -> None:
    """Make Transformer models train faster in less memory, with the same result.

    Example: [bold]hasten demo[/bold]
    """


def _doctor(
    model: Annotated[
        str | None,
        typer.Argument(
            help="A model id, folder or GGUF file: open it and say what is replaced, what is not, and why."
        ),
    ] = None,
    tune: Annotated[
        bool, typer.Option("--tune", help="Measure anew where torch beats a native kernel, and keep it.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Say what this machine has, what each optimisation does on it, and why one is off.

    Examples: [bold]hasten doctor[/bold], [bold]hasten doctor smollm2-135m[/bold]
    """
    from hasten.base.screen import Screen
    from hasten.doctor import collect, render

    screen = Screen(enabled=not json)
    if tune:
        from hasten.train.tuning import tune_now

        tune_now(screen)
    facts = collect(model, screen)
    if json:
        from json import dumps

        typer.echo(dumps(facts, indent=2, default=str))
        return
    from rich.console import Console

    Console().print(render(facts))


def main() -> None:
    """Entry point of the `hasten` command. What hasten raises on purpose is one message, not a traceback."""
    try:
        app()
    except HastenError as error:
        print(f"hasten: {error}", file=sys.stderr)
        sys.exit(2 if isinstance(error, UserError) else 1)


if __name__ == "__main__":
    main()

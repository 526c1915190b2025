"""`hasten train`: flags and a TOML file to one run, one message for a fault, an exit code for machines.

Light on purpose: torch is loaded when a run starts, not for `--help`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from hasten.base.errors import HastenError, UserError

HELP = """Train or fine-tune a model on text.

Everything can stand in a TOML file; --settings lists what there is. Every
setting can also be given as a flag, --set SECTION.KEY=VALUE, which wins over
the file.

Ctrl-C finishes the step, writes a checkpoint and leaves; the same command
continues from it, with the same bits as if it had never stopped. Before the
first step it leaves at once. The output folder gets model/ (or adapter/ with
LoRA), checkpoints/, metrics.jsonl and tensorboard/.

Exit codes: 0 done; 2 a mistake in the settings or the input; 1 another fault,
or something could not be written; 130 stopped by Ctrl-C; 143 by SIGTERM.

Examples:

  hasten train recipes/smollm2-stdlib.toml

  hasten train recipes/smollm2-stdlib.toml --steps 20 --output runs/short

  hasten train --model smollm2-135m --data my-texts/ --seq 512 --lr 1e-4
"""

CONFIG_FILE = Annotated[Path | None, typer.Argument(help="Settings, TOML.", show_default=False)]
MODEL = Annotated[str | None, typer.Option("--model", help="Preset, hub id, folder or GGUF file.")]
DATA = Annotated[str | None, typer.Option("--data", help="Folder, .txt, .jsonl, .parquet, or python-stdlib.")]
STEPS = Annotated[int | None, typer.Option("--steps", help="Optimizer steps.")]
SEQ = Annotated[int | None, typer.Option("--seq", help="Tokens in a row.")]
BATCH_TOKENS = Annotated[int | None, typer.Option("--batch-tokens", help="Tokens in an optimizer step.")]
LR = Annotated[float | None, typer.Option("--lr", help="Peak learning rate.")]
PRECISION = Annotated[str | None, typer.Option("--precision", help="auto, bf16 or fp32.")]
OUTPUT = Annotated[Path | None, typer.Option("--output", help="Where results go.")]
RESUME = Annotated[str | None, typer.Option("--resume", help="auto, none, or the path of a checkpoint.")]
OPTIMIZE = Annotated[
    bool | None,
    typer.Option("--optimize/--no-optimize", help="Rewrite the model with hasten.", show_default=False),
]
NO_TUNE = Annotated[
    bool, typer.Option("--no-tune", help="Do not measure, on first use, where torch beats a native kernel.")
]
PROFILE = Annotated[
    Path | None, typer.Option("--profile", help="Also write a measured step, for hasten plan --profile.")
]
SET = Annotated[
    list[str] | None, typer.Option("--set", help="Any setting: SECTION.KEY=VALUE; may be repeated.")
]
SETTINGS = Annotated[bool, typer.Option("--settings", help="List every setting and its default, and leave.")]
AS_JSON = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout; no progress.")]


def train(
    config_file: CONFIG_FILE = None,
    model: MODEL = None,
    data: DATA = None,
    steps: STEPS = None,
    seq: SEQ = None,
    batch_tokens: BATCH_TOKENS = None,
    lr: LR = None,
    precision: PRECISION = None,
    output: OUTPUT = None,
    resume: RESUME = None,
    optimize: OPTIMIZE = None,
    no_tune: NO_TUNE = False,
    profile: PROFILE = None,
    assignments: SET = None,
    settings: SETTINGS = False,
    as_json: AS_JSON = False,
) -> None:
    if settings:
        from hasten.train.config import describe_settings

        typer.echo(describe_settings())
        return
    flags = {
        "model.id": model,
        "data.path": data,
        "steps": steps,
        "batch.sequence_tokens": seq,
        "batch.batch_tokens": batch_tokens,
        "optimizer.lr": lr,
        "precision": precision,
        "output.folder": str(output) if output is not None else None,
        "checkpoint.resume": resume,
        "optimize": optimize,
    }
    try:
        result = _run(config_file, flags, assignments or [], as_json, not no_tune, profile)
    except HastenError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2 if isinstance(error, UserError) else 1) from None
    except KeyboardInterrupt:
        typer.echo("stopped at once; the last checkpoint is intact", err=True)
        raise typer.Exit(130) from None
    if as_json:
        typer.echo(json.dumps(result.as_dict()))
    raise typer.Exit(result.exit_code)


train.__doc__ = HELP


def _run(
    config_file: Path | None,
    flags: dict[str, Any],
    assignments: list[str],
    quiet: bool,
    tune: bool,
    profile: Path | None,
) -> Any:
    from hasten.base.config import parse_override
    from hasten.train import train as run_training
    from hasten.train.config import load_config

    overrides = dict(parse_override(text, "batch.sequence_tokens=512") for text in assignments)
    overrides |= {name: value for name, value in flags.items() if value is not None}
    config = load_config(config_file, overrides)
    return run_training(config, progress=not quiet, tune=tune, profile=profile)

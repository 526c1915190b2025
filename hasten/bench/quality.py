"""`hasten bench quality`: what each format of weights and cache costs, in bytes and in predictions.

One process: the model in float32 as it was is the judge, and every format answers the same text as the gate's
(`hasten.serve.gate`), whose measures these are.
"""

from __future__ import annotations

import shlex
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hasten.base.errors import ConfigError, HastenError, first_line, nearest
from hasten.base.facts import detect
from hasten.base.screen import Screen
from hasten.bench import train
from hasten.bench.report import Frozen, Interruption, read
from hasten.bench.workload import RANDOM, TINY

SCHEMA = "hasten.bench.quality/1"
FORMATS = ("bfloat16", "bfloat16+int8", "int8", "5", "4.5", "int4", "stored", "stored+int8")
"""WEIGHTS or WEIGHTS+CACHE, as `hasten generate --weights WEIGHTS --cache CACHE` takes them."""
_DEFAULT_CACHE = "bfloat16"


class Row(Frozen):
    """One format. Distances are from the model in float32; KL in nats."""

    weights: str
    cache: str
    weight_bytes: int
    """Of all matrices, with the scales and the padding of their formats."""
    bits_a_weight: float
    share_of_float32: float
    """`weight_bytes` over those of float32; 8:1 is 0.125."""
    cache_bytes_per_token: int
    tokens: int
    mean_kl: float
    tail_kl: float
    """99.9 % of the places are at or below it."""
    top1_agreement: float
    perplexity_ratio: float
    accepted: bool
    """Whether `--check` would serve it."""


class QualityReport(Frozen):
    """The whole report."""

    schema_name: Literal["hasten.bench.quality/1"] = Field(default="hasten.bench.quality/1", alias="schema")
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    model: str
    parameters: int
    """In matrices; tied ones count once."""
    perplexity: float
    """Of the model in float32 on the text."""
    max_perplexity_ratio: float
    rows: list[Row]
    failed: dict[str, str]
    interrupted: Interruption | None


class Format(NamedTuple):
    """How weights and cache are held."""

    weights: str
    cache: str

    def __str__(self) -> str:
        return self.weights if self.cache == _DEFAULT_CACHE else f"{self.weights}+{self.cache}"


def parse_formats(text: str | None) -> tuple[Format, ...]:
    """`"bfloat16,stored+int8,4.5"` as formats in the given order; None gives `FORMATS`.

    Raises:
        ConfigError: a name that `hasten generate` does not take, a repeated one, or none.
    """
    from hasten.serve.open import WEIGHTS, check_formats

    found: list[Format] = []
    names = FORMATS if text is None else [part.strip() for part in text.split(",") if part.strip()]
    for name in names:
        weights, plus, cache = name.partition("+")
        form = Format(weights, cache if plus else _DEFAULT_CACHE)
        if weights == "auto":
            raise ConfigError(f"format {name!r}: name the weights; {nearest(weights, WEIGHTS[1:])}")
        check_formats(*form)
        found.append(form)
    if not found or len(set(found)) < len(found):
        raise ConfigError(f"formats = {text!r}: name each once, at least one, e.g. bfloat16,stored+int8,4.5")
    return tuple(found)


def bench_quality(model: str, formats: tuple[Format, ...], screen: Screen) -> QualityReport:
    """Opens the model, then every format of it in turn, and compares them on the gate's text.

    A format that cannot be made is named in `failed`. A signal (see `StopSignals`) ends it with the rows
    that are there.

    Raises:
        ConfigError: a model of random weights, which predicts nothing.
        InputError: the model cannot be opened, or has no tokenizer.
        Interrupted: the signal came before the first row.
    """
    from hasten.models import open_model
    from hasten.serve.gate import MAX_PERPLEXITY_RATIO, model_chunks, model_logits
    from hasten.train.stop import Interrupted

    if model.startswith((TINY, RANDOM)):
        raise ConfigError(f"model = {model!r}: random weights predict nothing; give a trained model")
    facts = detect()
    before = train.machine(facts)
    with screen.bar("opening the model", 1):
        original, tokenizer = open_model(model)
    parameters = sum(p.numel() for p in original.parameters() if p.dim() > 1)
    chunks = model_chunks(original, tokenizer, 1)
    judge = _remembered(model_logits(original.eval()))
    rows: list[Row] = []
    failed: dict[str, str] = {}
    interruption: Interruption | None = None
    perplexity = 0.0
    for number, form in enumerate(formats):
        try:
            screen.note(f"{form} ({number + 1} of {len(formats)})")
            row, perplexity = _measured(model, form, judge, chunks, parameters, MAX_PERPLEXITY_RATIO, screen)
        except Interrupted as stopped:
            if not rows:
                raise
            interruption = Interruption(signal=str(stopped), during=str(form))
            break
        except HastenError as error:
            failed[str(form)] = first_line(error)
            screen.warn(f"{form}: {first_line(error)}")
            continue
        rows.append(row)
        screen.note(f"{form}: perplexity x {row.perplexity_ratio:.4f}, {row.bits_a_weight:.2f} bits a weight")
    if not rows:
        raise HastenError("no format could be measured: " + "; ".join(failed.values()))
    return QualityReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=shlex.join(["hasten", *sys.argv[1:]]),
        machine=before,
        versions=train.versions(),
        model=model,
        parameters=parameters,
        perplexity=perplexity,
        max_perplexity_ratio=MAX_PERPLEXITY_RATIO,
        rows=rows,
        failed=failed,
        interrupted=interruption,
    )


def render(report: QualityReport) -> RenderableType:
    """A table for a terminal."""
    title = (
        f"{report.model} ({report.parameters / 1e6:,.1f} M parameters), perplexity {report.perplexity:.3f} "
        f"in float32 on {report.rows[0].tokens:,} tokens, {report.date[:10]}"
    )
    table = Table(title=Text(title), title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    headings = ("format", "bits", "of fp32", "perplexity", "mean KL", "99.9 %", "top-1", "gate")
    for heading in headings:
        justify = "left" if heading in ("format", "gate") else "right"
        table.add_column(heading, justify=justify, no_wrap=True)  # type: ignore[arg-type]
    for row in report.rows:
        table.add_row(
            str(Format(row.weights, row.cache)),
            f"{row.bits_a_weight:.2f}",
            f"{row.share_of_float32:.3f}",
            f"x {row.perplexity_ratio:.4f}",
            f"{row.mean_kl:.5f}",
            f"{row.tail_kl:.3f}",
            f"{row.top1_agreement:.2%}",
            "serves" if row.accepted else "refuses",
        )
    parts: list[RenderableType] = [table]
    parts += [Text(f"{name} failed: {reason}", style="red") for name, reason in report.failed.items()]
    if report.interrupted:
        parts.append(Text(f"CUT SHORT by {report.interrupted.signal} during {report.interrupted.during}"))
    return Group(*parts)


def load(path: Path) -> QualityReport:
    """Reads and checks a report of `hasten bench quality`; raises as `hasten.bench.report.read`."""
    return read(QualityReport, path, SCHEMA, "quality")


def _measured(
    model: str,
    form: Format,
    judge: Any,
    chunks: list[Any],
    parameters: int,
    most_ratio: float,
    screen: Screen,
) -> tuple[Row, float]:
    """The format's row, and the judge's perplexity."""
    from hasten.serve.gate import compare
    from hasten.serve.open import open_runner, runner_logits

    served = open_runner(model, weights=form.weights, cache=form.cache, screen=screen)
    if served.about.ordinary:
        raise ConfigError(f"served by its ordinary forward pass: {served.about.ordinary}")
    with screen.bar("comparing", 1):
        gate = compare(judge, runner_logits(served.runner), chunks, str(form))
    row = Row(
        weights=form.weights,
        cache=form.cache,
        weight_bytes=served.about.weight_bytes,
        bits_a_weight=8 * served.about.weight_bytes / parameters,
        share_of_float32=served.about.weight_bytes / (4 * parameters),
        cache_bytes_per_token=served.about.cache_bytes_per_token,
        tokens=gate.tokens,
        mean_kl=gate.mean_kl,
        tail_kl=gate.tail_kl,
        top1_agreement=gate.top1_agreement,
        perplexity_ratio=gate.perplexity_ratio,
        accepted=gate.perplexity_ratio <= most_ratio,
    )
    return row, gate.perplexity


def _remembered(logits: Any) -> Any:
    """`logits` that keeps its answers: 0.8 GB in float32 for the gate's text and 49,152 words."""
    seen: dict[bytes, Any] = {}

    def answer(tokens_T: Any) -> Any:
        key = tokens_T.numpy().tobytes()
        if key not in seen:
            seen[key] = logits(tokens_T)
        return seen[key]

    return answer

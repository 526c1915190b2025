"""How a report is shown: tables for a terminal, and Markdown for a README.

`python -m hasten.bench.table REPORT.json` prints the Markdown; with `--into FILE` it goes between the lines
`<!-- demo-table -->` and `<!-- /demo-table -->` of FILE.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hasten.base.errors import HastenError, InputError, UserError
from hasten.base.files import write_atomically
from hasten.bench.report import Agreement, BenchReport, Contender, OperatorTime, load

BEGIN, END = "<!-- demo-table -->", "<!-- /demo-table -->"
HEADINGS = ("", "tokens/s", "a step", "first step", "peak memory", "first loss", "last loss", "of limit")
SHOWN_LOSSES = 6


class _Row(NamedTuple):
    name: str
    cells: tuple[str, ...]


def render(report: BenchReport) -> RenderableType:
    """Everything that the report says, for a terminal."""
    table = Table(
        # As text: rich would read `:llama:` of a model's name as a picture.
        title=Text(headline(report)),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, heading in enumerate(HEADINGS):
        # Two short lines: the table fits into 80 columns.
        table.add_column(heading.replace(" ", "\n"), justify="left" if index == 0 else "right", no_wrap=True)
    for row in _rows(report):
        table.add_row(row.name, *row.cells)
    parts: list[RenderableType] = [table, _losses(report)]
    parts += [Text(f"{name} failed: {reason}", style="red") for name, reason in report.failed.items()]
    parts += [Text(f"{name} was left out: {reason}") for name, reason in report.skipped.items()]
    parts += [Text(line) for line in _lines(report)]
    parts += [_where(name, entry.where) for name, entry in report.contenders.items() if entry.where]
    for name, contender in report.contenders.items():
        if contender.text is not None:
            parts.append(Text(f"\n{name} continues {report.workload.prompt!r}:", style="bold"))
            parts.append(Text(contender.text))
    return Group(*parts)


def markdown(report: BenchReport) -> str:
    """The table, the ratios and the agreement as Markdown."""
    head = "| " + " | ".join(HEADINGS) + " |"
    rule = "|" + "|".join([" --- ", *[" ---: "] * (len(HEADINGS) - 1)]) + "|"
    rows = [f"| `{row.name}` | " + " | ".join(row.cells) + " |" for row in _rows(report)]
    lines = _lines(report)
    return (
        "\n".join([f"{headline(report)}.", "", head, rule, *rows, "", *[f"- {line}" for line in lines]])
        + "\n"
    )


def headline(report: BenchReport) -> str:
    """Model, sizes, machine and date in one line."""
    work, machine = report.workload, report.machine
    size = f"{work.size.parameters / 1e6:,.1f} M parameters"
    return (
        f"{work.model} ({size}), {work.batch} x {work.sequence_tokens} tokens of {work.data}, "
        f"{work.steps} steps, on {machine.get('processor', 'unknown')} with {report.limits.threads} threads"
        f"{f' limited to {report.level}' if report.level else ''}, {report.date[:10]}"
    )


def ratio_lines(report: BenchReport) -> list[str]:
    """One sentence for each contender and base; no speed-up where the losses do not agree."""
    lines = []
    for name, bases in report.ratios.items():
        for base, ratio in bases.items():
            speed = (
                f"{ratio.speed:.2f}x the speed"
                if ratio.speed
                else "no speed-up is given (the losses do not agree)"
            )
            lines.append(
                f"{name} against {base}: {speed}, {ratio.peak_memory:.2f}x the peak memory, first forward "
                f"{_more(ratio.first_forward_extra_s)}"
            )
    return lines


def opening_line(report: BenchReport) -> str:
    """Seconds to open the model, and to the end of the first forward pass, of each contender."""
    each = "; ".join(
        f"{name} {contender.open_s:.1f} s, {contender.first_forward_s:.1f} s"
        for name, contender in report.contenders.items()
    )
    return f"opening the model, then the first forward with capture or compilation: {each}"


def agreement_lines(report: BenchReport) -> list[str]:
    """Whether the losses agree, by how much, and within which bound."""
    lines = [_agreement(entry) for entry in report.agreement]
    lines += sorted({f"bound: {entry.reason}" for entry in report.agreement})
    return lines


def note_lines(report: BenchReport) -> list[str]:
    """The measured limits, and what differed from the name of a contender."""
    rates = ", ".join(
        f"{rate / 1e9:.0f} GFLOP/s in {name}"
        for name, rate in report.limits.gemm_flops_per_s_by_dtype.items()
    )
    lines = [
        f"limits measured before the run: matrix products {rates}, reading memory "
        f"{report.limits.read_bytes_per_s / 1e9:.1f} GB/s"
    ]
    for name, contender in report.contenders.items():
        if contender.note:
            lines.append(f"{name}: {contender.note}")
        if not contender.repeatable:
            lines.append(f"{name}: its rounds did not give bit-equal losses")
    return lines


def write_into(file: Path, text: str) -> None:
    """Replaces what stands between the two marks of `file`.

    Raises:
        InputError: the file or one of its marks is missing.
    """
    if not file.is_file():
        raise InputError(f"no such file: {file}")
    old = file.read_text(encoding="utf-8")
    before, begin, rest = old.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise InputError(f"{file} has no line {BEGIN} followed by a line {END}")
    write_atomically(file, f"{before}{BEGIN}\n{text}{END}{after}")


def _lines(report: BenchReport) -> list[str]:
    cut = report.interrupted
    return [
        *(
            [f"CUT SHORT by {cut.signal} during {cut.during}: only what finished before it is here"]
            if cut
            else ()
        ),
        *ratio_lines(report),
        opening_line(report),
        *agreement_lines(report),
        *note_lines(report),
    ]


def _more(seconds: float) -> str:
    return f"{abs(seconds):.1f} s {'later' if seconds >= 0 else 'sooner'}"


def _rows(report: BenchReport) -> list[_Row]:
    return [_Row(name, _cells(contender)) for name, contender in report.contenders.items()]


def _cells(contender: Contender) -> tuple[str, ...]:
    return (
        f"{contender.tokens_per_s:,.0f}",
        f"{contender.step_s:.2f} s" if contender.step_s >= 0.1 else f"{contender.step_s * 1e3:.1f} ms",
        f"{contender.first_step_s:.1f} s",
        f"{contender.peak_rss_bytes / 1e9:.2f} GB",
        f"{contender.losses[0]:.4f}",
        f"{contender.losses[-1]:.4f}",
        f"{contender.share_of_limit:.0%}",
    )


def _losses(report: BenchReport) -> Table:
    """The loss of every step, or of some evenly spread ones."""
    steps = report.workload.steps
    shown = sorted({round(i * (steps - 1) / max(SHOWN_LOSSES - 1, 1)) for i in range(SHOWN_LOSSES)} | {0})
    shown = list(range(steps)) if steps <= 2 * SHOWN_LOSSES else shown
    table = Table(title="loss by step", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("")
    for step in shown:
        table.add_column(str(step + 1), justify="right")
    for name, contender in report.contenders.items():
        table.add_row(name, *[f"{contender.losses[step]:.4f}" for step in shown])
    return table


def _where(name: str, rows: Sequence[OperatorTime]) -> Table:
    """One row for each operator."""
    title = f"{name}: where a step's time goes (under the profiler)"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for heading in ("operator", "calls", "time", "share", "of limit"):
        table.add_column(heading, justify="left" if heading == "operator" else "right")
    for row in rows:
        limit = "" if row.share_of_limit is None else f"{row.share_of_limit:.0%}"
        calls = str(row.calls) if row.calls else ""
        table.add_row(row.operator, calls, f"{row.time_s * 1e3:.0f} ms", f"{row.share:.1%}", limit)
    return table


def _agreement(entry: Agreement) -> str:
    verdict = "agree" if entry.agree else "DO NOT agree"
    without = ""
    if entry.base_rounding is not None:
        without = (
            f"; {entry.base}'s float32 cross-entropy is {entry.base_rounding:+.1e} off and was corrected"
        )
    return (
        f"losses of {entry.contender} and {entry.base} {verdict}: relative difference "
        f"{entry.difference_first:.1e} at step 1 (allowed {entry.bound_first:.1e}), "
        f"{entry.difference_largest:.1e} at most (allowed {entry.bound_later:.1e}), "
        f"{entry.difference_mean:.1e} on average (allowed {entry.bound_mean:.1e}){without}"
    )


def main(arguments: list[str]) -> int:
    """Entry point: REPORT.json [--into FILE]."""
    try:
        if len(arguments) not in (1, 3) or arguments[1:2] not in ([], ["--into"]):
            raise UserError("usage: python -m hasten.bench.table REPORT.json [--into FILE]")
        text = markdown(load(Path(arguments[0])))
        if len(arguments) == 3:
            write_into(Path(arguments[2]), text)
        else:
            Console(soft_wrap=True).print(text, markup=False, highlight=False)
    except HastenError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

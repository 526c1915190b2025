"""How a report of `hasten bench generate` is shown: tables for a terminal, and Markdown.

`python -m hasten.bench.generation.table REPORT.json` prints the Markdown.
"""

from __future__ import annotations

import sys
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from hasten.base.errors import HastenError, UserError
from hasten.bench.generation.report import Agreement, Contender, GenerateReport, Ratio, load

HEADINGS = (
    "",
    "prefill tokens/s",
    "decode tokens/s",
    "of bound",
    "first token",
    "from start",
    "peak memory",
    "weights read",
)
_SHOWN_TEXT = 200


def render(report: GenerateReport) -> RenderableType:
    """Everything that the report says, for a terminal."""
    table = _new_table(Text(headline(report)), HEADINGS)
    for name, contender in report.contenders.items():
        table.add_row(name, *_cells(contender))
    parts: list[RenderableType] = [table]
    if any(contender.streams for contender in report.contenders.values()):
        parts.append(_streams_table(report))
    parts += [Text(f"{name} failed: {reason}", style="red") for name, reason in report.failed.items()]
    parts += [Text(line) for line in lines(report)]
    for name, contender in report.contenders.items():
        if contender.where is not None:
            parts.append(_where_table(name, contender.where))
    for name, contender in report.contenders.items():
        if contender.text is not None:
            parts.append(Text(f"\n{name} answers:", style="bold"))
            parts.append(Text(contender.text[:_SHOWN_TEXT]))
    return Group(*parts)


def markdown(report: GenerateReport) -> str:
    """The table, the ratios and the agreement as Markdown."""
    rule = "|" + "|".join([" --- ", *[" ---: "] * (len(HEADINGS) - 1)]) + "|"
    rows = [
        f"| `{name}` | " + " | ".join(_cells(contender)) + " |"
        for name, contender in report.contenders.items()
    ]
    failed = [f"{name} failed: {reason}" for name, reason in report.failed.items()]
    said = [f"- {line}" for line in (*failed, *lines(report))]
    return (
        "\n".join([f"{headline(report)}.", "", "| " + " | ".join(HEADINGS) + " |", rule, *rows, "", *said])
        + "\n"
    )


def headline(report: GenerateReport) -> str:
    """Model, sizes, machine and date in one line."""
    work = report.workload
    return (
        f"{work.model} ({work.size.parameters / 1e6:,.1f} M parameters), prompts of {work.prompt_tokens} "
        f"tokens of {work.data}, {work.new_tokens} new ones, on {report.machine.get('processor', 'unknown')} "
        f"with {report.limits.threads} threads, {report.date[:10]}"
    )


def lines(report: GenerateReport) -> list[str]:
    """What stands below the table, one sentence each."""
    cut = report.interrupted
    found = []
    if cut:
        found.append(f"CUT SHORT by {cut.signal} during {cut.during}: only what finished before it is here")
    found += [f"{name} was left out: {reason}" for name, reason in report.skipped.items()]
    found += [
        _ratio_line(name, base, ratio)
        for name, bases in report.ratios.items()
        for base, ratio in bases.items()
    ]
    found += [_agreement_line(entry) for entry in report.agreement]
    found += sorted({f"bound: {entry.reason}" for entry in report.agreement})
    if report.agree is None:
        found.append("the answers were not judged, so no speed-up is given")
    if report.longest_context is not None:
        longest = report.longest_context
        found += [
            f"longest context of {name} within the {longest.budget_bytes / 1e9:.2f} GB that "
            f"{longest.budget_of} needs for {longest.budget_tokens} tokens: {entry.tokens} "
            f"({longest.ratios[name]:.1f}x"
            f"{', all that the model is made for' if entry.limited_by == 'model' else ''})"
            for name, entry in longest.contenders.items()
        ]
    limits = report.limits
    found.append(
        "limits, the best of those measured before and behind every turn: matrix products "
        f"{limits.gemm_flops_per_s / 1e9:.0f} GFLOP/s, "
        f"reading memory {limits.read_bytes_per_s / 1e9:.1f} GB/s; the bound of decoding is what is "
        "read around a contender's own turns over the bytes of weights and cache that a token reads"
    )
    for name, contender in report.contenders.items():
        if contender.note:
            found.append(f"{name}: {contender.note}")
        if not contender.repeatable:
            found.append(f"{name}: its rounds did not give the same tokens")
    return found


def _streams_table(report: GenerateReport) -> Table:
    table = _new_table(
        Text("several streams together"),
        (
            "",
            "streams",
            "decode tokens/s",
            "against one",
            "all tokens/s",
            "first token",
            "last first",
            "peak memory",
        ),
    )
    for name, contender in report.contenders.items():
        for count, group in contender.streams.items():
            gain = contender.streams_gain[count]
            table.add_row(
                name,
                count,
                "-" if group.decode_tokens_per_s is None else f"{group.decode_tokens_per_s:,.1f}",
                "-" if gain is None else f"{gain:.2f}x",
                f"{group.tokens_per_s:,.1f}",
                f"{group.first_token_s:.2f} s",
                f"{group.last_first_token_s:.2f} s",
                f"{group.peak_rss_bytes / 1e9:.2f} GB",
            )
    return table


def _where_table(name: str, where: dict[str, dict[str, float]]) -> Table:
    """Milliseconds by operation, those that take most of a decoded token first."""
    table = _new_table(Text(f"{name}: where the time goes, ms"), ("", "prompt", "share", "token", "share"))
    prompt, token = where["prefill"], where["decode"]
    names = sorted(prompt | token, key=lambda operation: -token.get(operation, 0.0))
    for operation in names:
        cells = []
        for stage in (prompt, token):
            took = stage.get(operation, 0.0)
            cells += [f"{took * 1e3:.2f}", f"{took / sum(stage.values()):.1%}"]
        table.add_row(operation, *cells)
    return table


def _new_table(title: Text, headings: tuple[str, ...]) -> Table:
    table = Table(
        title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    for index, heading in enumerate(headings):
        # Two short lines: the table fits into 80 columns.
        table.add_column(heading.replace(" ", "\n"), justify="left" if index == 0 else "right", no_wrap=True)
    return table


def _cells(contender: Contender) -> tuple[str, ...]:
    return (
        f"{contender.prefill_tokens_per_s:,.0f}",
        f"{contender.decode_tokens_per_s:,.1f}",
        f"{contender.share_of_bound:.0%}",
        f"{contender.first_token_s * 1e3:,.0f} ms",
        f"{contender.start_to_first_token_s:.1f} s",
        f"{contender.peak_rss_bytes / 1e9:.2f} GB",
        f"{contender.weight_bytes / 1e6:,.0f} MB",
    )


def _ratio_line(name: str, base: str, ratio: Ratio) -> str:
    memory = f"{ratio.peak_memory:.2f}x the peak memory"
    if ratio.decode is None or ratio.prefill is None or ratio.start_to_first_token is None:
        return f"{name} against {base}: no speed-up is given (see the agreement), {memory}"
    together = "".join(
        f", {value:.2f}x with {count} streams" for count, value in ratio.streams.items() if value is not None
    )
    return (
        f"{name} against {base}: decode {ratio.decode:.2f}x{together}, prefill {ratio.prefill:.2f}x, "
        f"{ratio.start_to_first_token:.2f}x the time from start to first token, {memory}"
    )


def _agreement_line(entry: Agreement) -> str:
    verdict = "agrees" if entry.agree else "DOES NOT agree"
    parts = [
        f"{entry.contender} {verdict} with plain PyTorch in fp32: its tokens are {entry.regret_mean:.1e} "
        f"below the best on average (allowed {entry.bound_regret:.1e}), {entry.regret_largest:.1e} at most"
    ]
    if entry.logprob_difference_mean is not None:
        allowed = "" if entry.bound_logprob is None else f" (allowed {entry.bound_logprob:.1e})"
        parts.append(f"log-probabilities differ by {entry.logprob_difference_mean:.1e} on average{allowed}")
    if entry.base is not None:
        where = "never" if entry.first_divergence is None else f"at token {entry.first_divergence + 1}"
        parts.append(f"its cold answer parts from {entry.base}'s {where}")
    return "; ".join(parts)


def main(arguments: list[str]) -> int:
    """Entry point: REPORT.json."""
    try:
        if len(arguments) != 1:
            raise UserError("usage: python -m hasten.bench.generation.table REPORT.json")
        Console(soft_wrap=True).print(markdown(load(Path(arguments[0]))), markup=False, highlight=False)
    except HastenError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

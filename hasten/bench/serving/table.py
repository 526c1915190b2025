"""How a report of `hasten bench serve` is shown in a terminal."""

from __future__ import annotations

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from hasten.bench.serving.report import Contender, Ratio, ServeReport

HEADINGS = ("", "clients", "tokens/s", "first p50", "first p95", "between p50", "between p95", "failed")


def render(report: ServeReport) -> RenderableType:
    """Everything that the report says."""
    table = Table(
        title=Text(headline(report)),
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
    )
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading.replace(" ", "\n"), justify="left" if index == 0 else "right", no_wrap=True)
    for name, contender in report.contenders.items():
        for clients, level in contender.levels.items():
            table.add_row(
                name,
                clients,
                f"{level.tokens_per_s:,.1f}",
                f"{level.first_token_p50_s:.2f} s",
                f"{level.first_token_p95_s:.2f} s",
                f"{level.inter_token_p50_s * 1e3:.1f} ms",
                f"{level.inter_token_p95_s * 1e3:.1f} ms",
                f"{level.failures} of {level.requests}",
            )
    parts: list[RenderableType] = [table]
    parts += [Text(f"{name} failed: {reason}", style="red") for name, reason in report.failed.items()]
    return Group(*parts, *[Text(line) for line in lines(report)])


def headline(report: ServeReport) -> str:
    """Model, sizes, machine and date in one line."""
    work = report.workload
    return (
        f"{work.model} over HTTP, prompts of {work.prompt_tokens} tokens of {work.data}, up to "
        f"{work.new_tokens} new ones, {work.requests_per_client} requests a client, on "
        f"{report.machine.get('processor', 'unknown')} with {report.limits.threads} threads, "
        f"{report.date[:10]}"
    )


def lines(report: ServeReport) -> list[str]:
    """What stands below the table, one sentence each."""
    found = []
    if report.interrupted:
        cut = report.interrupted
        found.append(f"CUT SHORT by {cut.signal} during {cut.during}: only what finished before it is here")
    found += [f"{name} was left out: {reason}" for name, reason in report.skipped.items()]
    found += [
        _ratio_line(name, base, clients, ratio)
        for name, bases in report.ratios.items()
        for base, levels in bases.items()
        for clients, ratio in levels.items()
    ]
    for name, contender in report.contenders.items():
        found.append(_contender_line(name, contender))
        found += [f"{name}: {error}" for error in contender.errors]
    return found


def _contender_line(name: str, contender: Contender) -> str:
    equal = contender.compared - contender.different
    answers = (
        f"{equal} of {contender.compared} answers given to several clients at once equal those given alone"
        if contender.compared
        else "no answers were compared"
    )
    return (
        f"{name}: ready after {contender.ready_s:.1f} s, peak {contender.peak_rss_bytes / 1e9:.2f} GB, "
        f"{answers}; ended with {contender.exit_code} on SIGTERM"
    )


def _ratio_line(name: str, base: str, clients: str, ratio: Ratio) -> str:
    who = f"{name} against {base}, {clients} {'client' if clients == '1' else 'clients'}"
    if ratio.tokens_per_s is None or ratio.first_token_p50 is None or ratio.inter_token_p50 is None:
        return f"{who}: no speed-up is given (answers differ or failed)"
    return (
        f"{who}: {ratio.tokens_per_s:.2f}x the tokens/s, {ratio.first_token_p50:.2f}x the time to the first "
        f"token, {ratio.inter_token_p50:.2f}x the time between tokens"
    )

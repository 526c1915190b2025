"""A plan as tables for people, for `rich` to print."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hasten.base.screen import spell_time
from hasten.plan.cluster import Cluster
from hasten.plan.document import MFU
from hasten.plan.estimate import Estimate
from hasten.plan.explain import Comparison, Fit, Scale, training
from hasten.plan.job import Job
from hasten.plan.model import ModelShape
from hasten.plan.search import REASONS, Found, Rejected

# Of each kind of reason, so many layouts are shown; `--json` has all.
_EXAMPLES = 4


def show_plan(model: ModelShape, cluster: Cluster, job: Job, found: Found) -> Any:
    """The answer of a search."""
    head = Text.assemble(
        (model.name, "bold"),
        f": {model.parameters / 1e9:.4g} B parameters on {cluster.devices:,} x {cluster.device.name} "
        f"({cluster.name}), {job.batch:,} x {job.sequence:,} tokens a step in {job.precision}",
    )
    parts: list[Any] = [head]
    if found.best is None:
        parts.append(Text("No layout fits.", style="bold red"))
        if found.nearest_miss is not None:
            parts.append(Text(f"The nearest: {found.nearest_miss.layout.describe()}"))
            parts.append(Text(f"  {found.nearest_miss.reason}"))
    else:
        parts += _best(found.best, model, cluster, job)
        parts.append(_ranking(found))
    parts.append(_left_out(found))
    parts += [Text(f"note: {note}") for note in found.notes]
    return Group(*parts)


def _best(best: Estimate, model: ModelShape, cluster: Cluster, job: Job) -> list[Any]:
    room = cluster.device.memory_bytes.value
    step = best.step_s
    rows = [
        ("layout", best.layout.describe()),
        (
            "step",
            f"{spell_time(step.value)}  ({spell_time(step.low)} to {spell_time(step.high)}; "
            f"{best.confidence})",
        ),
        ("tokens/s", f"{best.tokens_per_s:,.0f}  ({best.tokens_per_s / best.layout.devices:,.0f} a device)"),
        ("MFU, HFU", f"{100 * best.mfu:.1f} %, {100 * best.hfu:.1f} %  ({MFU})"),
        ("memory", f"{best.memory_peak / 1e9:.1f} of {room / 1e9:.1f} GB at the fullest stage"),
    ]
    if (whole := training(best, model, cluster, job)) is not None:
        days = whole.days
        rows.append(
            (
                f"{whole.tokens:.3g} tokens",
                f"{days.value:.1f} days ({days.low:.1f} to {days.high:.1f}), {whole.device_hours:,.0f} "
                f"device hours"
                + (f", cost {whole.cost:,.0f}" if whole.cost else "")
                + f", {whole.flops:.3g} FLOP (6 per weight and token)",
            )
        )
    time = _table("Time of a step", ("part", "time", "share"), 1)
    total = sum(best.parts.values()) or 1.0
    for name, value in sorted(best.parts.items(), key=lambda pair: -pair[1]):
        if value > 0:
            time.add_row(escape(name), spell_time(value), f"{100 * value / total:.1f} %")
    answer = _table("Best layout", ("what", "value"), 9)
    for what, said in rows:
        answer.add_row(what, escape(said))
    return [answer, time, _memory(best), *[Text(f"note: {note}") for note in best.notes]]


def _memory(best: Estimate) -> Table:
    """The first stage, the fullest, the emptiest and the last, side by side."""
    sums = [sum(stage.values()) for stage in best.memory]
    chosen = sorted({0, len(sums) - 1, sums.index(max(sums)), sums.index(min(sums))})
    heads = [f"stage {index}" for index in chosen] if len(sums) > 1 else ["GB"]
    table = _table("Memory of a device, GB", ("category", *heads), 1)
    for name in dict.fromkeys(name for stage in best.memory for name in stage):
        sizes = [best.memory[index].get(name, 0.0) for index in chosen]
        if any(sizes):
            table.add_row(escape(name), *[f"{size / 1e9:.2f}" for size in sizes])
    table.add_row("all", *[f"{sums[index] / 1e9:.2f}" for index in chosen])
    return table


def _ranking(found: Found) -> Table:
    table = _table("The best and the runners-up", ("layout", "step", "over the best", "GB", "MFU"), 1)
    for item in found.ranked:
        over = item.step_s.value / found.ranked[0].step_s.value - 1
        table.add_row(
            escape(item.layout.describe()),
            spell_time(item.step_s.value),
            f"{100 * over:+.1f} %",
            f"{item.memory_peak / 1e9:.1f}",
            f"{100 * item.mfu:.1f} %",
        )
    return table


def _left_out(found: Found) -> Any:
    counts = found.counts()
    said = ", ".join(f"{counts[kind]:,} {REASONS[kind]}" for kind in sorted(counts))
    table = _table(
        f"{found.looked_at:,} layouts in {found.seconds:.1f} s; left out: {said or 'none'} (all with --json)",
        ("layout", "why"),
        9,
    )
    for kind in sorted(counts):
        for item in _nearest(found, kind):
            table.add_row(escape(item.layout.describe()), escape(item.reason))
    return table


def _nearest(found: Found, kind: str) -> Sequence[Rejected]:
    """Those that came nearest to being taken."""
    chosen = [item for item in found.rejected if item.kind == kind]
    chosen.sort(key=lambda item: (item.missing_bytes, item.step_s or 0.0))
    return chosen[:_EXAMPLES]


def show_comparison(comparison: Comparison) -> Any:
    """Two layouts side by side."""
    a, b = comparison.a, comparison.b
    head = _table("Two layouts", ("", "A", "B"), 9)
    head.add_row("layout", escape(a.layout.describe()), escape(b.layout.describe()))
    head.add_row("step", spell_time(a.step_s.value), spell_time(b.step_s.value))
    head.add_row("MFU", f"{100 * a.mfu:.1f} %", f"{100 * b.mfu:.1f} %")
    head.add_row("memory", f"{a.memory_peak / 1e9:.1f} GB", f"{b.memory_peak / 1e9:.1f} GB")
    time = _table("Time by part", ("part", "A", "B", "B over A"), 1)
    for row in comparison.time:
        if row.a or row.b:
            time.add_row(escape(row.name), spell_time(row.a), spell_time(row.b), _signed(row.difference))
    memory = _table("Memory of the fullest stage, GB", ("category", "A", "B", "B over A"), 1)
    for row in comparison.memory:
        if row.a or row.b:
            memory.add_row(
                escape(row.name), f"{row.a / 1e9:.2f}", f"{row.b / 1e9:.2f}", f"{row.difference / 1e9:+.2f}"
            )
    return Group(head, time, memory, *[Text(sentence) for sentence in comparison.sentences])


def _signed(seconds: float) -> str:
    return ("+" if seconds >= 0 else "-") + spell_time(abs(seconds))


def show_fit(answer: Fit, model: ModelShape, cluster: Cluster) -> Any:
    """Whether it fits, and what is missing."""
    name = f"{model.name} on {answer.devices:,} x {cluster.device.name}"
    room = f"{answer.need_bytes / 1e9:.1f} of {answer.room_bytes / 1e9:.1f} GB"
    lines = [
        Text(f"{name}: fits, {room}", style="bold green")
        if answer.fits
        else Text(
            f"{name}: does not fit; {answer.missing_bytes / 1e9:.1f} GB are missing ({room})",
            style="bold red",
        ),
        Text(f"the smallest layout: {answer.layout}; its fullest stage is {answer.stage}"),
    ]
    table = _table("That stage, GB", ("category", "GB"), 1)
    for category, value in sorted(answer.by_category.items(), key=lambda pair: -pair[1]):
        if value > 0:
            table.add_row(escape(category), f"{value / 1e9:.2f}")
    if answer.smallest_devices is not None:
        lines.append(
            Text(f"the smallest number of devices tried on which it fits: {answer.smallest_devices:,}")
        )
    elif not answer.fits:
        lines.append(Text("no number of these devices that divides this batch is enough"))
    return Group(*lines, table)


def show_scaling(rows: Sequence[Scale]) -> Any:
    """The best layout by number of devices."""
    table = _table(
        "Scaling, the batch staying the same",
        ("devices", "step", "tokens/s", "efficiency", "MFU", "layout"),
        9,
    )
    for row in rows:
        if row.best is None:
            why = row.miss.reason if row.miss else row.note
            table.add_row(f"{row.devices:,}", "", "", "", "", escape(why))
            continue
        table.add_row(
            f"{row.devices:,}",
            spell_time(row.best.step_s.value),
            f"{row.best.tokens_per_s:,.0f}",
            f"{100 * (row.efficiency or 0):.0f} %",
            f"{100 * row.best.mfu:.1f} %",
            escape(row.best.layout.describe()),
        )
    return table


def _table(title: str, columns: Sequence[str], numbers_from: int) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index >= numbers_from else "left", overflow="fold")
    return table

"""A plan as one HTML page that needs nothing else: no script, no font, no network; light and dark.

Everything is drawn from the document of `hasten.plan.document`, so a page can be made of a plan that was
saved.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from hasten.base.screen import spell_time
from hasten.plan.document import MOST_EVENTS
from hasten.plan.search import REASONS

# Okabe and Ito's colours, which people who see colours differently tell apart; each also has its legend in
# words.
_COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8f8f3c", "#7a5195", "#999999")
_KINDS = {
    "forward": "#0072b2",
    "backward": "#e69f00",
    "weight": "#009e73",
    "reduce": "#cc79a7",
    "optimizer": "#56b4e9",
}
_MOST_ROWS = 300
# Of the layouts in the picture of time and memory, over the best.
_SLOWEST = 4
_WIDTH = 920

_STYLE = """
:root { color-scheme: light dark; --ink: #1c1e21; --soft: #5c6370; --line: #d5d8dd; --back: #fff; --box:
#f5f6f8; --good: #00704a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e7e9ec; --soft: #a0a7b3; --line: #3a3f47; --back:
#16181c; --box: #202329; --good: #4cc38a; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 68rem; padding: 1.5rem; font: 15px/1.5 system-ui, sans-serif; color:
var(--ink); background: var(--back); }
h1 { font-size: 1.4rem; margin: 0 0 .2rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; } .soft { color: var(--soft); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(9.5rem, 1fr)); gap: .6rem; margin:
1rem 0; } .tile { background: var(--box); border-radius: .5rem; padding: .6rem .8rem; }
.tile b { display: block; font-size: 1.2rem; } .tile span { color: var(--soft); font-size: .85rem; }
svg { width: 100%; height: auto; display: block; } svg text { fill: var(--ink); font: 12px system-ui,
sans-serif; } svg .soft { fill: var(--soft); } svg .axis { stroke: var(--line); } svg .limit { stroke:
#d55e00; stroke-dasharray: 5 4; } .legend { display: flex; flex-wrap: wrap; gap: .3rem 1rem; font-size:
.85rem; margin: .4rem 0; } .legend i { display: inline-block; width: .8rem; height: .8rem; border-radius:
.15rem; margin-right: .35rem; vertical-align: -.08rem; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; width: 100%; font-size: .87rem; }
th, td { text-align: left; padding: .25rem .6rem; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 600; } td.n, th.n { text-align: right; white-space: nowrap;
font-variant-numeric: tabular-nums; } code { font: .85em ui-monospace, monospace; } details { margin: .5rem
0; } summary { cursor: pointer; }
"""


def render_page(document: Mapping[str, Any]) -> str:
    """The page of a plan document.

    A document without `best` (nothing fits) gives a page that says so and why.
    """
    model, cluster, job = document["model"], document["cluster"], document["job"]
    title = f"{model['name']} on {cluster['devices']} x {cluster['device']['name']}"
    body = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(model, cluster, job))}</p>',
    ]
    best = document.get("best")
    if best is None:
        miss = document.get("nearest_miss")
        body.append("<h2>No layout fits</h2>")
        if miss:
            body.append(
                f"<p>The nearest: <code>{escape(miss['layout'])}</code><br>{escape(miss['reason'])}</p>"
            )
    else:
        body += [
            f"<p><code>{escape(best['name'])}</code></p>",
            _tiles(best, document.get("training")),
            _section("Where a step's time goes", _parts(best["parts_s"])),
            _section("The pipeline over one step", _timeline(best)),
            _section(
                "Memory of a device, by stage",
                _memory(best["memory_bytes"], cluster["device"]["memory_bytes"]["value"]),
            ),
            _section("Time against memory", _pareto(document)),
            _section("The best and the runners-up", _ranked(document["ranked"])),
        ]
        if notes := [*best["notes"], *document["notes"]]:
            body.append(_section("Notes", "<ul>" + "".join(f"<li>{escape(n)}</li>" for n in notes) + "</ul>"))
    body.append(_section("What was left out, and why", _rejected(document)))
    body.append(_section("The figures behind it", _sources(cluster, document["mfu_convention"])))
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: plan</title><style>{_STYLE}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def _subtitle(model: Mapping[str, Any], cluster: Mapping[str, Any], job: Mapping[str, Any]) -> str:
    nodes = f"{cluster['nodes']} nodes of {cluster['devices_per_node']} ({cluster['name']})"
    return (
        f"{model['parameters'] / 1e9:.4g} B parameters; {nodes}; a step of {job['batch']:,} sequences of "
        f"{job['sequence']:,} tokens in {job['precision']}, {job['attention']} attention"
    )


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{content}</section>"


def _tiles(best: Mapping[str, Any], training: Mapping[str, Any] | None) -> str:
    step = best["step_s"]
    tiles = [
        (spell_time(step["value"]), f"a step ({spell_time(step['low'])} to {spell_time(step['high'])})"),
        (f"{best['tokens_per_s']:,.0f}", "tokens/s"),
        (f"{100 * best['mfu']:.1f} %", "MFU"),
        (f"{100 * best['hfu']:.1f} %", "HFU, recomputing counted"),
        (f"{best['memory_peak_bytes'] / 1e9:.1f} GB", "of memory at the fullest stage"),
        (best["confidence"], "confidence"),
    ]
    if training:
        days = training["days"]
        tiles.append(
            (
                f"{days['value']:.1f} days",
                f"for {training['tokens']:.3g} tokens ({days['low']:.1f} to {days['high']:.1f})",
            )
        )
        if training["cost"]:
            tiles.append((f"{training['cost']:,.0f}", f"for {training['device_hours']:,.0f} device hours"))
    cells = "".join(f'<div class="tile"><b>{escape(a)}</b><span>{escape(b)}</span></div>' for a, b in tiles)
    return f'<div class="tiles">{cells}</div>'


def _parts(parts: Mapping[str, float]) -> str:
    shown = sorted(((value, name) for name, value in parts.items() if value > 0), reverse=True)
    if not shown:
        return "<p>No time.</p>"
    total, longest = sum(value for value, _ in shown), shown[0][0]
    lines = []
    for row, (value, name) in enumerate(shown):
        y, width = 24 * row, 480 * value / longest
        lines.append(
            f'<text x="220" y="{y + 15}" text-anchor="end">{escape(name)}</text>'
            f'<rect x="230" y="{y + 3}" width="{width:.1f}" height="16" rx="2" fill="#0072b2"/>'
            f'<text x="{238 + width:.1f}" y="{y + 15}" class="soft">{spell_time(value)}, '
            f"{100 * value / total:.1f} %</text>"
        )
    return _svg(24 * len(shown) + 4, "Seconds of a step by part", lines)


def _timeline(best: Mapping[str, Any]) -> str:
    events: Sequence[Sequence[Any]] = best.get("timeline") or ()
    if not events:
        return "<p>One stage: its micro batches follow each other without a gap.</p>"
    stages = 1 + max(event[0] for event in events)
    end = max(event[5] for event in events)
    height = max(6.0, min(22.0, 420 / stages))
    scale = (_WIDTH - 70) / end
    lines = []
    for stage in range(stages):
        if stages <= 32 or stage % 8 == 0:
            lines.append(
                f'<text x="52" y="{(stage + 0.5) * height + 4:.1f}" text-anchor="end" '
                f'class="soft">{stage}</text>'
            )
    for stage, kind, micro, chunk, start, stop in events:
        x, width = 60 + start * scale, max((stop - start) * scale, 0.4)
        shade = 1.0 - 0.45 * (chunk % 4) / 3
        said = f"stage {stage}: {kind} of micro batch {micro}" + (f", chunk {chunk}" if chunk else "")
        lines.append(
            f'<rect x="{x:.1f}" y="{stage * height + 1:.1f}" width="{width:.2f}" height="{height - 2:.1f}" '
            f'fill="{_KINDS.get(kind, "#999")}" opacity="{shade:.2f}" stroke="var(--back)" stroke-width=".3">'
            f"<title>{escape(said)}, {spell_time(start)} to {spell_time(stop)}</title></rect>"
        )
    bottom = stages * height
    for tick in range(6):
        at = end * tick / 5
        lines.append(
            f'<text x="{60 + at * scale:.0f}" y="{bottom + 16:.0f}" text-anchor="middle" '
            f'class="soft">{spell_time(at)}</text>'
        )
    legend = _legend([(kind, colour) for kind, colour in _KINDS.items() if any(e[1] == kind for e in events)])
    cut = (
        " The first part of a step is shown."
        if end < 0.98 * best["step_s"]["value"] and len(events) >= MOST_EVENTS
        else ""
    )
    note = f'<p class="soft">A row is a pipeline stage, a gap is the bubble.{cut}</p>'
    return legend + _svg(bottom + 22, "Timeline of the pipeline's stages", lines) + note


def _memory(stages: Sequence[Mapping[str, float]], room: float) -> str:
    names = list(dict.fromkeys(name for stage in stages for name, value in stage.items() if value > 0))
    colours = {name: _COLOURS[index % len(_COLOURS)] for index, name in enumerate(names)}
    most = max(room, *(sum(stage.values()) for stage in stages))
    height = max(9.0, min(24.0, 480 / len(stages)))
    scale = (_WIDTH - 160) / most
    lines = []
    for index, stage in enumerate(stages):
        y, x = index * height, 60.0
        lines.append(
            f'<text x="52" y="{y + height / 2 + 4:.1f}" text-anchor="end" class="soft">{index}</text>'
        )
        for name in names:
            if value := stage.get(name, 0.0):
                lines.append(
                    f'<rect x="{x:.1f}" y="{y + 1:.1f}" width="{value * scale:.2f}" '
                    f'height="{height - 2:.1f}" '
                    f'fill="{colours[name]}"><title>stage {index}: {escape(name)} {value / 1e9:.2f} '
                    f"GB</title></rect>"
                )
                x += value * scale
        lines.append(
            f'<text x="{x + 6:.0f}" y="{y + height / 2 + 4:.1f}" '
            f'class="soft">{sum(stage.values()) / 1e9:.1f} GB</text>'
        )
    at, bottom = 60 + room * scale, height * len(stages)
    lines.append(f'<line x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{bottom:.0f}" class="limit"/>')
    lines.append(
        f'<text x="{at:.0f}" y="{bottom + 16:.0f}" text-anchor="end">the device has {room / 1e9:.1f} '
        f"GB</text>"
    )
    return _legend(list(colours.items())) + _svg(bottom + 22, "Memory of each stage by category", lines)


def _pareto(document: Mapping[str, Any]) -> str:
    if not document["fitting"]:
        return ""
    fastest = min(point["step_s"] for point in document["fitting"])
    points = [point for point in document["fitting"] if point["step_s"] <= _SLOWEST * fastest]
    slow = len(document["fitting"]) - len(points)
    xs, ys = [p["step_s"] for p in points], [p["memory_bytes"] / 1e9 for p in points]
    low, high = math.log(min(xs)), math.log(max(max(xs), min(xs) * 1.05))
    top = max(ys) * 1.08
    width, height = _WIDTH - 90, 320

    def place(step: float, size: float) -> tuple[float, float]:
        return 60 + (math.log(step) - low) / (high - low) * width, height - size / top * height

    lines = [
        f'<line x1="60" x2="60" y1="0" y2="{height}" class="axis"/>',
        f'<line x1="60" x2="{60 + width}" y1="{height}" y2="{height}" class="axis"/>',
    ]
    for tick in range(5):
        step = math.exp(low + (high - low) * tick / 4)
        x, _ = place(step, 0)
        lines.append(
            f'<text x="{x:.0f}" y="{height + 18}" text-anchor="middle" class="soft">{spell_time(step)}</text>'
        )
        _, y = place(min(xs), top * tick / 4)
        y = max(y, 24 if tick == 4 else 0)  # Below the name of the axis.
        lines.append(
            f'<text x="52" y="{y + 4:.0f}" text-anchor="end" class="soft">{top * tick / 4:.0f}</text>'
        )
    for point in points:
        x, y = place(point["step_s"], point["memory_bytes"] / 1e9)
        said = f"{point['layout']}: {spell_time(point['step_s'])}, {point['memory_bytes'] / 1e9:.1f} GB"
        lines.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="#999" '
            f'opacity=".45"><title>{escape(said)}</title></circle>'
        )
    front = [
        (*place(item["step_s"]["value"], item["memory_peak_bytes"] / 1e9), item["name"])
        for item in document["pareto"]
        if item["step_s"]["value"] <= _SLOWEST * fastest
    ]
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y, _ in front)
    lines.append(f'<polyline points="{path}" fill="none" stroke="#d55e00" stroke-width="1.5"/>')
    lines += [
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="5" fill="#d55e00"><title>{escape(name)}</title></circle>'
        for x, y, name in front
    ]
    lines.append(f'<text x="{60 + width}" y="{height + 36}" text-anchor="end">time of a step</text>')
    lines.append('<text x="70" y="12">GB of the fullest stage</text>')
    legend = _legend([("no other is both faster and smaller", "#d55e00"), ("fits", "#999")])
    note = (
        f'<p class="soft">{slow:,} more take over {_SLOWEST} times as long as the best.</p>' if slow else ""
    )
    return legend + _svg(height + 44, "Step time against memory of the layouts that fit", lines) + note


def _ranked(ranked: Sequence[Mapping[str, Any]]) -> str:
    first = ranked[0]["step_s"]["value"]
    rows = [
        (
            f"<code>{escape(item['name'])}</code>",
            spell_time(item["step_s"]["value"]),
            f"{100 * (item['step_s']['value'] / first - 1):+.1f} %",
            f"{item['memory_peak_bytes'] / 1e9:.1f}",
            f"{100 * item['mfu']:.1f} %",
            f"{item['tokens_per_s']:,.0f}",
        )
        for item in ranked
    ]
    return _table(("layout", "step", "over the best", "GB", "MFU", "tokens/s"), rows, 1)


def _rejected(document: Mapping[str, Any]) -> str:
    counts = document["rejected_counts"]
    said = ", ".join(f"{count:,} {REASONS.get(kind, kind)}" for kind, count in sorted(counts.items()))
    head = (
        f"<p>{document['looked_at']:,} layouts in {document['search_s']:.1f} s: "
        f"{said or 'none left out'}.</p>"
    )
    rejected = document.get("rejected") or ()
    if not rejected:
        return head
    rows = [
        (f"<code>{escape(item['layout'])}</code>", escape(item["reason"])) for item in rejected[:_MOST_ROWS]
    ]
    more = f" (the first {_MOST_ROWS} of {len(rejected):,})" if len(rejected) > _MOST_ROWS else ""
    return (
        head + f"<details><summary>Each with its "
        f"reason{more}</summary>{_table(('layout', 'why'), rows, 9)}</details>"
    )


def _sources(cluster: Mapping[str, Any], convention: str) -> str:
    device = cluster["device"]
    figures = [(f"{name} products, TFLOP/s", f, 1e12) for name, f in device["matmul_flops"].items()]
    figures += [
        ("memory, GB", device["memory_bytes"], 1e9),
        ("memory bandwidth, GB/s", device["memory_bandwidth"], 1e9),
        (f"inside ({cluster['inside']['kind']}), GB/s one way", cluster["inside"]["bandwidth"], 1e9),
        ("across nodes, GB/s one way", cluster["across"]["bandwidth"], 1e9),
        ("host, GB/s", cluster["host_bandwidth"], 1e9),
    ]
    rows = [
        (
            escape(name),
            f"{figure['value'] / unit:,.5g}",
            escape(figure["source"]),
            escape(figure["confidence"]),
        )
        for name, figure, unit in figures
    ]
    return (
        _table(("figure", "value", "source", "confidence"), rows, 9)
        + f'<p class="soft">{escape(convention)}.</p>'
    )


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], numbers_from: int) -> str:
    """Cells of `rows` are HTML already; columns from `numbers_from` on are numbers."""
    mark = [' class="n"' if index >= numbers_from else "" for index in range(len(head))]
    top = "".join(f"<th{m}>{escape(name)}</th>" for name, m in zip(head, mark, strict=True))
    lines = [
        "<tr>" + "".join(f"<td{m}>{c}</td>" for c, m in zip(row, mark, strict=True)) + "</tr>" for row in rows
    ]
    body = "".join(lines)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>'


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    return (
        '<div class="legend">'
        + "".join(
            f'<span><i style="background:{colour}"></i>{escape(name)}</span>' for name, colour in entries
        )
        + "</div>"
    )


def _svg(height: float, label: str, lines: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height:.0f}" role="img" aria-label="{escape(label)}">'
        + "".join(lines)
        + "</svg>"
    )

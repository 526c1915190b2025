"""What the doctor found, as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def render(found: Mapping[str, Any]) -> Any:
    """What `collect` found, as something that `rich` prints."""
    from rich.console import Group
    from rich.text import Text

    parts: list[Any] = [
        _table("Machine", ("what", "value", "source"), _machine_rows(found)),
        _table(
            "Instruction levels", ("level", "state"), [(row["level"], row["state"]) for row in found["isa"]]
        ),
        _table("Versions", ("what", "version"), list(found["versions"].items())),
        _table(
            "Settings",
            ("name", "value", "from"),
            [(row["name"], str(row["value"]), row["source"]) for row in found["settings"]],
        ),
        _table(
            "Optimisations",
            ("what", "state", "why"),
            [(row["name"], row["state"], row["why"]) for row in found["optimisations"]],
        ),
    ]
    if model := found.get("model"):
        parts.append(_table(f"Model {model['id']}", ("what", "value"), list(model["summary"].items())))
        parts.append(Text(model["report_text"]))
        parts.append(Text("\nWhy is my model not faster?", style="bold"))
        parts += [Text(f"- {answer}") for answer in model["answers"]]
    return Group(*parts)


def _machine_rows(found: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    rows = []
    for name, fact in found["machine"].items():
        value = fact["value"]
        if name.endswith("_bytes"):
            name, value = name.removesuffix("_bytes"), f"{value / 1e9:.1f} GB"
        elif name == "caches":
            value = (
                ", ".join(f"L{c['level']} {c['kind']} {c['size_bytes'] >> 10} KiB" for c in value)
                or "unknown"
            )
        rows.append((name.replace("_", " "), str(value), fact["source"]))
    return rows


def _table(title: str, columns: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> Any:
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=title, title_justify="left", title_style="bold", header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*map(escape, row))
    return table

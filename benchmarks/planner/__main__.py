"""`python -m benchmarks.planner --data DIR --json FILE`."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.planner.score import Score, score_folder
from hasten.base.files import write_atomically


def show(found: dict[str, Score], console: Console) -> None:
    """A table for people, and the reasons of refusal."""
    table = Table(title="planner against published runs")
    for name in (
        "file",
        "rows",
        "refused",
        "mean %",
        "median %",
        "fit half",
        "held back",
        "tau",
        "regret %",
        "in interval %",
    ):
        table.add_column(name, justify="left" if name == "file" else "right")
    for file, score in found.items():
        row = score.summary()
        figures = [
            row[k]
            for k in ("mean_abs_pct", "median_abs_pct", "mean_abs_pct_fit_half", "mean_abs_pct_held_back")
        ]
        figures += [row["tau"], row["regret_pct"], row["in_interval_pct"]]
        table.add_row(
            file, str(score.rows), str(score.refused), *("" if v is None else f"{v:.2f}" for v in figures)
        )  # type: ignore[str-format]
    console.print(table)
    for file, score in found.items():
        for reason, count in score.reasons.most_common():
            console.print(f"{file}: {count} refused: {reason}", style="dim", highlight=False)


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.planner", description="Scores the planner on published runs."
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of CSVs")
    parser.add_argument("--json", type=Path, help="where the figures go, by file name")
    asked = parser.parse_args()
    if not asked.data.is_dir():
        parser.error(f"--data {asked.data}: no such folder")
    found = score_folder(asked.data)
    if not found:
        parser.error(f"--data {asked.data}: holds none of the CSVs")
    show(found, Console(width=130))
    if asked.json:
        text = json.dumps({file: score.summary() for file, score in found.items()}, indent=1)
        write_atomically(asked.json, text + "\n")


if __name__ == "__main__":
    main()

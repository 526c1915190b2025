"""The numbers of a run, one JSON object a step in `metrics.jsonl`, and the same for TensorBoard.

A row: `step, loss, lr, grad_norm, tokens, tokens_per_s, step_s, rss_bytes, peak_rss_bytes` and, where the
model was evaluated, `eval_loss`. `tokens` counts from the start of the run, padding left out.
"""

from __future__ import annotations

import json
import resource
import shutil
import sys
from pathlib import Path
from typing import Any

import psutil

from hasten.base.files import write_atomically
from hasten.base.screen import Screen

METRICS_FILE = "metrics.jsonl"
# TensorBoard writes from a thread of its own, where a full disk cannot be caught: stop before that.
TENSORBOARD_MIN_FREE_BYTES = 1 << 20


def rss_bytes() -> int:
    """Memory that this process holds now."""
    return int(psutil.Process().memory_info().rss)


def peak_rss_bytes() -> int:
    """The most memory that this process has held so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # The kernel updates its peak a little later than the current value.
    return max(rss_bytes(), peak if sys.platform == "darwin" else peak * 1024)


class Metrics:
    """Appends rows. A row that a full disk refuses is kept and written with the next one."""

    def __init__(self, folder: Path, *, after_step: int, tensorboard: bool, screen: Screen) -> None:
        """Rows after `after_step` are of a part of the run that is done again: they are removed."""
        self.file = folder / METRICS_FILE
        self._folder = folder
        self._screen = screen
        self._pending: list[str] = []
        self._warned = False
        self._board: Any = None
        folder.mkdir(parents=True, exist_ok=True)
        if self.file.exists():
            kept = [line for line in self.file.read_text().splitlines() if _step(line) <= after_step]
            write_atomically(self.file, "".join(f"{line}\n" for line in kept))
        if tensorboard:
            from torch.utils.tensorboard import SummaryWriter

            self._board = SummaryWriter(str(folder / "tensorboard"), purge_step=after_step + 1)

    @property
    def unwritten(self) -> int:
        """Rows that could not be written so far."""
        return len(self._pending)

    def write(self, row: dict[str, Any]) -> None:
        """Adds one row."""
        self._pending.append(json.dumps(row) + "\n")
        self._flush()
        if self._board is not None:
            if shutil.disk_usage(self._folder).free < TENSORBOARD_MIN_FREE_BYTES:
                self._warn("no space for TensorBoard's events")
                return
            for name, value in row.items():
                if name != "step" and value is not None:
                    self._board.add_scalar(name, value, row["step"])

    def close(self) -> None:
        """Writes what is left."""
        self._flush()
        if self._board is not None:
            self._board.close()
            self._board = None

    def _flush(self) -> None:
        if not self._pending:
            return
        size = self.file.stat().st_size if self.file.exists() else 0
        try:
            with self.file.open("a") as out:
                out.write("".join(self._pending))
            self._pending.clear()
        except OSError as error:
            self._warn(
                f"{self.file}: {error.strerror}; rows are kept in memory and written when there is space"
            )
            # Half a row may have got through; without this the retry would write it again behind the half.
            if self.file.is_file():
                with self.file.open("rb+") as out:
                    out.truncate(size)

    def _warn(self, message: str) -> None:
        if not self._warned:
            self._warned = True
            self._screen.warn(message)


def _step(line: str) -> float:
    """The step of a row; a line cut off by a crash counts as after everything."""
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")

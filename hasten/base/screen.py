"""What a person sees: a progress bar on a terminal, plain lines elsewhere. On stderr, never on stdout."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

# Without a terminal a line is written at most this often.
PLAIN_INTERVAL_S = 5.0


class Bar:
    """One running bar, or one line now and then."""

    def __init__(self, screen: Screen, title: str, total: float, progress: Progress | None) -> None:
        self._screen = screen
        self._title = title
        self._total = total
        self._progress = progress
        self._task = progress.add_task(title, total=total, detail="") if progress is not None else None
        self._last_line_s = time.monotonic()
        self._started_s = self._last_line_s
        self._first: float | None = None

    def update(self, done: float, detail: str = "", *, line: bool = False) -> None:
        """Moves the bar to `done`; `detail` stands behind it; `line` forces a line where there is no bar."""
        if self._progress is not None and self._task is not None:
            self._progress.update(self._task, completed=done, detail=detail)
            return
        now_s = time.monotonic()
        if self._first is None:
            self._first = done
        if line or now_s - self._last_line_s >= PLAIN_INTERVAL_S:
            self._last_line_s = now_s
            self._screen.note(
                f"{self._title} {done / max(self._total, 1):4.0%}  {detail}{self._left(done, now_s)}"
            )

    def _left(self, done: float, now_s: float) -> str:
        progressed = done - (self._first or 0)
        if progressed <= 0:
            return ""
        return f"  {spell_clock((self._total - done) * (now_s - self._started_s) / progressed)} left"


class Screen:
    """Messages and bars of one command. `enabled=False` says nothing but warnings."""

    def __init__(self, enabled: bool = True) -> None:
        self.enabled = enabled
        self.console = Console(stderr=True, highlight=False)

    def note(self, message: str) -> None:
        """One line for information."""
        if self.enabled:
            self.console.print(message, markup=False, soft_wrap=True)

    def warn(self, message: str) -> None:
        """One line that is shown always."""
        self.console.print(f"warning: {message}", markup=False, soft_wrap=True, style="yellow")

    @contextmanager
    def bar(self, title: str, total: float) -> Iterator[Bar]:
        """A bar that is removed when the block ends."""
        if not (self.enabled and self.console.is_terminal):
            yield Bar(self, title, total, None)
            return
        columns = (
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[detail]}"),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=self.console, transient=True) as progress:
            yield Bar(self, title, total, progress)


def spell_bytes(count: float) -> str:
    """2_500_000_000 -> '2.50 GB'."""
    for unit, scale in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= scale:
            return f"{count / scale:.2f} {unit}"
    return f"{count:.0f} B"


def spell_time(seconds: float) -> str:
    """0.0123 -> '12.3 ms', 4.2 -> '4.20 s'."""
    return f"{seconds * 1e3:.3g} ms" if abs(seconds) < 1 else f"{seconds:.2f} s"


def spell_clock(seconds: float) -> str:
    """3725 -> '1:02:05'."""
    minutes, second = divmod(round(seconds), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02d}:{second:02d}"

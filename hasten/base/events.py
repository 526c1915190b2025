"""Events and spans as JSON lines: one object a line, appended and flushed, so a killed run keeps its history.

A line holds `time_s` (Unix time, when the event or the span began), `event` (its name), for a span
`duration_s` and, if it ended in an exception, `error`; and the caller's own fields. Numbers that JSON does
not have (nan, inf) are written as strings.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any


class EventLog:
    """Appends events to a file. A context manager; `close` is safe to call twice."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def event(self, name: str, **fields: Any) -> None:
        """Writes one line now."""
        self._write({"time_s": time.time(), "event": name} | fields)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[dict[str, Any]]:
        """Writes one line when the block ends. Fields put into the yielded dictionary are written too."""
        begin, clock = time.time(), time.perf_counter()
        line: dict[str, Any] = {"time_s": begin, "event": name} | fields
        try:
            yield line
        except BaseException as error:
            line["error"] = f"{type(error).__name__}: {error}"
            raise
        finally:
            line["duration_s"] = time.perf_counter() - clock
            self._write(line)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> EventLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, line: dict[str, Any]) -> None:
        self._file.write(json.dumps(_plain(line), allow_nan=False) + "\n")
        self._file.flush()


def _plain(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value

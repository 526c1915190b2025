"""Ctrl-C and SIGTERM: finish the step, write a checkpoint, leave. A second Ctrl-C leaves at once."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from hasten.train.screen import Screen


class StopSignals:
    """While open, notes the first SIGINT or SIGTERM in `received`; a second SIGINT raises KeyboardInterrupt.

    Outside the main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self, screen: Screen) -> None:
        self.received: int | None = None
        self._screen = screen
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._receive)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.received is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.received is None:
            self.received = number
            self._screen.note(
                f"{signal.Signals(number).name}: finishing this step, then writing a checkpoint "
                "(Ctrl-C again: stop at once)"
            )

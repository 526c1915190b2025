"""Ctrl-C and SIGTERM: leave at once, or, once there are steps, finish one and write a checkpoint first."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any

from hasten.base.screen import Screen


class Interrupted(KeyboardInterrupt):
    """SIGINT or SIGTERM arrived where there is nothing to finish; `str` gives the signal's name."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number

    @property
    def exit_code(self) -> int:
        """128 + signal: 130 for Ctrl-C, 143 for SIGTERM."""
        return 128 + self.number


class StopSignals:
    """While open, the first SIGINT or SIGTERM raises `Interrupted` in the main thread.

    After `defer()` it is noted in `received` and nothing is raised. A second SIGINT raises KeyboardInterrupt
    in either case; a second SIGTERM does nothing, so that whatever cleans up is not cut short. Outside the
    main thread, where Python allows no handlers, it does nothing.
    """

    def __init__(self, screen: Screen) -> None:
        self.received: int | None = None
        self._screen = screen
        self._deferring = False
        self._before: dict[int, Any] = {}

    def defer(self) -> None:
        """From here on a signal is noted, and whoever makes the steps looks at `received` after each."""
        self._deferring = True

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
        if self.received is not None:
            if number == signal.SIGINT:
                raise KeyboardInterrupt
            return
        self.received = number
        if not self._deferring:
            raise Interrupted(number)
        self._screen.note(
            f"{signal.Signals(number).name}: finishing this step, then writing a checkpoint "
            "(Ctrl-C again: stop at once)"
        )

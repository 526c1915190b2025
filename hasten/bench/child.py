"""A process whose life is tied to the one that started it, seen from both sides. Imports no torch.

The child leads a process group of its own, so a Ctrl-C of the terminal goes to the parent alone, and whatever
the child starts ends with it. Its standard input is a pipe that the parent holds open and never writes to:
the system closes it when the parent ends, however that ends, and the child then ends itself.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from hasten.base.errors import HastenError

END_WITH_PARENT = "--end-with-parent"
"""The argument that tells a child to call `end_with_parent`."""
EVENT = "hasten-bench-event"
"""Key that marks a line of a child's standard output as a message to whoever started it."""
_STDIN = 0

Emit = Callable[..., None]


@contextmanager
def child(
    command: Sequence[str], log: TextIO, environment: Mapping[str, str]
) -> Iterator[subprocess.Popen[str]]:
    """Runs `command` with END_WITH_PARENT behind it; its output is a pipe of text, its errors go to `log`.

    Leaving the block waits for its end. An exception in the block, an interrupt included, ends its whole
    group at once.
    """
    with subprocess.Popen(
        [*command, END_WITH_PARENT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=log,
        text=True,
        env=environment,
        process_group=0,
    ) as process:
        try:
            yield process
            process.wait()
        except BaseException:
            _kill_group(process.pid)
            raise


def end_with_parent() -> None:
    """Called by the child: ends its process group as soon as the parent is gone."""
    threading.Thread(target=_wait_for_parent, name="parent", daemon=True).start()


def emit(**event: Any) -> None:
    """Called by the child: sends its parent one message, a line of JSON on standard output."""
    print(json.dumps({EVENT: event}), flush=True)


def work(arguments: Sequence[str], run: Callable[[str, Emit], str]) -> int:
    """Entry point of a child: `SPEC.json OUT.json [--end-with-parent]`; returns its exit code.

    `run(text of SPEC, emit)` gives the text of OUT. A failure that hasten raises on purpose is one event
    `failed`, any other a traceback.
    """
    if END_WITH_PARENT in arguments[2:]:
        end_with_parent()
    try:
        result = run(Path(arguments[0]).read_text(encoding="utf-8"), emit)
    except HastenError as error:
        emit(event="failed", message=str(error))
        return 1
    # Read by the parent after this process has ended well, and gone with its temporary folder.
    Path(arguments[1]).write_text(result, encoding="utf-8")
    return 0


def _wait_for_parent() -> None:
    # Unbuffered: a daemon thread that holds the lock of sys.stdin would break the interpreter's own end.
    while os.read(_STDIN, 4096):
        pass
    os.killpg(os.getpgrp(), signal.SIGKILL)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # It has ended by itself; some systems say so with the second.
        return

"""A process whose life is tied to the one that started it, seen from both sides.

The child leads a process group of its own, so a Ctrl-C of the terminal goes to the parent alone, and whatever
the child starts ends with it. Its standard input is a pipe that the parent holds open and never writes to:
the system closes it when the parent ends, however that ends, and the child then ends itself.
"""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TextIO

END_WITH_PARENT = "--end-with-parent"
"""The argument that tells a child to call `end_with_parent`."""
_STDIN = 0


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

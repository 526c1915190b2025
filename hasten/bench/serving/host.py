"""Runs a server whose life is tied to the bench: `python -m hasten.bench.serving.host COMMAND ...`.

The server knows nothing of it. Its process id is the one message on standard output; what it prints itself
goes to standard error. The exit code is the server's.
"""

from __future__ import annotations

import subprocess
import sys

from hasten.bench.child import END_WITH_PARENT, emit, end_with_parent


def main(arguments: list[str]) -> int:
    """Entry point; with END_WITH_PARENT at the end it ends the server as soon as the bench is gone."""
    if arguments[-1:] == [END_WITH_PARENT]:
        arguments = arguments[:-1]
        end_with_parent()
    with subprocess.Popen(arguments, stdin=subprocess.DEVNULL, stdout=sys.stderr) as server:
        emit(event="started", pid=server.pid)
        code = server.wait()
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

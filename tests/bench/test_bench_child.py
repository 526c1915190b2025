"""No process outlives the one that started it, however that one ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

CHILD = """
import json, os, subprocess, sys, time
from hasten.bench.child import END_WITH_PARENT, end_with_parent
assert sys.argv[-1] == END_WITH_PARENT
end_with_parent()
grandchild = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
print(json.dumps([os.getpid(), grandchild.pid]), flush=True)
time.sleep(100)
"""
PARENT = """
import os, signal, sys
from hasten.bench.child import child
from hasten.base.screen import Screen
from hasten.train.stop import Interrupted, StopSignals
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
try:
    command = [sys.executable, "-c", sys.argv[1]]
    with StopSignals(Screen(enabled=False)), child(command, sys.stderr, os.environ) as c:
        print(c.stdout.readline(), flush=True)
        if sys.argv[2] == "exception":
            sys.stdin.readline()
            raise ValueError("a fault of the parent")
        c.stdout.readline()
except Interrupted as stopped:
    sys.exit(stopped.exit_code)
"""
ENDS = {"exception": 1, "SIGTERM": 143, "SIGINT": 130, "SIGKILL": -9, "SIGHUP": -1}


@pytest.mark.parametrize("cause", ENDS)
def test_the_child_and_what_it_started_end_with_the_parent(cause: str):
    pipe = subprocess.PIPE
    command = [sys.executable, "-c", PARENT, CHILD, cause]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as parent:
        assert parent.stdout is not None
        line = parent.stdout.readline()
        processes = [psutil.Process(pid) for pid in json.loads(line)]
        assert all(process.is_running() for process in processes)
        if cause != "exception":
            parent.send_signal(signal.Signals[cause])
        _, said = parent.communicate("go on\n", timeout=20)
    assert parent.returncode == ENDS[cause], said
    # The child of a parent that was killed is nobody's to wait for: it may be a zombie until init takes it.
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert [process for process in alive if process.status() != psutil.STATUS_ZOMBIE] == []


def test_a_child_that_ends_by_itself_is_waited_for(tmp_path: Path):
    from hasten.bench.child import child

    code = "import time; print('line', flush=True); time.sleep(0.2); raise SystemExit(3)"
    with (tmp_path / "log").open("w") as log, child([sys.executable, "-c", code], log, {}) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "line\n"
    assert process.returncode == 3

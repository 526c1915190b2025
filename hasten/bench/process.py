"""Running contenders: one in a process of its own, several in turn and never two at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from hasten.base.errors import HastenError
from hasten.base.screen import Screen
from hasten.bench.child import EVENT, child
from hasten.bench.report import Interruption
from hasten.train.stop import Interrupted

T = TypeVar("T")

LAST_LINES = 15


class ContenderError(HastenError):
    """A contender did not hand back a result; carries the reason that the report prints."""


class Turns(NamedTuple, Generic[T]):
    """What `take_turns` collected."""

    outcomes: dict[str, list[T]]
    """One entry for each round; no contender that failed."""
    failed: dict[str, str]
    interruption: Interruption | None


def take_turns(
    names: Sequence[str], rounds: int, run: Callable[[str, int, str], T], screen: Screen
) -> Turns[T]:
    """`run(name, round from 0, title)` for every contender in every round: A B C A B C.

    A machine that slows down so slows all. A contender that raises ContenderError is named in `failed` and
    does not stop the others. A signal that arrives after a contender finished (see `StopSignals`) ends the
    turns.

    Raises:
        HastenError: no contender finished.
        Interrupted: the signal came before any contender finished.
    """
    outcomes: dict[str, list[T]] = {}
    failed: dict[str, str] = {}
    interruption = None
    for number, name in [(number, name) for number in range(rounds) for name in names]:
        if name in failed:
            continue
        title = name if rounds == 1 else f"{name} (round {number + 1} of {rounds})"
        try:
            outcome = run(name, number, title)
            outcomes.setdefault(name, []).append(outcome)
        except ContenderError as failure:
            # One round that failed makes the contender's median meaningless.
            outcomes.pop(name, None)
            failed[name] = str(failure)
            screen.warn(f"{name} failed: {failure}")
        except Interrupted as stopped:
            if not outcomes:
                raise
            interruption = Interruption(signal=str(stopped), during=title)
            break
    if not outcomes:
        raise HastenError(f"no contender finished: {', '.join(failed)} failed as said above")
    return Turns(outcomes, failed, interruption)


def run_child(
    module: str,
    spec: str,
    folder: Path,
    seen: Callable[[dict[str, Any]], None],
    environment: Mapping[str, str] | None = None,
) -> str:
    """Runs `python -m module` on `spec` (see `child.work`) and waits for it.

    Args:
        folder: for the files between the two.
        seen: called with each event that the child sends.
        environment: variables that are set for it beside this process's own.

    Returns:
        What it wrote.

    Raises:
        ContenderError: it ended without a result; the message is its own, or its last lines.
    """
    spec_file, out_file, log_file = (folder / name for name in ("spec.json", "out.json", "stderr.txt"))
    spec_file.write_text(spec, encoding="utf-8")
    out_file.unlink(missing_ok=True)
    command = [sys.executable, "-m", module, str(spec_file), str(out_file)]
    # Inductor's cache starts empty in each bench: its first step is then a cold one, as for the others.
    variables = os.environ | {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "PYTHONUNBUFFERED": "1"}
    message = None
    with (
        log_file.open("w", encoding="utf-8") as log,
        child(command, log, variables | dict(environment or {})) as process,
    ):
        for line in process.stdout or ():
            event = event_of(line)
            if event.get("event") == "failed":
                message = str(event["message"])
            elif event:
                seen(event)
    if process.returncode != 0 or not out_file.exists():
        raise ContenderError(
            message or "\n".join([f"its process ended with {process.returncode}", *last_lines(log_file)])
        )
    return out_file.read_text(encoding="utf-8")


def event_of(line: str) -> dict[str, Any]:
    """The event in a line of a child's output; {} for anything else that was printed there."""
    if not line.startswith("{"):
        return {}
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return {}
    return dict(value.get(EVENT, {})) if isinstance(value, dict) else {}


def last_lines(log: Path) -> list[str]:
    """The end of what a process wrote to its log."""
    return log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-LAST_LINES:]

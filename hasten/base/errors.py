"""The exceptions that hasten raises on purpose.

HastenError
├── UserError            the caller asked for something that cannot be done; the command line exits with 2
│   ├── ConfigError      a setting: unknown key, value out of range, settings that contradict each other
│   ├── InputError       a file, folder, model or text that is missing, empty or malformed
│   ├── ShapeError       an operator was given shapes or dtypes that do not fit
│   ├── GateError        a format changes a model's answers by more than was allowed
│   └── ContextError     a prompt is longer than what the model or the cache can hold
├── CaptureError         a block could not be captured or rewritten; the original runs instead
├── CheckpointError      a checkpoint is damaged or incomplete
├── SamplingError        rows of logits that give no token
├── GrammarError         an answer of a given form cannot go on
└── ServeError           a request could not be served, through no fault of its own
    ├── QueueFull        too many requests wait already; try again later
    └── EngineStopped    the engine takes no requests: it was stopped, or it cannot go on

A message names what was wrong, what was given, what is allowed and the nearest that works.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from pydantic import ValidationError


class HastenError(Exception):
    """Root of every exception that hasten raises on purpose."""


class UserError(HastenError):
    """The caller's mistake; the command line prints the message alone and exits with 2."""


class ConfigError(UserError):
    """A setting that does not exist, is out of range, or contradicts another."""


class InputError(UserError):
    """A file, folder, model or text that is missing, empty or malformed."""


class ShapeError(UserError):
    """An operator was given shapes or dtypes that do not fit together."""


class GateError(UserError):
    """A format changes what a model says by more than was allowed; another format or limit is the way on."""


class ContextError(UserError):
    """A prompt is longer than what the model or the cache can hold."""


class CaptureError(HastenError):
    """A block could not be captured or rewritten; carries the reason that the report prints."""


class CheckpointError(HastenError):
    """A checkpoint is damaged or incomplete."""


class ServeError(HastenError):
    """A request could not be served, through no fault of its own."""


class QueueFull(ServeError):  # noqa: N818
    """Too many requests wait already; the same request may succeed later."""


class EngineStopped(ServeError):  # noqa: N818
    """The engine takes no requests: it was stopped, or it cannot go on; the message says which."""


class SamplingError(HastenError):
    """Rows of logits give no token; `failed` says which of those asked for, `reasons` why, one for each."""

    def __init__(self, failed: tuple[int, ...], reasons: tuple[str, ...]) -> None:
        super().__init__("; ".join(reasons))
        self.failed, self.reasons = failed, reasons


class GrammarError(HastenError):
    """An answer of a given form cannot go on: a token may not follow, or the constraint is too large."""


# A folder can hold thousands of names; a message that lists them all hides what it says.
_MAX_NAMES = 24


def nearest(given: str, allowed: Iterable[str]) -> str:
    """The part of a message that lists what is allowed (the first 24 of more) and guesses what was meant."""
    names = sorted(allowed)
    close = difflib.get_close_matches(given, names, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    more = f" and {len(names) - _MAX_NAMES} more" if len(names) > _MAX_NAMES else ""
    return f"allowed: {', '.join(names[:_MAX_NAMES]) or '(none)'}{more}{hint}"


class Fault(NamedTuple):
    """One complaint of pydantic: its kind, the field as `a.b` (empty: the whole), what was given, and what is
    wrong with it."""

    kind: str
    field: str
    given: Any
    said: str


def first_fault(error: ValidationError) -> Fault:
    """The first of a model's complaints, without pydantic's own words around it."""
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"])
    return Fault(first["type"], field, first["input"], first["msg"].removeprefix("Value error, "))


def first_line(error: BaseException) -> str:
    """The kind of an error and the beginning of what it says, which may be nothing."""
    said = next(iter(str(error).splitlines()), "")[:200]
    return f"{type(error).__name__}: {said}" if said else type(error).__name__

"""Which body of an operator runs where both can: a table measured on this machine, kept in the cache folder.

A row says how long the native kernel and the torch body of an operator took in one dtype at one size. The
torch body is taken where the kernel was more than `MARGIN` slower; a call takes the verdict of the nearest
measured size, and the kernel where none is near. Without a table the kernels run.

The file belongs to one processor, level, number of cores, torch, hasten and build of the kernels: its name is
a hash of these, and it says them again inside. `HASTEN_TUNE=0`: no table is read or measured.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, ValidationError

import hasten
from hasten.base.cache import cache_folder
from hasten.base.errors import first_line
from hasten.base.facts import detect
from hasten.base.files import make_folder, write_atomically
from hasten.ops import native

MARGIN = 1.05
NEAR = 2
"""Powers of two between a call and a measured size, in both numbers of `Size` together."""

Size = tuple[int, int]
"""Bits of the element counts of the first tensor argument (list) and of the largest."""


class Row(BaseModel):
    """One measurement: the faster of several calls of each body, in turn."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    op: str
    dtype: str
    """Of the first floating tensor, and the words among the arguments: `bfloat16 gelu`."""
    size: Size
    case: str
    native_s: float
    torch_s: float

    @property
    def torch_wins(self) -> bool:
        return self.native_s > MARGIN * self.torch_s


class Table(BaseModel):
    """What was measured; `key` is the machine and build that it holds for."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    key: dict[str, str] = {}
    rows: tuple[Row, ...] = ()
    source: str = "not measured: the kernels run"

    @functools.cached_property
    def by_operator(self) -> dict[str, dict[tuple[str, Size], bool]]:
        """Verdicts of the operators that lose somewhere; the others need no look."""
        losing = {row.op for row in self.rows if row.torch_wins}
        found: dict[str, dict[tuple[str, Size], bool]] = {name: {} for name in losing}
        for row in self.rows:
            if row.op in losing:
                found[row.op][row.dtype, row.size] = row.torch_wins
        return found

    @functools.cached_property
    def remembered(self) -> dict[tuple[str, str, Size], bool]:
        """Verdicts of the sizes that were asked for."""
        return {}

    def torch_wins(self, op: str, dtype: str, size: Size) -> bool:
        """Whether the torch body was faster at the nearest size measured."""
        verdicts = self.by_operator.get(op)
        if verdicts is None:
            return False
        remembered = self.remembered
        if (op, dtype, size) not in remembered:
            near = [
                (abs(size[0] - known[0]) + abs(size[1] - known[1]), wins)
                for (name, known), wins in verdicts.items()
                if name == dtype
            ]
            distance, wins = min(near, default=(NEAR + 1, False))
            remembered[op, dtype, size] = wins and distance <= NEAR
        return remembered[op, dtype, size]


def off() -> bool:
    """Whether the environment forbids tables."""
    return os.environ.get("HASTEN_TUNE", "1") == "0"


def key() -> dict[str, str]:
    """What a table holds for."""
    facts = detect()
    state = native.state()
    return {
        "processor": facts.processor.value,
        "level": str(state.level),
        "cores": str(facts.cores.value),
        "torch": torch.__version__,
        "hasten": hasten.__version__,
        "kernels": native.build_hash(),
    }


def path() -> Path:
    """Where this machine's table lies, or would lie."""
    digest = hashlib.sha256(json.dumps(key(), sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder().value / "choices" / f"{digest}.json"


@functools.cache
def in_force() -> Table:
    """The table of this machine, read once; `source` says why there is none."""
    if native.state().level is None:
        return Table(source="no kernels, nothing to choose")
    if off():
        return Table(source="HASTEN_TUNE=0: the kernels run")
    file = path()
    try:
        table = Table.model_validate_json(file.read_text())
    except FileNotFoundError:
        return Table()
    except (OSError, ValidationError) as error:
        return Table(source=f"{file} cannot be read, the kernels run: {first_line(error)}")
    if table.key != key():
        return Table(source=f"{file} is of another machine or build, the kernels run")
    return table.model_copy(update={"source": str(file)})


def make_place() -> None:
    """Creates the folder of the tables.

    Raises:
        InputError: it cannot be created.
    """
    make_folder(path().parent, f"the folder of measured choices, {path().parent}, cannot be used")


def keep(rows: Sequence[Row]) -> Table:
    """Writes the table of this machine, and puts it in force in this process.

    Raises:
        InputError: the cache folder cannot be written.
    """
    make_place()
    file = path()
    table = Table(key=key(), rows=tuple(rows), source=str(file))
    write_atomically(file, json.dumps(table.model_dump(), indent=1) + "\n")
    in_force.cache_clear()
    return in_force()


_SEEN: ContextVar[list[tuple[str, str, Size]] | None] = ContextVar("hasten_choices_seen", default=None)


@contextmanager
def observed() -> Iterator[list[tuple[str, str, Size]]]:
    """Lists (operator, dtype, size) of the operators called inside, by this thread; the kernels run."""
    seen: list[tuple[str, str, Size]] = []
    token = _SEEN.set(seen)
    try:
        yield seen
    finally:
        _SEEN.reset(token)


def takes_torch(op: str, arguments: Sequence[Any]) -> bool:
    """Whether a call of `op` goes to its torch body by the table."""
    seen = _SEEN.get()
    if seen is not None:
        seen.append((op, *_described(arguments)))
        return False
    table = in_force()
    return op in table.by_operator and table.torch_wins(op, *_described(arguments))


def _described(arguments: Sequence[Any]) -> tuple[str, Size]:
    dtype, counts = "", []
    # One kind of activation or norm says nothing of another.
    words = [argument for argument in arguments if isinstance(argument, str)]
    for argument in arguments:
        tensors = argument if isinstance(argument, (list, tuple)) else (argument,)
        count = 0
        for tensor in tensors:
            if isinstance(tensor, torch.Tensor):
                count += tensor.numel()
                if not dtype and tensor.is_floating_point():
                    dtype = str(tensor.dtype).removeprefix("torch.")
        if count:
            counts.append(count)
    size = (counts[0].bit_length(), max(counts).bit_length()) if counts else (0, 0)
    return " ".join([dtype, *words]), size

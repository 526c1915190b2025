"""The contenders by name, and what one process is told to do.

Imports no torch: the command line reads it for its help and to refuse a name that does not exist.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from pydantic import BaseModel, ConfigDict

from hasten.base.errors import ConfigError, nearest


class Kind(NamedTuple):
    """How a contender differs from the others; everything else is the same for all."""

    description: str
    engine: str
    """`eager`, `compile` (Inductor), `hasten` or `openvino`."""
    wants_bf16: bool
    buffer_reuse: bool = False
    """The C library is told to keep freed blocks (`base/allocator.py`)."""
    tasks: tuple[str, ...] = ("clm", "mlm", "infer")


CONTENDERS: dict[str, Kind] = {
    "eager-fp32": Kind("plain PyTorch in fp32", "eager", False),
    "eager-bf16": Kind("plain PyTorch under autocast to bf16, as a user finds it", "eager", True),
    "eager-bf16-malloc": Kind("eager-bf16 with glibc told to keep freed blocks", "eager", True, True),
    "compile-bf16": Kind("torch.compile (Inductor) under autocast to bf16", "compile", True),
    "hasten": Kind("hasten.optimize and hasten's AdamW under autocast to bf16", "hasten", True),
    "hasten-fp32": Kind("hasten.optimize and hasten's AdamW in fp32", "hasten", False),
    "openvino-bf16": Kind(
        "the same torch model through openvino.convert_model, in bf16", "openvino", True, tasks=("infer",)
    ),
}

DEFAULT = ("eager-fp32", "eager-bf16", "eager-bf16-malloc", "compile-bf16", "hasten", "hasten-fp32")
BASES = ("eager-bf16", "eager-bf16-malloc")
"""What ratios are taken against; `eager-fp32` for the contenders in fp32."""


class Spec(BaseModel):
    """One run of one contender, as JSON from the bench to the process."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    contender: str
    model: str
    task: str = "clm"
    """See `hasten.bench.tasks`."""
    blocks_file: str
    """`.npz` with `input_ids`, `labels` and for a causal model `position_ids`, each int64
    [steps * batch, sequence_tokens]."""
    batch: int
    steps: int
    learning_rate: float
    seed: int
    bf16: bool
    """False where the processor has no bf16 in hardware: the bf16 contenders then run in fp32."""
    prompt: str | None = None
    new_tokens: int = 40
    where: bool = False
    """One more step under the profiler after everything else; OpenVINO has none."""


def parse(
    names: str | None, known: Iterable[str] = CONTENDERS, default: tuple[str, ...] = DEFAULT
) -> tuple[str, ...]:
    """`"eager-bf16,hasten"` as a tuple in the given order; None gives `default`.

    Raises:
        ConfigError: a name that is not in `known`, a repeated one, or none at all.
    """
    if names is None:
        return default
    known = tuple(known)
    given = tuple(name.strip() for name in names.split(",") if name.strip())
    if not given:
        raise ConfigError(f"contenders = {names!r}: name at least one; {nearest(names, known)}")
    for name in given:
        if name not in known:
            raise ConfigError(f"unknown contender {name!r}; {nearest(name, known)}")
        if given.count(name) > 1:
            raise ConfigError(
                f"contender {name!r} is named {given.count(name)} times in {names!r}; name it once"
            )
    return given

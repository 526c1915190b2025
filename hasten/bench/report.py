"""The report that `hasten bench train` and `hasten demo` write: `docs/formats/report.md` describes it.

Everything that is printed is computed from this object, so a report on disk is the whole measurement.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hasten.base.errors import InputError, first_fault
from hasten.base.files import make_folder, write_atomically

SCHEMA = "hasten.bench.train/3"
_Report = TypeVar("_Report", bound=BaseModel)


class Frozen(BaseModel):
    """A part of a report: nothing changes it, and unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class Limits(Frozen):
    """What this machine can do at most, measured by `hasten.bench.limits` just before the contenders ran; the
    bench of generation measures it behind them too, and takes the better of the two."""

    gemm_flops_per_s: float = Field(gt=0)
    """The faster of the two entries below: the peak of the dtype that the run may use at best."""
    gemm_flops_per_s_by_dtype: dict[str, float]
    """Highest median rate of `torch.mm` over several shapes, a multiply-add counted as two; by dtype."""
    read_bytes_per_s: float = Field(gt=0)
    """Median rate at which all threads read a buffer much larger than the caches."""
    threads: int = Field(ge=1)

    def better(self, other: Limits) -> Limits:
        """The higher of the figures of two measurements of one machine."""
        rates = {
            name: max(rate, other.gemm_flops_per_s_by_dtype.get(name, 0.0))
            for name, rate in self.gemm_flops_per_s_by_dtype.items()
        }
        return Limits(
            gemm_flops_per_s=max(self.gemm_flops_per_s, other.gemm_flops_per_s),
            gemm_flops_per_s_by_dtype=rates,
            read_bytes_per_s=max(self.read_bytes_per_s, other.read_bytes_per_s),
            threads=self.threads,
        )


class ModelSize(Frozen):
    """What the arithmetic of a step depends on."""

    parameters: int
    """Each shared tensor once."""
    product_parameters: int
    """Of them, those that take part in matrix products: an untied embedding table does not."""
    attention_width: int
    """heads * head dimension, summed over the layers."""
    sees_documents: bool
    """The model takes `position_ids`, so a token sees its own document alone."""


class Workload(Frozen):
    """What every contender does: the same weights, the same token blocks, the same learning rate."""

    model: str
    task: str
    """`clm`, `mlm` or `infer`; see `hasten.bench.tasks`."""
    size: ModelSize
    data: str
    batch: int = Field(ge=1)
    sequence_tokens: int = Field(ge=1)
    tokens_per_step: int = Field(ge=1)
    documents: int = Field(ge=0)
    steps: int = Field(ge=1)
    rounds: int = Field(ge=1)
    learning_rate: float
    seed: int
    flops_per_step: float
    """See `hasten.bench.compare.flops_per_step`."""
    visible_keys_per_step: float
    """Query-key pairs that the causal mask and the document boundaries leave, a head."""
    prompt: str | None = None


class OperatorTime(Frozen):
    """What one operator takes of a step under torch's profiler, which costs some time itself."""

    operator: str
    calls: int
    time_s: float
    share: float
    """Of the step."""
    flops: float | None
    """Null where they are not counted."""
    share_of_limit: float | None = None
    """Operations a second over the measured matrix-product peak of the contender's dtype."""


class Round(Frozen):
    """One process of one contender."""

    open_s: float
    """Opening the model, importing what that needs included: no part of any step."""
    first_forward_s: float
    """From the call that prepares the model (capture, compilation) to the end of the first forward pass."""
    first_step_s: float
    """From the call that prepares the model (capture, compilation) to the end of the first optimizer step."""
    steps_s: list[float]
    """Every step in order; the first entry is `first_step_s`."""
    losses: list[float]
    peak_rss_bytes: int
    """High-water mark of the whole process after the last step."""
    rss_open_bytes: int
    peak_rss_first_step_bytes: int
    loss_rounding: float | None = None
    """Plain PyTorch in fp32, after the last step: its loss minus that of its logits in float64."""
    text: str | None = None
    """Greedy continuation of the prompt by the tuned model."""
    where: list[OperatorTime] | None = None
    """Of one more step, where that was asked for."""


class Outcome(Frozen):
    """What the process of a contender hands back."""

    round: Round
    size: ModelSize


class Contender(Frozen):
    """One contender over all its rounds."""

    description: str
    dtype: str
    note: str | None = None
    """Why it did not run as its name says, e.g. bf16 without hardware."""
    step_s: float
    """Median over every step but the first of each round (over all steps if there is only one)."""
    open_s: float
    """Median over the rounds."""
    first_forward_s: float
    """Of the first round, capture or compilation included."""
    first_step_s: float
    """Of the first round: nothing cached before it."""
    tokens_per_s: float
    peak_rss_bytes: int
    """Median over the rounds."""
    losses: list[float]
    repeatable: bool
    """Every round gave bit-equal losses."""
    loss_rounding: float | None = None
    """Of the first round; see `Round`."""
    flops_per_s: float
    share_of_limit: float
    """`flops_per_s` over the measured matrix-product peak of its dtype."""
    text: str | None = None
    where: list[OperatorTime] | None = None
    """Of the first round: where a step's time goes, from the most to the least; null if not asked for."""
    rounds: list[Round]


class Ratio(Frozen):
    """A contender against a base. Numbers above 1 are better for `speed`, below 1 for `peak_memory`."""

    speed: float | None
    """Base step time over the contender's; null where the losses do not agree."""
    peak_memory: float
    first_step: float
    first_forward_extra_s: float
    """The contender's first forward pass minus the base's: what capture or compilation costs."""


class Agreement(Frozen):
    """Whether a contender's losses equal its base's within the bound for its dtype; relative numbers."""

    contender: str
    base: str
    bound_first: float
    bound_later: float
    bound_mean: float
    reason: str
    base_rounding: float | None = None
    """The base's `loss_rounding`, which is taken off its losses before the contender's are compared."""
    difference_first: float
    difference_largest: float
    difference_mean: float
    agree: bool


class Interruption(Frozen):
    """The signal that ended a bench before its last contender, and where it was."""

    signal: str
    """`SIGINT` or `SIGTERM`"""
    during: str
    """What ran; nothing of it is in the report."""


class BenchReport(Frozen):
    """The whole report. `extra="forbid"`: a reader of another version fails loudly."""

    schema_name: Literal["hasten.bench.train/3"] = Field(default="hasten.bench.train/3", alias="schema")
    date: str
    command: str
    machine: dict[str, Any]
    versions: dict[str, str]
    level: str | None
    """The instruction level that hasten and torch were limited to; null: the machine's own."""
    workload: Workload
    limits: Limits
    contenders: dict[str, Contender]
    failed: dict[str, str]
    """Contenders that did not finish, with the reason."""
    skipped: dict[str, str]
    """Contenders that were not started, with the reason."""
    interrupted: Interruption | None
    """Null if the bench ran to its end. Otherwise contenders may have fewer rounds than `workload` says."""
    ratios: dict[str, dict[str, Ratio]]
    """`ratios[contender][base]`, bases `eager-bf16` and `eager-bf16-malloc` where they ran."""
    agree: bool | None
    """Every contender agrees with its base; null with a single contender."""
    agreement: list[Agreement]


def dump(report: BaseModel) -> str:
    """Any report as indented JSON, keys in the order of its classes."""
    return json.dumps(report.model_dump(by_alias=True), indent=2, allow_nan=False) + "\n"


def save(report: BaseModel, path: Path) -> None:
    """Writes any report under a temporary name and renames it: a reader never sees half a file."""
    write_atomically(path, dump(report))


def check_writable(path: Path) -> None:
    """Finds out before a long run whether the report can be written: makes its folder and tries a file there.

    Raises:
        InputError: the folder cannot be made or written to; says why.
    """
    if path.is_dir():
        raise InputError(
            f"cannot write the report to {path}: it is a folder; name a file, e.g. {path / 'report.json'}"
        )
    make_folder(path.parent, f"cannot write the report to {path}")


def load(path: Path) -> BenchReport:
    """Reads and checks a report of `hasten bench train`; raises as `read`."""
    return read(BenchReport, path, SCHEMA, "train")


def read(kind: type[_Report], path: Path, schema: str, command: str) -> _Report:
    """Reads and checks a report that `hasten bench COMMAND` wrote.

    Raises:
        InputError: the file is missing, is no JSON, or does not have this schema; names the first field.
    """
    if not path.is_file():
        raise InputError(f"no report at {str(path)!r}: write one with 'hasten bench {command} --json {path}'")
    try:
        return kind.model_validate_json(path.read_text(encoding="utf-8"))
    except ValidationError as error:
        fault = first_fault(error)
        raise InputError(
            f"{str(path)!r} is not a report of schema {schema}: {fault.field or 'the file'}: {fault.said}"
        ) from error

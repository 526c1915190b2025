"""The settings of a training run: one frozen tree, read from a TOML file and from flags.

A key that does not exist, a value out of range and a batch that does not divide are found here, before a
model is opened. Units are in the names: `_tokens`, `_s`, `_bytes`; `steps` counts optimizer steps.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator
from pydantic.fields import FieldInfo

from hasten.base.errors import ConfigError, InputError, nearest

# A checkpoint continues only under the settings that decide its numbers. The rest (where files go, how often
# something is written or evaluated, whether the model is rewritten) may change between two parts of a run.
FIXED_SECTIONS = ("model", "data", "batch", "precision", "optimizer", "schedule", "lora", "seed")
# What of the data section says where a file lies and not what is in it; the tokens themselves are compared.
FREE_DATA_KEYS = ("path", "cache_folder")


class Section(BaseModel):
    """Base of every section: frozen, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _truth_is_no_number(cls, values: Any) -> Any:
        for name, value in values.items() if isinstance(values, dict) else ():
            field = cls.model_fields.get(name)
            if isinstance(value, bool) and field is not None and field.annotation is not bool:
                raise ValueError(f"{name} = {str(value).lower()}: a truth value has no meaning here")
        return values


class ModelSection(Section):
    """Which model is trained."""

    id: str = Field(min_length=1, description="preset id, hub id, folder, or GGUF file")
    dtype: Literal["fp32", "bf16"] = Field("fp32", description="format of the master weights")


class DataSection(Section):
    """Which text it is trained on."""

    path: str = Field(
        min_length=1,
        description="folder, .txt, .jsonl or .parquet file, or python-stdlib (Python's own library)",
    )
    glob: str = Field("**/*", min_length=1, description="which files of a folder")
    field: str = Field("text", min_length=1, description="field of .jsonl rows, column of .parquet")
    max_tokens: int | None = Field(None, gt=0, description="stop tokenising here")
    validation_fraction: float = Field(
        0.0, ge=0.0, lt=1.0, description="share of the tokens, from the end, that is kept for evaluation"
    )
    packing: bool = Field(
        True, description="several documents in one row, kept apart; false: one document a row, padded"
    )
    cache_folder: Path | None = Field(None, description="where tokenised text is kept")


class BatchSection(Section):
    """How many tokens go into a row, a forward pass and an optimizer step."""

    sequence_tokens: int = Field(512, ge=2, description="tokens in one row")
    batch_tokens: int = Field(1024, gt=0, description="tokens in one optimizer step")
    micro_batch_tokens: int | None = Field(
        None, gt=0, description="tokens in one forward pass; the default is the whole batch"
    )

    @model_validator(mode="after")
    def _divides(self) -> BatchSection:
        S = self.sequence_tokens
        if self.batch_tokens % S:
            raise ValueError(
                f"batch_tokens = {self.batch_tokens} is not a multiple of sequence_tokens = {S}; "
                f"the nearest valid values are {_join(_multiples_near(self.batch_tokens, S))}"
            )
        micro = self.micro_batch_tokens
        if micro is not None and (micro % S or self.batch_tokens % micro):
            rows = self.batch_tokens // S
            allowed = [S * k for k in range(1, rows + 1) if rows % k == 0]
            close = sorted(sorted(allowed, key=lambda tokens: abs(tokens - micro))[:2])
            raise ValueError(
                f"micro_batch_tokens = {micro} must be a multiple of sequence_tokens = {S} and divide "
                f"batch_tokens = {self.batch_tokens}; the nearest valid values are {_join(close)}"
            )
        return self

    @property
    def micro_rows(self) -> int:
        """Rows in one forward pass."""
        return (self.micro_batch_tokens or self.batch_tokens) // self.sequence_tokens

    @property
    def rows(self) -> int:
        """Rows in one optimizer step."""
        return self.batch_tokens // self.sequence_tokens

    @property
    def accumulation(self) -> int:
        """Forward passes in one optimizer step."""
        return self.rows // self.micro_rows


class OptimizerSection(Section):
    """AdamW: decoupled weight decay (Loshchilov and Hutter, 2019)."""

    name: Literal["adamw"] = "adamw"
    lr: float = Field(1e-4, gt=0.0, description="peak learning rate")
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = Field(1e-8, gt=0.0)
    weight_decay: float = Field(
        0.1, ge=0.0, description="on matrices; never on norms, biases and embedding tables"
    )
    max_grad_norm: float | None = Field(1.0, gt=0.0, description="clip the global gradient norm here")

    @model_validator(mode="after")
    def _betas_in_range(self) -> OptimizerSection:
        if not all(0.0 <= beta < 1.0 for beta in self.betas):
            raise ValueError(f"betas = {list(self.betas)}: each must be at least 0 and below 1")
        return self


class ScheduleSection(Section):
    """The learning rate over the run."""

    kind: Literal["constant", "linear", "cosine"] = "cosine"
    warmup_steps: int = Field(0, ge=0, description="steps of linear rise from 0")
    min_lr_ratio: float = Field(0.1, ge=0.0, le=1.0, description="last learning rate over the peak")


class LoraSection(Section):
    """Low-rank adapters by PEFT instead of training every weight."""

    r: int = Field(8, gt=0)
    alpha: float = Field(16.0, gt=0.0)
    dropout: float = Field(0.0, ge=0.0, lt=1.0)
    target_modules: tuple[str, ...] | Literal["all-linear"] = Field(
        "all-linear", description="all-linear, or a list of names of modules"
    )
    merge: bool = Field(False, description="also write the model with the adapter merged in")

    @field_validator("target_modules", mode="before")
    @classmethod
    def _one_name_is_a_list(cls, value: Any) -> Any:
        return value if value == "all-linear" or not isinstance(value, str) else (value,)

    @model_validator(mode="after")
    def _names_a_module(self) -> LoraSection:
        if not self.target_modules:
            raise ValueError("target_modules = []: name at least one module, or give 'all-linear'")
        return self


class EvalSection(Section):
    """Evaluation loss on the held-out tokens."""

    every_steps: int = Field(0, ge=0, description="0: never")
    batches: int = Field(8, gt=0, description="at most this many forward passes")


class CheckpointSection(Section):
    """When the state is written, and what a run starts from."""

    every_steps: int = Field(0, ge=0, description="0: only when interrupted and at the end")
    keep_last: int = Field(2, gt=0)
    folder: Path | None = Field(None, description="the default is checkpoints/ in the output folder")
    resume: str = Field("auto", min_length=1, description="auto, none, or the path of one checkpoint")


class LayoutSection(Section):
    """How several devices share the run, as `hasten plan` writes it; one device has 1 everywhere."""

    tp: int = Field(1, gt=0, description="tensor parallel degree")
    cp: int = Field(1, gt=0, description="context parallel degree")
    pp: int = Field(1, gt=0, description="pipeline stages")
    virtual: int = Field(1, gt=0, description="model chunks of one stage")
    ep: int = Field(1, gt=0, description="expert parallel degree")
    dp: int = Field(1, gt=0, description="data parallel degree")
    zero: int = Field(0, ge=0, le=3, description="what is sharded over dp")
    sequence_parallel: bool = False
    schedule: Literal["1f1b", "gpipe", "interleaved", "zero_bubble"] = "1f1b"

    @model_validator(mode="after")
    def _one_device(self) -> LayoutSection:
        if (devices := self.tp * self.cp * self.pp * self.dp) > 1:
            raise ValueError(
                f"tp x cp x pp x dp = {devices} devices; hasten train runs on one so far: plan with "
                f"--devices 1"
            )
        return self


class OutputSection(Section):
    """Where the results go: model/ or adapter/, checkpoints/, metrics.jsonl, tensorboard/."""

    folder: Path = Path("runs/train")
    tensorboard: bool = True


class RunConfig(Section):
    """Everything that describes a run."""

    model: ModelSection
    data: DataSection
    steps: int = Field(100, gt=0, description="optimizer steps in the whole run")
    seed: int = Field(0, ge=0, lt=2**32)
    precision: Literal["auto", "bf16", "fp32"] = Field(
        "auto", description="auto: bf16 autocast where the processor has it in hardware"
    )
    optimize: bool = Field(True, description="rewrite the model with hasten.optimize")
    level: Literal[0, 1, 2, 3] | None = Field(None, description="level given to hasten.optimize")
    gradient_checkpointing: bool = Field(False, description="the model's own; less memory, more time")
    batch: BatchSection = BatchSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    lora: LoraSection | None = None
    eval: EvalSection = EvalSection()
    checkpoint: CheckpointSection = CheckpointSection()
    layout: LayoutSection = LayoutSection()
    output: OutputSection = OutputSection()

    @model_validator(mode="after")
    def _agree(self) -> RunConfig:
        if self.eval.every_steps and not self.data.validation_fraction:
            raise ValueError(
                f"eval.every_steps = {self.eval.every_steps} needs held-out text: set "
                "data.validation_fraction, for example to 0.05"
            )
        if self.schedule.warmup_steps > self.steps:
            raise ValueError(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} is more than steps = {self.steps}; "
                f"the nearest valid value is {self.steps}"
            )
        return self

    @property
    def checkpoint_folder(self) -> Path:
        """Where checkpoints lie."""
        return self.checkpoint.folder or self.output.folder / "checkpoints"

    def as_json(self) -> dict[str, Any]:
        """The settings as plain JSON values."""
        return dict(json.loads(self.model_dump_json()))

    def fixed_settings(self) -> dict[str, Any]:
        """The settings that must be the same when a run is resumed, as dotted names."""
        whole = self.as_json()
        flat: dict[str, Any] = {}
        for name in FIXED_SECTIONS:
            value = whole[name]
            if isinstance(value, dict):
                flat.update({f"{name}.{key}": item for key, item in value.items()})
            else:
                flat[name] = value
        for key in FREE_DATA_KEYS:
            flat.pop(f"data.{key}", None)
        flat.pop("lora.merge", None)
        return flat


def load_config(file: str | Path | None = None, overrides: Mapping[str, Any] | None = None) -> RunConfig:
    """The settings of a TOML file with `overrides` (dotted name -> value) laid over it.

    Raises:
        InputError: the file is missing or is not TOML.
        ConfigError: an unknown key (with the nearest one), a value out of range, settings that do not fit
            together.
    """
    tree: dict[str, Any] = {}
    origin = "the settings"
    if file is not None:
        path = Path(file)
        origin = str(path)
        try:
            tree = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise InputError(f"no such file: {path}{_files_beside(path)}") from None
        except IsADirectoryError:
            raise InputError(f"{path} is a folder; give a TOML file") from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise InputError(f"{path} is not valid TOML: {error}") from None
        except OSError as error:
            raise InputError(f"{path} cannot be read: {error.strerror}") from None
    for name, value in (overrides or {}).items():
        _set(tree, name, value)
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise ConfigError(f"{origin}: " + "; ".join(_explain(item) for item in error.errors())) from None


def describe_settings() -> str:
    """Every setting with its default and meaning, as commented TOML; sections in the order of `RunConfig`."""
    lines = [_describe(name, field) for name, field in RunConfig.model_fields.items() if not _sections(field)]
    for name, field in RunConfig.model_fields.items():
        for section in _sections(field):
            lines += ["", f"[{name}]  # {section.__doc__}"]
            lines += [_describe(key, item) for key, item in section.model_fields.items()]
    return "\n".join(lines)


def _describe(name: str, field: FieldInfo) -> str:
    default = json.dumps(field.get_default(), default=str).replace("null", "(not set)")
    if field.is_required():
        default = "(must be set)"
    choices = [str(choice) for choice in get_args(field.annotation) if isinstance(choice, str)]
    words = [word for word in (" | ".join(choices), field.description) if word]
    return f"{name} = {default}" + (f"  # {'; '.join(words)}" if words else "")


def _sections(field: FieldInfo) -> list[type[Section]]:
    options = (field.annotation, *get_args(field.annotation))
    return [kind for kind in options if isinstance(kind, type) and issubclass(kind, Section)]


def _set(tree: dict[str, Any], name: str, value: Any) -> None:
    *sections, key = name.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{name}: {section} is a value, not a section")
    tree[key] = value


def _explain(item: Mapping[str, Any]) -> str:
    """One sentence for one of pydantic's errors."""
    location = [part for part in item["loc"] if isinstance(part, str) and not part.startswith("literal[")]
    location = [part for part in location if not part.startswith("tuple[")]
    name = ".".join(location)
    if item["type"] == "extra_forbidden":
        section = _section(location[:-1])
        allowed = list(section.model_fields) if section is not None else []
        return f"unknown key {name!r}; {nearest(location[-1], allowed)}"
    if item["type"] == "missing":
        return f"{name} lacks an entry" if isinstance(item["loc"][-1], int) else f"{name} is not set"
    message = str(item["msg"]).removeprefix("Value error, ")
    message = message[:1].lower() + message[1:]
    if item["type"] == "value_error":
        return f"{name}.{message}" if name else message
    return f"{name} = {item['input']!r}: {message}"


def _section(location: Iterable[str]) -> type[Section] | None:
    current: type[Section] = RunConfig
    for part in location:
        field = current.model_fields.get(part)
        found = _sections(field) if field is not None else []
        if not found:
            return None
        current = found[0]
    return current


def _multiples_near(value: int, unit: int) -> list[int]:
    below = value // unit * unit
    return [tokens for tokens in (below, below + unit) if tokens > 0]


def _join(values: Iterable[int]) -> str:
    return " and ".join(str(value) for value in values)


def _files_beside(path: Path) -> str:
    beside = [entry.name for entry in path.parent.glob("*.toml")] if path.parent.is_dir() else []
    return f" ({nearest(path.name, beside)})" if beside else ""

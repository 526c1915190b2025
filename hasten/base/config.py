"""The settings of `hasten.optimize`, and where each value came from.

An explicit argument wins over the environment, the environment over the default. `HASTEN_*` are the names of
this project; `ENABLE_FUSED_TRANSFORMER` and `OPTIMIZE_MEMORY` are accepted because users of Ascend's stack
know them.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, ValidationError, field_validator

from hasten.base.errors import ConfigError, first_fault, nearest
from hasten.base.facts import detect

_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}


def parse_memory(value: str | int | float) -> int | float:
    """A number of bytes (int > 1) or a share of the machine's memory (0 < float <= 1).

    Accepts `6e9`, `"6GB"`, `"6 GiB"`, `0.5`, `"50%"`.

    Raises:
        ConfigError: if the value is neither.
    """
    if isinstance(value, str):
        text = value.strip().lower()
        if match := re.fullmatch(r"([\d.]+)\s*%", text):
            value = float(match[1]) / 100
        elif match := re.fullmatch(r"([\d.]+(?:e\d+)?)\s*([kmgt]?i?)b?", text):
            value = float(match[1]) * _UNITS[match[2]]
        else:
            raise ConfigError(
                f"memory = {value!r}: give bytes ('6GB', '6 GiB', 6000000000) or a share ('50%', 0.5)"
            )
    if value <= 0:
        raise ConfigError(f"memory = {value!r}: must be positive; give bytes ('6GB') or a share (0.5)")
    return float(value) if value <= 1 else int(value)


def parse_override(text: str, example: str) -> tuple[str, Any]:
    """`batch.rows=512` -> `("batch.rows", 512)`; a value that is not TOML is a string.

    Raises:
        ConfigError: no name or no value; shows `example`.
    """
    name, equals, raw = (part.strip() for part in text.partition("="))
    if not equals or not name:
        raise ConfigError(f"--set {text!r}: give NAME=VALUE, for example {example}")
    try:
        return name, tomllib.loads(f"value = {raw}")["value"]
    except tomllib.TOMLDecodeError:
        return name, raw


class Config(BaseModel):
    """What `hasten.optimize` may do to a model. Frozen; unknown names are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    level: int = Field(default=3, ge=0, le=3)
    """0: nothing; 1: fuse operators; 2: also inside a layer; 3: also across layers and constant folding."""

    precision: Literal["follow", "auto", "bf16", "fp32"] = "follow"
    """`follow`: the caller's `torch.autocast` and the model's dtype. `bf16`: the model's forward runs under
    autocast to bf16. `auto`: `bf16` where the processor has it in hardware, else `follow`. `fp32`: autocast
    off."""

    memory: int | float | None = None
    """A bound for the process, in bytes (> 1) or as a share of the machine's memory (<= 1). As many blocks as
    it takes are recomputed in the backward pass. None: nothing but what the operators rebuild anyway."""

    dynamic_shape: tuple[int, int] = (128, 4096)
    """Sequence lengths between these bounds share one captured graph; see `graph/capture.py`."""

    hardware: Mapping[str, Any] = Field(default_factory=dict)
    """Overrides of what was detected, e.g. `{"isa": "avx2", "bf16_in_hardware": False}`."""

    verify: bool = True
    """Compare each rewritten block with the original on its first inputs, outputs and gradients."""

    measure: bool = True
    """Time each rewritten block against the original once, and keep the original where it is faster."""

    buffers: bool | Literal["huge"] = True
    """Keep the memory of large CPU tensors for reuse while a model is optimised; see `ops/buffers.py`.
    `"huge"`: in pages of 2 MiB, where the system gives them."""

    _sources: dict[str, str] = PrivateAttr(default_factory=dict)

    @field_validator("memory", mode="before")
    @classmethod
    def _memory(cls, value: Any) -> Any:
        return None if value is None else parse_memory(value)

    @field_validator("buffers", mode="before")
    @classmethod
    def _buffers(cls, value: Any) -> Any:
        if not isinstance(value, bool) and value != "huge":
            raise ValueError("must be True, False or 'huge'")
        return value

    @field_validator("dynamic_shape")
    @classmethod
    def _bounds(cls, value: tuple[int, int]) -> tuple[int, int]:
        low, high = value
        if not 1 <= low <= high:
            raise ValueError("must be (low, high) with 1 <= low <= high")
        return value

    def memory_bytes(self) -> int | None:
        """The bound in bytes; a share counts from what this process may use (cgroup limit or installed)."""
        if self.memory is None or self.memory > 1:
            return None if self.memory is None else int(self.memory)
        return int(self.memory * detect(self.hardware).memory_limit_bytes.value)

    @property
    def sources(self) -> Mapping[str, str]:
        """For each field: `argument`, `default`, or the environment variable that set it."""
        return dict(self._sources)


_ENVIRONMENT = {
    "HASTEN_LEVEL": "level",
    "HASTEN_PRECISION": "precision",
    "HASTEN_MEMORY": "memory",
}


def _from_environment(environ: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Field -> (text, variable that gave it)."""
    found = {field: (environ[name], name) for name, field in _ENVIRONMENT.items() if environ.get(name)}
    if "level" not in found and (flag := environ.get("ENABLE_FUSED_TRANSFORMER")):
        found["level"] = ("0" if flag.lower() in ("0", "false", "off") else "3", "ENABLE_FUSED_TRANSFORMER")
    if (
        "memory" not in found
        and (text := environ.get("OPTIMIZE_MEMORY"))
        and text.lower() not in ("0", "1", "true", "false")
    ):
        found["memory"] = (text, "OPTIMIZE_MEMORY")
    return found


def make_config(environ: Mapping[str, str] | None = None, **arguments: Any) -> Config:
    """The settings in force: `arguments`, then the environment, then the defaults.

    Raises:
        ConfigError: for an unknown name or a value out of range; names the field, the value and what is
        allowed.
    """
    for name in arguments:
        if name not in Config.model_fields:
            raise ConfigError(f"unknown setting {name!r}; {nearest(name, Config.model_fields)}")
    given: dict[str, Any] = {}
    sources = dict.fromkeys(Config.model_fields, "default")
    for field, (text, variable) in _from_environment(os.environ if environ is None else environ).items():
        given[field], sources[field] = text, variable
    for field, value in arguments.items():
        given[field], sources[field] = value, "argument"
    try:
        config = Config(**given)
    except ValidationError as error:
        fault = first_fault(error)
        field = fault.field.partition(".")[0] or "?"
        raise ConfigError(
            f"{field} = {given.get(field)!r} (from {sources.get(field, '?')}): {fault.said}"
        ) from error
    config._sources.update(sources)
    return config

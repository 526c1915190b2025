"""Devices and the links between them; every figure carries its source."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from hasten.base.errors import ConfigError, InputError, first_fault, nearest


class Sourced(BaseModel):
    """A figure, where it stands, and how sure it is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    value: float = Field(ge=0)
    source: str = "given by the user"
    confidence: Literal["datasheet", "secondary", "recalled", "derived", "measured", "given"] = "given"

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, data: Any) -> Any:
        return {"value": data} if isinstance(data, int | float) else data


class Device(BaseModel):
    """One accelerator. FLOP/s, bytes and bytes/s."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str
    matmul_flops: dict[str, Sourced]
    """Peak of dense matrix products by format: bf16, fp16, fp8, fp4, fp32."""
    memory_bytes: Sourced
    memory_bandwidth: Sourced
    cores: int = Field(default=0, ge=0)
    """Units over which the tiles of a product are dealt; 0: not known, no quantisation."""
    constants: str = ""
    """The set of fitted constants in `presets/fitted.toml`; empty: the name's own, else the default."""
    overrides: dict[str, float] = Field(default_factory=dict)
    """Constants of `efficiency.Constants` that replace the fitted ones, e.g. from `hasten calibrate`."""
    replayed: dict[str, float] = Field(default_factory=dict)
    """Measured over computed seconds by kind of operator, from a profile; see `hasten.plan.replay`."""

    def peak(self, precision: str) -> float:
        """FLOP/s of dense products in a format.

        Raises:
            ConfigError: the device has no figure for it.
        """
        if precision not in self.matmul_flops:
            raise ConfigError(
                f"{self.name} has no peak for {precision}; {nearest(precision, self.matmul_flops)}"
            )
        return self.matmul_flops[precision].value


class Link(BaseModel):
    """What joins the devices of one tier. Bandwidths in bytes/s, one way, per device."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: Literal["switch", "mesh", "pod"] = "switch"
    """switch: any pair has the full bandwidth; mesh: a device's bandwidth is the sum over its direct
    peers, so a group of g of n reaches (g-1)/(n-1) of it; pod: one switch beyond the node."""
    bandwidth: Sourced
    latency_s: Sourced = Sourced(value=5e-6, source="order of magnitude of one step", confidence="recalled")


AllReduce = Literal["ring", "tree", "hierarchical", "pipelined", "two_orders"]
"""Algorithms over several islands of fast links; `hasten.plan.collectives` has their formulas."""


class Cluster(BaseModel):
    """`nodes` x `devices_per_node` equal devices."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = "cluster"
    device: Device
    devices_per_node: int = Field(gt=0)
    nodes: int = Field(default=1, gt=0)
    inside: Link
    across: Link
    domain: int = Field(default=0, ge=0)
    """Devices joined by `inside`; 0: those of a node."""
    all_reduce: tuple[AllReduce, ...] = Field(default=("ring", "tree"), min_length=1)
    """What the communication library chooses from across islands; the default is NCCL's."""
    host_bandwidth: Sourced = Sourced(value=25e9, source="PCIe 4.0 x16, usable", confidence="recalled")
    """Bytes/s between a device and its host's memory."""
    price_per_device_hour: float = Field(default=0, ge=0)

    @property
    def devices(self) -> int:
        """All devices."""
        return self.devices_per_node * self.nodes

    @property
    def joined(self) -> int:
        """Devices that the fast links join."""
        return self.domain or self.devices_per_node

    @model_validator(mode="after")
    def _consistent(self) -> Cluster:
        if self.domain and self.domain < self.devices_per_node:
            raise ValueError(
                f"domain = {self.domain} is less than devices_per_node = {self.devices_per_node}: "
                f"the fast links join "
                "at least a node"
            )
        if self.nodes > 1 and self.across.bandwidth.value > self.inside.bandwidth.value:
            raise ValueError(
                f"across.bandwidth = {self.across.bandwidth.value:g} B/s is more than inside.bandwidth = "
                f"{self.inside.bandwidth.value:g} B/s; both are bytes/s, one way, per device"
            )
        if self.device.memory_bandwidth.value < self.inside.bandwidth.value:
            raise ValueError(
                f"inside.bandwidth = {self.inside.bandwidth.value:g} B/s is more than the device's "
                f"memory bandwidth "
                f"{self.device.memory_bandwidth.value:g} B/s"
            )
        return self


def build(values: Mapping[str, Any], where: str) -> Cluster:
    """A cluster from the fields of `Cluster`.

    Raises:
        InputError: a field is missing, unknown, or contradicts another.
    """
    try:
        return Cluster(**values)
    except ValidationError as error:
        fault = first_fault(error)
        field = fault.field
        if fault.kind == "missing":
            raise InputError(f"{where}: the field {field!r} is missing") from None
        if fault.kind == "extra_forbidden":
            raise InputError(f"{where}: no field {field!r}; {nearest(field, Cluster.model_fields)}") from None
        raise InputError(f"{where}: {field + ': ' if field else ''}{fault.said}") from None


def presets() -> dict[str, dict[str, Any]]:
    """The clusters that can be named, from `presets/clusters.toml`; `device` names one of `devices()`."""
    return tomllib.loads(resources.files("hasten.plan").joinpath("presets/clusters.toml").read_text("utf-8"))


def devices() -> dict[str, dict[str, Any]]:
    """The devices that can be named, from `presets/devices.toml`."""
    return tomllib.loads(resources.files("hasten.plan").joinpath("presets/devices.toml").read_text("utf-8"))


def device(name: str) -> Device:
    """A device by its short name.

    Raises:
        ConfigError: there is none of this name.
    """
    known = devices()
    if name not in known:
        raise ConfigError(f"device {name!r} is not a preset; {nearest(name, known)}")
    return Device(**{"name": name, **known[name]})


def _resolve(values: dict[str, Any]) -> dict[str, Any]:
    if isinstance(values.get("device"), str):
        values["device"] = device(values["device"])
    return values


def preset(name: str, nodes: int | None = None) -> Cluster:
    """A cluster by its short name, with as many nodes as asked for.

    Raises:
        ConfigError: there is none of this name.
    """
    known = presets()
    if name not in known:
        raise ConfigError(f"cluster {name!r} is not a preset; {nearest(name, known)}")
    values = _resolve({"name": name, **known[name]})
    return build({**values, "nodes": nodes} if nodes else values, f"preset {name}")


def load(path: str | Path) -> Cluster:
    """A preset's name, or a TOML file: the fields of `Cluster`, or `base = "preset"` and what differs from
    it.

    Raises:
        InputError: the file is missing, malformed, or contradicts itself.
    """
    file = Path(path)
    if not file.exists():
        if str(path) in presets():
            return preset(str(path))
        raise InputError(
            f"cluster {str(path)!r} is neither a file nor a preset; {nearest(str(path), presets())}"
        )
    try:
        data = tomllib.loads(file.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{file}: cannot be read as TOML: {error}") from None
    base = data.pop("base", None)
    if base is None:
        return build(_resolve({"name": file.stem, **data}), str(file))
    return overridden(preset(base), data, str(file))


def overridden(cluster: Cluster, changes: Mapping[str, Any], where: str = "overrides") -> Cluster:
    """The cluster with some figures replaced; nested tables reach into `device`, `inside` and `across`.

    Raises:
        InputError: the result contradicts itself.
    """

    def merge(into: dict[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
        for key, value in new.items():
            old = into.get(key)
            into[key] = merge(old, value) if isinstance(value, Mapping) and isinstance(old, dict) else value
        return into

    return build(_resolve(merge(cluster.model_dump(), changes)), where)

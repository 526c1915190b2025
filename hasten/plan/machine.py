"""Which cluster a name means, and this machine as a cluster of one device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hasten.base.cache import cache_folder
from hasten.base.config import parse_override
from hasten.base.errors import ConfigError, InputError, nearest
from hasten.base.facts import Facts, detect
from hasten.plan import cluster as clusters
from hasten.plan.cluster import Cluster

THIS = ("this", "this-machine")
THIS_NAME = "this machine"
"""Name of the cluster that `hasten calibrate` measures, also where it is written elsewhere."""

# What torch's gloo reduces large buffers with.
GLOO = ("ring",)

# FLOP of one core in one cycle, fused multiply-adds counted as two: two units of 512 or 256 bits (Intel
# Optimization Reference Manual, chapter 17; one tile product of AMX is 16 x 16 x 32 in 16 cycles).
_FP32_PER_CYCLE = {"generic": 8.0, "avx2": 32.0, "avx512": 64.0, "amx": 64.0}
_BF16_PER_CYCLE = {"generic": 8.0, "avx2": 32.0, "avx512": 128.0, "amx": 1024.0}
_CYCLES_PER_S = 2.5e9
# One channel of DDR5-4800 for every four cores, and never less than one.
_CHANNEL_BYTES_PER_S = 38.4e9


def device_file(cache: str | Path | None = None) -> Path:
    """Where `hasten calibrate` stores what it measured of this machine."""
    return cache_folder(cache).value / "plan" / "this.toml"


def this_machine(cache: str | Path | None = None, facts: Facts | None = None) -> Cluster:
    """What `hasten calibrate` measured here, else orders of magnitude from the processor's instruction level.

    Raises InputError for a stored file that is damaged.
    """
    stored = device_file(cache)
    if stored.is_file():
        return clusters.load(stored)
    facts = facts or detect()
    level, cores = facts.isa.value, facts.cores.value
    fp32 = cores * _CYCLES_PER_S * _FP32_PER_CYCLE[level]
    bf16 = cores * _CYCLES_PER_S * _BF16_PER_CYCLE[level] if facts.bf16_in_hardware.value else fp32 / 4
    source = f"{cores} cores, {level}, 2.5 GHz assumed; `hasten calibrate` measures it"
    bandwidth = _CHANNEL_BYTES_PER_S * max(1.0, cores / 4)
    return clusters.build(
        {
            "name": THIS_NAME,
            "device": {
                "name": facts.processor.value,
                "matmul_flops": {
                    "fp32": _derived(fp32, source),
                    "bf16": _derived(bf16, source),
                },
                "memory_bytes": _derived(facts.memory_limit_bytes.value, facts.memory_limit_bytes.source),
                "memory_bandwidth": _derived(bandwidth, "one channel of DDR5-4800 for four cores"),
            },
            "devices_per_node": 1,
            "inside": {"bandwidth": _derived(2e9, "gloo over the loopback, order of magnitude")},
            "across": {"bandwidth": _derived(1e9, "Ethernet of 10 Gb/s")},
            "all_reduce": GLOO,
            "host_bandwidth": _derived(bandwidth, "the same memory"),
        },
        THIS_NAME,
    )


def open_cluster(
    name: str,
    nodes: int | None = None,
    devices: int | None = None,
    settings: Sequence[str] = (),
    cache: str | Path | None = None,
) -> Cluster:
    """A preset, a TOML file or `this`, with so many nodes (or devices), and figures replaced by `settings`.

    Args:
        settings: `device.memory_bytes=64e9`, `across.bandwidth=12.5e9`, ...

    Raises:
        InputError: no such cluster, a file that is malformed, figures that contradict each other.
        ConfigError: a number of devices that is no whole number of nodes.
    """
    if name in THIS:
        cluster = this_machine(cache)
    elif not Path(name).exists() and name not in clusters.presets():
        known = [*clusters.presets(), THIS[0]]
        raise InputError(f"cluster {name!r} is neither a file nor a preset; {nearest(name, known)}")
    else:
        cluster = clusters.load(name)
    if nodes is not None and devices is not None:
        raise ConfigError("give --nodes or --devices, not both")
    if devices is not None:
        per = cluster.devices_per_node
        if devices > per and devices % per:
            raise ConfigError(
                f"devices = {devices}: a node of {cluster.name} has {per}, so the nearest numbers are "
                f"{devices // per * per} and {(devices // per + 1) * per}"
            )
        nodes = max(1, devices // per)
    changes = _changes(settings)
    if nodes is not None:
        changes["nodes"] = nodes
    return clusters.overridden(cluster, changes, f"cluster {name}") if changes else cluster


def _changes(settings: Sequence[str]) -> dict[str, Any]:
    """`a.b=1` -> nested tables. A bare number is a figure that the user gives."""
    tree: dict[str, Any] = {}
    for text in settings:
        name, value = parse_override(text, "device.memory_bytes=64e9")
        into = tree
        *tables, key = name.split(".")
        for table in tables:
            into = into.setdefault(table, {})
            if not isinstance(into, dict):
                raise ConfigError(f"--set {text!r}: {table} is a value, not a table")
        # A figure is replaced together with its source.
        number = isinstance(value, int | float) and not isinstance(value, bool)
        figure = number and key not in _PLAIN_NUMBERS
        into[key] = {"value": value, "source": "--set", "confidence": "given"} if figure else value
    return tree


_PLAIN_NUMBERS = ("devices_per_node", "nodes", "domain", "price_per_device_hour", "cores")


def as_toml(cluster: Cluster, comment: str = "") -> str:
    """A cluster as the text of a TOML file that `hasten.plan.cluster.load` reads."""
    lines = [f"# {line}" for line in comment.splitlines()]
    _table(lines, (), cluster.model_dump(exclude_defaults=True))
    return "\n".join(lines) + "\n"


def _table(lines: list[str], path: tuple[str, ...], values: Mapping[str, Any]) -> None:
    tables = {
        key: value for key, value in values.items() if isinstance(value, Mapping) and not _figure(value)
    }
    if path:
        lines += ["", "[" + ".".join(_key(part) for part in path) + "]"]
    for key, value in values.items():
        if key not in tables:
            lines.append(f"{_key(key)} = {_value(value)}")
    for key, value in tables.items():
        _table(lines, (*path, key), value)


def _figure(value: Mapping[str, Any]) -> bool:
    return "value" in value and not isinstance(value["value"], Mapping)


def _key(key: str) -> str:
    return key if key.replace("_", "").replace("-", "").isalnum() and key.isascii() else _text(key)


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    return _text(str(value))


def _text(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", " ") + '"'


def _derived(value: float, source: str) -> dict[str, Any]:
    return {"value": float(value), "source": source, "confidence": "derived"}

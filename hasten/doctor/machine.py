"""The doctor's facts: the machine, installed versions, the settings in force and what they switch on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hasten.base.cache import cache_folder
from hasten.base.config import Config
from hasten.base.facts import Fact, Facts, accelerators
from hasten.ops import buffers, choices, native
from hasten.train.tuning import summary

_PACKAGES = ("hasten", "torch", "transformers", "peft", "safetensors", "numpy")
_LEVELS = {
    1: "fuse operators: norms, rotary, activations, linear with bias and activation, head with cross-entropy",
    2: "fuse inside a layer: residual with norm, one product for Q, K, V and for gate and up",
    3: "fuse across layers, fold what depends only on weights and configuration",
}


def machine(facts: Facts) -> dict[str, dict[str, Any]]:
    shown: dict[str, Fact[Any]] = {
        "processor": facts.processor,
        "architecture": facts.architecture,
        "cores": facts.cores,
        "physical_cores": facts.physical_cores,
        "memory_bytes": facts.memory_bytes,
        "memory_limit_bytes": facts.memory_limit_bytes,
        "bf16_in_hardware": facts.bf16_in_hardware,
        **accelerators(),
    }
    rows: dict[str, dict[str, Any]] = {
        name: {"value": fact.value, "source": fact.source} for name, fact in shown.items()
    }
    caches = [
        {"level": c.level, "kind": c.kind, "size_bytes": c.size_bytes, "shared_by": c.shared_by}
        for c in facts.caches.value
    ]
    rows["caches"] = {"value": caches, "source": facts.caches.source}
    return rows


def versions() -> dict[str, str]:
    import torch

    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    found["torch's own level"] = torch.backends.cpu.get_cpu_capability()
    found["torch threads"] = str(torch.get_num_threads())
    found["C library"] = " ".join(part for part in platform.libc_ver() if part) or platform.system()
    found["compiler"] = _compiler()
    found["system"] = f"{platform.system()} {platform.release()}"
    return found


def _compiler() -> str:
    wanted = os.environ.get("CXX")
    for name in (wanted,) if wanted else ("c++", "g++", "clang++"):
        if path := shutil.which(name):
            said = subprocess.run(
                [path, "--version"], capture_output=True, text=True, timeout=10, check=False
            ).stdout
            return said.splitlines()[0] if said else path
    return f"CXX={wanted} is not found" if wanted else "none (c++, g++ and clang++ are not found)"


def settings(config: Config, facts: Facts) -> list[dict[str, Any]]:
    rows = [
        {"name": name, "value": getattr(config, name), "source": config.sources.get(name, "default")}
        for name in type(config).model_fields
    ]
    isa_source = facts.isa.source if facts.isa.source in ("HASTEN_ISA", "argument hardware") else "default"
    cache = cache_folder()
    rows.append({"name": "isa", "value": facts.isa.value, "source": isa_source})
    rows.append({"name": "cache folder", "value": str(cache.value), "source": cache.source})
    return rows


def optimisations(config: Config, facts: Facts) -> list[dict[str, str]]:
    """One row each: name, state (`on` or `off`) and why."""
    rows = []
    for level, meaning in _LEVELS.items():
        on = config.level >= level
        source = config.sources.get("level", "default")
        why = meaning if on else f"level = {config.level} ({source}); level {level} would {meaning}"
        rows.append((f"level {level}", on, why))
    kernels = native.state()
    rows.append(("native kernels", kernels.level is not None, kernels.reason))
    table = choices.in_force()
    rows.append(("measured choices", bool(table.rows), summary(table)))
    refusal = buffers.refusal()
    reuse = config.level > 0 and config.buffers and not refusal
    if refusal:
        why = refusal
    elif reuse:
        why = f"while a model is optimised: {buffers.way()}"
    elif config.buffers:
        why = "level = 0"
    else:
        why = f"buffers = False ({config.sources.get('buffers', 'default')})"
    rows.append(("buffer reuse", reuse, why))
    rows.append(_bf16(config, facts))
    proof = "each rewritten block is compared with the original, outputs and gradients, at its first run"
    rows.append(("proof", config.verify, proof if config.verify else "verify = False"))
    timing = "each rewritten block is timed against the original; the faster one stays"
    rows.append(("measuring", config.measure, timing if config.measure else "measure = False"))
    bound = f"the bound is {config.memory} ({config.sources.get('memory', 'default')})"
    rows.append(
        (
            "memory bound",
            config.memory is not None,
            bound if config.memory is not None else "memory is not set",
        )
    )
    return [{"name": name, "state": "on" if on else "off", "why": why} for name, on, why in rows]


def _bf16(config: Config, facts: Facts) -> tuple[str, bool, str]:
    source = config.sources.get("precision", "default")
    hardware = facts.bf16_in_hardware
    able = f"the processor {'has' if hardware.value else 'has no'} bf16 in hardware: {hardware.source}"
    if config.precision == "follow":
        return "bf16", False, f"precision = follow ({source}): the caller's torch.autocast decides; {able}"
    if config.precision == "auto":
        return "bf16", hardware.value, able
    return "bf16", config.precision == "bf16", f"precision = {config.precision} ({source}); {able}"

"""`hasten doctor`: what this machine has, what each optimisation does on it, and why a model is not faster.

`collect` gathers plain dictionaries (for `--json`), `render` makes them readable. With a model, one training
step of 64 tokens is run before and after `hasten.optimize`; the answers come from the report of the engine.
"""

from __future__ import annotations

from typing import Any

from hasten.base.config import make_config
from hasten.base.facts import ISA_LEVELS, detect
from hasten.base.screen import Screen
from hasten.doctor.machine import machine, optimisations, settings, versions
from hasten.doctor.model import examine, explain
from hasten.doctor.show import render

__all__ = ["collect", "explain", "render"]


def collect(model_id: str | None = None, screen: Screen | None = None) -> dict[str, Any]:
    """Everything that `hasten doctor [MODEL]` prints, as data that `json.dumps` takes.

    How far a model is goes to `screen`.
    Keys: `machine`, `isa`, `versions`, `settings`, `optimisations`, and with `model_id` also `model`.

    Raises:
        ConfigError: a setting in the environment is wrong.
        InputError: the model cannot be opened.
    """
    config = make_config()
    facts = detect(config.hardware)
    found: dict[str, Any] = {
        "machine": machine(facts),
        "isa": [{"level": level, "state": facts.isa_reason(level)} for level in ISA_LEVELS],
        "versions": versions(),
        "settings": settings(config, facts),
        "optimisations": optimisations(config, facts),
    }
    if model_id is not None:
        found["model"] = examine(model_id, facts, screen or Screen(enabled=False))
    return found

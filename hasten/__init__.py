"""hasten: one call makes a Transformer train faster in less memory, proven equal.

    import hasten
    hasten.optimize(model)        # in place
    print(hasten.report(model))   # what was replaced, what was left and why
    hasten.restore(model)         # bit-equal to the original

Names are imported on first use, so that `import hasten` costs nothing.
"""

from __future__ import annotations

from typing import Any

from hasten.base import lazy

__version__ = "0.1.0"

_HOMES = {
    "optimize": "hasten.graph.api",
    "restore": "hasten.graph.api",
    "report": "hasten.graph.api",
    "register_fusion_pattern": "hasten.graph.api",
    "fusion_patterns": "hasten.graph.api",
    "Report": "hasten.graph.records",
    "Config": "hasten.base.config",
    "HastenError": "hasten.base.errors",
    "UserError": "hasten.base.errors",
}

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    return lazy.attribute(__name__, name, _HOMES, __all__)


def __dir__() -> list[str]:
    return sorted(__all__)

"""hasten: one call makes a Transformer train faster in less memory, proven equal.

    import hasten
    hasten.optimize(model)        # in place
    print(hasten.report(model))   # what was replaced, what was left and why
    hasten.restore(model)         # bit-equal to the original

Names are imported on first use, so that `import hasten` costs nothing.
"""

from __future__ import annotations

import importlib
from typing import Any

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
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'hasten' has no attribute {name!r}; it has {', '.join(sorted(__all__))}")


def __dir__() -> list[str]:
    return sorted(__all__)

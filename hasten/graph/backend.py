"""PyTorch's own door: `torch.compile(model, backend="hasten")`.

The whole model is one graph here (or a few, where Dynamo breaks it), so the rules see across layers: a
residual sum at the end of one layer joins the norm at the start of the next.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import fx

from hasten.base.config import make_config
from hasten.base.errors import ConfigError
from hasten.graph.api import registered_rules
from hasten.graph.capture import Engine


def backend(module: fx.GraphModule, examples: Sequence[Any], **settings: Any) -> Callable[..., Any]:
    """Dynamo backend; `torch.compile(model, backend="hasten", options={"level": 2})` passes settings.

    Raises:
        ConfigError: for a setting that is unknown or out of range.
    """
    options = settings.pop("options", None) or {}
    if settings:
        raise ConfigError(
            f"backend 'hasten': unknown arguments {sorted(settings)}; pass settings as options={{...}}"
        )
    # Timing a whole model against itself would cost several steps; ask for it with options={"measure": True}.
    config = make_config(**{"measure": False, **options})
    if config.level == 0:
        return module.forward
    engine = Engine(config, registered_rules())
    compiled = engine.compile(module, "whole graph")
    captured.append(engine)
    del captured[:-_KEPT]
    return compiled


_KEPT = 8
captured: list[Engine] = []
"""The last few engines made by `torch.compile(backend="hasten")`, newest last: what `reports()` shows."""


def reports() -> list[Any]:
    """Records of the last graphs that `torch.compile(backend="hasten")` captured, newest last."""
    return [record for engine in captured for record in engine.graphs]

"""Training runs: `train(config)` for Python, `hasten train` for the command line."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from hasten.train.config import RunConfig, load_config

if TYPE_CHECKING:
    from hasten.train.result import Result

__all__ = ["RunConfig", "load_config", "train"]


def train(
    config: RunConfig, *, progress: bool = True, tune: bool = False, profile: Path | None = None
) -> Result:
    """Runs, or continues, the training that `config` describes; see `hasten.train.run`."""
    from hasten.train.run import train as run

    return run(config, progress=progress, tune=tune, profile=profile)

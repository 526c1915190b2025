"""`hasten train --profile FILE`: the seconds of one step's operators, for `hasten plan --profile`.

The format is `hasten-profile/1` (`hasten/plan/replay.py`). Of a few profiled steps the fastest is kept, and
the step's own seconds are those of the fastest of all, with the profiler or without: whatever else runs on
the machine, the profiler too, only adds.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import nn
from torch.autograd.profiler import profile

from hasten.base.errors import ConfigError
from hasten.base.facts import detect
from hasten.base.files import make_folder, write_atomically
from hasten.plan.job import Job
from hasten.plan.layout import Layout
from hasten.plan.model import from_config
from hasten.plan.replay import FORMAT, Profile
from hasten.train.config import RunConfig
from hasten.train.loop import Loop, StepNumbers

# The first steps capture, prove and allocate.
WARM_UP = 2
PROFILED = WARM_UP + 2
"""The first step that is profiled."""
MOST_PROFILED = 3


class Recorder:
    """Runs the steps of a run; a few from the fourth on under a profiler."""

    def __init__(
        self, config: RunConfig, precision: str, model: nn.Module, done_steps: int, file: Path
    ) -> None:
        """`done_steps`: those that an earlier part of the run made.

        Raises:
            ConfigError: the run has too few steps, or trains adapters.
            InputError: the planner cannot read the model's config.
            HastenError: the file's folder cannot be used.
        """
        if config.steps - done_steps < PROFILED:
            raise ConfigError(
                f"--profile needs {PROFILED} steps ({WARM_UP} to warm up, one without and one with the "
                f"profiler); this run makes {config.steps - done_steps}: the nearest is steps = "
                f"{done_steps + PROFILED}"
            )
        if config.lora is not None:
            raise ConfigError(
                "--profile: the planner has no price of adapters on one device; leave [lora] out"
            )
        make_folder(file.parent, f"--profile {file}: cannot be written")
        self.file = file
        batch = config.batch
        self._facts = {
            "format": FORMAT,
            "device": detect().processor.value,
            "model": from_config(model.config.to_dict(), config.model.id),  # type: ignore[union-attr, operator]
            "layout": Layout(
                micro_batch=batch.micro_rows,
                accumulation=batch.accumulation,
                recompute="full" if config.gradient_checkpointing else "none",
            ),
            "job": Job(
                batch=batch.rows,
                sequence=batch.sequence_tokens,
                precision=precision,  # type: ignore[arg-type]
                master="none" if config.model.dtype == "bf16" else "fp32",
                fused_loss=config.optimize,
            ),
        }
        self._steps = 0
        self._fastest_s = self._profiled_s = math.inf
        self._operators: dict[str, float] = {}

    def step(self, loop: Loop) -> StepNumbers:
        """One step of the loop."""
        self._steps += 1
        if not PROFILED <= self._steps < PROFILED + MOST_PROFILED:
            numbers = loop.step()
        else:
            with profile() as found:
                numbers = loop.step()
            if numbers.step_s < self._profiled_s:
                self._profiled_s = numbers.step_s
                self._operators = _seconds(found)
        if self._steps > WARM_UP:
            self._fastest_s = min(self._fastest_s, numbers.step_s)
        return numbers

    def write(self) -> str:
        """Writes the file where the step was reached; says what was done."""
        if not self._operators:
            return f"no profile: the run ended before its step {PROFILED}"
        # What slowed the profiled step slowed its operators.
        share = self._fastest_s / self._profiled_s
        seconds = {name: round(s * share, 7) for name, s in self._operators.items() if s >= 1e-6}
        found = Profile.model_validate(
            {
                **self._facts,
                "step_s": self._fastest_s,
                "operators_s": seconds,
                "source": f"hasten train, from step {PROFILED} on; {torch.get_num_threads()} threads",
            }
        )
        text = json.dumps(found.model_dump(exclude_defaults=True) | {"format": FORMAT}, indent=1)
        write_atomically(self.file, text + "\n")
        return f"profile: {self.file}"


def _seconds(found: profile) -> dict[str, float]:
    """Seconds of each operator without those that it calls."""
    seconds: dict[str, float] = {}
    for event in found.key_averages():
        seconds[event.key] = seconds.get(event.key, 0.0) + 1e-6 * event.self_cpu_time_total
    return seconds

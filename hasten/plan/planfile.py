"""`plan.toml`: the answer of a search as settings of `hasten train`.

What concerns one device are the ordinary settings (batch, micro batch, precision, recomputing); how several
devices share the run stands in `[layout]`.
"""

from __future__ import annotations

import json

from hasten.base.errors import ConfigError
from hasten.base.screen import spell_time
from hasten.plan.estimate import Estimate
from hasten.plan.job import Job

# Formats that `hasten train` computes in.
_PRECISIONS = ("bf16", "fp32")


def plan_toml(item: Estimate, job: Job, model_id: str) -> str:
    """The text of the file.

    Args:
        model_id: what `hasten train` opens: a preset, a hub id, a folder, a GGUF file.

    Raises:
        ConfigError: a format, an optimizer or a place for its states that `hasten train` does not have.
    """
    if job.precision not in _PRECISIONS:
        raise ConfigError(
            f"precision = {job.precision!r}: hasten train computes in {' or '.join(_PRECISIONS)}; plan "
            f"with one of them"
        )
    layout = item.layout
    if layout.offload != "none" or job.optimizer != "adamw":
        what = (
            f"offload = {layout.offload!r}" if layout.offload != "none" else f"optimizer = {job.optimizer!r}"
        )
        raise ConfigError(
            f"{what}: hasten train has adamw alone, with its states on the device; plan with both"
        )
    S = job.sequence
    lines = [
        "# Written by `hasten plan`; run it with: hasten train plan.toml --data my-texts/",
        f"# predicted: {spell_time(item.step_s.value)} a step ({spell_time(item.step_s.low)} to "
        f"{spell_time(item.step_s.high)}), {item.memory_peak / 1e9:.2f} GB, {item.confidence}",
        f'precision = "{job.precision}"',
        f"gradient_checkpointing = {str(layout.recompute != 'none').lower()}",
        "",
        "[model]",
        f"id = {json.dumps(model_id, ensure_ascii=False)}",
        "",
        "[batch]",
        f"sequence_tokens = {S}",
        f"batch_tokens = {S * job.batch}",
        f"micro_batch_tokens = {S * layout.micro_batch}",
    ]
    if layout.devices > 1:
        degrees = {name: getattr(layout, name) for name in ("tp", "cp", "pp", "virtual", "ep", "dp", "zero")}
        lines += ["", "[layout]", *(f"{name} = {value}" for name, value in degrees.items())]
        lines += [f"sequence_parallel = {str(layout.sp).lower()}", f'schedule = "{layout.schedule}"']
    return "\n".join(lines) + "\n"

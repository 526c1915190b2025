"""What a checkpoint holds: weights, optimizer, RNG, position; out of a loop and back into one."""

from __future__ import annotations

import base64
import platform
import random
from typing import Any

import numpy as np
import torch
import transformers
from torch import nn

import hasten
from hasten.base.errors import ConfigError
from hasten.train.checkpoint import Checkpoint, load, stored_tensors
from hasten.train.config import RunConfig
from hasten.train.loop import Loop
from hasten.train.optimizer import trainable

MODEL, OPTIMIZER = "model.", "optimizer."


def tensors(loop: Loop) -> dict[str, torch.Tensor]:
    """`model.<name>` and `optimizer.<name>.<state>`; live tensors, not copies; a tied weight once."""
    found = {f"{MODEL}{name}": value for name, value in _weights(loop.model, loop.config).items()}
    return found | {f"{OPTIMIZER}{name}": value for name, value in loop.stepper.tensors().items()}


def record(
    loop: Loop, settings: dict[str, Any], fingerprint: str, last_row: dict[str, Any] | None
) -> dict[str, Any]:
    """Everything of a checkpoint that is not a tensor, as JSON values."""
    return {
        "consumed_rows": loop.consumed_rows,
        "tokens": loop.tokens,
        "data_fingerprint": fingerprint,
        "settings": settings,
        "config": loop.config.as_json(),
        "base_model": loop.config.model.id,
        "optimizer_without_state": sorted(
            name
            for name, parameter in loop.stepper.parameters.items()
            if parameter not in loop.stepper.optimizer.state
        ),
        "last_row": last_row,
        "rng": rng_state(),
        "versions": {
            "hasten": hasten.__version__,
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
    }


def restore(loop: Loop, start: Checkpoint) -> None:
    """Puts a loop where it was when the checkpoint was written.

    Raises:
        CheckpointError: the checkpoint and the model do not have the same tensors; names one.
    """
    stored = stored_tensors(start)
    state = {
        name.removeprefix(OPTIMIZER): kind for name, kind in stored.items() if name.startswith(OPTIMIZER)
    }
    loop.stepper.allocate(state, start.record["optimizer_without_state"])
    load(start, tensors(loop))
    loop.step_number = start.step
    loop.consumed_rows = int(start.record["consumed_rows"])
    loop.tokens = int(start.record["tokens"])
    set_rng_state(start.record["rng"])


def fixed_settings(config: RunConfig, precision: str) -> dict[str, Any]:
    """The settings that decide the numbers of a run, with `auto` resolved."""
    return config.fixed_settings() | {"precision": precision}


def check_settings(config: RunConfig, precision: str, start: Checkpoint) -> None:
    """Refuses to continue a run under other settings.

    Raises:
        ConfigError: names every setting that differs, with both values.
    """
    here, there = fixed_settings(config, precision), start.record["settings"]
    changed = [name for name in sorted(here.keys() | there.keys()) if here.get(name) != there.get(name)]
    if changed:
        differences = "; ".join(f"{name} was {there.get(name)!r}, is {here.get(name)!r}" for name in changed)
        raise ConfigError(
            f"{start.path} was written under other settings: {differences}. Set them back to continue, "
            "or choose another output.folder to start anew"
        )


def seed_all(seed: int) -> None:
    """Seeds Python's, numpy's and torch's generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def rng_state() -> dict[str, Any]:
    """The state of every generator, as JSON values."""
    version, words, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "numpy": [name, np.asarray(keys).tolist(), int(position), int(has_gauss), float(cached)],
        "torch": _packed(torch.get_rng_state()),
    }
    if torch.cuda.is_available():
        state["cuda"] = [_packed(item) for item in torch.cuda.get_rng_state_all()]
    return state


def set_rng_state(state: dict[str, Any]) -> None:
    """The inverse of `rng_state`."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, np.asarray(keys, dtype=np.uint32), position, has_gauss, cached))
    torch.set_rng_state(_unpacked(state["torch"]))
    if torch.cuda.is_available() and len(state.get("cuda", ())) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all([_unpacked(item) for item in state["cuda"]])


def _weights(model: nn.Module, config: RunConfig) -> dict[str, torch.Tensor]:
    """With LoRA what is trained; else every parameter and every buffer that the model saves."""
    if config.lora is not None:
        return dict(trainable(model))
    saved = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return dict(model.named_parameters()) | buffers


def _packed(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode()


def _unpacked(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)

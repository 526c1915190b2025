"""AdamW with named parameters, and the learning rate as a function of the step."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from hasten.base.errors import CheckpointError
from hasten.ops.adamw import total_norm
from hasten.train.config import OptimizerSection, ScheduleSection


def lr_at(step: int, steps: int, lr: float, schedule: ScheduleSection) -> float:
    """The learning rate of optimizer step `step` (the first is 1) of `steps`.

    Warm-up rises linearly to `lr` at `warmup_steps`; then constant, or linear or cosine (Loshchilov and
    Hutter, 2017, without restarts) down to `min_lr_ratio * lr` at the last step.
    """
    warmup = schedule.warmup_steps
    if step <= warmup:
        return lr * step / warmup
    if schedule.kind == "constant":
        return lr
    past = (step - warmup) / max(1, steps - warmup)
    share = 1.0 - past if schedule.kind == "linear" else 0.5 * (1.0 + math.cos(math.pi * past))
    return lr * (schedule.min_lr_ratio + (1.0 - schedule.min_lr_ratio) * share)


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Every parameter that is trained, once, by name; one tied to several modules has its first name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Parameter groups: matrices decay; norms, biases and other vectors, and embedding tables, do not.

    A table that is tied to the output head is an embedding table.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    decayed: list[nn.Parameter] = []
    kept: list[nn.Parameter] = []
    for parameter in trainable(model).values():
        (decayed if parameter.ndim >= 2 and id(parameter) not in tables else kept).append(parameter)
    groups = [{"params": decayed, "weight_decay": weight_decay}, {"params": kept, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


class Stepper:
    """An AdamW optimizer, global gradient clipping, and its state by parameter name."""

    def __init__(
        self, model: nn.Module, section: OptimizerSection, *, fused: bool, shadows: bool = False
    ) -> None:
        """`fused` takes hasten's AdamW instead of torch's; the formula and the state are the same.

        shadows: the fused step also writes the bf16 weights, 2 bytes a parameter. What they ask for holds
        here: nothing writes weights between a step and the next forward pass (`hasten/ops/shadow.py`).
        """
        self.parameters = trainable(model)
        # hasten's optimizer clips inside its update, without a pass that writes the gradients.
        self._clip_norm = None if fused else section.max_grad_norm
        groups = decay_groups(model, section.weight_decay)
        settings: dict[str, Any] = {"lr": section.lr, "betas": section.betas, "eps": section.eps}
        self.optimizer: torch.optim.Optimizer
        if fused:
            from hasten.ops.adamw.optimizer import AdamW

            self.optimizer = AdamW(groups, max_grad_norm=section.max_grad_norm, shadows=shadows, **settings)
        else:
            self.optimizer = torch.optim.AdamW(groups, fused=True, **settings)

    def gradient_norm(self) -> float:
        """The L2 norm of all gradients together."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        return float(total_norm(gradients))

    def discard(self) -> None:
        """Frees the gradients unused."""
        self.optimizer.zero_grad(set_to_none=True)

    def step(self, lr: float, norm: float) -> None:
        """One update from the gradients, clipped to `max_grad_norm` if `norm` is above it; they are freed."""
        if self._clip_norm is not None and norm > self._clip_norm:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters.values(), self._clip_norm, torch.tensor(norm)
            )
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, torch.Tensor]:
        """`<parameter>.<state>` -> tensor; empty before the first step."""
        return {
            f"{name}.{key}": value
            for name, parameter in self.parameters.items()
            for key, value in self.optimizer.state.get(parameter, {}).items()
        }

    def allocate(
        self, stored: Mapping[str, tuple[tuple[int, ...], torch.dtype]], without: Iterable[str]
    ) -> None:
        """Makes room for the state named in a checkpoint, so that it can be loaded in place.

        `without`: parameters that had no state when the checkpoint was written (they never had a gradient).

        Raises:
            CheckpointError: state for a parameter that is not trained, or none for one that is; names it.
        """
        state: dict[str, dict[str, torch.Tensor]] = {}
        for full, (shape, dtype) in stored.items():
            name, _, key = full.rpartition(".")
            if name not in self.parameters:
                raise CheckpointError(
                    f"the checkpoint holds optimizer state for {name}, which is not trained"
                )
            device = self.parameters[name].device
            state.setdefault(name, {})[key] = torch.empty(shape, dtype=dtype, device=device)
        if missing := sorted(self.parameters.keys() - state.keys() - set(without)):
            raise CheckpointError(
                f"the checkpoint has no optimizer state for {missing[0]} (of {len(missing)})"
            )
        # Not by load_state_dict, which would cast fp32 state to the format of a bf16 parameter.
        for name, tensors in state.items():
            self.optimizer.state[self.parameters[name]] = tensors

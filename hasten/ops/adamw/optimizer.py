"""AdamW as a torch optimizer: torch's own constructor and state, with gradient clipping inside the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hasten.base.errors import ConfigError
from hasten.ops import shadow
from hasten.ops.adamw import adamw_, total_norm


class AdamW(torch.optim.Optimizer):
    """Drop-in for `torch.optim.AdamW`; a state_dict of one loads in the other.

    Args:
        params, lr, betas, eps, weight_decay: as `torch.optim.AdamW`.
        amsgrad, maximize, capturable, differentiable: accepted for the same signature, must be False.
        foreach, fused: accepted and without effect; the step is always the fused one.
        max_grad_norm: clip the gradients' total 2-norm over all groups to this, as
            `torch.nn.utils.clip_grad_norm_` does, but without writing the scaled gradients.
        shadows: for parameters of a model under `hasten.optimize`, also writes the bfloat16 copies that its
            products use, so that no forward pass casts. The promise: between a step and the next one nothing
            writes parameters through `.data`, which leaves no trace (`with torch.no_grad(): p.clamp_()` is
            seen). Costs 2 bytes a parameter.

    Attributes:
        last_grad_norm: total 2-norm of the last step's gradients before clipping; None if it was not needed.

    Raises:
        ConfigError: a value is out of range or a mode is not supported.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        max_grad_norm: float | None = None,
        shadows: bool = False,
    ) -> None:
        modes = {
            "amsgrad": amsgrad,
            "maximize": maximize,
            "capturable": capturable,
            "differentiable": differentiable,
        }
        for name, value in modes.items():
            if value:
                raise ConfigError(f"AdamW: {name}={value} is not supported; allowed: False")
        bounds = {"lr": float(lr), "eps": eps, "weight_decay": weight_decay}
        for name, number in bounds.items():
            if not number >= 0:
                raise ConfigError(f"AdamW: {name} must be >= 0, got {number}")
        if not all(0 <= beta < 1 for beta in betas):
            raise ConfigError(f"AdamW: betas must be in [0, 1), got {betas}")
        if max_grad_norm is not None and not max_grad_norm > 0:
            raise ConfigError(f"AdamW: max_grad_norm must be > 0 or None, got {max_grad_norm}")
        # The keys and values of torch.optim.AdamW's groups, so that the two can load each other's state.
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            **modes,
            "foreach": foreach,
            "fused": fused,
            "decoupled_weight_decay": True,
        }
        super().__init__(params, defaults)
        self.max_grad_norm = max_grad_norm
        self.shadows = shadows
        self.last_grad_norm: Tensor | None = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """One step over every parameter that has a gradient; returns the closure's loss, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        grad_scale = self._clip_factor()
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            params = [p for p in group["params"] if p.grad is not None]
            states = [self._state_of(p) for p in params]
            if self.shadows:
                shadow.follow(params)
            adamw_(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [state["step"] for state in states],
                float(group["lr"]),
                beta1,
                beta2,
                group["eps"],
                group["weight_decay"],
                grad_scale,
            )
        return loss

    def _clip_factor(self) -> float:
        if self.max_grad_norm is None:
            self.last_grad_norm = None
            return 1.0
        grads = [p.grad for group in self.param_groups for p in group["params"] if p.grad is not None]
        self.last_grad_norm = total_norm(grads)
        # The small constant is that of torch.nn.utils.clip_grad_norm_.
        return min(1.0, self.max_grad_norm / (self.last_grad_norm.item() + 1e-6))

    def _state_of(self, param: Tensor) -> dict[str, Tensor]:
        state: dict[str, Tensor] = self.state[param]
        if not state:
            wide = torch.promote_types(param.dtype, torch.float32)
            state["step"] = torch.zeros((), dtype=torch.float32)
            state["exp_avg"] = torch.zeros_like(param, dtype=wide, memory_format=torch.preserve_format)
            state["exp_avg_sq"] = torch.zeros_like(param, dtype=wide, memory_format=torch.preserve_format)
        return state

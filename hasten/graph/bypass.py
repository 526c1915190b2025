"""When a block's original code must run in place of its captured graph, and the words for it in the report.

Dynamo guards neither hooks on inner modules nor what only exists around one call (transforms of `torch.func`,
dispatch modes), and one graph serves all blocks of a class: each call of a block is looked at here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

_PLAIN = (torch.Tensor, bool, int, float, str, type(None), torch.dtype, torch.device)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_RECORDER = "transformers.utils.output_capturing"


def bypass_reason(block: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> str:
    """Why this call cannot run the captured graph; empty if it can."""
    if kwargs.get("output_attentions"):
        return "attention weights were asked for"
    for name, given in (*((f"argument {i}", a) for i, a in enumerate(args)), *kwargs.items()):
        pieces = given if isinstance(given, (tuple, list)) else (given,)
        for piece in pieces:
            if not isinstance(piece, _PLAIN):
                if "Cache" in type(piece).__name__:
                    return "with a key-value cache"
                return f"{name} is a {type(piece).__name__}"
            if isinstance(piece, torch.Tensor) and type(piece) not in (torch.Tensor, nn.Parameter):
                return f"{name} is a {type(piece).__name__}"
    if transforming():
        return "inside a transform of torch.func"
    if torch.jit.is_tracing():
        return "inside torch.jit.trace"
    if torch._C._len_torch_dispatch_stack():
        return "inside a dispatch mode, which is to see every operator"
    return _hooked(block)


def transforming() -> bool:
    """Whether grad, vmap, jvp or another transform of torch.func is at work around this call."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def recorded() -> frozenset[str]:
    """What transformers record in this forward by hooks of their own: `attentions`, `router_logits`, ..."""
    from transformers.utils import output_capturing

    collector = output_capturing._active_collector.get()
    return frozenset() if collector is None else frozenset(collector)


def _hooked(block: nn.Module) -> str:
    if _has_any_global_hook():
        return "a hook on all modules is registered"
    for module in block.modules():
        if module is block:  # its hooks run around its forward, whatever stands there
            continue
        for kind in _HOOKS:
            for hook in module.__dict__[kind].values():
                if _acts(hook):
                    return f"a hook is registered inside, on a {type(module).__name__}"
    return ""


def observed(block: nn.Module) -> bool:
    """Whether hooks on the block itself see what goes in or comes out in this call."""
    return any(_acts(hook) for kind in _HOOKS for hook in block.__dict__[kind].values())


def _acts(hook: Callable[..., Any]) -> bool:
    """Whether the hook does anything: transformers leave theirs behind, idle until an output is asked for."""
    if getattr(hook, "__module__", "") != _RECORDER:
        return True
    wanted = recorded()
    return bool(wanted) and inspect.getclosurevars(hook).nonlocals.get("key") in wanted

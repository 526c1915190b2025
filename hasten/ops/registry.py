"""How an operator enters `torch.ops.hasten.*`: one call that states everything that PyTorch must know.

An operator folder holds `reference.py` (the meaning, in plain torch) and calls `operator(...)` from its
`__init__.py`. The five parts are kept apart on purpose:

- `forward`   the body for every device without a kernel of its own; sees no autograd and no autocast;
- `fake`      shapes and dtypes only, for tracing;
- `save`      which tensors the backward pass needs: `save(ctx, inputs, output)`;
- `backward`  explicit gradients; runs with autocast off whatever the caller's state is;
- `autocast`  how the arguments change inside `torch.autocast`: `autocast(dtype, *args) -> args`.
  Without it the operator keeps its dtypes, like a norm.

A forward asks `native.refusal(...)` and calls a kernel or does the work in torch; where both can, the table
of `choices.py` decides.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hasten.ops import choices, native

_AUTOCAST_KEYS = {"cpu": "AutocastCPU", "cuda": "AutocastCUDA"}
_LIBRARY = torch.library.Library("hasten", "DEF")
_NO_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)

names: list[str] = []
"""The operators that exist, in order of definition."""


def operator(
    name: str,
    schema: str,
    *,
    forward: Callable[..., Any],
    fake: Callable[..., Any],
    save: Callable[[Any, Sequence[Any], Any], None] | None = None,
    backward: Callable[..., Any] | None = None,
    autocast: Callable[..., tuple[Any, ...]] | None = None,
) -> torch._ops.OpOverload:
    """Defines `hasten::name` with the given torch schema and returns its overload.

    Args:
        name: name inside the `hasten` namespace.
        schema: the schema without the name, e.g. `"(Tensor x, float eps) -> Tensor"`.
        forward, fake, save, backward, autocast: see the module's docstring.

    Raises:
        RuntimeError: from torch, if the name is taken or the schema does not parse.
    """
    _LIBRARY.define(f"{name}{schema}")
    _LIBRARY.impl(name, _chosen_body(name, forward), "CompositeExplicitAutograd")
    qualified = f"hasten::{name}"
    torch.library.register_fake(qualified, fake, lib=_LIBRARY)
    if backward is not None:

        def backward_without_autocast(ctx: Any, *grads: Any) -> Any:
            if torch.is_grad_enabled():
                # The formulas treat saved statistics as constants: a second derivative would be wrong.
                raise RuntimeError(
                    f"hasten::{name} has no second derivative; call backward without create_graph=True"
                )
            with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
                return backward(ctx, *grads)

        torch.library.register_autograd(
            qualified, backward_without_autocast, setup_context=_positional(save), lib=_LIBRARY
        )
    overload: torch._ops.OpOverload = getattr(torch.ops.hasten, name).default
    if autocast is not None:
        for device, key in _AUTOCAST_KEYS.items():
            _LIBRARY.impl(name, _autocast_kernel(overload, device, autocast), key)
    names.append(name)
    return overload


def _chosen_body(name: str, forward: Callable[..., Any]) -> Callable[..., Any]:
    """`forward`, with its native kernels off where the table of this machine says that torch is faster."""

    def body(*args: Any, **kwargs: Any) -> Any:
        if choices.takes_torch(name, args):
            with native.switched_off():
                return forward(*args, **kwargs)
        return forward(*args, **kwargs)

    return body


def _positional(save: Callable[[Any, Sequence[Any], Any], None] | None) -> Callable[..., None] | None:
    if save is None:
        return None

    def setup_context(ctx: Any, inputs: Sequence[Any], output: Any) -> None:
        save(ctx, inputs, output)

    return setup_context


def _autocast_kernel(
    overload: torch._ops.OpOverload, device: str, autocast: Callable[..., tuple[Any, ...]]
) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        dtype = torch.get_autocast_dtype(device)
        with torch._C._ExcludeDispatchKeyGuard(_NO_AUTOCAST):
            return overload(*autocast(dtype, *args, **kwargs))

    return kernel


def cast(tensor: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """Autocast's rule for one argument: floating tensors narrower than float64 become `dtype`."""
    if tensor is None or not tensor.is_floating_point() or tensor.dtype in (dtype, torch.float64):
        return tensor
    return tensor.to(dtype)

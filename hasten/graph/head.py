"""The output head: logits that are computed only if somebody looks at them.

A training step needs the cross-entropy of the logits, not the logits: `[tokens, vocabulary]` in fp32 is often
the largest tensor of the step. The head of an optimised model returns `DeferredLogits`. Whatever reaches
`torch.nn.functional.cross_entropy` through casts, views, leading slices, scaling and soft-capping runs as
`hasten::linear_cross_entropy` in chunks; anything else computes the logits once, as the original head would,
and goes on with them. So a loss of the user's own, generation and evaluation work unchanged.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from hasten.graph.bypass import transforming
from hasten.graph.deferred import Deferred, Pullback
from hasten.graph.instance import InstanceForward
from hasten.ops.cross_entropy import linear_cross_entropy


@dataclass(frozen=True)
class _Recipe:
    """softcap(scale * (hidden W^T + bias)) in `compute` (None: no autocast), then cast to `dtype`."""

    hidden: torch.Tensor
    weight: torch.Tensor
    bias: torch.Tensor | None
    compute: torch.dtype | None
    dtype: torch.dtype
    scale: float = 1.0
    softcap: float = 0.0
    inside_tanh: bool = False
    """tanh is applied, its outer factor not yet: only a product with the cap completes the soft-cap."""
    versions: tuple[int, ...] = ()
    """`_versions` of the head when it was called."""

    @property
    def vocabulary(self) -> int:
        return self.weight.shape[0]

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.hidden.shape[:-1], self.vocabulary))

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        return tuple(t for t in (self.hidden, self.weight, self.bias) if t is not None)

    def evaluate(self) -> torch.Tensor:
        _warn_of_new_weights(self)
        with torch.autocast(
            self.hidden.device.type, dtype=self.compute or torch.bfloat16, enabled=self.compute is not None
        ):
            logits = F.linear(self.hidden, self.weight, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.inside_tanh or self.softcap:
            logits = torch.tanh(logits / self.softcap) if self.softcap else torch.tanh(logits)
        if self.softcap and not self.inside_tanh:
            logits = logits * self.softcap
        return logits.to(self.dtype)

    def pullback(self) -> Pullback:
        """Makes the logits once more, which only a caller that takes them unseen pays for."""

        def rule(grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
            wanted = [part for part in self.parts if part.requires_grad]
            again = torch.is_grad_enabled()
            with torch.enable_grad():
                value = self.evaluate()
            found = iter(torch.autograd.grad(value, wanted, grad, create_graph=again))
            return tuple(next(found) if part.requires_grad else None for part in self.parts)

        return rule


class DeferredLogits(Deferred):
    """Stands for `head(hidden)`; see the module's docstring."""


def _versions(weight: torch.Tensor, bias: torch.Tensor | None) -> tuple[int, ...]:
    """How often each tensor was written in place; inference tensors do not count that."""
    return tuple(0 if t is None or t.is_inference() else t._version for t in (weight, bias))


def _warn_of_new_weights(recipe: _Recipe) -> None:
    if recipe.versions and recipe.versions != _versions(recipe.weight, recipe.bias):
        warnings.warn(
            "the logits of an optimised model are computed where they are looked at, and the weights of the "
            "output head were changed since the forward pass (by an optimizer step?): they are computed with "
            "the new weights. Look at them before the weights change.",
            stacklevel=2,
        )


def _cast(recipe: _Recipe, *args: Any, **kwargs: Any) -> Any:
    dtypes = [a for a in (*args, *kwargs.values()) if isinstance(a, torch.dtype)]
    harmless = {"dtype", "non_blocking", "device"}
    devices = [a for a in (*args, *kwargs.values()) if isinstance(a, (torch.device, str))]
    if (
        len(dtypes) > 1
        or set(kwargs) - harmless
        or any(torch.device(d) != recipe.hidden.device for d in devices)
    ):
        return NotImplemented
    if any(not isinstance(a, (torch.dtype, torch.device, str, bool)) for a in args):
        return NotImplemented
    return _to_dtype(recipe, dtypes[0] if dtypes else recipe.dtype)


def _to_dtype(recipe: _Recipe, dtype: torch.dtype) -> Any:
    if not dtype.is_floating_point or torch.finfo(dtype).bits < torch.finfo(recipe.dtype).bits:
        return NotImplemented
    return replace(recipe, dtype=dtype)


def _reshape(recipe: _Recipe, *sizes: Any, shape: Any = None) -> Any:
    if any(isinstance(s, torch.dtype) for s in sizes):
        return NotImplemented
    wanted = list(
        shape
        if shape is not None
        else sizes[0]
        if len(sizes) == 1 and not isinstance(sizes[0], int)
        else sizes
    )
    if not all(isinstance(s, int) for s in wanted):
        return NotImplemented
    total = recipe.shape.numel()
    if wanted.count(-1) == 1:
        known = 1
        for s in wanted:
            known *= s if s != -1 else 1
        if known == 0:
            return NotImplemented
        wanted[wanted.index(-1)] = total // known
    if not wanted or wanted[-1] != recipe.vocabulary:
        return NotImplemented
    return replace(recipe, hidden=recipe.hidden.reshape(*wanted[:-1], recipe.hidden.shape[-1]))


def _index(recipe: _Recipe, key: Any) -> Any:
    keys = key if isinstance(key, tuple) else (key,)
    if any(not (isinstance(k, (int, slice)) or k is Ellipsis) or isinstance(k, bool) for k in keys):
        return NotImplemented
    if Ellipsis in keys:
        at = keys.index(Ellipsis)
        keys = (*keys[:at], *([slice(None)] * (recipe.hidden.dim() - len(keys) + 1)), *keys[at + 1 :])
    if len(keys) > recipe.hidden.dim():
        return NotImplemented
    if len(keys) == recipe.hidden.dim():
        if keys[-1] != slice(None):
            return NotImplemented
        keys = keys[:-1]
    return replace(recipe, hidden=recipe.hidden[keys])


def _same(recipe: _Recipe, *args: Any, **kwargs: Any) -> Any:
    return recipe if not args and not kwargs else NotImplemented


def _times(recipe: _Recipe, factor: Any, **kwargs: Any) -> Any:
    if kwargs or isinstance(factor, bool) or not isinstance(factor, (int, float)) or factor == 0:
        return NotImplemented
    if recipe.inside_tanh:
        cap = recipe.softcap or 1.0
        return replace(recipe, inside_tanh=False) if abs(factor - cap) <= 1e-6 * cap else NotImplemented
    if recipe.softcap:
        return NotImplemented
    return replace(recipe, scale=recipe.scale * factor)


def _divide(recipe: _Recipe, divisor: Any, **kwargs: Any) -> Any:
    if (
        kwargs
        or isinstance(divisor, bool)
        or not isinstance(divisor, (int, float))
        or divisor == 0
        or recipe.inside_tanh
    ):
        return NotImplemented
    return _times(recipe, 1.0 / divisor)


def _tanh(recipe: _Recipe, **kwargs: Any) -> Any:
    """tanh(logits / c): the cap is 1 / scale, as far as the scale stands for that division alone."""
    if kwargs or recipe.inside_tanh or recipe.softcap or recipe.scale == 1.0:
        return NotImplemented
    return replace(recipe, scale=1.0, softcap=1.0 / recipe.scale, inside_tanh=True)


def _detach(recipe: _Recipe) -> Any:
    bias = recipe.bias.detach() if recipe.bias is not None else None
    return replace(recipe, hidden=recipe.hidden.detach(), weight=recipe.weight.detach(), bias=bias)


def _cross_entropy(
    recipe: _Recipe,
    target: torch.Tensor,
    weight: torch.Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    simple = weight is None and size_average is None and reduce is None and reduction in ("mean", "sum")
    classes = recipe.hidden.dim() == 2 and target.dim() == 1 and not target.is_floating_point()
    if not (simple and classes) or recipe.inside_tanh:
        return NotImplemented
    _warn_of_new_weights(recipe)
    with torch.autocast(
        recipe.hidden.device.type, dtype=recipe.compute or torch.bfloat16, enabled=recipe.compute is not None
    ):
        return linear_cross_entropy(
            recipe.hidden,
            recipe.weight,
            target,
            recipe.bias,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            logit_scale=recipe.scale,
            softcap=recipe.softcap,
            reduction=reduction,
        )


DeferredLogits._handlers = {
    F.cross_entropy: _cross_entropy,
    torch.Tensor.float: lambda recipe: _to_dtype(recipe, torch.float32),
    torch.Tensor.double: lambda recipe: NotImplemented,
    torch.Tensor.to: _cast,
    torch.Tensor.view: _reshape,
    torch.Tensor.reshape: _reshape,
    torch.reshape: _reshape,
    torch.Tensor.contiguous: _same,
    torch.Tensor.__getitem__: _index,
    torch.Tensor.mul: _times,
    torch.Tensor.__mul__: _times,
    torch.Tensor.__rmul__: _times,
    torch.mul: _times,
    torch.Tensor.div: _divide,
    torch.Tensor.__truediv__: _divide,
    torch.div: _divide,
    torch.tanh: _tanh,
    torch.Tensor.tanh: _tanh,
    torch.Tensor.detach: _detach,
}


class HeadForward(InstanceForward):
    """Stands in `forward` of the model's output head, an instance of `nn.Linear`."""

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        head = self.module
        rows = input.numel() // max(input.shape[-1], 1)
        plain = type(input) is torch.Tensor and input.is_floating_point()
        traced = torch.compiler.is_compiling() or torch.jit.is_tracing()
        if traced or rows <= 1 or not plain or transforming():
            return F.linear(input, head.weight, head.bias)
        device = input.device.type
        compute = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        narrow = compute if compute is not None and input.dtype != torch.float64 else None
        recipe = _Recipe(
            input, head.weight, head.bias, narrow, narrow or input.dtype,
            versions=_versions(head.weight, head.bias),
        )  # fmt: skip
        return DeferredLogits(recipe)


def find_head(model: nn.Module) -> tuple[nn.Linear | None, str]:
    """The output head by transformers' own accessor, or why there is none to replace."""
    accessor = getattr(model, "get_output_embeddings", None)
    head = accessor() if callable(accessor) else None
    if head is None:
        return None, "the model has no output head over a vocabulary"
    if type(head) is not nn.Linear:
        return None, f"the output head is a {type(head).__name__}, not a plain Linear"
    if "forward" in head.__dict__ and not isinstance(head.__dict__["forward"], HeadForward):
        return None, "the output head's forward was replaced before"
    return head, "on: cross-entropy runs in chunks, logits are computed only where they are looked at"

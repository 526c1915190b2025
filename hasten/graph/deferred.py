"""Tensors whose value is computed only if somebody looks at it.

A `Deferred` has shape, dtype, device and a place in autograd's graph from the start; its value is made from a
plan at the first operator that needs it, and stands in its place from then on. What a subclass adds is the
plan, and the functions that make a new plan instead of a value (`_handlers`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

Pullback = Callable[[Tensor], tuple[Tensor | None, ...]]


class Plan(Protocol):
    """How a value is made from `parts`, the tensors that its gradient goes to."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def parts(self) -> tuple[Tensor, ...]: ...

    def evaluate(self) -> Tensor:
        """The value, with the autograd history of the parts under the grad mode in force."""

    def pullback(self) -> Pullback:
        """From the gradient of the value to those of the parts; kept as long as the tensor's graph is."""


class _Node(torch.autograd.Function):
    """Gives a deferred tensor its place in the graph.

    Functions that take it without looking at it through `__torch_function__` (a custom `autograd.Function`,
    `torch.autograd.backward`, hooks of modules on gradients) find the history here.
    """

    @staticmethod
    def forward(ctx: Any, make: Callable[[], Tensor], pullback: Pullback, *parts: Tensor) -> Tensor:
        ctx.pullback = pullback
        return make()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return (None, None, *ctx.pullback(grads[0]))


class Deferred(Tensor):
    """See the module's docstring; a subclass is made from its plan."""

    _handlers: ClassVar[Mapping[Any, Callable[..., Any]]] = {}
    """Function -> what answers it from (plan, further arguments): a plan, a result or NotImplemented."""

    _plan: Any
    """The plan; None when the value is there, so that the parts are not held any longer."""

    _value: Tensor | None

    @staticmethod
    def __new__(cls, plan: Plan) -> Any:
        parts = plan.parts

        def make() -> Tensor:
            made = Tensor._make_wrapper_subclass(cls, plan.shape, dtype=plan.dtype, device=parts[0].device)
            made._plan, made._value = plan, None  # type: ignore[attr-defined]
            return made

        if torch.is_grad_enabled() and any(p.requires_grad for p in parts):
            return _Node.apply(make, plan.pullback(), *parts)
        return make()

    def materialise(self) -> Tensor:
        """The value as an ordinary tensor with its autograd history; computed once.

        The history is that of the plan, whatever grad mode reigns where somebody looks.
        """
        if self._value is None:
            with torch.inference_mode(False), torch.set_grad_enabled(self.requires_grad):
                self._settle(self._plan.evaluate())
        assert self._value is not None
        return self._value

    def _settle(self, value: Tensor) -> None:
        self._value, self._plan = value, None

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else None
        if isinstance(first, Deferred) and first._value is None:
            if func in _METADATA:
                with torch._C.DisableTorchFunctionSubclass():
                    return func(*args, **kwargs)
            handler = first._handlers.get(func)
            if handler is not None:
                with torch.set_grad_enabled(torch.is_grad_enabled() and first.requires_grad):
                    answer = handler(first._plan, *args[1:], **kwargs)
                    if isinstance(answer, type(first._plan)):
                        return type(first)(answer)
                if answer is not NotImplemented:
                    return answer
        plain_args, plain_kwargs = plain((tuple(args), kwargs))
        return func(*plain_args, **plain_kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        # Reached by callers in C++, which skip __torch_function__: autograd has seen this tensor already.
        plain_args, plain_kwargs = plain((tuple(args), kwargs or {}))
        return func(*plain_args, **plain_kwargs)


def plain(tree: Any) -> Any:
    """`tree` with the value of each deferred tensor in its place."""
    return tree_map_only(Deferred, lambda deferred: deferred.materialise(), tree)


_PROPERTIES = (
    "shape", "dtype", "device", "ndim", "requires_grad", "layout", "is_sparse", "is_quantized", "is_meta",
    "is_cuda", "is_mps", "is_xpu", "itemsize", "is_nested",
)  # fmt: skip
_METADATA = {getattr(Tensor, name).__get__ for name in _PROPERTIES} | {
    Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.is_floating_point, Tensor.is_complex,
    Tensor.get_device, Tensor.element_size, Tensor.__len__,
    torch.is_floating_point, torch.numel, torch.is_complex, torch.is_tensor,
}  # fmt: skip

"""A callable that stands in the `forward` attribute of one module instance.

The class stays as it is, so other models, hooks and saving are untouched; a copy of the module gets a
callable of its own, and a pickled one is an ordinary module again, since compiled code does not travel.
"""

from __future__ import annotations

import copy
from typing import Any, ClassVar, TypeVar

from torch import nn

_Self = TypeVar("_Self", bound="InstanceForward")


class InstanceForward:
    """Base of what `optimize` puts into `forward`; `previous` is an own forward that stood there before."""

    _copied: ClassVar[tuple[str, ...]] = ("module",)
    """Attributes that a copy of the module has of its own; all others are shared."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        before = module.__dict__.get("forward")
        # A module reached twice is put back once.
        self.previous = before.previous if isinstance(before, InstanceForward) else before
        self.__name__ = "forward"

    def __deepcopy__(self: _Self, memo: dict[int, Any]) -> _Self:
        twin = object.__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(self.__dict__)
        for name in self._copied:
            twin.__dict__[name] = copy.deepcopy(self.__dict__[name], memo)
        return twin

    def __reduce__(self) -> Any:
        return _plain_forward, (self.module,)


def _plain_forward(module: nn.Module) -> Any:
    return type(module).forward.__get__(module)


def put_back(module: nn.Module) -> None:
    """Removes the callable of `optimize` from `module`, if one stands there."""
    replaced = module.__dict__.get("forward")
    if not isinstance(replaced, InstanceForward):
        return
    del module.__dict__["forward"]
    if replaced.previous is not None:
        module.__dict__["forward"] = replaced.previous

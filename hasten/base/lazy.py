"""Names of a package that are imported on first use (PEP 562): importing the package then costs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from typing import Any


def attribute(package: str, name: str, homes: Mapping[str, str], names: Iterable[str]) -> Any:
    """What a package's `__getattr__` returns.

    Args:
        homes: a name -> the module that has it.
        names: all that the package has, for the message.

    Raises:
        AttributeError: no such name.
    """
    if name in homes:
        return getattr(importlib.import_module(homes[name]), name)
    raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(names))}")

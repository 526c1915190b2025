"""What every operator test runs under: a fixed seed, one thread count, and poisoned fresh memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from hasten.ops import native

FRESH = [
    (torch, "empty"),
    (torch, "empty_like"),
    (torch, "empty_strided"),
    (torch.Tensor, "new_empty"),
    (torch.Tensor, "new_empty_strided"),
    (np, "empty"),
]


def _poisoned(function: Callable[..., Any]) -> Callable[..., Any]:
    def fresh(*args: Any, **kwargs: Any) -> Any:
        tensor = function(*args, **kwargs)
        if isinstance(tensor, np.ndarray) and tensor.dtype.kind == "f":
            tensor.fill(np.nan)
        if isinstance(tensor, torch.Tensor) and tensor.dtype.is_floating_point:
            with torch.no_grad():
                tensor.fill_(float("nan"))
        return tensor

    return fresh


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An output that is not written shows as NaN, also one that a native kernel allocates."""
    for holder, name in FRESH:
        monkeypatch.setattr(holder, name, _poisoned(getattr(holder, name)))
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(params=["native", "torch"])
def body(request: pytest.FixtureRequest) -> Iterator[str]:
    """Runs a test with the native kernels and again with the torch bodies."""
    if request.param == "native":
        if native.state().level is None:
            pytest.skip(native.state().reason)
        yield "native"
        return
    with native.switched_off():
        yield "torch"


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """The same random numbers and two threads for each test."""
    threads = torch.get_num_threads()
    torch.manual_seed(0)
    torch.set_num_threads(min(2, threads))
    yield
    torch.set_num_threads(threads)

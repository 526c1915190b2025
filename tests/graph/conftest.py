"""What these tests run under."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # Dynamo looks at `.grad` of every input and makes an instance of every autograd.Function. It hides the
    # warnings about itself from the screen, but not from `-W error`.
    own = ("The .grad attribute of a Tensor that is not a leaf", ".*should not be instantiated")
    for item in items:
        if item.path.parent == Path(__file__).parent:
            for message in own:
                item.add_marker(pytest.mark.filterwarnings(f"ignore:{message}"))


@pytest.fixture(autouse=True)
def one_thread_and_fresh_dynamo() -> Iterator[None]:
    """Small tensors run fastest on one thread; no test inherits the graphs of another."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch._dynamo.reset()

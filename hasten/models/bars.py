"""The progress bars of transformers, kept away while there is nothing to wait for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

BAR_AFTER_S = 2.0


@contextmanager
def late_bars() -> Iterator[None]:
    """Inside the block a bar of transformers appears after two seconds at the earliest."""
    from transformers.utils import logging

    def late(factory: Callable[..., Any], args: tuple[Any, ...], settings: dict[str, Any]) -> Any:
        if before is not None:
            return before(factory, args, settings)
        return factory(*args, **{"delay": BAR_AFTER_S, **settings})

    # A hook that a caller has set decides for itself.
    before = logging.set_tqdm_hook(None)
    logging.set_tqdm_hook(late)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)

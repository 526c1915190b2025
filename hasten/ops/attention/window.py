"""The key ranges of causal attention with a window, by name: a graph that holds it tells the window."""

from __future__ import annotations

import torch
from torch import Tensor

from hasten.ops.registry import operator

__all__ = ["window_ranges"]


def window_ranges(rows: Tensor, window: int) -> Tensor:
    """Visible keys of each row i: [max(0, i - window + 1), i + 1); with a window of -1 all, [0, S).

    Args:
        rows: [B, S, ...]; only its sizes count.
        window: at most so many keys, the row's own among them; 0 is no limit, -1 sees later keys too.

    Returns:
        int32 [B, S, 2], as `attention` takes them.
    """
    return torch.ops.hasten.window_ranges(rows, window)  # type: ignore[no-any-return]


def _forward(rows: Tensor, window: int) -> Tensor:
    last = torch.arange(1, rows.shape[1] + 1, dtype=torch.int32, device=rows.device)
    first = (last - window).clamp(min=0) if window > 0 else torch.zeros_like(last)
    last = last if window >= 0 else torch.full_like(last, rows.shape[1])
    return torch.stack((first, last), dim=-1).expand(rows.shape[0], -1, -1).contiguous()


def _fake(rows: Tensor, window: int) -> Tensor:
    return rows.new_empty((rows.shape[0], rows.shape[1], 2), dtype=torch.int32)


operator("window_ranges", "(Tensor rows, int window) -> Tensor", forward=_forward, fake=_fake)

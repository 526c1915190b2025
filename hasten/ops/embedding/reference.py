"""The meaning of the embedding: rows of the weight, times a constant."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def embedding(ids: Tensor, weight: Tensor, padding_idx: int = -1, scale: float = 1.0) -> Tensor:
    """weight[ids] * scale; ids of any shape [...], weight [V, H], result [..., H] in weight.dtype."""
    rows = F.embedding(ids, weight, None if padding_idx < 0 else padding_idx)
    return rows if scale == 1.0 else rows * scale

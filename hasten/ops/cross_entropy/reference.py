"""What the output head with cross-entropy means, in plain torch that autograd can follow."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None = None,
    *,
    token_weight: Tensor | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    logit_scale: float = 1.0,
    softcap: float = 0.0,
    compute: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(loss_sum, weight_sum, z_sum) for x [N, K], weight [V, K], labels [N]; see the package."""
    dtype = x.dtype if compute is None else compute
    wide = torch.promote_types(x.dtype, torch.float32)
    logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)).to(wide)
    logits = logits * logit_scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    valid = labels != ignore_index
    w = valid.to(wide) if token_weight is None else torch.where(valid, token_weight.to(wide), 0.0)
    loss = F.cross_entropy(
        logits, labels, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    )
    z_sum = z_loss * (w * torch.logsumexp(logits, -1).square()).sum()
    return (w * loss).sum() + z_sum, w.sum(), z_sum

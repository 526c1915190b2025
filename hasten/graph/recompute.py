"""A bound on memory, kept by recomputing whole blocks in the backward pass (Chen et al. 2016).

The operators already rebuild what is cheap; this is for what is left. On the first training forward the bytes
that one block stores for its backward pass are counted. From the process's memory at that moment, what is
still to come (gradients, the optimizer's two moments) and the blocks ahead follows how many blocks must be
recomputed, first ones first, since theirs are held longest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

# AdamW's two moments in fp32, for each byte of an fp32 parameter.
_MOMENTS = 2


class Recompute:
    """Decides for each block of one model whether its forward is run again in the backward pass."""

    def __init__(self, bound_bytes: int | None) -> None:
        self.bound_bytes = bound_bytes
        self.blocks: list[nn.Module] = []
        self.recomputed: int | None = None
        self.state = "no bound" if bound_bytes is None else "bound set; decided in the first training step"

    def run(
        self, block: nn.Module, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """The block's output; under a bound, with its activations stored or not as decided."""
        training = self.bound_bytes is not None and block.training and torch.is_grad_enabled()
        if not training or not self.blocks:
            return compiled(block, *args, **kwargs)
        if self.recomputed is None:
            return self._measure(block, compiled, args, kwargs)
        position = next((i for i, b in enumerate(self.blocks) if b is block), len(self.blocks))
        if position < self.recomputed:
            return checkpoint(compiled, block, *args, use_reentrant=False, **kwargs)
        return compiled(block, *args, **kwargs)

    def _measure(
        self, block: nn.Module, compiled: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        weights = {p.untyped_storage().data_ptr() for p in block.parameters()}
        stored: dict[int, int] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in weights:
                stored[storage.data_ptr()] = storage.nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = compiled(block, *args, **kwargs)
        kept = sum(t.untyped_storage().nbytes() for t in _tensors((args, kwargs)) if t.requires_grad)
        self._decide(sum(stored.values()), kept)
        return output

    def _decide(self, stored_bytes: int, input_bytes: int) -> None:
        """`stored_bytes` of one block when nothing is recomputed, `input_bytes` of it when all is."""
        assert self.bound_bytes is not None
        trainable = {p for block in self.blocks for p in block.parameters() if p.requires_grad}
        coming = sum(p.numel() * p.element_size() for p in trainable if p.grad is None) * (1 + _MOMENTS)
        now, count = psutil.Process().memory_info().rss, len(self.blocks)
        # At the end of the forward pass the activations are whole and no gradient is there; at the end of the
        # backward pass it is the other way round. The larger of the two is the peak.
        moments = coming * _MOMENTS // (1 + _MOMENTS)
        room = self.bound_bytes - now - moments
        freed = max(stored_bytes - input_bytes, 1)
        needed = stored_bytes * (count - 1)
        self.recomputed = min(count, max(0, math.ceil((needed - room) / freed)))
        fits = needed - self.recomputed * freed <= room
        self.state = (
            f"bound {_gb(self.bound_bytes)}: "
            f"{self.recomputed} of {count} blocks are recomputed in the backward pass "
            f"({_gb(stored_bytes)} stored by one block)"
        )
        if not fits:
            least = now + moments + needed - count * freed
            self.state += f"; it cannot be kept by recomputing alone, about {_gb(least)} are needed"


def _tensors(tree: Any) -> Iterable[torch.Tensor]:
    return (leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor))


def _gb(count: int) -> str:
    return f"{count / 1e9:.2f} GB"

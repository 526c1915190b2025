"""One optimizer step, and the evaluation loss.

B rows in a forward pass, S tokens a row, V entries in the vocabulary. Losses are token sums over one global
token count: accumulation gives the gradient of the whole batch, however its rows and documents are cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from hasten.base.errors import HastenError
from hasten.train.config import RunConfig
from hasten.train.data import IGNORE, Batch, Order, Rows, shifted_labels
from hasten.train.optimizer import Stepper, lr_at


@dataclass(frozen=True)
class StepNumbers:
    """What one optimizer step did."""

    step: int
    loss: float
    """mean over the predicted tokens of the step"""
    lr: float
    grad_norm: float
    """before clipping"""
    tokens: int
    """in this step, padding left out"""
    step_s: float


def loss_sum(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The summed cross-entropy of a batch; fp32 scalar.

    The labels are shifted by padding and the logits are not cut, so that a model whose output head is fused
    with the loss never makes the logits.
    """
    inputs: dict[str, Any] = {"input_ids": batch.input_ids, "use_cache": False}
    if batch.position_ids is not None:
        inputs["position_ids"] = batch.position_ids
    logits_BSV = model(**inputs).logits
    V = logits_BSV.shape[-1]
    labels = shifted_labels(batch.labels).view(-1)
    return F.cross_entropy(logits_BSV.view(-1, V).float(), labels, reduction="sum", ignore_index=IGNORE)


class Loop:
    """The state of a run between two steps, and the step itself."""

    def __init__(
        self,
        model: nn.Module,
        stepper: Stepper,
        rows: Rows,
        held_out: Rows | None,
        config: RunConfig,
        precision: str,
    ) -> None:
        """`precision`: `bf16` runs the forward pass under autocast, `fp32` does not."""
        self.model = model
        self.stepper = stepper
        self.rows = rows
        self.held_out = held_out
        self.order = Order(len(rows), config.seed)
        self.config = config
        self.precision = precision
        self.step_number = 0
        self.consumed_rows = 0
        self.tokens = 0

    def _autocast(self) -> AbstractContextManager[Any]:
        device = next(self.model.parameters()).device.type
        return torch.autocast(device, dtype=torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def step(self) -> StepNumbers:
        """One optimizer step.

        Raises:
            HastenError: the loss or the gradient norm is not finite; weights and optimizer are as before the
                step.
        """
        started_s = time.perf_counter()
        config = self.config
        number = self.step_number + 1
        chosen = self.order.take(self.consumed_rows, config.batch.rows)
        batches = [self.rows.batch(part) for part in np.split(chosen, config.batch.accumulation)]
        predicted = max(1, sum(int((shifted_labels(batch.labels) != IGNORE).sum()) for batch in batches))
        total = 0.0
        self.model.train()
        for batch in batches:
            with self._autocast():
                summed = loss_sum(self.model, batch)
            (summed / predicted).backward()
            total += float(summed.detach())
        lr = lr_at(number, config.steps, config.optimizer.lr, config.schedule)
        norm = self.stepper.gradient_norm()
        if not (math.isfinite(total) and math.isfinite(norm)):
            self.stepper.discard()
            raise HastenError(
                f"step {number}: the loss is {total / predicted} and the gradient norm is {norm}; stopped "
                "before the weights were changed. Lower optimizer.lr, or set precision = 'fp32'"
            )
        self.stepper.step(lr, norm)
        self.step_number = number
        self.consumed_rows += config.batch.rows
        tokens = sum(batch.tokens for batch in batches)
        self.tokens += tokens
        return StepNumbers(number, total / predicted, lr, norm, tokens, time.perf_counter() - started_s)

    def evaluate(self) -> float | None:
        """The mean loss of a predicted token over the first held-out batches; None without any."""
        if self.held_out is None:
            return None
        total, predicted = 0.0, 0
        self.model.eval()
        with torch.no_grad():
            for batch in self._held_out_batches(self.held_out):
                with self._autocast():
                    total += float(loss_sum(self.model, batch))
                predicted += int((shifted_labels(batch.labels) != IGNORE).sum())
        self.model.train()
        return total / predicted if predicted else None

    def _held_out_batches(self, rows: Rows) -> Iterator[Batch]:
        size = self.config.batch.micro_rows
        for first in range(0, min(len(rows), size * self.config.eval.batches), size):
            yield rows.batch(list(range(first, min(first + size, len(rows)))))

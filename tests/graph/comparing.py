"""What these tests share: one batch, one run, one budget."""

from __future__ import annotations

import copy
import inspect
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import hasten

IGNORED = -100
# Relative error (root mean square) beside twice the original's own, over a whole tiny model of three layers.
FLOORS = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
# Share of the largest gradient below which a gradient has no scale of its own (bias of keys: exactly zero).
NO_SCALE = 1e-2


@dataclass(frozen=True)
class Batch:
    """ids, labels [B,S] int64 and mask [B,S] int64 or None; labels are -100 wherever no loss is counted."""

    ids: torch.Tensor
    labels: torch.Tensor
    mask: torch.Tensor | None

    @property
    def real(self) -> torch.Tensor:
        """bool [B,S]: tokens that are no padding."""
        return torch.ones_like(self.ids, dtype=torch.bool) if self.mask is None else self.mask.bool()


def make_batch(length: int, padding: str = "", rows: int = 2, seed: int = 3) -> Batch:
    """`padding` is "", "left" or "right": then the first row is half padding."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 256, (rows, length), generator=generator)
    labels, mask = ids.clone(), None
    if padding:
        mask = torch.ones_like(ids)
        blank = length // 2
        where = slice(0, blank) if padding == "left" else slice(length - blank, length)
        mask[0, where] = 0
        ids[mask == 0] = 0
        labels[mask == 0] = IGNORED
        if padding == "left" and blank:
            # It would be predicted by a padding token, which sees no key and so has no defined logits.
            labels[0, blank] = IGNORED
    return Batch(ids, labels, mask)


@dataclass(frozen=True)
class Run:
    """logits [B,S,V] float64 detached, loss, and the gradient of each parameter that got one."""

    loss: float
    logits: torch.Tensor
    gradients: dict[str, torch.Tensor]


def takes(model: nn.Module, argument: str) -> bool:
    return argument in inspect.signature(type(model).forward).parameters


def forward(model: nn.Module, batch: Batch, **more: Any) -> tuple[torch.Tensor, Any]:
    """(loss, logits) of a transformers model with labels, or of a plain module that returns logits."""
    if hasattr(model, "config"):
        if takes(model, "use_cache"):  # decoders keep keys and values by default, even in training
            more = {"use_cache": False} | more
        out = model(input_ids=batch.ids, attention_mask=batch.mask, labels=batch.labels, **more)
        return out.loss, out.logits
    logits = model(batch.ids, batch.mask)
    return F.cross_entropy(logits.flatten(0, 1).float(), batch.labels.flatten(), ignore_index=IGNORED), logits


def run(model: nn.Module, batch: Batch, autocast: torch.dtype | None = None, **more: Any) -> Run:
    """One training step without an update; gradients start from none."""
    model.zero_grad(set_to_none=True)
    with torch.autocast("cpu", dtype=autocast or torch.bfloat16, enabled=autocast is not None):
        loss, logits = forward(model, batch, **more)
    if torch.isfinite(loss):
        loss.backward()
    gradients = {n: p.grad.detach().double() for n, p in model.named_parameters() if p.grad is not None}
    return Run(loss.item(), torch.as_tensor(logits.detach()).double(), gradients)


def original_of(model: nn.Module, dtype: torch.dtype | None = None) -> nn.Module:
    """An independent copy with the same weights, made before `optimize`."""
    twin = copy.deepcopy(model)
    return twin if dtype is None else twin.to(dtype)


def rms(x: torch.Tensor) -> float:
    return x.square().mean().sqrt().item() if x.numel() else 0.0


def assert_budget(
    ours: Run,
    own: Run,
    truth: Run,
    batch: Batch,
    dtype: torch.dtype,
    where: str = "",
    floor: float | None = None,
) -> None:
    """error(ours) <= 2 error(original) + floor, against `truth`, for logits, loss and every gradient."""
    floor = FLOORS[dtype] if floor is None else floor
    real = batch.real
    pairs = {"logits": (ours.logits[real], own.logits[real], truth.logits[real])}
    assert ours.gradients.keys() == own.gradients.keys(), f"{where}: other parameters have gradients"
    for name in own.gradients:
        pairs[f"gradient of {name}"] = (ours.gradients[name], own.gradients[name], truth.gradients[name])
    typical = max((rms(t) for t in truth.gradients.values()), default=0.0)
    for name, (a, b, t) in pairs.items():
        assert torch.isfinite(a).all(), f"{where}: {name} is not finite"
        scale = max(rms(t), NO_SCALE * typical if name != "logits" else 0.0, 1e-30)
        error, allowed = rms(a - t) / scale, 2 * rms(b - t) / scale + floor
        assert error <= allowed, f"{where}: {name} has error {error:.2e}, allowed {allowed:.2e}"
    if own.loss == own.loss:
        error, allowed = abs(ours.loss - truth.loss), 2 * abs(own.loss - truth.loss) + floor * abs(truth.loss)
        assert error <= allowed, f"{where}: loss {ours.loss}, original {own.loss}, truth {truth.loss}"
    else:
        assert ours.loss != ours.loss, f"{where}: loss {ours.loss} where the original has none to count"


def assert_rewritten(model: nn.Module) -> None:
    """Every graph was recognised and proved, and no block ran its original code."""
    report = hasten.report(model)
    assert report.graphs, "nothing was captured"
    for graph in report.graphs:
        assert graph.runs == "rewritten", f"{graph.block}: {graph.reason}"
        assert graph.proof is not None, f"{graph.block} was not proved"
        assert graph.proof.passed, graph.proof.reason
    assert not report.originals, dict(report.originals)

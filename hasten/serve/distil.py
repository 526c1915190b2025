"""Quantised matrices that learn from the model as it was: codes, scales and minima by gradient descent.

Rounding (`quantise.py`) looks at one matrix at a time. Here all are trained together on a text, so that

    KL(p || q) = sum_v p_v (log p_v - log q_v)      p of the original, q of the quantised model

gets smaller (distillation without labels: Liu et al. 2023, arXiv:2305.17888). A weight is

    scale * clamp(round(u), 0, highest) + minimum

and u, which starts within half a step of the code that rounding chose, as near to the original weight as
that allows, gets the gradient that it would have without rounding (Bengio et al. 2013, arXiv:1308.3432).
Scales and minima learn as they are. The model itself trains under `hasten.optimize`. Result and start are
held against pieces of the text that were not trained on, and the better of the two is kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from hasten.base.errors import ConfigError, InputError
from hasten.base.facts import detect
from hasten.base.screen import Screen, spell_bytes
from hasten.graph.api import optimize
from hasten.ops.panels.rotation import rotate, rotated_weights
from hasten.serve.calibrate import Matrix
from hasten.serve.quantise import Quantised
from hasten.serve.weights import Weight, part_of

BATCH = 2
PIECE_TOKENS = 512
PIECES = 512
PIECES_OF_EACH = 6
"""Most pieces of one document: many documents teach more."""
HELD_BACK = 6
"""Pieces that are not trained on."""

# By Adam, a step moves a code by about so much of the distance to the next one, and scales and minima by so
# much of the scale. Measured on SmolLM2-135M at 4.0 bits (docs/LOG.md).
_CODE_RATE = 3e-3
_SCALE_RATE = 6e-4
_WARM_UP = 0.05
_LAST = 0.05
# How far from its code a weight may lie at the start, in steps: at the edge noise alone would move it.
_REACH = 0.45
# The original, codes as numbers, their gradient, Adam's two moments, the weights and their gradient.
_BYTES_PER_WEIGHT = 4 + 4 + 4 + 8 + 8
# Logits and log-probabilities of both models, and gradients of the student's.
_COPIES_OF_LOGITS = 6


@dataclass(frozen=True)
class Distilled:
    """Matrices by parameter, at least as good as the given ones, and what was reached, KL in nats a token."""

    matrices: dict[str, Quantised]
    before: float
    """On the pieces held back, as given."""
    after: float
    """After the last step, in the numbers that are stored."""

    @property
    def helped(self) -> bool:
        """Whether the matrices learnt anything; else they are those given. False where `after` is NaN."""
        return self.after < self.before


def check_memory(weights: int, vocabulary: int) -> None:
    """Raises ConfigError where this process may not take the memory that distilling so many weights needs:
    what is kept for each, and the logits of both models. Activations of the layers come on top of it."""
    limit = detect().memory_limit_bytes.value
    logits = _COPIES_OF_LOGITS * 4 * BATCH * PIECE_TOKENS * vocabulary
    needed = _BYTES_PER_WEIGHT * weights + logits
    if needed > limit:
        raise ConfigError(
            f"distilling {weights:,} weights takes {spell_bytes(needed)}, this process may use "
            f"{spell_bytes(limit)}: up to {max(0, limit - logits) // _BYTES_PER_WEIGHT:,} weights; "
            "quantise without steps (int4), or with more bits (4.5, int8)"
        )


def distil(
    model: Any,
    matrices: Mapping[str, Quantised],
    of: Sequence[Matrix],
    pieces: Sequence[Tensor],
    steps: int,
    screen: Screen | None = None,
) -> Distilled:
    """Trains quantised matrices until the model says what it said, as far as `steps` allow.

    Args:
        model: transformers model with its own weights, fp32; it stays optimised and without gradients.
        matrices: by parameter; what is not in it stays as it is in the model.
        of: what `calibrate.matrices_of` says of the model.
        pieces: token ids int64 [T], all of one length; the last `HELD_BACK` are not trained on.
        steps: of `BATCH` pieces each; pieces are used again in another order where they do not suffice.

    Raises:
        InputError: too few pieces, or no matrix that has codes.
    """
    if not matrices:
        raise InputError("no matrix is quantised, so there is nothing to distil")
    if len(pieces) < HELD_BACK + BATCH:
        raise InputError(f"a text of {len(pieces)} pieces; distilling needs {HELD_BACK + BATCH} at least")
    screen = screen or Screen(enabled=False)
    learners = {
        matrix.name: _Learner(matrices[matrix.name], matrix, model.get_parameter(matrix.name))
        for matrix in of
        if matrix.name in matrices
    }
    model.eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    optimize(model)
    student = _Student(model, learners)
    kept, trained = torch.stack(list(pieces[-HELD_BACK:])), pieces[:-HELD_BACK]
    before = student.distance(kept)
    optimizer = torch.optim.Adam(
        [
            {"params": [learner.codes for learner in learners.values()], "rate": _CODE_RATE},
            {"params": [p for learner in learners.values() for p in learner.moved], "rate": _SCALE_RATE},
        ],
        betas=(0.9, 0.95),
        eps=1e-12,
        fused=True,
    )
    order = _order(len(trained))
    with screen.bar("distilling", steps) as bar:
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = group["rate"] * rate_at(step, steps)
            batch = torch.stack([trained[next(order)] for _ in range(BATCH)])
            loss = student.loss(batch)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            optimizer.zero_grad()
            bar.update(step + 1, f"KL {loss.item():.4f}")
    learnt = {name: learner.quantised() for name, learner in learners.items()}
    for learner in learners.values():
        learner.store()
    found = Distilled(learnt, before, student.distance(kept))
    return found if found.helped else replace(found, matrices={name: matrices[name] for name in learners})


def rate_at(step: int, steps: int) -> float:
    """Share of the full rate: a short climb, then half a cosine down to a twentieth."""
    climb = min(1.0, (step + 1) / max(1.0, _WARM_UP * steps))
    return climb * (_LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * step / steps)))


def _order(count: int) -> Iterator[int]:
    """All pieces in one order after another."""
    generator = torch.Generator().manual_seed(0)
    while True:
        yield from torch.randperm(count, generator=generator).tolist()


class _Learner:
    """One matrix [N, K] in groups along K: `codes` [N, groups, group], and `moved`: what scales and minima
    moved by, each [N, groups] in units of the first scale."""

    def __init__(self, start: Quantised, matrix: Matrix, parameter: Tensor) -> None:
        self.start, self.matrix, self.shape = start, matrix, parameter.shape
        format = start.format
        self.scale = start.scales.float() * start.unit
        self.base = (
            self.scale * -float(format.zero or 0)
            if start.minima is None
            else start.minima.float() * start.unit
        )
        rows_NK = part_of(parameter.detach().float(), Weight(matrix.name, matrix.transposed))
        rows_NK = rotated_weights(rows_NK) if format.rotated else rows_NK
        N, K = rows_NK.shape
        padding = -K % format.group

        def grouped(matrix_NK: Tensor) -> Tensor:
            return nn.functional.pad(matrix_NK.float(), (0, padding)).view(N, -1, format.group)

        inverse = torch.where(self.scale == 0, 0.0, 1.0 / self.scale).unsqueeze(-1)
        exact = (grouped(rows_NK) - self.base.unsqueeze(-1)).mul_(inverse)
        codes = grouped(start.codes)
        self.codes = torch.maximum(torch.minimum(exact, codes + _REACH), codes - _REACH).requires_grad_()
        count = 1 if start.minima is None else 2
        self.moved = [torch.zeros_like(self.scale).requires_grad_() for _ in range(count)]

    def weight(self, dtype: torch.dtype) -> Tensor:
        """The parameter that the codes stand for, in the shape that the model has it."""
        scale, base = self._numbers()
        format, K = self.start.format, self.start.codes.shape[1]
        first = torch.float32 if format.rotated else dtype
        weight_NGK = _Rounded.apply(self.codes, scale, base, format.highest, first)
        weight_NK = weight_NGK.flatten(1)[:, :K]
        weight_NK = rotate(weight_NK).to(dtype) if format.rotated else weight_NK
        return _parameter(weight_NK, self.matrix, self.shape)

    def quantised(self) -> Quantised:
        """Codes, scales and minima as they are now."""
        start = self.start
        with torch.no_grad():
            scale, base = self._numbers()
            codes = self.codes.round().clamp_(0, start.format.highest).to(torch.uint8).flatten(1)
            return replace(
                start,
                codes=codes[:, : start.codes.shape[1]].contiguous(),
                scales=(scale / start.unit).half(),
                minima=None if start.minima is None else (base / start.unit).half(),
            )

    def store(self) -> None:
        """Scales and minima become what fp16 stores of them."""
        with torch.no_grad():
            unit = self.start.unit
            scale, base = ((part / unit).half().float() * unit for part in self._numbers())
            self.scale = scale
            self.base = scale * -float(self.start.format.zero or 0) if self.start.minima is None else base
            for moved in self.moved:
                moved.zero_()

    def _numbers(self) -> tuple[Tensor, Tensor]:
        """Scales and what the code 0 stands for."""
        scale = self.scale * (1 + self.moved[0])
        if self.start.minima is None:
            return scale, scale * -float(self.start.format.zero or 0)
        return scale, self.base + self.scale * self.moved[1]


class _Rounded(torch.autograd.Function):
    """scale * clamp(round(codes), 0, highest) + base, with the gradients that this file's docstring has."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, codes: Tensor, scale: Tensor, base: Tensor, highest: int, dtype: torch.dtype
    ) -> Tensor:
        ctx.save_for_backward(codes, scale)
        ctx.highest = highest
        rounded = codes.round().clamp_(0, highest)
        return rounded.mul_(scale.unsqueeze(-1)).add_(base.unsqueeze(-1)).to(dtype)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        codes, scale = ctx.saved_tensors
        gradient = gradient.float()
        rounded = codes.round().clamp_(0, ctx.highest)
        of_scale = rounded.mul_(gradient).sum(-1)
        of_base = gradient.sum(-1)
        of_codes = gradient * scale.unsqueeze(-1)
        # Beyond the last code, moving on changes nothing.
        of_codes.masked_fill_((codes < -0.5) | (codes > ctx.highest + 0.5), 0.0)
        return of_codes, of_scale, of_base, None, None


class _Student:
    """The model with the learners' weights, and as it was."""

    def __init__(self, model: nn.Module, learners: Mapping[str, _Learner]) -> None:
        self._model, self._learners = model, learners
        self._bf16 = bool(detect().bf16_in_hardware.value)

    def loss(self, ids_BT: Tensor) -> Tensor:
        """KL in nats, mean over tokens."""
        with torch.no_grad():
            original = self._logits({}, ids_BT).log_softmax(-1)
        weights = {name: learner.weight(self._dtype(learner)) for name, learner in self._learners.items()}
        other = self._logits(weights, ids_BT).log_softmax(-1)
        return nn.functional.kl_div(
            other.flatten(0, 1), original.flatten(0, 1), reduction="batchmean", log_target=True
        )

    def distance(self, ids_BT: Tensor) -> float:
        """The same without gradients, a piece at a time."""
        with torch.no_grad():
            return sum(float(self.loss(ids.unsqueeze(0))) for ids in ids_BT) / len(ids_BT)

    def _dtype(self, learner: _Learner) -> torch.dtype:
        # What is looked up begins the residual stream, which stays fp32.
        return torch.bfloat16 if self._bf16 and learner.matrix.role == "projection" else torch.float32

    def _logits(self, weights: dict[str, Tensor], ids_BT: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self._bf16):
            found = torch.func.functional_call(
                self._model, weights, (), {"input_ids": ids_BT, "use_cache": False}
            )
        return found.logits.float()  # type: ignore[no-any-return]


def _parameter(matrix_NK: Tensor, matrix: Matrix, shape: torch.Size) -> Tensor:
    """The way back from `weights.part_of`."""
    if len(shape) == 3:
        E, N, K = shape if not matrix.transposed else (shape[0], shape[2], shape[1])
        stack = matrix_NK.reshape(E, -1, K)[:, :N]
        return stack.transpose(1, 2) if matrix.transposed else stack
    return matrix_NK.t() if matrix.transposed else matrix_NK

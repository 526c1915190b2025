"""The meaning of a program in plain torch: one sequence, all its tokens at once, no cache."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hasten.ops.activation.reference import activation
from hasten.ops.program.codes import BINARY, FUNCTION, FUNCTIONS, KINDS

_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "exp": torch.exp, "expm1": torch.expm1, "log": torch.log, "log1p": torch.log1p, "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt, "reciprocal": torch.reciprocal, "square": torch.square, "abs": torch.abs,
    "trunc": torch.trunc, "floor": torch.floor, "softplus": torch.nn.functional.softplus,
}  # fmt: skip

_BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add, "subtract": torch.sub, "multiply": torch.mul, "divide": torch.div,
    "maximum": torch.maximum, "minimum": torch.minimum, "greater": torch.gt, "greater_equal": torch.ge,
    "less": torch.lt, "less_equal": torch.le, "equal": torch.eq, "not_equal": torch.ne, "power": torch.pow,
}  # fmt: skip


def run(
    program: Any, matrices: Sequence[Tensor], tokens_T: Tensor, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Logits [T, V] of every token.

    Args:
        program: `hasten.serve.program.Program`.
        matrices: [N, K] for each of its matrices.
        dtype: of all computation.
    """
    return _Run(program, matrices, tokens_T, dtype).logits()


class _Run:
    def __init__(self, program: Any, matrices: Sequence[Tensor], tokens_T: Tensor, dtype: torch.dtype):
        self.program, self.tokens, self.dtype = program, tokens_T.long(), dtype
        self.matrices = [matrix.to(dtype) for matrix in matrices]
        T = len(tokens_T)
        self.roots = [torch.zeros(T, root.width, dtype=dtype) for root in program.roots]
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def logits(self) -> Tensor:
        for one in self.program.instructions:
            getattr(self, f"_{one.op}", self._nothing)(one)
        return self.roots[self.program.logits]

    def _view(self, ref: Any, n0: int, n1: int) -> Tensor:
        """[T, n0, n1] of an operand."""
        T = len(self.tokens)
        if ref.kind == "root":
            held, stride = self.roots[ref.index], self.roots[ref.index].shape[1]
        elif ref.kind == "table":
            held = self._held(self.program.tables[ref.index][:T])
            stride = held.shape[1]
        else:
            held, stride = self._held(self.program.vectors[ref.index]), 0
        return torch.as_strided(held, (T, n0, n1), (stride, ref.s0, ref.s1), ref.offset)

    def _held(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self.dtype)

    def _nothing(self, one: Any) -> None:
        """`prepare` and `merge` are about how, not what."""

    def _embed(self, one: Any) -> None:
        rows = self.matrices[one.matrix][self.tokens] * one.floats[0]
        self._view(one.dst, 1, one.n1)[:, 0] = rows

    def _norm(self, one: Any) -> None:
        x = self._view(one.a, one.n0, one.n1)
        if one.ints[0]:
            x = x - x.mean(-1, keepdim=True)
        y = x / torch.sqrt(x.square().mean(-1, keepdim=True) + one.floats[0])
        if one.b is not None:
            y = y * (self._view(one.b, 1, one.n1) + one.floats[1])
        if one.c is not None:
            y = y + self._view(one.c, 1, one.n1)
        self._view(one.dst, one.n0, one.n1)[:] = y

    def _product(self, one: Any, matrix: int) -> Tensor:
        y = self._view(one.a, 1, one.n1)[:, 0] @ self.matrices[matrix].T
        bias = self.program.matrices[matrix].bias
        return y if bias < 0 else y + self._held(self.program.vectors[bias])

    def _linear(self, one: Any) -> None:
        y = self._product(one, one.matrix)
        if one.ints[0] >= 0:
            y = activation(y, KINDS[one.ints[0]])
        if one.up >= 0:
            y = y * self._product(one, one.up)
        y = y * one.floats[0]
        if one.c is not None:
            y = y + self._view(one.c, 1, y.shape[1])[:, 0]
        self._view(one.dst, 1, y.shape[1])[:, 0] = y

    def _rotary(self, one: Any) -> None:
        turned, interleaved = one.ints
        x = self._view(one.a, one.n0, one.n1)
        cos, sin = self._view(one.b, 1, turned), self._view(one.c, 1, turned)
        part = x[..., :turned]
        if interleaved:
            other = torch.stack((-part[..., 1::2], part[..., ::2]), dim=-1).flatten(-2)
        else:
            other = torch.cat((-part[..., turned // 2 :], part[..., : turned // 2]), dim=-1)
        y = torch.cat((part * cos + other * sin, x[..., turned:]), dim=-1)
        self._view(one.dst, one.n0, one.n1)[:] = y

    def _store(self, one: Any) -> None:
        layer, value_size = one.ints
        self.keys[layer] = self._view(one.a, one.n0, one.n1).clone()
        self.values[layer] = self._view(one.b, one.n0, value_size).clone()

    def _attend(self, one: Any) -> None:
        layer, value_size, kv_heads, window = one.ints
        scale, softcap = one.floats
        group = one.n0 // kv_heads
        q = self._view(one.a, one.n0, one.n1)
        keys, values = (x.repeat_interleave(group, 1) for x in (self.keys[layer], self.values[layer]))
        scores = torch.einsum("ihd,jhd->hij", q, keys) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        place = torch.arange(len(self.tokens))
        distance = place[None] - place[:, None]
        if one.c is not None:
            scores = scores + self._heads(one.c, one.n0)[:, None, None] * distance
        hidden = (distance > 0) | ((distance <= -window) if window else torch.zeros((), dtype=torch.bool))
        scores = scores.masked_fill(hidden, -math.inf)
        if one.b is not None:
            sinks = self._heads(one.b, one.n0)[:, None, None].expand(-1, len(place), 1)
            scores = torch.cat((scores, sinks), dim=-1)
        weights = scores.softmax(-1)[..., : len(place)]
        out = torch.einsum("hij,jhd->ihd", weights, values)
        self._view(one.dst, one.n0, value_size)[:] = out

    def _heads(self, ref: Any, heads: int) -> Tensor:
        return self._view(ref, 1, heads)[0, 0]

    def _binary(self, one: Any) -> None:
        a, b = self._view(one.a, one.n0, one.n1), self._view(one.b, one.n0, one.n1)
        self._view(one.dst, one.n0, one.n1)[:] = _BINARY[BINARY[one.ints[0]]](a, b)

    def _where(self, one: Any) -> None:
        condition, a, b = (self._view(ref, one.n0, one.n1) for ref in (one.a, one.b, one.c))
        self._view(one.dst, one.n0, one.n1)[:] = torch.where(condition != 0, a, b)

    def _unary(self, one: Any) -> None:
        y = self._view(one.a, one.n0, one.n1) * one.floats[0] + one.floats[1]
        if one.ints[0] >= FUNCTION:
            y = _FUNCTIONS[FUNCTIONS[one.ints[0] - FUNCTION]](y)
        elif one.ints[0] >= 0:
            y = activation(y, KINDS[one.ints[0]])
        self._view(one.dst, one.n0, one.n1)[:] = y

    def _gated(self, one: Any) -> None:
        gate, up = self._view(one.a, one.n0, one.n1), self._view(one.b, one.n0, one.n1)
        self._view(one.dst, one.n0, one.n1)[:] = activation(gate, KINDS[one.ints[0]]) * up

    def _select(self, one: Any) -> None:
        self._view(one.dst, 1, one.n1)[:] = self._view(one.a, 1, one.n1)

    def _reduce(self, one: Any) -> None:
        x = self._view(one.a, one.n0, one.n1)
        y = (x.sum(-1), x.amax(-1), x.amin(-1))[one.ints[0]] * one.floats[0]
        self._view(one.dst, one.n0, 1)[..., 0] = y

    def _softmax(self, one: Any) -> None:
        self._view(one.dst, one.n0, one.n1)[:] = self._view(one.a, one.n0, one.n1).softmax(-1)

    def _places(self, one: Any) -> None:
        count, largest = one.ints
        x = self._view(one.a, one.n0, one.n1)
        order = x.sort(dim=-1, descending=bool(largest), stable=True).indices
        self._view(one.dst, one.n0, count)[:] = order[..., :count].to(self.dtype)

    def _gather(self, one: Any) -> None:
        places = self._view(one.b, one.n0, one.n1).long()
        x = self._view(one.a, one.n0, int(places.max()) + 1)
        self._view(one.dst, one.n0, one.n1)[:] = x.gather(-1, places)

    def _scatter(self, one: Any) -> None:
        places = self._view(one.a, one.n0, one.n1).long()
        to = self._view(one.dst, one.n0, int(places.max()) + 1)
        to.scatter_(-1, places, self._view(one.b, one.n0, one.n1))

    def _experts(self, one: Any) -> None:
        N, E = one.ints
        x = self._view(one.a, one.n0, one.n1)
        chosen = self._view(one.b, 1, one.n0)[:, 0].long()
        stack = self.matrices[one.matrix].view(E, -1, one.n1)[:, :N]
        y = torch.einsum("tsk,tsnk->tsn", x, stack[chosen])
        bias = self.program.matrices[one.matrix].bias
        if bias >= 0:
            y = y + self._held(self.program.vectors[bias]).view(E, N)[chosen]
        self._view(one.dst, one.n0, N)[:] = y

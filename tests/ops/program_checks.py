"""Checks of the native program for this process's level: programs made by hand against their meaning.

`level_suite.py` and `tests/serve/test_serve_link.py` run them. No model and no capture: every instruction
occurs, with sizes that are no multiple of anything.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import torch
from torch import Tensor

from hasten.ops.panels import BFLOAT16, FLOAT32, Format, named, quantised
from hasten.ops.panels.reference import pack, unpack
from hasten.ops.program.reference import run
from hasten.serve.link import CacheSettings, Linked
from hasten.serve.native_runner import NativeRunner
from hasten.serve.program import (
    FUNCTION,
    FUNCTIONS,
    KINDS,
    Instruction,
    Layer,
    MatrixUse,
    Program,
    Ref,
    Root,
    Weight,
)
from hasten.serve.quantise import quantise
from hasten.serve.runner import Step

VOCABULARY, HIDDEN, INNER, CONTEXT = 37, 44, 50, 160
# Heads, KV heads, size of a key and of a value, dims that turn.
SHAPES = ((6, 2, 10, 10, 6), (3, 3, 8, 20, 8), (4, 1, 16, 16, 16), (2, 1, 9, 7, 4))
EXACT, NARROW = 3e-5, 5e-2


def floats(tensors: Sequence[Tensor]) -> tuple[np.ndarray, ...]:
    return tuple(tensor.numpy() for tensor in tensors)


class Builder:
    """A decoder of two layers whose instructions, sizes and orders differ with the seed."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)
        self.seed = seed
        self.instructions: list[Instruction] = []
        self.roots: list[Root] = []
        self.vectors: list[Tensor] = []
        self.tables: list[Tensor] = []
        self.dense: list[Tensor] = []
        self.uses: list[MatrixUse] = []
        self.layers: list[Layer] = []

    def random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.generator)

    def root(self, width: int, selected: bool = False) -> Ref:
        self.roots.append(Root(width, selected))
        return Ref("root", len(self.roots) - 1)

    def vector(self, size: int) -> Ref:
        self.vectors.append(0.3 * self.random(size))
        return Ref("vector", len(self.vectors) - 1)

    def table(self, width: int) -> Ref:
        self.tables.append(self.random(CONTEXT, width))
        return Ref("table", len(self.tables) - 1)

    def matrix(self, N: int, K: int, bias: bool) -> int:
        self.dense.append(self.random(N, K) * K**-0.5)
        at = self.vector(N).index if bias else -1
        self.uses.append(MatrixUse(Weight(f"w{len(self.dense)}"), N, K, at))
        return len(self.dense) - 1

    def emit(self, op: str, n0: int, n1: int, dst: Ref | None = None, **fields: object) -> None:
        self.instructions.append(Instruction(op, n0, n1, dst, **fields))  # type: ignore[arg-type]

    def linear(
        self, x: Ref, N: int, K: int, bias: bool = False, kind: int = -1, selected: bool = False
    ) -> Ref:
        dst = self.root(N, selected)
        matrix = self.matrix(N, K, bias)
        self.emit("linear", 1, K, dst, a=x, matrix=matrix, ints=(kind,), floats=(1.0,), selected=selected)
        return dst

    def pointwise(self, op: str, width: int, *operands: Ref, ints: tuple[int, ...], floats=()) -> Ref:  # type: ignore[no-untyped-def]
        dst = self.root(width)
        named_operands = dict(zip("ab", operands, strict=False))
        self.emit(op, 1, width, dst, **named_operands, ints=ints, floats=floats)
        return dst

    def layer(self, x: Ref, shape: tuple[int, int, int, int, int], window: int) -> Ref:
        heads, kv, D, Dv, turned = shape
        odd = self.seed % 2
        normed = self.root(HIDDEN)
        self.emit(
            "norm", 1, HIDDEN, normed, a=x, b=self.vector(HIDDEN), c=self.vector(HIDDEN) if odd else None,
            ints=(odd,), floats=(1e-5, 0.0 if odd else 1.0),
        )  # fmt: skip
        q, k = self.linear(normed, heads * D, HIDDEN), self.linear(normed, kv * D, HIDDEN, bias=True)
        # The values come as a part of a wider product, one head after another with a gap, or every other one.
        step = 2 if self.seed % 3 == 2 else 1
        wide = self.linear(normed, kv * (step * Dv + 3), HIDDEN)
        v = Ref("root", wide.index, 2, step * Dv + 3, step)
        cos, sin = self.table(turned), self.table(turned)
        turned_q, turned_k = self.root(heads * D), self.root(kv * D)
        for source, to, count in ((q, turned_q, heads), (k, turned_k, kv)):
            self.emit(
                "rotary", count, D, Ref("root", to.index, 0, D), a=Ref("root", source.index, 0, D), b=cos,
                c=sin, ints=(turned, odd),
            )  # fmt: skip
        self.layers.append(Layer(kv, D, Dv, window))
        at = len(self.layers) - 1
        self.emit("store", kv, D, a=Ref("root", turned_k.index, 0, D), b=v, ints=(at, Dv))
        mixed = self.root(heads * Dv)
        extras = {"b": self.vector(heads)} if odd else {"c": self.vector(heads)}
        for op in ("attend", "merge"):
            self.emit(
                op, heads, D, Ref("root", mixed.index, 0, Dv), a=Ref("root", turned_q.index, 0, D),
                **extras, ints=(at, Dv, kv, window), floats=(D**-0.5, 2.0 * odd),
            )  # fmt: skip
        x = self.pointwise("binary", HIDDEN, x, self.linear(mixed, HIDDEN, heads * Dv), ints=(0,))
        gate, up = self.linear(x, INNER, HIDDEN, bias=bool(odd)), self.linear(x, INNER, HIDDEN)
        inner = self.pointwise("gated", INNER, gate, up, ints=(self.seed % len(KINDS),))
        down = self.linear(inner, HIDDEN, INNER, kind=(self.seed + 3) % len(KINDS))
        down = self.pointwise("unary", HIDDEN, down, ints=(-1,), floats=(0.5, 0.25))
        down = self.pointwise("binary", HIDDEN, down, self.vector(HIDDEN), ints=(2,))
        return self.pointwise("binary", HIDDEN, down, x, ints=(1,) if odd else (0,))

    def routed(self, x: Ref) -> Ref:
        """Experts chosen by the position, so that rounding in low formats chooses no other."""
        odd = self.seed % 2
        E, S, N = 5, 3, 21 if odd else 32
        scores, places, values = self.root(E), self.root(S), self.root(S)
        self.emit("softmax", 1, E, scores, a=self.table(E))
        self.emit("places", 1, E, places, a=scores, ints=(S, odd))
        self.emit("gather", 1, S, values, a=scores, b=places)
        total, most = self.root(1), self.root(1)
        self.emit("reduce", 1, S, total, a=values, ints=(0,), floats=(0.5,))
        self.emit("reduce", 1, S, most, a=values, ints=(1 + odd,), floats=(1.0,))
        total = self.pointwise("binary", 1, total, most, ints=(4 + odd,))
        share = self.pointwise("binary", S, values, Ref("root", total.index, 0, 0, 0), ints=(3,))
        # What was not chosen keeps the vector's number.
        kept = self.root(E)
        self.emit("unary", 1, E, kept, a=self.vector(E), ints=(-1,), floats=(1.0, 0.0))
        self.emit("scatter", 1, S, kept, a=places, b=share)
        above = self.pointwise("binary", E, kept, scores, ints=(6 + self.seed % 6,))
        scores = self.root(E)
        self.emit("where", 1, E, scores, a=above, b=kept, c=self.vector(E))
        self.emit("gather", 1, S, values, a=scores, b=places)
        padded = -(-N // 16) * 16
        inner, out = self.root(S * N), self.root(S * HIDDEN)
        for source, step, to, n, k in ((x, 0, inner, N, HIDDEN), (inner, N, out, HIDDEN, N)):
            rows = padded if to is inner else -(-HIDDEN // 16) * 16
            matrix = self.matrix(E * rows, k, False)
            if odd:
                self.uses[matrix] = MatrixUse(self.uses[matrix].weight, E * rows, k, self.vector(E * n).index)
            self.emit(
                "experts", S, k, Ref("root", to.index, 0, n), a=Ref("root", source.index, 0, step), b=places,
                matrix=matrix, ints=(n, E),
            )  # fmt: skip
        weighted = self.root(S * HIDDEN)
        self.emit(
            "binary", S, HIDDEN, Ref("root", weighted.index, 0, HIDDEN), a=Ref("root", out.index, 0, HIDDEN),
            b=Ref("root", values.index, 0, 1, 0), ints=(2,),
        )  # fmt: skip
        joined = self.root(HIDDEN)
        self.emit(
            "reduce", HIDDEN, S, Ref("root", joined.index, 0, 1), a=Ref("root", weighted.index, 0, 1, HIDDEN),
            ints=(0,), floats=(0.7,),
        )  # fmt: skip
        bounded = self.pointwise("unary", HIDDEN, joined, ints=(KINDS.index("tanh"),), floats=(1.0, 0.0))
        code = FUNCTION + self.function()
        bounded = self.pointwise("unary", HIDDEN, bounded, ints=(code,), floats=(0.5, 2.0))
        return self.pointwise("binary", HIDDEN, x, bounded, ints=(0,))

    def function(self) -> int:
        """Another with each seed, all of them over the suite's seeds; rounding is no matter here."""
        smooth = [i for i, name in enumerate(FUNCTIONS) if name not in ("trunc", "floor")]
        self.used_functions = getattr(self, "used_functions", 0) + 1
        return smooth[(2 * self.seed + self.used_functions) % len(smooth)]

    def program(self, shape: tuple[int, int, int, int, int]) -> Program:
        x = self.root(HIDDEN)
        self.emit("embed", 1, HIDDEN, x, matrix=self.matrix(VOCABULARY, HIDDEN, False), floats=(1.5,))
        x = self.pointwise("binary", HIDDEN, x, self.table(HIDDEN), ints=(0,))
        for window in (0, 19):
            x = self.routed(self.layer(x, shape, window))
        wanted = self.root(HIDDEN, True)
        self.emit("select", 1, HIDDEN, wanted, a=x, selected=True)
        logits = self.linear(wanted, VOCABULARY, HIDDEN, selected=True)
        return Program(
            tuple(self.instructions), tuple(self.roots), tuple(self.uses), tuple(self.layers), logits.index,
            VOCABULARY, CONTEXT, floats(self.vectors), floats(self.tables),
        )  # fmt: skip


def logits(runner: NativeRunner, tokens: Tensor, pieces: tuple[int, ...]) -> Tensor:
    """[T, V] from steps of these sizes, with the blocks of the pool in falling order."""
    found, begin = [], 0
    for size in pieces:
        rows = np.arange(size, dtype=np.int32)
        tables = tuple(
            np.arange(group.blocks - 1, -1, -1, dtype=np.int32)[None, : CONTEXT // 32].copy()
            for group in runner.groups
        )
        ids = tokens[begin : begin + size].numpy().astype(np.int32)
        found.append(runner.run(Step(ids, rows + begin, np.array([0, size], np.int32), tables, rows)).copy())
        begin += size
    return torch.from_numpy(np.concatenate(found))


def check(seed: int, form: Format, cache: str, pieces: tuple[int, ...]) -> None:
    """Raises AssertionError where the native program is not what the program means."""
    builder = Builder(seed)
    program = builder.program(SHAPES[seed % len(SHAPES)])
    panels = [pack(m, form) if form.dense else quantise(m, form) for m in builder.dense]
    tokens = torch.randint(VOCABULARY, (sum(pieces),), generator=builder.generator)
    expected = run(program, [unpack(p).double() for p in panels], tokens)
    settings = CacheSettings(cache, tuple(7 for _ in program.windows()))
    runner = NativeRunner(Linked(program, panels, settings, max(pieces), max(pieces)))
    error = (logits(runner, tokens, pieces).double() - expected).abs().max() / expected.abs().max()
    allowed = EXACT if form == FLOAT32 and cache == "float32" else NARROW
    assert error <= allowed, f"relative error {error:.2e}, allowed {allowed:.0e}"


def check_greedy(seed: int, form: Format, cache: str, count: int = 6) -> None:
    """Raises AssertionError where steps in one call choose other tokens than steps one at a time."""
    builder = Builder(seed)
    program = builder.program(SHAPES[seed % len(SHAPES)])
    panels = [pack(m, form) if form.dense else quantise(m, form) for m in builder.dense]
    settings = CacheSettings(cache, tuple(14 for _ in program.windows()))
    runner = NativeRunner(Linked(program, panels, settings, 8, 8))
    tables = tuple(np.arange(14, dtype=np.int32).reshape(2, 7) for _ in runner.groups)

    def step(tokens: list[int], position: int) -> Step:
        places = np.full(2, position, np.int32)
        return Step(
            np.array(tokens, np.int32),
            places,
            np.arange(3, dtype=np.int32),
            tables,
            np.arange(2, dtype=np.int32),
        )

    first = torch.randint(VOCABULARY, (2,), generator=builder.generator).tolist()
    expected, tokens = [], first
    for place in range(count):
        tokens = runner.run(step(tokens, place)).argmax(-1).tolist()
        expected.append(tokens)
    assert runner.run_greedy(step(first, 0), count).tolist() == expected


def suite(smallest: bool = False) -> Iterator[tuple[str, Callable[[], None]]]:
    """Named checks: formats of matrices and of the cache, prompts in one piece and in several."""
    # 150 rows are enough for a thread to take rows of its own.
    pieces = ((1,) * 5 + (70, 1, 1), (77,), (33, 31, 13), (9, 1, 8, 59), (150, 1))
    formats = (FLOAT32, BFLOAT16, quantised(8), named("int8g64"), named("int8r"))
    for seed in range(1 if smallest else 6):
        for i, cut in enumerate(pieces[:1] if smallest else pieces):
            form = formats[(seed + i) % len(formats)]
            for cache in ("float32", "bfloat16", "int8"):
                which = FLOAT32 if cache == "float32" else form
                yield f"program {seed} {which} {cache} {cut}", partial(check, seed, which, cache, cut)
        for cache in ("float32", "bfloat16", "int8"):
            which = FLOAT32 if cache == "float32" else quantised(8)
            yield f"greedy steps {seed} {cache}", partial(check_greedy, seed, which, cache)

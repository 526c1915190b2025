"""Checks of attention over a cache, for this process's level, apart from what storing loses: keys and values
are numbers that bytes hold. `level_suite.py` and `tests/serve/test_serve_link.py` run them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from program_checks import CONTEXT, SHAPES, Builder, logits
from torch import Tensor

from hasten.ops.panels import FLOAT32
from hasten.ops.panels.reference import pack
from hasten.ops.program.reference import run
from hasten.serve.link import CacheSettings, Linked
from hasten.serve.native_runner import NativeRunner
from hasten.serve.program import Layer, Program, Ref

# Queries and weights are rounded to 16 bits, or to bf16, or not at all.
ROUNDED = {"int8": 1e-3, "bfloat16": 2e-2, "float32": 1e-5}


class Attention:
    """One layer of attention whose queries, keys and values are the rows of a table, one for each token."""

    def __init__(self, seed: int, window: int, softcap: float) -> None:
        self.heads, self.kv, self.D, self.Dv, _ = SHAPES[seed % len(SHAPES)]
        self.seed, self.generator = seed, Builder(seed).generator
        self.window, self.softcap = window, softcap

    def held_by_bytes(self, kv: int, width: int) -> Tensor:
        """[CONTEXT, kv, width] of integers up to 127, which occurs in each row, times powers of two."""
        x = torch.randint(-127, 128, (CONTEXT, kv, width), generator=self.generator).float()
        x[..., -1] = 127.0
        return x * 2.0 ** torch.randint(-9, -4, (CONTEXT, kv, 1), generator=self.generator)

    def rows(self) -> Tensor:
        q = 2.0 * torch.randn(CONTEXT, self.heads * self.D, generator=self.generator)
        k, v = self.held_by_bytes(self.kv, self.D), self.held_by_bytes(self.kv, self.Dv)
        return torch.cat([q, k.flatten(1), v.flatten(1)], 1)

    def program(self, table: Tensor) -> tuple[Program, list[Tensor]]:
        build, heads, kv, D, Dv = Builder(self.seed), self.heads, self.kv, self.D, self.Dv
        width, out, k_at = table.shape[1], heads * Dv, heads * D
        x, mixed, wanted = build.root(width), build.root(out), build.root(out, True)
        build.emit("embed", 1, width, x, matrix=build.matrix(CONTEXT, width, False), floats=(1.0,))
        build.layers.append(Layer(kv, D, Dv, self.window))
        q, k, v = (Ref("root", x.index, at, step) for at, step in ((0, D), (k_at, D), (k_at + kv * D, Dv)))
        build.emit("store", kv, D, a=k, b=v, ints=(0, Dv))
        for op in ("attend", "merge"):
            build.emit(
                op, heads, D, Ref("root", mixed.index, 0, Dv), a=q, ints=(0, Dv, kv, self.window),
                floats=(D**-0.5, self.softcap),
            )  # fmt: skip
        build.emit("select", 1, out, wanted, a=mixed, selected=True)
        program = Program(
            tuple(build.instructions), tuple(build.roots), tuple(build.uses), tuple(build.layers),
            wanted.index, out, CONTEXT,
        )  # fmt: skip
        return program, [table]

    def native(self, cache: str, table: Tensor, pieces: tuple[int, ...]) -> Tensor:
        """[T, heads, Dv]"""
        program, matrices = self.program(table)
        settings = CacheSettings(cache, tuple(CONTEXT // 32 for _ in program.windows()))
        runner = NativeRunner(
            Linked(program, [pack(m, FLOAT32) for m in matrices], settings, max(pieces), max(pieces))
        )
        return logits(runner, torch.arange(sum(pieces)), pieces).double().view(-1, self.heads, self.Dv)

    def meaning(self, table: Tensor, tokens: int) -> Tensor:
        """The same in float64."""
        program, matrices = self.program(table)
        found = run(program, [matrix.double() for matrix in matrices], torch.arange(tokens))
        return found.view(-1, self.heads, self.Dv)


def check(cache: str, seed: int, window: int, softcap: float, pieces: tuple[int, ...]) -> None:
    """Raises AssertionError where attention loses more than the rounding of queries and weights does."""
    case = Attention(seed, window, softcap)
    table = case.rows()
    found, expected = case.native(cache, table, pieces), case.meaning(table, sum(pieces))
    error = (found - expected).abs().max() / expected.abs().max()
    assert error <= ROUNDED[cache], f"relative error {error:.2e}, allowed {ROUNDED[cache]:.0e}"


def check_spoilt(
    cache: str, seed: int, what: str, value: float, window: int, pieces: tuple[int, ...]
) -> None:
    """A number that is not finite spoils the rows that see it, in its KV head alone.

    NaN has all its bits but the sign: whoever rounds or shifts them as numbers gets something else.
    """
    case = Attention(seed, window, 0.0)
    group, row, kv = case.heads // case.kv, 70, case.kv - 1
    at = {
        "query": group * kv * case.D,
        "key": case.heads * case.D + kv * case.D,
        "value": (case.heads + case.kv) * case.D + kv * case.Dv,
    }[what]

    table = case.rows()
    clean = case.native(cache, table, pieces)
    if value != value:
        table.view(torch.int32)[row, at + 1] = 0x7FFFFFFF
    else:
        table[row, at + 1] = value
    found = case.native(cache, table, pieces)
    T = len(found)
    expected = torch.zeros(T, case.heads, dtype=torch.bool)
    if what == "query":
        expected[row, group * kv] = True
    else:
        expected[row : min(T, row + window) if window else T, group * kv : group * (kv + 1)] = True
    spoilt, counts = found.isnan().all(-1), torch.ones_like(expected)
    if what == "value" and cache != "int8":
        # One number alone is spoilt, where bytes share a scale; also in earlier rows of the step, which give
        # it a weight of 0, as in plain PyTorch.
        spoilt = found.isnan().any(-1)
        counts[:row, group * kv : group * (kv + 1)] = False
    assert torch.equal(spoilt[counts], expected[counts]), f"spoilt {spoilt.nonzero().tolist()[:8]}"
    assert torch.equal(found[~expected & counts], clean[~expected & counts])


def suite(smallest: bool = False) -> Iterator[tuple[str, Callable[[], None]]]:
    """Named checks: shapes, windows, prompts in one piece and in several, numbers that are not finite."""
    cuts = ((CONTEXT,), (33, 31, 13, 1, 1), (1,) * 150)
    nan, infinity = float("nan"), float("inf")
    spoils = (("query", nan, 0), ("key", nan, 45), ("value", nan, 0))
    # Of bytes alone, whose scale becomes NaN: an infinite key of another kind may get the weight 0, and an
    # infinite value makes a result infinite.
    infinite = (("key", infinity, 45), ("value", -infinity, 45))
    for cache in ROUNDED:
        for seed in range(1 if smallest else 4):
            for cut in cuts[:1] if smallest else cuts:
                for window, softcap in ((0, 0.0), (45, 0.0), (0, 3.0)):
                    call = partial(check, cache, seed, window, softcap, cut)
                    yield f"{cache} {seed} {window} {softcap} {len(cut)}", call
                for what, value, window in (*spoils, *(infinite if cache == "int8" else ())):
                    call = partial(check_spoilt, cache, seed, what, value, window, cut)
                    yield f"{cache} {seed} {what} {value} {window} {len(cut)}", call

"""A decoder as data: instructions over rows, the weights they need, and the layers of the cache.

A row is a token's. Values live in *roots*, rows of floats; an operand is a strided view of a root's row, of a
table's row at the token's position, or of one vector for all rows. `link.py` gives them addresses; the
meaning of an instruction stands beside `Op` in ops/program/cpu.h.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np

from hasten.ops.program.codes import BINARY, FUNCTION, FUNCTIONS, KINDS

__all__ = [
    "BINARY",
    "FUNCTION",
    "FUNCTIONS",
    "KINDS",
    "OPCODES",
    "Instruction",
    "Layer",
    "MatrixUse",
    "Program",
    "Ref",
    "Root",
    "Weight",
]

OPCODES = (
    "embed", "norm", "prepare", "linear", "rotary", "store", "attend", "merge", "binary", "unary", "gated",
    "select", "where", "reduce", "softmax", "places", "gather", "scatter", "experts",
)  # fmt: skip


@dataclass(frozen=True)
class Ref:
    """Element (i, j) of the row lies at offset + i * s0 + j * s1 floats. kind: root, table, vector."""

    kind: str
    index: int
    offset: int = 0
    s0: int = 0
    s1: int = 1


@dataclass(frozen=True)
class Instruction:
    """Sizes n0 and n1, operands, and numbers; see ops/program/cpu.h. `source` names the node it came from."""

    op: str
    n0: int
    n1: int
    dst: Ref | None = None
    a: Ref | None = None
    b: Ref | None = None
    c: Ref | None = None
    matrix: int = -1
    up: int = -1
    ints: tuple[int, ...] = ()
    floats: tuple[float, ...] = ()
    selected: bool = False
    source: str = ""

    def reads(self) -> list[Ref]:
        return [ref for ref in (self.a, self.b, self.c) if ref is not None]


@dataclass(frozen=True)
class Root:
    """`width` floats a row; `selected`: rows are those whose logits are wanted."""

    width: int
    selected: bool = False


@dataclass(frozen=True)
class Layer:
    """A cache layer. window_tokens: 0 sees all."""

    heads: int
    key_size: int
    value_size: int
    window_tokens: int = 0


@dataclass(frozen=True)
class Weight:
    """A matrix [N, K] of a program: a part of a parameter, or all matrices of a stack, one below another."""

    name: str
    """Of the parameter in the transformers model, e.g. `model.layers.0.self_attn.q_proj.weight`."""
    transposed: bool = False
    """Whether the program's [N, K] is the parameter's transpose (GPT-2's Conv1D)."""
    rows: tuple[int, int] | None = None
    """A part of the program's rows."""
    columns: tuple[int, int] | None = None
    role: str = "projection"
    """`projection`, `embedding` or `head`."""
    layer: int | None = None


@dataclass(frozen=True)
class MatrixUse:
    """A weight matrix [N, K] with an optional bias (an index into `vectors`)."""

    weight: Weight
    N: int
    K: int
    bias: int = -1


@dataclass(frozen=True)
class Program:
    """What a model computes for a row of logits. The last instruction writes `logits`, a selected root.
    Vectors [n] and tables [positions, n] are float32."""

    instructions: tuple[Instruction, ...]
    roots: tuple[Root, ...]
    matrices: tuple[MatrixUse, ...]
    layers: tuple[Layer, ...]
    logits: int
    vocab_size: int
    context_tokens: int
    vectors: tuple[np.ndarray, ...] = field(default=(), compare=False)
    tables: tuple[np.ndarray, ...] = field(default=(), compare=False)

    def windows(self) -> tuple[int, ...]:
        """The windows that occur, 0 first: one group of the cache each."""
        return tuple(sorted({layer.window_tokens for layer in self.layers}))

    def as_dict(self) -> dict[str, Any]:
        """All but the arrays, for a file."""
        plain = replace(self, vectors=(), tables=())
        return asdict(plain)

    @classmethod
    def from_dict(cls, data: dict[str, Any], vectors: list[np.ndarray], tables: list[np.ndarray]) -> Program:
        """The inverse of `as_dict`, with the arrays."""

        def ref(given: dict[str, Any] | None) -> Ref | None:
            return None if given is None else Ref(**given)

        instructions = []
        for given in data["instructions"]:
            operands = {name: ref(given[name]) for name in ("dst", "a", "b", "c")}
            numbers = {"ints": tuple(given["ints"]), "floats": tuple(given["floats"])}
            instructions.append(Instruction(**{**given, **operands, **numbers}))
        matrices = []
        for given in data["matrices"]:
            weight = dict(given["weight"])
            for name in ("rows", "columns"):
                weight[name] = None if weight.get(name) is None else tuple(weight[name])
            matrices.append(MatrixUse(**{**given, "weight": Weight(**weight)}))
        return cls(
            instructions=tuple(instructions),
            roots=tuple(Root(**given) for given in data["roots"]),
            matrices=tuple(matrices),
            layers=tuple(Layer(**given) for given in data["layers"]),
            logits=data["logits"],
            vocab_size=data["vocab_size"],
            context_tokens=data["context_tokens"],
            vectors=tuple(vectors),
            tables=tuple(tables),
        )

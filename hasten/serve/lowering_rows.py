"""What the lowering of a graph knows while it goes through the nodes: values, and how instructions are made.

A row value is a view of a root; its layout is a meta tensor whose dim of T tokens has the root's width as
stride, so that views of the graph are views of that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hasten.base.errors import CaptureError
from hasten.graph.nodes import aten, full_args, is_call, mutated_nodes, shape_of
from hasten.graph.whole import Whole
from hasten.serve.evaluate import Evaluator, Further
from hasten.serve.program import Instruction, Layer, MatrixUse, Ref, Root
from hasten.serve.weights import Weight

_MOST_PIECES = 256


@dataclass(frozen=True)
class Value:
    """A view: `kind` and `index` as in `Ref`, `meta` its layout (with the dim of T tokens)."""

    kind: str
    index: int
    meta: Tensor


class RefusedError(CaptureError):
    """A node without an instruction."""


class Rows:
    """Operands and instructions of one program."""

    def __init__(self, whole: Whole, dense: Callable[[str], Tensor], context_tokens: int) -> None:
        self.T = whole.tokens
        self.graph = whole.module.graph
        self.names = whole.names
        self.context_tokens = context_tokens
        self.evaluator = Evaluator(whole, dense, context_tokens)
        self.further = Further(whole, dense, context_tokens)
        self.values: dict[fx.Node, Value | list[Value]] = {}
        self.instructions: list[Instruction] = []
        self.roots: list[Root] = []
        self.matrices: list[MatrixUse] = []
        self.layers: list[Layer] = []
        self.vectors: list[Tensor] = []
        self.tables: list[Tensor] = []
        self._known: dict[Any, int] = {}
        self.masks: dict[int, tuple[Tensor | None, int]] = {}
        """What written masks came to, by their key in `further`."""
        self.selected = False
        self.head: fx.Node | None = None
        self.order = {node: i for i, node in enumerate(self.graph.nodes)}
        self.changed = mutated_nodes(self.graph)
        """Nodes whose memory is written by a later one: a copy of them is no second name."""

    # --- values -------------------------------------------------------------------------------------------

    def kind(self, node: Any) -> str:
        return self.evaluator.kind(node)

    def value(self, node: Any) -> Value:
        """A node or a number as an operand: rows, a table or a vector."""
        kind = self.evaluator.kind(node)
        if kind == "rows":
            found = self.values[node]
            if isinstance(found, list):
                raise RefusedError(f"{node}: several results used as one")
            return found
        if kind == "position":
            return self.table(node)
        if kind in ("constant", "weight"):
            held = self.evaluator.value(node)
            return self.vector(held if isinstance(held, Tensor) else torch.tensor(float(held)), node)
        raise RefusedError(f"{node}: the tokens themselves are used in a computation")

    def table(self, node: fx.Node) -> Value:
        """A function of the position."""
        shape = shape_of(node)
        if list(shape).count(self.T) != 1:
            raise RefusedError(f"{node}: depends on the positions of two tokens at once")
        rows = self.evaluator.table(node, shape.index(self.T))
        return Value("table", self._once(self.tables, rows), layout(shape, self.T))

    def vector(self, tensor: Tensor, node: Any) -> Value:
        """A constant; one that differs from place to place is a table, as far as the context goes."""
        shape = tuple(tensor.shape)
        if self.T in shape:
            dim = shape.index(self.T)
            if shape.count(self.T) > 1:
                raise RefusedError(f"{node}: a constant for each pair of places in the sequence")
            first = tensor.narrow(dim, 0, 1)
            if not torch.equal(tensor, first.expand(shape)):
                held = self.further.places(node, dim)
                self.context_tokens = min(self.context_tokens, len(held))
                return Value("table", self._once(self.tables, held), layout(shape, self.T))
            tensor = first
        held = tensor.detach().to(torch.float32).contiguous()
        meta = torch.empty(held.shape, device="meta").expand(shape)
        return Value("vector", self._once(self.vectors, held.flatten()), meta)

    def _once(self, among: list[Tensor], tensor: Tensor) -> int:
        key = (id(among), tuple(tensor.shape), hash(tensor.numpy().tobytes()))
        if key not in self._known:
            self._known[key] = len(among)
            among.append(tensor)
        return self._known[key]

    def new(self, shape: Sequence[int], node: fx.Node) -> Value:
        if list(shape).count(self.T) != 1:
            raise RefusedError(f"{node}: {node.target} gives {tuple(shape)}, which is no row for each token")
        meta = layout(shape, self.T)
        self.roots.append(Root(meta.numel() // self.T, self.selected))
        return Value("root", len(self.roots) - 1, meta)

    def number(self, given: Any) -> float | None:
        """A Python number, or a constant of one element; None for everything else."""
        if isinstance(given, (int, float)):
            return float(given)
        if isinstance(given, fx.Node) and self.evaluator.kind(given) == "constant":
            held = self.evaluator.value(given)
            if isinstance(held, Tensor) and held.numel() == 1:
                return float(held)
        return None

    def matrix(self, node: Any, N: int, K: int, bias: int, role: str) -> int:
        self.matrices.append(MatrixUse(self.weight(node, role), N, K, bias))
        return len(self.matrices) - 1

    def weight(self, node: Any, role: str) -> Weight:
        """The parameter behind a node: as it is, transposed, or some of its rows."""
        transposed, rows = False, None
        while node.op == "call_function":
            args = full_args(node)
            if is_call(node, aten.to.dtype, aten._to_copy.default, aten.alias.default, aten.detach.default):
                pass
            elif len(shape_of(node)) != 2:
                raise RefusedError(f"{node}: a stack of weights is computed by {node.target}")
            elif is_call(node, aten.t.default) or (
                is_call(node, aten.transpose.int) and {d % 2 for d in args[1:]} == {0, 1}
            ):
                if rows is not None:
                    raise RefusedError(f"{node}: a slice of a weight is transposed")
                transposed = not transposed
            elif is_call(node, aten.slice.Tensor) and args[1] % 2 == 0 and args[4] == 1 and rows is None:
                size = shape_of(args[0])[0]
                rows = tuple(
                    min(max(v + size if v < 0 else v, 0), size) for v in (args[2] or 0, args[3] or size)
                )
            else:
                raise RefusedError(f"{node}: a weight is computed by {node.target}")
            node = args[0]
        if str(node.target) not in self.names:
            raise RefusedError(f"{node}: a matrix that is no parameter")
        name = self.names[str(node.target)]
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        return Weight(name, transposed, rows, None, role, layer)  # type: ignore[arg-type]

    # --- instructions -------------------------------------------------------------------------------------

    def emit(self, op: str, node: fx.Node, **fields: Any) -> None:
        self.instructions.append(Instruction(op, selected=self.selected, source=str(node), **fields))

    def ref(self, value: Value, s0: int = 0, s1: int = 1, extra: int = 0) -> Ref:
        return Ref(value.kind, value.index, int(value.meta.storage_offset()) + extra, s0, s1)

    def axes(self, value: Value, shape: Sequence[int]) -> list[tuple[int, int]]:
        """(size, stride) of a view, expanded to `shape`, without the tokens."""
        meta = value.meta.expand(shape) if tuple(value.meta.shape) != tuple(shape) else value.meta
        return [
            (size, stride if size > 1 else 0)
            for size, stride in zip(meta.shape, meta.stride(), strict=True)
            if size != self.T
        ]

    def heads(self, value: Value, node: fx.Node) -> tuple[Value, int, int, int]:
        """(view, n0, stride, n1) of rows [n0, n1] whose last dim is dense; copied where it is not."""
        axes = merged([[axis] for axis in self.axes(value, value.meta.shape)])
        if len(axes) > 2 or axes[-1][0][1] != 1:
            value = self.copy(value, node)
            axes = merged([[axis] for axis in self.axes(value, value.meta.shape)])
        # The last dim of the tensor stays one, also where it could be merged with the one before.
        last = value.meta.shape[-1]
        sizes = [axis[0] for axis in axes]
        if len(sizes) == 2 and sizes[1][0] == last:
            return value, *sizes[0], last
        if len(sizes) == 1:
            return value, sizes[0][0] // last, last, last
        raise RefusedError(f"{node}: rows of {tuple(value.meta.shape)} in an order of their own")

    def copy(self, value: Value, node: fx.Node, shape: Sequence[int] | None = None) -> Value:
        """The same elements in a root of their own, in the order of the dims."""
        new = self.new(value.meta.shape, node)
        self.apply(node, new, [value], "unary", (-1,), (1.0, 0.0))
        if shape is not None:
            return Value("root", new.index, new.meta.view(*shape))
        return new

    def apply(
        self,
        node: fx.Node,
        dst: Value,
        operands: Sequence[Value],
        op: str,
        ints: tuple[int, ...],
        floats: tuple[float, ...] = (),
    ) -> None:
        """A pointwise instruction, or several where dims beyond two remain after merging."""
        shape = dst.meta.shape
        columns = [self.axes(value, shape) for value in (dst, *operands)]
        axes = merged(list(map(list, zip(*columns, strict=True))))
        if axes[-1][0][0] > 1 and axes[-1][0][1] != 1:  # results are written side by side
            axes.append([(1, 1)] * len(columns))
        self._pieces(node, op, [dst, *operands], axes[:-1], axes[-1], ints, floats)

    def along(
        self,
        node: fx.Node,
        op: str,
        dim: int,
        operands: Sequence[Value],
        ints: tuple[int, ...],
        floats: tuple[float, ...] = (),
        size: int | None = None,
    ) -> None:
        """An instruction that works along a dim, whose size may differ from operand to operand.

        operands: the result first, all with the same other dims. size: n1; default: the first source's.
        """
        lines, outer = [], []
        for value in operands:
            meta = value.meta.movedim(dim, -1)
            lines.append((meta.shape[-1], meta.stride(-1) if meta.shape[-1] > 1 else 0))
            first = Value(value.kind, value.index, meta[..., 0])
            outer.append(self.axes(first, first.meta.shape))
        lines[0] = (size or lines[1][0], lines[0][1])
        axes = merged(list(map(list, zip(*outer, strict=True)))) if outer[0] else []
        self._pieces(node, op, operands, axes, lines, ints, floats)

    def _pieces(
        self,
        node: fx.Node,
        op: str,
        values: Sequence[Value],
        axes: list[list[tuple[int, int]]],
        last: list[tuple[int, int]],
        ints: tuple[int, ...],
        floats: tuple[float, ...],
    ) -> None:
        """One instruction for each place of all axes but the last two."""
        outer, first = axes[:-1], axes[-1] if axes else [(1, 0)] * len(values)
        offsets = [[0] * len(values)]
        for axis in outer:
            offsets = [
                [o + i * stride for o, (_, stride) in zip(start, axis, strict=True)]
                for start in offsets
                for i in range(axis[0][0])
            ]
        if len(offsets) > _MOST_PIECES:
            raise RefusedError(f"{node}: {node.target} over dims that cannot be merged")
        for start in offsets:
            refs = [self.ref(value, first[i][1], last[i][1], start[i]) for i, value in enumerate(values)]
            named = dict(zip(("dst", "a", "b", "c"), refs, strict=False))
            self.emit(op, node, n0=first[0][0], n1=last[0][0], **named, ints=ints, floats=floats)


def layout(shape: Sequence[int], tokens: int) -> Tensor:
    """A meta tensor of `shape` with the tokens outermost in memory and the other dims in their order."""
    strides, stride = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        if shape[i] != tokens:
            strides[i] = stride
            stride *= shape[i]
    strides[list(shape).index(tokens)] = stride
    return torch.empty_strided(tuple(shape), strides, device="meta")


def merged(axes: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
    """Axes, each a (size, stride) for every operand, without those of size 1 and with neighbours merged."""
    found: list[list[tuple[int, int]]] = []
    for axis in axes:
        if axis[0][0] == 1:
            continue
        if found and all(
            outer[1] == size * stride for outer, (size, stride) in zip(found[-1], axis, strict=True)
        ):
            found[-1] = [
                (outer[0] * size, stride) for outer, (size, stride) in zip(found[-1], axis, strict=True)
            ]
        else:
            found.append(list(axis))
    return found or [[(1, 1 if i == 0 else 0) for i in range(len(axes[0]) if axes else 1)]]


def name_of(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return (
        f"{target.namespace}.{packet.__name__}"
        if packet is not None
        else getattr(target, "__name__", str(target))
    )

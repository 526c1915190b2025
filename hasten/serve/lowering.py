"""From the graph of a whole decoder to a program.

Every node is of one kind: a constant, a weight, a function of the position, the tokens, or *rows*, which is
everything that depends on the tokens. Rows are instructions; the rest is computed here, once. A row value is
a view of a root; its layout is a meta tensor whose dim of T tokens has the root's width as stride, so that
views of the graph are views of that tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hasten.base.errors import CaptureError
from hasten.graph.nodes import aten, full_args, getitem, is_call, shape_of
from hasten.graph.whole import Whole
from hasten.serve.evaluate import Evaluator
from hasten.serve.program import BINARY, KINDS, Instruction, Layer, MatrixUse, Program, Ref, Root
from hasten.serve.weights import Weight

_hops = torch.ops.hasten
# A score below this has weight zero beside any other.
_HIDDEN = -1e30
_MOST_PIECES = 256


@dataclass(frozen=True)
class _Value:
    """A view: `kind` and `index` as in `Ref`, `meta` its layout (with the dim of T tokens)."""

    kind: str
    index: int
    meta: Tensor


class _RefusedError(CaptureError):
    """A node without an instruction."""


def lower(whole: Whole, dense: Callable[[str], Tensor], vocab_size: int, context_tokens: int) -> Program:
    """The program of a captured decoder.

    Args:
        dense: a parameter's values by its name; asked for small ones.
        vocab_size: columns of the logits.
        context_tokens: rows of the tables by position.

    Raises:
        CaptureError: names the node that has no instruction.
    """
    return _Lowering(whole, dense, vocab_size, context_tokens).run()


class _Lowering:
    def __init__(
        self, whole: Whole, dense: Callable[[str], Tensor], vocab_size: int, context_tokens: int
    ) -> None:
        self.T = whole.tokens
        self.graph = whole.module.graph
        self.names = whole.names
        self.vocab_size, self.context_tokens = vocab_size, context_tokens
        self.evaluator = Evaluator(whole, dense, context_tokens)
        self.values: dict[fx.Node, _Value | list[_Value]] = {}
        self.instructions: list[Instruction] = []
        self.roots: list[Root] = []
        self.matrices: list[MatrixUse] = []
        self.layers: list[Layer] = []
        self.vectors: list[Tensor] = []
        self.tables: list[Tensor] = []
        self._known: dict[Any, int] = {}
        self.selected = False
        self.head: fx.Node | None = None

    def run(self) -> Program:
        output = self.graph.output_node().args[0]
        if isinstance(output, (tuple, list)):
            output = output[0]
        self.head = self._find_head(output)
        for node in self.graph.nodes:
            if node.op == "call_function" and self.evaluator.kind(node) == "rows":
                self._node(node)
        logits = self.values[output]  # type: ignore[index]
        if not isinstance(logits, _Value) or logits.kind != "root" or not self.roots[logits.index].selected:
            raise CaptureError("the logits do not come from one last linear layer")
        if self.roots[logits.index].width != self.vocab_size or logits.meta.storage_offset():
            raise CaptureError(
                f"the logits have {self.roots[logits.index].width} columns a row, not {self.vocab_size}"
            )
        return Program(
            tuple(self.instructions), tuple(self.roots), tuple(self.matrices), tuple(self.layers),
            logits.index, self.vocab_size, self.context_tokens, tuple(self.vectors), tuple(self.tables),
        )  # fmt: skip

    def _find_head(self, node: Any) -> fx.Node:
        """The linear layer behind the logits; what follows it works on the wanted rows alone."""
        while isinstance(node, fx.Node):
            if is_call(node, aten.linear.default, _hops.linear.default):
                return node
            rows = [n for n in node.all_input_nodes if self.evaluator.kind(n) == "rows"]
            if len(rows) != 1:
                break
            node = rows[0]
        raise CaptureError(f"no linear layer makes the logits; the search ended at {node}")

    # --- values -------------------------------------------------------------------------------------------

    def _value(self, node: Any) -> _Value:
        """A node as an operand: rows, a table or a vector."""
        kind = self.evaluator.kind(node)
        if kind == "rows":
            found = self.values[node]
            if isinstance(found, list):
                raise _RefusedError(f"{node}: several results used as one")
            return found
        if kind == "position":
            return self._table(node)
        if kind in ("constant", "weight"):
            return self._vector(self.evaluator.value(node), node)
        raise _RefusedError(f"{node}: the tokens themselves are used in a computation")

    def _table(self, node: fx.Node) -> _Value:
        shape = shape_of(node)
        if list(shape).count(self.T) != 1:
            raise _RefusedError(f"{node}: depends on the positions of two tokens at once")
        rows = self.evaluator.table(node, shape.index(self.T))
        meta = _layout(shape, self.T)
        return _Value("table", self._once(self.tables, rows), meta)

    def _vector(self, tensor: Tensor, node: Any) -> _Value:
        if self.T in tensor.shape:
            raise _RefusedError(f"{node}: a constant for each place in the sequence")
        held = tensor.detach().to(torch.float32).contiguous()
        return _Value(
            "vector", self._once(self.vectors, held.flatten()), torch.empty(held.shape, device="meta")
        )

    def _once(self, among: list[Tensor], tensor: Tensor) -> int:
        key = (id(among), tuple(tensor.shape), hash(tensor.numpy().tobytes()))
        if key not in self._known:
            self._known[key] = len(among)
            among.append(tensor)
        return self._known[key]

    def _new(self, shape: Sequence[int], node: fx.Node) -> _Value:
        if list(shape).count(self.T) != 1:
            raise _RefusedError(
                f"{node}: {_named(node)} gives {tuple(shape)}, which is no row for each token"
            )
        meta = _layout(shape, self.T)
        self.roots.append(Root(meta.numel() // self.T, self.selected))
        return _Value("root", len(self.roots) - 1, meta)

    def _axes(self, value: _Value, shape: Sequence[int]) -> list[tuple[int, int]]:
        """(size, stride) of a view, expanded to `shape`, without the tokens."""
        meta = value.meta.expand(shape) if tuple(value.meta.shape) != tuple(shape) else value.meta
        return [
            (size, stride if meta.shape[i] > 1 else 0)
            for i, (size, stride) in enumerate(zip(meta.shape, meta.stride(), strict=True))
            if size != self.T
        ]

    def _emit(self, op: str, node: fx.Node, **fields: Any) -> None:
        self.instructions.append(Instruction(op, selected=self.selected, source=str(node), **fields))

    def _ref(self, value: _Value, s0: int = 0, s1: int = 1, extra: int = 0) -> Ref:
        return Ref(value.kind, value.index, int(value.meta.storage_offset()) + extra, s0, s1)

    def _heads(self, value: _Value, node: fx.Node) -> tuple[_Value, int, int, int]:
        """(view, n0, stride, n1) of rows [n0, n1] whose last dim is dense; copied where it is not."""
        axes = _merged([[axis] for axis in self._axes(value, value.meta.shape)])
        if len(axes) > 2 or axes[-1][0][1] != 1:
            value = self._copy(value, node)
            axes = _merged([[axis] for axis in self._axes(value, value.meta.shape)])
        # The last dim of the tensor stays one, also where it could be merged with the one before.
        last = value.meta.shape[-1]
        sizes = [axis[0] for axis in axes]
        if len(sizes) == 2 and sizes[1][0] == last:
            return value, *sizes[0], last
        if len(sizes) == 1:
            return value, sizes[0][0] // last, last, last
        raise _RefusedError(f"{node}: rows of {tuple(value.meta.shape)} in an order of their own")

    def _copy(self, value: _Value, node: fx.Node, shape: Sequence[int] | None = None) -> _Value:
        """The same elements in a root of their own, in the order of the dims."""
        new = self._new(value.meta.shape, node)
        self._apply(node, new, [value], "unary", (-1,), (1.0, 0.0))
        if shape is not None:
            return _Value("root", new.index, new.meta.view(*shape))
        return new

    def _apply(
        self,
        node: fx.Node,
        dst: _Value,
        operands: Sequence[_Value],
        op: str,
        ints: tuple[int, ...],
        floats: tuple[float, ...] = (),
    ) -> None:
        """A pointwise instruction, or several where dims beyond two remain after merging."""
        shape = dst.meta.shape
        columns = [self._axes(value, shape) for value in (dst, *operands)]
        axes = _merged(list(map(list, zip(*columns, strict=True))))
        while len(axes) < 2:
            axes.insert(0, [(1, 0)] * len(columns))
        outer, first, last = axes[:-2], axes[-2], axes[-1]
        offsets = [[0] * len(columns)]
        for axis in outer:
            offsets = [
                [o + i * stride for o, (_, stride) in zip(start, axis, strict=True)]
                for start in offsets
                for i in range(axis[0][0])
            ]
        if len(offsets) > _MOST_PIECES:
            raise _RefusedError(f"{node}: {_named(node)} over dims that cannot be merged")
        for start in offsets:
            refs = [
                self._ref(value, first[i][1], last[i][1], start[i])
                for i, value in enumerate((dst, *operands))
            ]
            named = dict(zip(("dst", "a", "b"), refs, strict=False))
            self._emit(op, node, n0=first[0][0], n1=last[0][0], **named, ints=ints, floats=floats)

    # --- nodes --------------------------------------------------------------------------------------------

    def _node(self, node: fx.Node) -> None:
        if (index := getitem(node)) is not None:
            found = self.values[node.args[0]]  # type: ignore[index]
            if isinstance(found, list):
                if index >= len(found):
                    if node.users:
                        raise _RefusedError(f"{node}: a statistic of {node.args[0]} is used")
                    return
                self.values[node] = found[index]
                return
            if index:
                if node.users:
                    raise _RefusedError(f"{node}: a statistic of {node.args[0]} is used")
                return
            self.values[node] = found
            return
        name = _name(node)
        handler = _HANDLERS.get(name)
        if handler is None:
            raise _RefusedError(f"{node}: no instruction for {_named(node)}")
        result = handler(self, node, full_args(node))
        if result is not None:
            self.values[node] = result

    def _same(self, node: fx.Node, args: list[Any]) -> _Value:
        return self._value(args[0])

    def _view(self, node: fx.Node, args: list[Any]) -> _Value | list[_Value]:
        source = self._value(args[0])
        if is_call(node, aten.expand_as):
            return _Value(source.kind, source.index, source.meta.expand(shape_of(node)))
        result = node.target(source.meta, *node.args[1:], **node.kwargs)  # type: ignore[operator]
        if isinstance(result, (tuple, list)):
            return [_Value(source.kind, source.index, meta) for meta in result]
        return _Value(source.kind, source.index, result)

    def _reshape(self, node: fx.Node, args: list[Any]) -> _Value:
        source, shape = self._value(args[0]), shape_of(node)
        if list(shape).count(self.T) != 1:
            raise _RefusedError(f"{node}: {_named(node)} joins tokens: {shape}")
        try:
            return _Value(source.kind, source.index, source.meta.view(*shape))
        except RuntimeError:
            return self._copy(source, node, shape)

    def _embedding(self, node: fx.Node, args: list[Any]) -> _Value:
        if self.evaluator.kind(args[1]) != "tokens":
            raise _RefusedError(f"{node}: looks up something other than the tokens")
        new = self._new(shape_of(node), node)
        K = shape_of(node)[-1]
        matrix = self._matrix(args[0], shape_of(args[0])[0], K, -1, "embedding", node)
        self._emit("embed", node, n0=1, n1=K, dst=self._ref(new), matrix=matrix, floats=(1.0,))
        return new

    def _matrix(self, node: Any, N: int, K: int, bias: int, role: str, user: fx.Node) -> int:
        weight = self._weight(node, role)
        self.matrices.append(MatrixUse(weight, N, K, bias))
        return len(self.matrices) - 1

    def _weight(self, node: Any, role: str) -> Weight:
        """The parameter behind a node: as it is, transposed, or some of its rows."""
        transposed, rows = False, None
        while node.op == "call_function":
            args = full_args(node)
            if is_call(node, aten.to.dtype, aten._to_copy.default, aten.alias.default, aten.detach.default):
                pass
            elif is_call(node, aten.t.default) or (
                is_call(node, aten.transpose.int) and {d % 2 for d in args[1:]} == {0, 1}
            ):
                if rows is not None:
                    raise _RefusedError(f"{node}: a slice of a weight is transposed")
                transposed = not transposed
            elif is_call(node, aten.slice.Tensor) and args[1] % 2 == 0 and args[4] == 1 and rows is None:
                size = shape_of(args[0])[0]
                rows = tuple(
                    min(max(v + size if v < 0 else v, 0), size) for v in (args[2] or 0, args[3] or size)
                )
            else:
                raise _RefusedError(f"{node}: a weight is computed by {_named(node)}")
            node = args[0]
        if str(node.target) not in self.names:
            raise _RefusedError(f"{node}: a matrix that is no parameter")
        name = self.names[str(node.target)]
        layer = next((int(part) for part in name.split(".") if part.isdigit()), None)
        return Weight(name, transposed, rows, None, role, layer)  # type: ignore[arg-type]

    def _linear(self, node: fx.Node, args: list[Any]) -> _Value:
        x, weight, bias = args[:3]
        kind = args[3] if is_call(node, _hops.linear.default) else "identity"
        if kind not in ("identity", *KINDS):
            raise _RefusedError(f"{node}: no instruction for the activation {kind}")
        source = self._value(x)
        source, n0, _, K = self._heads(source, node)
        if n0 != 1:
            raise _RefusedError(f"{node}: a linear layer over {n0} parts of each row")
        if source.kind != "root":
            raise _RefusedError(f"{node}: a linear layer over what depends on the position alone")
        head = node is self.head
        if head:
            before = source
            self.selected = True
            source = self._new(before.meta.shape, node)
            source = _Value("root", source.index, source.meta)
            self._emit("select", node, n0=1, n1=K, dst=self._ref(source), a=self._ref(before))
        N = shape_of(node)[-1]
        vector = -1
        if bias is not None:
            vector = self._vector(self.evaluator.value(bias), node).index
        matrix = self._matrix(weight, N, K, vector, "head" if head else "projection", node)
        new = self._new(shape_of(node), node)
        code = -1 if kind == "identity" else KINDS.index(kind)
        self._emit(
            "linear", node, n0=1, n1=K, dst=self._ref(new), a=self._ref(source), matrix=matrix, ints=(code,),
            floats=(1.0,),
        )  # fmt: skip
        return new

    def _norm(self, node: fx.Node, args: list[Any]) -> _Value:
        layer = is_call(node, _hops.layer_norm.default, aten.layer_norm.default)
        if is_call(node, aten.layer_norm.default):
            x, shape, weight, bias, eps = args[:5]
            offset = 0.0
            if len(shape) != 1:
                raise _RefusedError(f"{node}: a norm over {len(shape)} dims")
        elif layer:
            x, weight, bias, eps = args[:4]
            offset = 0.0
        else:
            x, weight, eps, offset = args[:4]
            bias = None
        source, n0, stride, K = self._heads(self._value(x), node)
        new = self._new(source.meta.shape, node)
        _, m0, to, _ = self._heads(new, node)
        if m0 != n0:
            raise _RefusedError(f"{node}: a norm over rows in an order of their own")
        vectors = {
            name: self._ref(self._vector(self.evaluator.value(given), node))
            for name, given in (("b", weight), ("c", bias))
            if given is not None
        }
        self._emit(
            "norm", node, n0=n0, n1=K, dst=self._ref(new, to), a=self._ref(source, stride), **vectors,
            ints=(int(layer),), floats=(float(eps), float(offset)),
        )  # fmt: skip
        return new

    def _rotary(self, node: fx.Node, args: list[Any]) -> _Value:
        x, cos, sin, interleaved = args[:4]
        source, n0, stride, D = self._heads(self._value(x), node)
        if self.evaluator.kind(cos) != "position" or self.evaluator.kind(sin) != "position":
            raise _RefusedError(f"{node}: rotary angles that are no function of the position")
        new = self._new(source.meta.shape, node)
        _, _, to, _ = self._heads(new, node)
        self._emit(
            "rotary", node, n0=n0, n1=D, dst=self._ref(new, to), a=self._ref(source, stride),
            b=self._ref(self._table(cos)), c=self._ref(self._table(sin)),
            ints=(shape_of(cos)[-1], int(interleaved)),
        )  # fmt: skip
        return new

    def _attention(self, node: fx.Node, args: list[Any]) -> _Value:
        q, k, v, ranges, bias, sinks, alibi, scale, causal, window, softcap = args
        slopes = None
        if bias is not None:
            slopes = self._slopes(node, bias, shape_of(q)[1])
            causal = True
        if is_call(ranges, _hops.window_ranges.default):
            limit = full_args(ranges)[1]
            window = min(filter(None, (limit, window)), default=0)
        elif ranges is not None or not causal:
            raise _RefusedError(f"{node}: attention that is not causal")
        sources = [self._value(x) for x in (q, k, v)]
        heads, kv_heads = sources[0].meta.shape[1], sources[1].meta.shape[1]
        D, Dv = sources[0].meta.shape[3], sources[2].meta.shape[3]
        if sources[0].meta.stride(3) != 1:
            sources[0] = self._copy(sources[0], node)
        refs = [self._ref(s, s.meta.stride(1), s.meta.stride(3)) for s in sources]
        if any(s.kind != "root" for s in sources):
            raise _RefusedError(f"{node}: keys or values that depend on the position alone")
        self.layers.append(Layer(kv_heads, D, Dv, int(window)))
        layer = len(self.layers) - 1
        vectors = {
            name: self._ref(self._vector(self.evaluator.value(given), node))
            for name, given in (("b", sinks), ("c", alibi))
            if given is not None
        }
        if slopes is not None:
            if alibi is not None:
                raise _RefusedError(f"{node}: two biases by distance")
            vectors["c"] = self._ref(self._vector(slopes, node))
        new = self._new((1, self.T, heads, Dv), node)
        self._emit("store", node, n0=kv_heads, n1=D, a=refs[1], b=refs[2], ints=(layer, Dv))
        factor = D**-0.5 if scale is None else float(scale)
        for op in ("attend", "merge"):
            self._emit(
                op, node, n0=heads, n1=D, dst=self._ref(new, Dv), a=refs[0], **vectors,
                ints=(layer, Dv, kv_heads, int(window)), floats=(factor, float(softcap)),
            )  # fmt: skip
        return new

    def _slopes(self, node: fx.Node, bias: Any, heads: int) -> Tensor | None:
        """ALiBi's slopes behind a constant bias that is causal and linear in the key's place; None if flat.

        What is the same for all keys of a row does not change its softmax.
        """
        if self.evaluator.kind(bias) != "constant":
            raise _RefusedError(f"{node}: attention with a bias that is no constant")
        held = self.evaluator.value(bias)
        if held.dtype == torch.bool:
            held = torch.zeros(held.shape).masked_fill_(~held, float("-inf"))
        table = held.float().expand(1, heads, self.T, self.T)[0]
        lower = torch.ones(self.T, self.T, dtype=torch.bool).tril()
        if not torch.equal(table > _HIDDEN, lower.expand_as(table)):
            raise _RefusedError(f"{node}: a mask that is not causal")
        steps = (table[:, -1, 1:] - table[:, -1, :-1]).double()
        slopes = steps.mean(-1)
        places = torch.arange(self.T).double()
        first = table.double() - slopes[:, None, None] * places
        spread = (first - first[:, :, :1]).masked_fill(~lower, 0).abs().amax()
        if spread > 1e-4 * max(1.0, float(table[:, lower].abs().amax())):
            raise _RefusedError(f"{node}: a bias that is not linear in the distance")
        return slopes.float() if bool(slopes.abs().amax() > 1e-12) else None

    def _unary_of(self, node: fx.Node, x: Any, code: int, factor: float = 1.0, added: float = 0.0) -> _Value:
        source = self._value(x)
        new = self._new(source.meta.shape, node)
        self._apply(node, new, [source], "unary", (code,), (factor, added))
        return new

    def _activation(self, node: fx.Node, args: list[Any]) -> _Value:
        kind = args[1] if is_call(node, _hops.activation.default) else _ATEN_KINDS[_name(node)]
        if is_call(node, aten.gelu.default) and args[1] == "tanh":
            kind = "gelu_tanh"
        if kind == "identity":
            return self._value(args[0])
        if kind not in KINDS:
            raise _RefusedError(f"{node}: no instruction for the activation {kind}")
        return self._unary_of(node, args[0], KINDS.index(kind))

    def _gated(self, node: fx.Node, args: list[Any]) -> _Value:
        gate, up, kind = args[:3]
        if kind not in KINDS:
            raise _RefusedError(f"{node}: no instruction for the activation {kind}")
        return self._two(node, "gated", gate, up, KINDS.index(kind))

    def _two(self, node: fx.Node, op: str, a: Any, b: Any, code: int) -> _Value:
        new = self._new(shape_of(node), node)
        self._apply(node, new, [self._value(a), self._value(b)], op, (code,))
        return new

    def _number(self, given: Any) -> float | None:
        """A Python number, or a constant of one element; None for everything else."""
        if isinstance(given, (int, float)):
            return float(given)
        if isinstance(given, fx.Node) and self.evaluator.kind(given) == "constant":
            held = self.evaluator.value(given)
            if isinstance(held, Tensor) and held.numel() == 1:
                return float(held)
        return None

    def _binary(self, node: fx.Node, args: list[Any]) -> _Value:
        a, b = args[:2]
        op = _BINARIES[_name(node)]
        alpha = args[2] if op in ("add", "subtract") and len(args) > 2 else 1
        if alpha != 1:
            raise _RefusedError(f"{node}: {op} with a factor of {alpha}")
        number = self._number(b)
        if number is not None:
            factor, added = {
                "add": (1.0, number), "subtract": (1.0, -number), "multiply": (number, 0.0),
                "divide": (1.0 / number, 0.0),
            }[op]  # fmt: skip
            return self._unary_of(node, a, -1, factor, added)
        number = self._number(a)
        if number is not None and op != "divide":
            factor, added = {"add": (1.0, number), "subtract": (-1.0, number), "multiply": (number, 0.0)}[op]
            return self._unary_of(node, b, -1, factor, added)
        return self._two(node, "binary", a, b, BINARY.index(op))

    def _negative(self, node: fx.Node, args: list[Any]) -> _Value:
        return self._unary_of(node, args[0], -1, -1.0)

    def _cat(self, node: fx.Node, args: list[Any]) -> _Value:
        parts, dim = args[0], args[1]
        new = self._new(shape_of(node), node)
        start = 0
        for part in parts:
            value = self._value(part)
            size = value.meta.shape[dim]
            place = _Value("root", new.index, new.meta.narrow(dim, start, size))
            start += size
            self._apply(node, place, [value], "unary", (-1,), (1.0, 0.0))
        return new


def _layout(shape: Sequence[int], tokens: int) -> Tensor:
    """A meta tensor of `shape` with the tokens outermost in memory and the other dims in their order."""
    strides, stride = [0] * len(shape), 1
    for i in reversed(range(len(shape))):
        if shape[i] != tokens:
            strides[i] = stride
            stride *= shape[i]
    strides[list(shape).index(tokens)] = stride
    return torch.empty_strided(tuple(shape), strides, device="meta")


def _merged(axes: list[list[tuple[int, int]]]) -> list[list[tuple[int, int]]]:
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


def _name(node: fx.Node) -> str:
    target: Any = node.target
    packet = getattr(target, "overloadpacket", None)
    return (
        f"{target.namespace}.{packet.__name__}"
        if packet is not None
        else getattr(target, "__name__", str(target))
    )


def _named(node: fx.Node) -> str:
    return str(node.target)


_BINARIES = {
    "aten.add": "add", "aten.sub": "subtract", "aten.mul": "multiply", "aten.div": "divide",
    "aten.add_": "add", "aten.sub_": "subtract", "aten.mul_": "multiply", "aten.div_": "divide",
}  # fmt: skip
_ATEN_KINDS = {
    "aten.silu": "silu", "aten.gelu": "gelu", "aten.relu": "relu", "aten.sigmoid": "sigmoid",
    "aten.tanh": "tanh",
}  # fmt: skip
_SAME = ("to", "_to_copy", "type_as", "contiguous", "clone", "detach", "alias", "dropout", "lift_fresh_copy")
_VIEWED = (
    "transpose", "permute", "t", "unsqueeze", "squeeze", "expand", "slice", "select", "split", "chunk",
    "unbind", "split_with_sizes", "expand_as", "narrow", "movedim", "swapaxes",
)  # fmt: skip
_HANDLERS: dict[str, Callable[[_Lowering, fx.Node, list[Any]], Any]] = {
    **dict.fromkeys((f"aten.{name}" for name in _SAME), _Lowering._same),
    **dict.fromkeys((f"aten.{name}" for name in _VIEWED), _Lowering._view),
    **dict.fromkeys(("aten.view", "aten.reshape", "aten.flatten", "aten.unflatten"), _Lowering._reshape),
    **dict.fromkeys(_BINARIES, _Lowering._binary),
    **dict.fromkeys(("hasten.activation", *_ATEN_KINDS), _Lowering._activation),
    **dict.fromkeys(("aten.linear", "hasten.linear"), _Lowering._linear),
    **dict.fromkeys(("hasten.rms_norm", "hasten.layer_norm", "aten.layer_norm"), _Lowering._norm),
    **dict.fromkeys(("aten.embedding", "hasten.embedding"), _Lowering._embedding),
    "aten.neg": _Lowering._negative,
    "aten.cat": _Lowering._cat,
    "hasten.gated_activation": _Lowering._gated,
    "hasten.rotary": _Lowering._rotary,
    "hasten.attention": _Lowering._attention,
}

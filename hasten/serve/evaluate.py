"""What of a decoder's graph depends on no token, computed: constants, weights, and tables by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from hasten.base.errors import CaptureError
from hasten.graph.nodes import aten, full_args, is_call, is_mutation, is_view, mutated_nodes
from hasten.graph.whole import Whole

_hops = torch.ops.hasten
# Of the tokens' shape alone.
_SHAPE_ONLY = (
    aten.zeros_like, aten.ones_like, aten.full_like, aten.empty_like, aten.new_zeros, aten.new_ones,
    aten.new_full, aten.sym_size,
)  # fmt: skip
_RANK = ("constant", "weight", "position", "tokens", "rows")


class Evaluator:
    """Kinds of nodes, and values of those that are not rows."""

    def __init__(self, whole: Whole, dense: Callable[[str], Tensor], context_tokens: int) -> None:
        self._whole, self._dense, self._context_tokens = whole, dense, context_tokens
        self._kinds: dict[fx.Node, str] = {}
        self._values: dict[fx.Node, Any] = {}
        self._tables: dict[fx.Node, Tensor] = {}
        ids, positions = (n for n in whole.module.graph.nodes if n.op == "placeholder")
        self._ids, self._positions = ids, positions
        self._rewritten = _rewritten(whole.module.graph)
        for node in whole.module.graph.nodes:
            self._kinds[node] = self._kind_of(node)

    def kind(self, node: Any) -> str:
        """constant, weight, position (a function of it, weights and constants), tokens, or rows."""
        return self._kinds[node] if isinstance(node, fx.Node) else "constant"

    def _kind_of(self, node: fx.Node) -> str:
        if node is self._ids:
            return "tokens"
        if node is self._positions:
            return "position"
        if node.op == "get_attr":
            return "weight" if str(node.target) in self._whole.names else "constant"
        inputs = [self._kinds[n] for n in node.all_input_nodes]
        highest = max(inputs, key=_RANK.index, default="constant")
        if highest == "rows":
            return "rows"
        if highest == "tokens":
            if is_call(node, _hops.window_ranges, *_SHAPE_ONLY):
                return "constant"
            same = is_call(node, aten.view, aten.reshape, aten.to, aten.contiguous, aten.clone, aten.alias)
            return "tokens" if same and set(inputs) == {"tokens"} else "rows"
        return highest

    def value(self, node: Any) -> Any:
        """A constant or a function of weights."""
        return self._run(node, self._values, None)

    def once(self, node: Any) -> Any:
        """`value`, of which nothing is kept."""
        return self._run(node, {}, None)

    def table(self, node: fx.Node, tokens_dim: int) -> Tensor:
        """float32 [context_tokens, values of one position]."""
        if node not in self._tables:
            size, pieces = self._whole.tokens, []
            for start in range(0, self._context_tokens, size):
                # Rows behind the last position are cut off; learned positions have no more.
                positions = torch.arange(start, start + size).clamp(max=self._context_tokens - 1)[None]
                held = self._run(node, dict(self._values), positions)
                pieces.append(held.to(torch.float32).movedim(tokens_dim, 0).reshape(size, -1))
            self._tables[node] = torch.cat(pieces)[: self._context_tokens].contiguous()
        return self._tables[node]

    def _run(self, node: Any, known: dict[fx.Node, Any], positions: Tensor | None) -> Any:
        with torch.no_grad():
            return self._step(node, known, positions)

    def _step(self, node: Any, known: dict[fx.Node, Any], positions: Tensor | None) -> Any:
        if not isinstance(node, fx.Node):
            return node
        if node in known:
            return known[node]
        if node in self._rewritten:
            raise CaptureError(f"{node}: a constant of which a part is written later")
        if node is self._positions:
            if positions is None:
                raise CaptureError(f"{node}: a constant was expected, not the position")
            result: Any = positions
        elif node is self._ids:
            result = torch.zeros(1, self._whole.tokens, dtype=torch.long)
        elif node.op == "get_attr":
            name = self._whole.names.get(str(node.target))
            result = self._attribute(node) if name is None else self._dense(name)
            if isinstance(result, FakeTensor):
                raise CaptureError(f"{node}: a constant without values")
        else:
            # Depth first without recursion over long chains: positions are reached through few nodes.
            args = fx.node.map_arg(node.args, lambda n: self._step(n, known, positions))
            kwargs = fx.node.map_arg(node.kwargs, lambda n: self._step(n, known, positions))
            result = node.target(*args, **kwargs)  # type: ignore[operator]
        known[node] = result
        return result

    def _attribute(self, node: fx.Node) -> Any:
        found: Any = self._whole.module
        for part in str(node.target).split("."):
            found = getattr(found, part)
        return found


def _rewritten(graph: fx.Graph) -> set[fx.Node]:
    """Nodes whose memory a later one writes under another name: their arguments do not tell their value."""
    writes = [n for n in graph.nodes if n.op == "call_function" and is_mutation(n)]
    place = {node: i for i, node in enumerate(graph.nodes)} if writes else {}

    def alone(write: fx.Node) -> bool:
        target = full_args(write)[0]
        later = isinstance(target, fx.Node) and any(place[user] > place[write] for user in target.users)
        return isinstance(target, fx.Node) and not is_view(target) and not later

    return set() if all(map(alone, writes)) else mutated_nodes(graph)


class Further:
    """The same decoder for longer rows, traced when it is first asked for.

    A short row does not show a window that is longer, nor what a constant holds for later places.
    """

    def __init__(self, whole: Whole, dense: Callable[[str], Tensor], context_tokens: int) -> None:
        self._whole, self._dense, self._context_tokens = whole, dense, context_tokens
        self._place = {node: i for i, node in enumerate(whole.module.graph.nodes)}
        self._made: dict[int, tuple[int, list[fx.Node], Evaluator]] = {}
        self._keys: dict[fx.Node, int] = {}
        self._seen: dict[str, int] = {}

    def value(self, node: fx.Node, most_tokens: int) -> tuple[Tensor, int]:
        """A constant as it is in a row of at most so many tokens, and how many they are."""
        if most_tokens not in self._made:
            self._made[most_tokens] = self._make(most_tokens)
        tokens, nodes, evaluator = self._made[most_tokens]
        found = nodes[self._place[node]]
        if evaluator.kind(found) not in ("constant", "weight"):
            raise CaptureError(f"{node}: a constant in a short row and none in a long one")
        return evaluator.once(found), tokens

    def places(self, node: fx.Node, tokens_dim: int) -> Tensor:
        """float32 [tokens, values of one place], of as many tokens as can be told."""
        held, tokens = self.value(node, self._context_tokens)
        return held.to(torch.float32).movedim(tokens_dim, 0).reshape(tokens, -1).contiguous()

    def key(self, node: fx.Node) -> int:
        """Equal for nodes that compute the same from the same inputs: every layer makes its own mask."""
        if node not in self._keys:
            given = fx.node.map_arg((node.args, node.kwargs), lambda n: f"%{self.key(n)}")
            inputs = (node.op, str(node.target), given, str(node) if node.op == "placeholder" else "")
            self._keys[node] = self._seen.setdefault(repr(inputs), len(self._seen))
        return self._keys[node]

    def _make(self, most_tokens: int) -> tuple[int, list[fx.Node], Evaluator]:
        if self._whole.again is None:
            raise CaptureError("a graph that cannot be traced for longer rows")
        for tokens in (most_tokens, most_tokens - 1):  # of a whole buffer no slice is taken
            whole = self._whole.again(tokens)
            nodes = list(whole.module.graph.nodes)
            if [_what(n) for n in nodes] == [_what(n) for n in self._place]:
                return tokens, nodes, Evaluator(whole, self._dense, self._context_tokens)
        raise CaptureError(f"another graph for a row of {most_tokens} tokens")


def _what(node: fx.Node) -> str:
    return str(node.target) if node.op == "call_function" else node.op

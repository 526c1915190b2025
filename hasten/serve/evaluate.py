"""What of a decoder's graph depends on no token, computed: constants, weights, and tables by position."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor

from hasten.base.errors import CaptureError
from hasten.graph.nodes import aten, is_call
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

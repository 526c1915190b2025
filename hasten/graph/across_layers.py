"""Level 3 across layers: the residual sum that ends one layer joins the norm that begins the next.

A layer whose output is `a + b` leaves the sum to its successor: it returns a `DeferredSum`, an ordinary
tensor to everybody who looks at it. The next layer, if nobody looked, runs a graph of its own whose first
step is that sum, so that the passes for residual sums and norms see both. The sum comes out of that graph too
and becomes the value of the `DeferredSum`, which has one place in autograd's graph whoever computes it.
"""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from hasten.graph.bypass import observed
from hasten.graph.deferred import Deferred, Pullback
from hasten.graph.nodes import (
    aten,
    call,
    draws_random_numbers,
    full_args,
    is_call,
    is_view,
    mutated_nodes,
    prune,
    rank_of,
    same_shape,
    value,
)
from hasten.graph.passes import PassLog

LEVEL = 3
_LEFT = "sum_to_next_layer"
_TAKEN = "sum_of_last_layer"


class _Place(torch.autograd.Function):
    """The one place in autograd's graph that the sum has, whoever computes it: its gradient is that of both.

    The result still holds `a`, in memory that it shares with it, until its data is set.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.second = b.dtype
        return a.data

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0].to(ctx.second)


@dataclass(frozen=True)
class _Sum:
    """first + second, of one shape and of the dtype of `first`, which has the place of the sum.

    second: None where the next layer has computed the sum and put it into `first`.
    """

    first: Tensor
    second: Tensor | None

    @property
    def shape(self) -> torch.Size:
        return self.first.shape

    @property
    def dtype(self) -> torch.dtype:
        return self.first.dtype

    @property
    def parts(self) -> tuple[Tensor, ...]:
        return (self.first,)

    def evaluate(self) -> Tensor:
        with torch.no_grad():
            # The next layer's sum is kept for its backward pass: who looks later must not write into it.
            self.first.data = self.first.clone() if self.second is None else self.first + self.second
        return self.first

    def pullback(self) -> Pullback:
        return lambda grad: (grad,)


class DeferredSum(Deferred):
    """Stands for the output `a + b` of one layer until the next one, or anybody else, needs it."""

    def summands(self) -> tuple[Tensor, Tensor] | None:
        """(a, b), where the next layer may do the sum: nobody did, and its history is wanted.

        The gradient of the sum goes to the first; the second takes none.
        """
        open_ = self._value is None and self._plan.second is not None
        if not (open_ and self.requires_grad and torch.is_grad_enabled()):
            return None
        return self._plan.first, self._plan.second

    def settle(self, total: Tensor) -> None:
        """`total` is the sum that the next layer has computed."""
        self._plan.first.data = total.detach()
        self._plan = _Sum(self._plan.first, None)


def sum_of(a: Tensor, b: Tensor) -> Tensor:
    """a + b, deferred where a backward pass will follow.

    Without gradients it is computed at once: the forward of an `autograd.Function` (reentrant checkpointing)
    runs so, and what it returns must be an ordinary tensor.
    """
    dtype = torch.promote_types(a.dtype, b.dtype)
    first, second = (a, b) if a.dtype == dtype else (b, a)
    if not torch.is_grad_enabled() or not (a.requires_grad or b.requires_grad) or first.dtype != dtype:
        return a + b
    return DeferredSum(_Sum(_Place.apply(first, second), second.detach()))


class LeftSum:
    """The two forms of a rewritten graph without its last sum: summed, to be proved, and deferred, to run."""

    def __init__(self, module: fx.GraphModule, position: int) -> None:
        self._module, self._position = module, position

    def _run(self, args: Sequence[Any], add: Callable[[Tensor, Tensor], Tensor]) -> Sequence[Any]:
        *outputs, second = self._module.forward(*args)
        outputs[self._position] = add(outputs[self._position], second)
        return outputs

    def summed(self, *args: Any) -> Sequence[Any]:
        return self._run(args, operator.add)

    def deferred(self, *args: Any) -> Sequence[Any]:
        return self._run(args, sum_of)


def leave_last_sum(module: fx.GraphModule, captured: fx.GraphModule) -> tuple[LeftSum | None, PassLog]:
    """Takes the last sum out of `module`, in place: its second summand becomes one more output.

    captured: Dynamo's graph, which tells whether it is the whole layer or was broken off.
    """
    started = time.perf_counter()
    reason = getattr(captured, "compile_subgraph_reason", None)
    if reason is None or reason.graph_break:
        why, found = "the layer is captured in several pieces", None
    else:
        found, why = _last_sum(module.graph)
    left = None
    if found is not None:
        position, first, second = found
        output = module.graph.output_node()
        outputs = list(output.args[0])  # type: ignore[arg-type]
        outputs[position] = first
        output.args = ((*outputs, second),)
        prune(module.graph)
        module.graph.lint()
        module.recompile()
        left = LeftSum(module, position)
    seconds = time.perf_counter() - started
    return left, PassLog(_LEFT, LEVEL, int(left is not None), seconds, (why,) if why else ())


def _last_sum(graph: fx.Graph) -> tuple[tuple[int, fx.Node, fx.Node] | None, str]:
    """(position among the outputs, both summands), or why there is none; no words if no output is a sum."""
    outputs = graph.output_node().args[0]
    if not isinstance(outputs, (tuple, list)):
        return None, ""
    why = ""
    for position, node in enumerate(outputs):
        # The sum may be given another shape on its way out.
        total = node.args[0] if is_call(node, aten.view.default, aten.reshape.default) else node
        if not _is_sum(total) or not value(node).is_floating_point() or rank_of(node) < 2:
            continue
        a, b = total.args[:2]
        if any(len(n.users) > 1 for n in (node, total)) or list(outputs).count(node) > 1:
            why = "the sum is used inside the layer too"
        elif mutated_nodes(graph) & {a, b, total, node}:
            why = "a summand is written in place"
        elif not (_owned(a, outputs) and _owned(b, outputs)):
            why = "a summand is the layer's own input, or another output"
        elif node is total:
            return (position, a, b), ""
        else:
            with graph.inserting_before(node):
                shaped = [call(graph, node.target, n, *node.args[1:]) for n in (a, b)]
            return (position, shaped[0], shaped[1]), ""
    return None, why


def _is_sum(node: Any) -> bool:
    if not is_call(node, aten.add.Tensor) or full_args(node)[2] != 1:
        return False
    a, b = node.args[:2]
    return isinstance(a, fx.Node) and isinstance(b, fx.Node) and a is not b and same_shape(a, b)


_NEW_MEMORY = (
    aten.linear.default, aten.matmul.default, aten.mm.default, aten.bmm.default, aten.addmm.default,
    aten.add.Tensor, aten.mul.Tensor,
)  # fmt: skip


def _owned(node: fx.Node, outputs: Sequence[Any]) -> bool:
    """Whether nobody outside the graph can reach the memory of `node`, to write it before the sum is done."""
    root = _root(node)
    if any(isinstance(n, fx.Node) and _root(n) is root for n in outputs if n is not node) or node in outputs:
        return False
    made = root.args[0] if is_call(root, operator.getitem) else root
    return is_call(made, *_NEW_MEMORY) or _of_hasten(made) or draws_random_numbers(root)


def _root(node: fx.Node) -> fx.Node:
    """The node whose memory `node` is, or may be: through views and casts that may change nothing."""
    while (
        is_view(node)
        or is_call(node, aten.to.dtype, aten.contiguous.default)
        or (is_call(node, operator.getitem) and not _of_hasten(node.args[0]))
    ):
        node = node.args[0]  # type: ignore[assignment]
    return node


def _of_hasten(node: Any) -> bool:
    return isinstance(node, fx.Node) and getattr(node.target, "namespace", "") == "hasten"


def taken_sum(graph: fx.Graph) -> PassLog:
    """For a graph that begins with the sum of the layer before: whether a norm operator took it."""
    started = time.perf_counter()
    hops = torch.ops.hasten
    taken = any(
        is_call(n, hops.norm_linear.default, hops.add_rms_norm.default, hops.add_layer_norm.default)
        and all(isinstance(a, fx.Node) and a.op == "placeholder" and rank_of(a) >= 2 for a in n.args[:2])
        for n in graph.nodes
    )
    seconds = time.perf_counter() - started
    return PassLog(_TAKEN, LEVEL, int(taken), seconds, () if taken else ("the layer begins with no norm",))


def behind(function: Callable[..., Any], place: int | str) -> Callable[..., Any]:
    """`function(block, ...)`, a layer's forward, that is given two summands for the argument at `place`.

    Returns `(what the layer returns, the sum)`.
    """

    def summed(block: nn.Module, a: Tensor, b: Tensor, *args: Any, **kwargs: Any) -> tuple[Any, Tensor]:
        h = a + b
        if isinstance(place, int):
            return function(block, *args[:place], h, *args[place:], **kwargs), h
        return function(block, *args, **{**kwargs, place: h}), h

    # Dynamo remembers by the code's name which sizes vary; layers of other classes must not count there.
    summed.__code__ = summed.__code__.replace(co_name=f"{function.__module__}.{function.__qualname__} behind")
    return summed


def only_sum(args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[int | str, DeferredSum] | None:
    """(place, value) of the one argument that is a deferred sum, if it is the only one."""
    everything: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    found = [(place, given) for place, given in everything if isinstance(given, DeferredSum)]
    return found[0] if len(found) == 1 else None


def without(place: int | str, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """(args, kwargs) without the argument at `place`."""
    if isinstance(place, int):
        return (*args[:place], *args[place + 1 :]), kwargs
    return tuple(args), {name: given for name, given in kwargs.items() if name != place}


def may_leave(block: nn.Module, follower: nn.Module | None, kind: type) -> bool:
    """Whether the output of `block` may go to `follower` as a deferred sum.

    Not if the follower is not optimised (its `forward` is no `kind`), nor where hooks around either see it.
    """
    return (
        follower is not None
        and isinstance(follower.__dict__.get("forward"), kind)
        and not observed(block)
        and not observed(follower)
    )

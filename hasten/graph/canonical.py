"""The canonical form: one spelling for each piece of mathematics, so that few patterns are enough.

A Dynamo graph is traced once more through `make_fx(pre_dispatch=True)`, which turns methods and functions
into ATen operators above autograd and autocast: the result can still be differentiated, and runs under the
caller's autocast. Then spellings are unified:

| written as | becomes |
|---|---|
| casts, views, slices, expands, dropouts that change nothing | nothing |
| `type_as`, `_to_copy`, `float()`; the same cast twice | `aten.to.dtype`, once |
| non-negative dims | negative dims |
| `x*x`, `square` | `pow(x, 2)` |
| `1/sqrt(v)`, `v**-0.5`, `y/sqrt(v)` | `rsqrt(v)`, `y*rsqrt(v)` |
| halves, pairs and their turns | see `canonical_rotary.py` |
| `addmm`, `matmul(x, W^T)`, linear between views that flatten leading dims | one `aten.linear` |
| linear of a tensor whose leading dims are swapped | the linear, then the swap |
| a pointwise in-place operator on a new tensor that nobody else sees | its out-of-place form |
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from hasten.base.errors import CaptureError, first_line
from hasten.graph.canonical_steps import STEPS
from hasten.graph.nodes import (
    annotate,
    aten,
    calls,
    draws_random_numbers,
    first_position,
    full_args,
    is_barrier,
    is_call,
    mutated_nodes,
    prune,
    rank_of,
    replace,
    segments,
)


def trace(function: Any, examples: list[Any], known: Collection[int] = ()) -> fx.GraphModule:
    """An ATen graph of `function` on fake `examples` (fake tensors, symbolic ints or plain values).

    known: ids of fake tensors that the function holds itself, as a model without values holds its weights.

    Raises:
        CaptureError: if the function cannot be traced, or reads the memory of a tensor past autograd.
    """
    mode = next((e.fake_mode for e in examples if isinstance(e, FakeTensor)), None)
    try:
        # Without gradients nothing is saved while tracing: hooks of the caller (checkpoints) see none of it.
        with _inside(mode), torch.no_grad():
            module = make_fx(function, pre_dispatch=True, _allow_non_fake_inputs=True)(*examples)
    except Exception as error:
        # Tracing runs the user's code on fake tensors: whatever it raises means the same thing here.
        raise CaptureError(f"cannot be traced: {first_line(error)}") from error
    _refuse_hidden_inputs(module.graph, known)
    _annotate_all(module.graph)
    return module


def _refuse_hidden_inputs(graph: fx.Graph, known: Collection[int]) -> None:
    """`x.data` reaches the tracer as a constant without values: the graph would not depend on x any more."""
    for node in graph.nodes:
        held = _attribute(node) if node.op == "get_attr" else None
        if isinstance(held, FakeTensor) and id(held) not in known:
            raise CaptureError("cannot be traced: reads the .data of a tensor, which no graph can follow")


@contextlib.contextmanager
def _inside(mode: FakeTensorMode | None) -> Iterator[None]:
    """Tensors that the code makes itself are fake too; constants that it holds are let in."""
    if mode is None:
        yield
        return
    before, mode.allow_non_fake_inputs = mode.allow_non_fake_inputs, True
    try:
        with mode:
            yield
    finally:
        mode.allow_non_fake_inputs = before


def _annotate_all(graph: fx.Graph) -> None:
    for node in graph.nodes:
        if node.op == "get_attr" and "val" not in node.meta:
            node.meta["val"] = _attribute(node)
        elif node.op == "call_function" and "val" not in node.meta and node.target is operator.getitem:
            annotate(node)


def _attribute(node: fx.Node) -> Any:
    found: Any = node.graph.owning_module
    for part in str(node.target).split("."):
        found = getattr(found, part)
    return found


def canonicalise(graph: fx.Graph) -> None:
    """Unifies spellings in place until nothing changes."""
    for _ in range(8):
        changed = False
        for step in STEPS:
            for node in calls(graph):
                if node.users:
                    changed |= step(graph, node)
        changed |= _merge_casts(graph)
        prune(graph)
        if not changed:
            break
    _hoist_weights(graph)
    graph.lint()


def _merge_casts(graph: fx.Graph) -> bool:
    """Casts of one tensor to one dtype become one cast, so that what follows both sees the same tensor."""
    segment, mutated = segments(graph), mutated_nodes(graph)
    first: dict[tuple[Any, ...], fx.Node] = {}
    changed = False
    for node in calls(graph):
        if not is_call(node, aten.to.dtype) or not node.users or node in mutated or node.args[0] in mutated:
            continue
        kept = first.setdefault((*full_args(node), segment[node]), node)
        if kept is not node:
            replace(node, kept)
            changed = True
    return changed


def _hoist_weights(graph: fx.Graph) -> None:
    """What depends on weights alone (`1 + w`, `W^T`) moves to the top: no later pass meets it too late."""
    if any(is_barrier(node) for node in graph.nodes):
        return
    mutated, early, hoisted = mutated_nodes(graph), set[fx.Node](), list[fx.Node]()
    for node in list(graph.nodes):
        if node.op in ("placeholder", "get_attr"):
            if 0 < rank_of(node) <= 2 and node not in mutated:
                early.add(node)
                if node.op == "get_attr":
                    hoisted.append(node)
        elif (
            node.op == "call_function"
            and getattr(node.target, "_schema", None) is not None
            and node not in mutated
            and node.all_input_nodes
            and early.issuperset(node.all_input_nodes)
            and not draws_random_numbers(node)
        ):
            early.add(node)
            hoisted.append(node)
    last_input = first_position(graph).prev
    for node in reversed(hoisted):
        last_input.append(node)

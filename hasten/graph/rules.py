"""A rule: where this pattern stands, compute that instead. Rules are data, kept in one ordered table.

`BUILTIN` is filled by `hasten/graph/rulebook.py`; a user adds with `register_fusion_pattern`: these come
first within their level. Both have one form.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

import hasten.ops.every  # noqa: F401  (defines the operators that replacements call)
from hasten.base.errors import ConfigError
from hasten.graph.matcher import Match, Pattern, find, trace_pattern
from hasten.graph.nodes import annotate, dtype_of, is_barrier, mutated_nodes, segments, shape_of, value


@dataclass(frozen=True)
class Context:
    """What a replacement may ask about the place that it replaces."""

    match: Match
    autocast: torch.dtype | None

    def dtype(self, index: int = -1) -> torch.dtype | None:
        """dtype of one output of the matched pattern, as it was before the replacement."""
        return dtype_of(self.match.outputs[index])

    def shape(self, name: str) -> tuple[Any, ...]:
        """Shape of the tensor bound to the pattern's argument `name`."""
        return shape_of(self.match.inputs[name])

    def dtype_of(self, name: str) -> torch.dtype | None:
        return dtype_of(self.match.inputs[name])


@dataclass(frozen=True)
class Rule:
    """`pattern` -> `replacement`, where `condition` holds.

    name: shown in reports; several rules that spell one thing share a name.
    pattern: plain PyTorch; tensor arguments match any tensor, arguments annotated `float` any number.
    examples: small tensors to trace the pattern with, one for each tensor argument.
    replacement: called with the pattern's arguments by name, and `context=` if it has such an argument;
        returns what the pattern returns.
    condition: may look at the match; returns "" or the reason why not.
    level: 0 unifies spelling, 1 fuses an operator, 2 works inside a layer, 3 across layers.
    reason: why both sides are equal.
    """

    name: str
    pattern: Callable[..., Any]
    replacement: Callable[..., Any]
    examples: Callable[[], Sequence[torch.Tensor]]
    level: int
    reason: str
    condition: Callable[[Context], str] | None = None

    @functools.cached_property
    def traced(self) -> Pattern:
        return trace_pattern(self.pattern, self.examples())


@dataclass
class Applied:
    """How often a rule replaced something in one graph, and what it declined."""

    rule: str
    level: int
    count: int
    declined: list[str]


def apply_rule(graph: fx.Graph, rule: Rule, autocast: torch.dtype | None) -> Applied:
    """Replaces every occurrence of one rule, in the order of the graph."""
    done = Applied(rule.name, rule.level, 0, [])
    anchor_target = rule.traced.anchor.target
    if not any(node.target is anchor_target for node in graph.nodes):
        return done
    position = {node: i for i, node in enumerate(graph.nodes)}
    segment, mutated = segments(graph), mutated_nodes(graph)
    for anchor in list(graph.nodes):
        if anchor.op != "call_function" or anchor.target is not anchor_target or not anchor.users:
            continue
        match = find(rule.traced, anchor)
        if match is None:
            continue
        context = Context(match, autocast)
        declined = _hindrance(match, position, segment, mutated) or (
            _of_the_rule(rule, "condition", functools.partial(rule.condition, context))
            if rule.condition
            else ""
        )
        if declined:
            done.declined.append(declined)
            continue
        _replace(graph, rule, context, position)
        position = {node: i for i, node in enumerate(graph.nodes)}
        segment = segments(graph)
        done.count += 1
    return done


def _hindrance(
    match: Match, position: dict[fx.Node, int], segment: dict[fx.Node, int], mutated: set[fx.Node]
) -> str:
    inner = [t for p, t in match.nodes.items() if p.op == "call_function"]
    if mutated and any(n in mutated for n in match.nodes.values()):
        return "a tensor of the pattern is changed in place"
    if len({segment[n] for n in inner}) > 1:
        return "the pattern crosses a change of autocast or grad mode"
    if len(match.outputs) > 1:
        first = min(position[n] for n in match.outputs)
        bound = [t for p, t in match.nodes.items() if p.op == "placeholder"]
        if any(position[n] > first for n in bound):
            return "an input of the pattern is computed after its first output"
    return ""


def _replace(graph: fx.Graph, rule: Rule, context: Context, position: dict[fx.Node, int]) -> None:
    match = context.match
    place = min(match.outputs, key=position.__getitem__)
    tracer = fx.proxy.GraphAppendingTracer(graph)
    arguments = {
        name: fx.Proxy(bound, tracer) if isinstance(bound, fx.Node) else bound
        for name, bound in match.inputs.items()
    }
    if "context" in inspect.signature(rule.replacement).parameters:
        arguments["context"] = context
    before = set(graph.nodes)
    with graph.inserting_before(place):
        result = _of_the_rule(rule, "replacement", lambda: rule.replacement(**arguments))
    results = result if isinstance(result, (tuple, list)) else (result,)
    if len(results) != len(match.outputs):
        raise ConfigError(
            f"rule {rule.name!r}: the replacement returns {len(results)} tensors, "
            f"the pattern {len(match.outputs)}"
        )
    if not all(isinstance(r, fx.Proxy) for r in results):
        raise ConfigError(f"rule {rule.name!r}: the replacement returns something that is no tensor")
    for node in graph.nodes:
        if node not in before:
            if any(isinstance(leaf, torch.Tensor) for leaf in tree_leaves((node.args, node.kwargs))):
                raise ConfigError(
                    f"rule {rule.name!r}: the replacement holds a tensor of its own; allowed: numbers, and "
                    "tensors made from its arguments (torch.full_like)"
                )
            if isinstance(node.target, torch._ops.OpOverloadPacket):
                node.target = node.target.default
            if node.op == "call_method":  # `x.float()` in a replacement
                node.op, node.target = "call_function", getattr(torch.Tensor, str(node.target))
            try:
                annotate(node)
            except (RuntimeError, TypeError, ValueError) as error:
                raise ConfigError(f"rule {rule.name!r}: {node.target} does not fit there: {error}") from error
            node.meta["rule"] = rule.name
    for old, new in zip(match.outputs, results, strict=True):
        new_node = new.node
        if isinstance(value(old), torch.Tensor) and dtype_of(old) != dtype_of(new_node):
            raise ConfigError(
                f"rule {rule.name!r}: gives {dtype_of(new_node)} where the pattern gave {dtype_of(old)}"
            )
        if isinstance(value(old), torch.Tensor) and _other_shape(shape_of(old), shape_of(new_node)):
            raise ConfigError(
                f"rule {rule.name!r}: gives shape {shape_of(new_node)} where the pattern gave {shape_of(old)}"
            )
        old.replace_all_uses_with(new_node, propagate_meta=False)
    # Erase the covered nodes, last first; a barrier is never among them.
    for node in sorted(
        (t for p, t in match.nodes.items() if p.op == "call_function"), key=position.__getitem__, reverse=True
    ):
        if not node.users and not is_barrier(node):
            graph.erase_node(node)


def _of_the_rule(rule: Rule, part: str, work: Callable[[], Any]) -> Any:
    """What a part of a rule returns. It is anybody's code: whatever it raises leaves the graph as it was."""
    try:
        return work()
    except Exception as error:
        raise ConfigError(f"rule {rule.name!r}: its {part} raised {type(error).__name__}: {error}") from error


def _other_shape(a: tuple[Any, ...], b: tuple[Any, ...]) -> bool:
    """Whether two shapes differ for certain; symbolic sizes may be one size in two spellings."""
    known = ((x, y) for x, y in zip(a, b, strict=False) if isinstance(x, int) and isinstance(y, int))
    return len(a) != len(b) or any(x != y for x, y in known)

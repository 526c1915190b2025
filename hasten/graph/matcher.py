"""Finding a pattern, itself an ATen graph, inside another ATen graph.

A pattern is a plain PyTorch function, traced on small example tensors and canonicalised like the model's,
so both speak the same spelling. In the pattern
- a tensor argument matches any node (the same node wherever it occurs);
- a number argument, passed as a recognisable value while tracing, matches any number;
- an argument with a default is not an argument of the pattern: it keeps its value;
- a cast to float32 (a wide intermediate) matches one to float32 or float64, any other cast any cast;
- views' sizes match any sizes;
- `add` and `mul` match with their operands swapped.

Inner nodes of a match may have no users outside it, unless they are outputs of the pattern.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from hasten.base.errors import CaptureError
from hasten.graph.canonical import canonicalise, trace
from hasten.graph.nodes import aten, full_args

_COMMUTATIVE = {aten.add.Tensor, aten.mul.Tensor, aten.add.Scalar, aten.mul.Scalar}
_ANY_SIZES = {aten.view.default, aten.reshape.default, aten.expand.default}
_ANY_NORMALIZED_SHAPE = {aten.layer_norm.default, aten.rms_norm.default}
# Numbers that no model contains: they mark where a pattern's number arguments went.
_MARKS = [0.0078431372549, 0.0196078431373, 0.0274509803922, 0.0431372549020, 0.0509803921569]


@dataclass(frozen=True)
class Pattern:
    """A traced pattern: its graph, its tensor arguments, and the marks of its number arguments."""

    graph: fx.Graph
    tensors: dict[str, fx.Node]
    numbers: dict[float, str]
    outputs: tuple[fx.Node, ...]

    @property
    def anchor(self) -> fx.Node:
        return self.outputs[-1]


@dataclass
class Match:
    """One occurrence: what each argument of the pattern is bound to, and the nodes that it covers."""

    nodes: dict[fx.Node, fx.Node] = field(default_factory=dict)
    numbers: dict[str, float] = field(default_factory=dict)
    outputs: tuple[fx.Node, ...] = ()
    inputs: dict[str, Any] = field(default_factory=dict)

    def copy(self) -> Match:
        return Match(dict(self.nodes), dict(self.numbers))


def trace_pattern(function: Callable[..., Any], examples: Sequence[torch.Tensor | None]) -> Pattern:
    """Traces `function` on fake copies of `examples` (one for each argument without a float annotation).

    Raises:
        CaptureError: if it cannot be traced, returns no tensor, or its outputs do not all feed the last one.
    """
    examples = list(examples)
    arguments: list[Any] = []
    names: list[str] = []
    numbers: dict[float, str] = {}
    with FakeTensorMode() as mode:
        for name, parameter in inspect.signature(function).parameters.items():
            if parameter.default is not inspect.Parameter.empty:
                continue
            if parameter.annotation in (float, "float"):
                mark = _MARKS[len(numbers)]
                numbers[mark] = name
                arguments.append(mark)
            else:
                example = examples.pop(0)
                names.append(name)
                arguments.append(None if example is None else mode.from_tensor(example))

        def on_tensors(*given: torch.Tensor) -> Any:
            supplied = iter(given)
            return function(*(next(supplied) if isinstance(a, torch.Tensor) else a for a in arguments))

        module = trace(on_tensors, [a for a in arguments if isinstance(a, torch.Tensor)])
    canonicalise(module.graph)
    graph = module.graph
    placeholders = [n for n in graph.nodes if n.op == "placeholder"]
    output = next(n for n in graph.nodes if n.op == "output").args[0]
    outputs = tuple(output) if isinstance(output, (tuple, list)) else (output,)
    if not outputs or not all(isinstance(n, fx.Node) and n.op == "call_function" for n in outputs):
        raise CaptureError(f"pattern {getattr(function, '__name__', '?')}: must return computed tensors")
    return Pattern(graph, dict(zip(names, placeholders, strict=True)), numbers, outputs)


def find(pattern: Pattern, anchor: fx.Node) -> Match | None:
    """The match whose last output is `anchor`, or None."""
    match = _match(pattern, pattern.anchor, anchor, Match())
    if match is None or any(out not in match.nodes for out in pattern.outputs):
        return None
    match.outputs = tuple(match.nodes[out] for out in pattern.outputs)
    match.inputs = {name: match.nodes.get(node) for name, node in pattern.tensors.items()}
    match.inputs.update(match.numbers)
    inner = {n for p, n in match.nodes.items() if p.op == "call_function"}
    bound = {n for p, n in match.nodes.items() if p.op == "placeholder"}
    if inner & bound:
        return None
    for node in inner - set(match.outputs):
        if any(user not in inner for user in node.users):
            return None
    return match


def _match(pattern: Pattern, p: Any, t: Any, match: Match) -> Match | None:
    """Extends `match` so that the pattern's argument `p` stands for the target's argument `t`."""
    if isinstance(p, fx.Node):
        if not isinstance(t, fx.Node):
            return None
        if p in match.nodes:
            return match if match.nodes[p] is t else None
        if p.op == "placeholder":
            match.nodes[p] = t
            return match
        if p.op != t.op or p.target is not t.target:
            return None
        if p.op == "get_attr":
            return None
        return _match_call(pattern, p, t, match)
    if isinstance(p, (list, tuple)):
        if not isinstance(t, (list, tuple)) or len(p) != len(t):
            return None
        for a, b in zip(p, t, strict=True):
            extended = _match(pattern, a, b, match)
            if extended is None:
                return None
            match = extended
        return match
    if isinstance(p, float) and p in pattern.numbers:
        name = pattern.numbers[p]
        if not isinstance(t, (int, float)) or match.numbers.get(name, t) != t:
            return None
        match.numbers[name] = float(t)
        return match
    if isinstance(p, torch.dtype):
        fits = isinstance(t, torch.dtype) and (p is not torch.float32 or t in (torch.float32, torch.float64))
        return match if fits else None
    if isinstance(p, (int, float)) and isinstance(t, (int, float)):
        return match if abs(p - t) <= 1e-6 * max(abs(p), abs(t)) else None
    return match if p == t else None


def _match_call(pattern: Pattern, p: fx.Node, t: fx.Node, match: Match) -> Match | None:
    p_args, t_args = full_args(p), full_args(t)
    if len(p_args) != len(t_args):
        return None
    if p.target in _ANY_SIZES:
        p_args, t_args = p_args[:1], t_args[:1]
    elif p.target in _ANY_NORMALIZED_SHAPE:
        if len(p_args[1]) != len(t_args[1]):
            return None
        p_args, t_args = [p_args[0], *p_args[2:]], [t_args[0], *t_args[2:]]
    orders = [t_args]
    if p.target in _COMMUTATIVE and isinstance(t_args[1], fx.Node):
        orders.append([t_args[1], t_args[0], *t_args[2:]])
    for order in orders:
        attempt: Match | None = match.copy()
        for a, b in zip(p_args, order, strict=True):
            attempt = _match(pattern, a, b, attempt)  # type: ignore[arg-type]
            if attempt is None:
                break
        if attempt is not None:
            attempt.nodes[p] = t
            return attempt
    return None

"""THE order of everything that is done to a captured graph. One list; the report prints it with counts and
times.

| level | pass | what it needs before it |
|---|---|---|
| 0 | spelling rules | the canonical form |
| 1 | user's rules, then the built-in rules | one spelling |
| 1 | the part of a head that is not turned, attention written out | rotary |
| 1 | linear + activation | activations |
| 2 | norm + projections, projections together, activation + projection | level 1's operators |
| 2 | residual + norm, narrow results | the passes above, which take their share first |
| 3 | fold constants | all the rest, so that only what nobody fused is folded |
| 3 | products by packed weights, in graphs without gradients | all the rest |
| 3 | last sum left to the next layer (`across_layers.py`) | all the rest: it changes what the graph returns |
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from hasten.graph.attention_written import written_attention
from hasten.graph.canonical import canonicalise
from hasten.graph.layer_passes import (
    activation_into_linear,
    fold_constants,
    group_projections,
    linear_with_activation,
    narrow_results,
    norm_into_linears,
    products_by_packed_weights,
    residual_into_norm,
)
from hasten.graph.nodes import prune
from hasten.graph.rotary_rules import partial_rotary
from hasten.graph.rulebook import BUILTIN
from hasten.graph.rules import Applied, Rule, apply_rule

Pass = Callable[[fx.Graph, torch.dtype | None], Applied]


@dataclass(frozen=True)
class PassLog:
    """What one pass did to one graph."""

    name: str
    level: int
    count: int
    seconds: float
    declined: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return {**self.__dict__, "declined": list(self.declined)}


_STRUCTURAL: tuple[tuple[int, Pass], ...] = (
    (1, partial_rotary),
    (1, written_attention),
    (1, linear_with_activation),
    (2, norm_into_linears),
    (2, group_projections),
    (2, activation_into_linear),
    (2, residual_into_norm),
    (2, narrow_results),
    (3, fold_constants),
)
_PACKING_LEVEL = 3


def _apply(rule: Rule, graph: fx.Graph, autocast: torch.dtype | None) -> Applied:
    return apply_rule(graph, rule, autocast)


def ordered(
    level: int, user_rules: Sequence[Rule] = (), gradients: bool = True
) -> Iterator[tuple[str, int, Pass]]:
    """The passes up to `level`, in the order in which they run: (name, level, function)."""
    for rule_level in (0, 1):
        for rule in (*user_rules, *BUILTIN):
            if rule.level == rule_level <= level:
                yield rule.name, rule_level, functools.partial(_apply, rule)
        for pass_level, function in _STRUCTURAL:
            if pass_level == rule_level <= level:
                yield function.__name__, pass_level, function
    for later in (2, 3):
        for rule in user_rules:
            if rule.level == later <= level:
                yield rule.name, later, functools.partial(_apply, rule)
        for pass_level, function in _STRUCTURAL:
            if pass_level == later <= level:
                yield function.__name__, pass_level, function
    if level >= _PACKING_LEVEL and not gradients:
        yield products_by_packed_weights.__name__, _PACKING_LEVEL, products_by_packed_weights


def run_passes(
    module: fx.GraphModule,
    level: int,
    autocast: torch.dtype | None,
    user_rules: Sequence[Rule] = (),
    gradients: bool = True,
) -> list[PassLog]:
    """Rewrites `module.graph` in place. Returns one entry for each pass that did or declined something.

    gradients: whether the graph is to be differentiated; without, weights may be packed once.
    """
    graph = module.graph
    log: list[PassLog] = []
    started = time.perf_counter()
    canonicalise(graph)
    log.append(PassLog("canonical form", 0, 0, time.perf_counter() - started))
    for name, pass_level, function in ordered(level, user_rules, gradients):
        started = time.perf_counter()
        applied = function(graph, autocast)
        if applied.count and pass_level == 0:
            canonicalise(graph)
        if applied.count or applied.declined:
            seconds = time.perf_counter() - started
            log.append(
                PassLog(
                    applied.rule or name,
                    pass_level,
                    applied.count,
                    seconds,
                    tuple(dict.fromkeys(applied.declined)),
                )
            )
    canonicalise(graph)
    prune(graph)
    graph.lint()
    module.recompile()
    return log

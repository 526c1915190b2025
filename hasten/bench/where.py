"""Where the time of a training step goes: one step under torch's profiler, its seconds by operator.

A kernel's seconds belong to the operator of hasten that called it, else to itself; products of matrices stand
alone, since the machine's limit is stated for them, except inside attention. What no operator accounts for is
Python, autograd and dispatch.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Sequence
from typing import Any

from hasten.bench.report import OperatorTime

PRODUCTS = "products of matrices"
OPTIMIZER = "optimizer"
REST = "python, autograd, dispatch"
_PRODUCTS = {"mm": 0, "bmm": 0, "addmm": 1, "addmm_": 1, "baddbmm": 1, "baddbmm_": 1}
"""Where in the arguments the first of the two factors stands."""
_BACKWARD = re.compile(r"GeneratedBackwardFor_hasten_(\w+?)_default(Backward)?$")
_KEPT_SHARE = 0.005
"""Operators with less of the step are one row."""


def time_by_operator(step: Callable[[], object], attention_flops: float = 0.0) -> list[OperatorTime]:
    """Runs `step` once under the profiler.

    Args:
        step: forward, backward and optimizer.
        attention_flops: of the forward pass; the backward counts twice that (Dao et al. 2022 count 2.5 times,
            the scores that are computed again included).

    Returns:
        Rows from the most time to the least; the times add up to the step's.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as trace:
        begin = time.perf_counter()
        step()
        wall_s = time.perf_counter() - begin
    seconds: dict[str, float] = {}
    calls: dict[str, int] = {}
    flops: dict[str, float] = {}
    for event in trace.events() or ():
        name = _owner(event)
        seconds[name] = seconds.get(name, 0.0) + event.self_cpu_time_total * 1e-6
        if _begins(event, name):
            calls[name] = calls.get(name, 0) + 1
        if name == PRODUCTS:
            flops[name] = flops.get(name, 0.0) + _product_flops(event.name, event.input_shapes)
    if attention_flops:
        flops |= {"attention": attention_flops, "attention backward": 2 * attention_flops}
    return _rows(seconds, calls, flops, wall_s)


def _rows(
    seconds: dict[str, float], calls: dict[str, int], flops: dict[str, float], wall_s: float
) -> list[OperatorTime]:
    small = [name for name, took in seconds.items() if took < _KEPT_SHARE * wall_s and name != REST]
    kept = {name: took for name, took in seconds.items() if name not in small and name != REST}
    if small:
        kept["others"] = sum(seconds[name] for name in small)
        calls = calls | {"others": sum(calls.get(name, 0) for name in small)}
    kept[REST] = max(0.0, wall_s - sum(kept.values()))
    total = sum(kept.values())
    return [
        OperatorTime(
            operator=name, calls=calls.get(name, 0), time_s=took, share=took / total, flops=flops.get(name)
        )
        for name, took in sorted(kept.items(), key=lambda item: -item[1])
    ]


def _owner(event: Any) -> str:
    """The row that an event's own time belongs to."""
    owner, inner = REST, ""
    while event is not None:
        name = event.name
        if name.startswith("aten::") and name.removeprefix("aten::") in _PRODUCTS:
            inner = PRODUCTS
        if name.startswith("Optimizer.step"):
            return OPTIMIZER
        if name.startswith("hasten::"):
            owner = _spoken(name.removeprefix("hasten::"))
        elif found := _BACKWARD.match(name):
            # The autograd node of an operator: its forward has the same name without the ending.
            owner = _spoken(found[1] + ("_backward" if found[2] else ""))
        elif owner == REST and name.startswith(("aten::", "hasten_cpu::")):
            owner = name
        event = event.cpu_parent
    return PRODUCTS if inner and not owner.startswith("attention") else owner


def _begins(event: Any, name: str) -> bool:
    """Whether an event is the outermost of its row."""
    return name != REST and (event.cpu_parent is None or _owner(event.cpu_parent) != name)


def _spoken(name: str) -> str:
    return name.removesuffix("_backward") + (" backward" if name.endswith("_backward") else "")


def _product_flops(name: str, shapes: Sequence[Sequence[int]]) -> float:
    """2 * rows * inner * columns, times the batch."""
    place = _PRODUCTS.get(name.removeprefix("aten::"))
    if place is None or len(shapes) < place + 2:
        return 0.0
    return 2.0 * math.prod(shapes[place]) * shapes[place + 1][-1]

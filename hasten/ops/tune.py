"""Measures which body of each operator is faster here, within a time; `choices.py` keeps the result.

The operators' own cases are the work: the sizes of real models first, then the largest test case of every
other size, forward and backward apart. What the time does not reach keeps the kernel.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hasten.ops import choices, native
from hasten.ops.cases import Case, all_cases
from hasten.ops.choices import Row, Table

BUDGET_S = 20.0
PAIR_S = 0.05
"""Time for one comparison; a large case takes longer, its two pairs."""
LONG_S = 0.2
"""A pair that takes longer is compared once."""
MIN_PAIRS = 2
CONFIRM_PAIRS = 6
"""Before a kernel is set aside: a busy machine may have slowed its few calls alone."""
MAX_PAIRS = 50

Progress = Callable[[float, str], None]


def tune(budget_s: float = BUDGET_S, progress: Progress = lambda done_s, what: None) -> Table:
    """Measures for about `budget_s` seconds, writes the table and returns it.

    `progress(seconds, case)` is called between cases. Nothing is measured where no kernel runs.

    Raises:
        InputError: the cache folder cannot be written.
    """
    if native.state().level is None or choices.off():
        return choices.in_force()
    choices.make_place()
    return choices.keep(list(measure(budget_s, progress)))


def measure(budget_s: float, progress: Progress) -> Iterator[Row]:
    """One row for each operator, dtype and size, as far as the time goes."""
    start = time.perf_counter()
    known: set[tuple[str, str, choices.Size]] = set()
    without_kernel: set[tuple[str, torch.dtype]] = set()
    for case, dtype in _work():
        if (case.operator, dtype) in without_kernel:
            continue
        spent = time.perf_counter() - start
        if spent >= budget_s:
            return
        progress(spent, str(case))
        before = native.launches()
        for row in _compare(case, dtype, known, start + budget_s):
            known.add((row.op, row.dtype, row.size))
            yield row
        if native.launches() == before:  # its first case, of a real size, speaks for the others
            without_kernel.add((case.operator, dtype))


def _work() -> list[tuple[Case, torch.dtype]]:
    """Cases of real sizes, then the others from large to small; operators in turn."""
    turns: list[tuple[int, int, Case]] = []
    for cases in all_cases().values():
        real = [c for c in cases if c.benchmark]
        rest = sorted((c for c in cases if not c.benchmark), key=_numbers, reverse=True)
        turns += [(group, n, c) for group, members in enumerate((real, rest)) for n, c in enumerate(members)]
    ordered = sorted(turns, key=lambda turn: turn[:2])
    return [(case, dtype) for _, _, case in ordered for dtype in case.dtypes if dtype in native.DTYPES]


def _numbers(case: Case) -> int:
    leaves = pytree.tree_leaves(case.inputs(case.dtypes[0]))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def _compare(
    case: Case, dtype: torch.dtype, known: set[tuple[str, str, choices.Size]], end: float
) -> Iterator[Row]:
    args, kwargs = case.inputs(dtype)
    holders: tuple[Any, Any] = (list(args), dict(kwargs))
    leaves = []
    for name in case.grads:
        holder = holders[isinstance(name, str)]
        holder[name] = holder[name].detach().requires_grad_()
        leaves.append(holder[name])

    def forward() -> Any:
        return case.op(*holders[0], **holders[1])

    def backward() -> Any:
        return torch.autograd.grad(outputs, leaves, seeds, retain_graph=True, allow_unused=True)

    yield from _rows(case, forward, known, end)
    outputs = [out for out in pytree.tree_leaves(forward()) if isinstance(out, Tensor) and out.requires_grad]
    if outputs:
        seeds = [torch.ones_like(out) for out in outputs]
        yield from _rows(case, backward, known, end)


def _rows(
    case: Case, call: Callable[[], Any], known: set[tuple[str, str, choices.Size]], end: float
) -> Iterator[Row]:
    if time.perf_counter() >= end:
        return
    before = native.launches()
    with choices.observed() as seen:
        call()
    if native.launches() == before or not set(seen) - known:
        return
    native_s, torch_s = _fastest(call, end)
    for op, dtype, size in dict.fromkeys(seen):
        if (op, dtype, size) not in known:
            yield Row(op=op, dtype=dtype, size=size, case=str(case), native_s=native_s, torch_s=torch_s)


def _fastest(call: Callable[[], Any], end: float) -> tuple[float, float]:
    """The shortest time of each body over calls in turn."""
    best = [float("inf"), float("inf")]
    stop = min(end, time.perf_counter() + PAIR_S)
    for pair in range(MAX_PAIRS):
        loses = best[0] > choices.MARGIN * best[1]
        least = CONFIRM_PAIRS if loses else 1 if sum(best) > LONG_S else MIN_PAIRS
        if pair >= least and time.perf_counter() >= stop:
            break
        for index in (0, 1):
            best[index] = min(best[index], _timed(call, torch_body=bool(index)))
    return best[0], best[1]


def _timed(call: Callable[[], Any], torch_body: bool) -> float:
    if torch_body:
        with native.switched_off():
            begin = time.perf_counter()
            call()
            return time.perf_counter() - begin
    with choices.observed():  # the kernel, whatever an older table says
        begin = time.perf_counter()
        call()
        return time.perf_counter() - begin

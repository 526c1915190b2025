"""`hasten bench ops`: each operator against plain torch doing the same in the same dtype.

The two take turns, call by call, so that whatever else the machine does slows both. Where the outputs or the
gradients miss the operator's error budget, no ratio is given.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, Literal

import torch
from pydantic import Field
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from torch import Tensor
from torch.utils import _pytree as pytree

from hasten.base.errors import ConfigError, nearest
from hasten.base.facts import detect
from hasten.base.screen import Screen
from hasten.bench import train
from hasten.bench.report import Frozen, Interruption, Limits
from hasten.ops import native
from hasten.ops.cases import Case, all_cases, check_backward, check_forward
from hasten.train.stop import Interrupted
from hasten.train.tuning import tune_once

SHORT = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
TORCH = "torch"
MIN_PAIRS = 3
MAX_PAIRS = 2000


class OpRow(Frozen):
    """One case in one dtype, forward alone or forward and backward together."""

    op: str
    case: str
    dtype: str
    direction: Literal["forward", "forward+backward"]
    level: str
    """The instruction level of the native kernel that ran, or `torch`: the operator's body in torch code."""
    time_s: float
    """Median of one call of hasten's operator."""
    torch_s: float
    """Median of plain torch doing the same; the two took turns."""
    torch_body_s: float | None = None
    """Median of hasten's operator with its kernels off, in turn with the two; null where no kernel ran."""
    agree: bool
    error: str | None = None
    """What missed its budget, with numbers."""
    ratio: float | None
    """torch_s / time_s; null where they do not agree."""
    bytes_per_s: float | None = None
    """Each input read once and each output written once, over time_s; forward only."""
    flops_per_s: float | None = None
    share_of_limit: float | None = None
    """The longer of bytes / bandwidth and flops / peak, over time_s; above 1 for data in cache."""


class OpsReport(Frozen):
    """The report of `hasten bench ops`."""

    schema_name: Literal["hasten.bench.ops/2"] = Field(default="hasten.bench.ops/2", alias="schema")
    date: str
    machine: dict[str, Any]
    versions: dict[str, str]
    limits: Limits
    rows: list[OpRow]
    agree: bool
    """Of every row."""
    interrupted: Interruption | None
    """Null if every case was timed."""


def bench_ops(
    op: str | None,
    case: str | None,
    seconds: float,
    screen: Screen,
    *,
    every: bool = False,
    tune: bool = False,
) -> OpsReport:
    """Times the benchmark cases of `op` (None: of every operator), `seconds` for each measurement.

    `every`: all their cases. `tune`: first measure the table of choices, if this machine has none.

    A signal after the first row (see `StopSignals`) ends it, and the report holds the rows before.

    Raises:
        ConfigError: no operator or case of that name.
        Interrupted: the signal came before the first row.
    """
    chosen = choose(all_cases(), op, case, every)
    facts = detect()
    bf16 = facts.default_dtype().value == "bf16"
    machine = train.machine(facts)
    if tune:
        tune_once(screen)
    limit = train.measure_limits(bf16, screen)
    work = [(entry, dtype) for entry in chosen for dtype in entry.dtypes]
    rows: list[OpRow] = []
    interruption = None
    what = ""
    try:
        with screen.bar("operators", len(work)) as bar:
            for done, (entry, dtype) in enumerate(work):
                what = f"{entry} {_name(dtype)}"
                bar.update(done, what)
                rows.append(_forward(entry, dtype, seconds, limit))
                if entry.grads:
                    bar.update(done + 0.3, f"{what} with backward")
                    rows.append(_both(entry, dtype, seconds))
    except Interrupted as stopped:
        if not rows:
            raise
        interruption = Interruption(signal=str(stopped), during=what)
    return OpsReport(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=machine,
        versions=train.versions(),
        limits=limit,
        rows=rows,
        agree=all(row.agree for row in rows),
        interrupted=interruption,
    )


def choose(cases: dict[str, list[Case]], op: str | None, case: str | None, every: bool = False) -> list[Case]:
    """The cases to time: the named one, else an operator's benchmark sizes, else its largest test case.

    `every`: all of them that hold a number.

    Raises:
        ConfigError: no operator or case of that name.
    """
    if op is not None and op not in cases:
        raise ConfigError(f"op = {op!r}: no such operator; {nearest(op, cases)}")
    names = [op] if op is not None else sorted(cases)
    if case is not None:
        found = [entry for name in names for entry in cases[name] if entry.name == case]
        if not found:
            known = [entry.name for name in names for entry in cases[name]]
            raise ConfigError(f"case = {case!r}: no such case of {', '.join(names)}; {nearest(case, known)}")
        return found
    chosen: list[Case] = []
    for name in names:
        if every:
            chosen += [entry for entry in cases[name] if _input_numbers(entry)]
            continue
        large = [entry for entry in cases[name] if entry.benchmark]
        chosen += large or [max(cases[name], key=_input_numbers)]
    return chosen


def render(report: OpsReport) -> RenderableType:
    """A table for a terminal, and the errors of the rows that do not agree."""
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("operator, case", overflow="fold", min_width=18)
    table.add_column("level")
    for heading in ("hasten", "torch", "ratio", "GB/s", "GFLOP/s", "of limit"):
        table.add_column(heading.replace(" ", "\n"), justify="right", no_wrap=True)
    above = None
    for row in report.rows:
        if (row.op, row.case) != above:
            above = (row.op, row.case)
            table.add_row(Text(f"{row.op} {row.case}", style="bold"))
        table.add_row(
            f"  {SHORT.get(row.dtype, row.dtype)}{' + backward' if row.direction != 'forward' else ''}",
            row.level,
            _duration(row.time_s),
            _duration(row.torch_s),
            f"{row.ratio:.2f}x" if row.ratio is not None else "differs",
            f"{row.bytes_per_s / 1e9:.1f}" if row.bytes_per_s else "",
            f"{row.flops_per_s / 1e9:.0f}" if row.flops_per_s else "",
            f"{row.share_of_limit:.0%}" if row.share_of_limit is not None else "",
        )
    cut = report.interrupted
    problems = [
        Text(f"{row.op} {row.case} {row.dtype} {row.direction}: {row.error}")
        for row in report.rows
        if row.error
    ]
    if cut is not None:
        problems.append(
            Text(f"CUT SHORT by {cut.signal} during {cut.during}: only what came before it is here")
        )
    return Group(table, *problems)


def interleaved(calls: Sequence[Callable[[], object]], seconds: float) -> list[float]:
    """Median seconds of each; they take turns for about `seconds` in all, at least three times."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    end = time.perf_counter() + seconds
    while len(times[0]) < MIN_PAIRS or (time.perf_counter() < end and len(times[0]) < MAX_PAIRS):
        for call, kept in zip(calls, times, strict=True):
            begin = time.perf_counter()
            call()
            kept.append(time.perf_counter() - begin)
    return [statistics.median(kept) for kept in times]


def level_of(call: Callable[[], object]) -> str:
    """The level of the native kernels if `call` ran one, else `torch`."""
    before = native.launches()
    call()
    return native.state().level or TORCH if native.launches() > before else TORCH


def _times(
    call: Callable[[], object], yardstick: Callable[[], object], seconds: float
) -> tuple[str, float, float, float | None]:
    """(level, seconds of the call, of plain torch, of the call with its kernels off)."""

    def torch_body() -> None:
        with native.switched_off():
            call()

    level = level_of(call)
    times = interleaved([call, yardstick] + ([] if level == TORCH else [torch_body]), seconds)
    return level, times[0], times[1], times[2] if len(times) > 2 else None


def _forward(case: Case, dtype: torch.dtype, seconds: float, limit: Limits) -> OpRow:
    args, kwargs = case.inputs(dtype)
    with torch.no_grad():
        level, ours, theirs, torch_body_s = _times(
            lambda: case.op(*args, **kwargs), lambda: case.yardstick(*args, **kwargs), seconds
        )
    error = _error(lambda: check_forward(case, dtype))
    moved, flops = case.bytes(dtype), case.flops()
    peak = limit.gemm_flops_per_s_by_dtype.get(_name(dtype))
    least = moved / limit.read_bytes_per_s
    if peak is not None:
        least = max(least, flops / peak)
    return OpRow(
        op=case.operator,
        case=case.name,
        dtype=_name(dtype),
        direction="forward",
        level=level,
        time_s=ours,
        torch_s=theirs,
        torch_body_s=torch_body_s,
        agree=error is None,
        error=error,
        ratio=theirs / ours if error is None else None,
        bytes_per_s=moved / ours,
        flops_per_s=flops / ours if flops else None,
        share_of_limit=least / ours if peak is not None or not flops else None,
    )


def _both(case: Case, dtype: torch.dtype, seconds: float) -> OpRow:
    call = _forward_backward(case, case.op, dtype)
    level, ours, theirs, torch_body_s = _times(call, _forward_backward(case, case.yardstick, dtype), seconds)
    error = _error(lambda: check_backward(case, dtype))
    return OpRow(
        op=case.operator,
        case=case.name,
        dtype=_name(dtype),
        direction="forward+backward",
        level=level,
        time_s=ours,
        torch_s=theirs,
        torch_body_s=torch_body_s,
        agree=error is None,
        error=error,
        ratio=theirs / ours if error is None else None,
    )


def _forward_backward(case: Case, function: Callable[..., Any], dtype: torch.dtype) -> Callable[[], object]:
    args_tuple, kwargs = case.inputs(dtype)
    args = list(args_tuple)
    leaves: list[Tensor] = []
    for key in case.grads:
        holder: Any = kwargs if isinstance(key, str) else args
        holder[key] = holder[key].detach().requires_grad_()
        leaves.append(holder[key])

    def outputs() -> list[Tensor]:
        found = pytree.tree_leaves(function(*args, **kwargs))
        return [out for out in found if isinstance(out, Tensor) and out.requires_grad]

    seeds: Sequence[Tensor] = [torch.ones_like(out) for out in outputs()]
    return lambda: torch.autograd.grad(outputs(), leaves, seeds, allow_unused=True)


def _error(check: Callable[[], object]) -> str | None:
    try:
        check()
    except AssertionError as error:
        return str(error)
    return None


def _input_numbers(case: Case) -> int:
    args, kwargs = case.inputs(case.dtypes[0])
    return sum(leaf.numel() for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor))


def _duration(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.1f} us"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

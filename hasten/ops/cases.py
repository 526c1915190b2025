"""One definition of a case, read by the tests, the gradient check and the benchmark.

Every operator folder has a `cases.py` with `CASES: list[Case]`. A case says how its inputs are made, what the
operator is, what it means (the reference, run in float64 as the truth) and what a user would write in plain
torch (the yardstick of error and of speed).

The error budget: with `error(x) = max |x - truth| / max |truth|`, and the same for the root mean square,

    error(operator in dtype) <= 2 * error(plain torch in the same dtype) + FLOOR[dtype]

for every output and every gradient. Values that are not finite must agree exactly with the truth.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import pkgutil
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

FLOOR: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-12, 1e-13),
    torch.float32: (2e-6, 4e-7),
    torch.float16: (2.0**-11, 2.0**-13),
    torch.bfloat16: (2.0**-8, 2.0**-10),
}
"""Slack for the (largest, root mean square) relative error: two and a half units in the last place."""

SMALLEST_SCALE = 1e-2
"""Errors are relative to max |truth|, but never to less than this: inputs and output gradients have scale 1,
so a gradient that is zero by cancellation is held to an absolute error."""

Inputs = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """One set of inputs for one operator.

    Attributes:
        operator: name in `torch.ops.hasten`, e.g. `"rms_norm"`.
        name: unique within the operator, e.g. `"residual-513x576"`.
        make: `make(generator, dtype) -> (args, kwargs)`; draws tensors of scale 1 with the CPU generator.
        op: the operator under test, called `op(*args, **kwargs)`; returns a tensor or a tuple of tensors. For
            an operator that works in place, clone inside and return the changed tensors.
        reference: the meaning, same arguments; run with every floating tensor in float64 as the truth.
        torch_equivalent: what a user would write in plain torch, same arguments and dtypes; None takes the
            reference in the same dtype as the yardstick.
        grads: positions (int) or keywords (str) of the arguments that get a gradient; empty: no backward.
        dtypes: the dtypes the case is meant for.
        flops: floating-point operations of one forward call in its products (a multiply-add is two); 0 for an
            operator without products, which memory alone limits.
        moved: bytes that a forward call moves at least, from its arguments and outputs; None: all of them.
        benchmark: True for a size that is timed and left out of the tests.
    """

    operator: str
    name: str
    make: Callable[[torch.Generator, torch.dtype], Inputs]
    op: Callable[..., Any]
    reference: Callable[..., Any]
    torch_equivalent: Callable[..., Any] | None = None
    grads: tuple[int | str, ...] = ()
    dtypes: tuple[torch.dtype, ...] = (torch.float32, torch.bfloat16)
    flops: Callable[[], float] = field(default=lambda: 0.0)
    moved: Callable[[Inputs, Any], int] | None = None
    benchmark: bool = False

    def inputs(self, dtype: torch.dtype) -> Inputs:
        """The case's arguments: the same bits at every call."""
        generator = torch.Generator().manual_seed(zlib.crc32(f"{self.operator}/{self.name}".encode()))
        return self.make(generator, dtype)

    def bytes(self, dtype: torch.dtype) -> int:
        """Bytes that a forward call moves at least: inputs read once, outputs written once, or `moved`."""
        args, kwargs = self.inputs(dtype)
        with torch.no_grad():
            out = self.op(*args, **kwargs)
        if self.moved is not None:
            return self.moved((args, kwargs), out)
        tensors = [t for t in pytree.tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)]
        return sum(t.numel() * t.element_size() for t in tensors)

    @property
    def yardstick(self) -> Callable[..., Any]:
        """Plain torch doing the same: what the error and the time are compared with."""
        return self.torch_equivalent or self.reference

    def __str__(self) -> str:
        return f"{self.operator}/{self.name}"


@dataclass(frozen=True)
class Measured:
    """Errors of one output or gradient; each pair is (largest, root mean square), relative."""

    what: str
    error: tuple[float, float]
    torch_error: tuple[float, float]
    allowed: tuple[float, float]

    @property
    def ok(self) -> bool:
        """Both errors are within what is allowed (a NaN error is not)."""
        return all(e <= a for e, a in zip(self.error, self.allowed, strict=True))

    def __str__(self) -> str:
        return (
            f"{self.what}: max error {self.error[0]:.3e} "
            f"(allowed {self.allowed[0]:.3e}, torch {self.torch_error[0]:.3e}), "
            f"rms error {self.error[1]:.3e} (allowed {self.allowed[1]:.3e}, torch {self.torch_error[1]:.3e})"
        )


@dataclass(frozen=True)
class Report:
    """What a check found: one entry for each output or gradient."""

    case: str
    dtype: torch.dtype
    measured: tuple[Measured, ...]

    @property
    def ok(self) -> bool:
        """Every output or gradient is within its budget."""
        return all(m.ok for m in self.measured)

    def __str__(self) -> str:
        lines = "\n".join(f"  {'ok  ' if m.ok else 'FAIL'} {m}" for m in self.measured)
        return f"{self.case} in {self.dtype}:\n{lines}"


def check_forward(case: Case, dtype: torch.dtype) -> Report:
    """Compares the outputs of the case's operator with its reference in float64.

    Raises:
        AssertionError: an output has another shape, is finite where the truth is not (or the reverse), or
            misses the error budget; the message holds the numbers.
    """
    args, kwargs = case.inputs(dtype)
    with torch.no_grad():
        truth = _outputs(case.reference, *_as_double((args, kwargs)))
        got = _outputs(case.op, args, kwargs)
        yardstick = _outputs(case.yardstick, args, kwargs)
    return _compare(case, dtype, "output", truth, got, yardstick)


def check_backward(case: Case, dtype: torch.dtype) -> Report:
    """Compares the gradients of every argument in `case.grads`, for a random output gradient of scale 1.

    Raises:
        AssertionError: as `check_forward`, or a gradient is missing or has another dtype than its argument.
    """
    args, kwargs = case.inputs(dtype)
    truth = _gradients(case, case.reference, _as_double((args, kwargs)))
    got = _gradients(case, case.op, (args, kwargs))
    yardstick = _gradients(case, case.yardstick, (args, kwargs))
    return _compare(case, dtype, "gradient", truth, got, yardstick)


@functools.cache
def all_cases() -> dict[str, list[Case]]:
    """The cases of every operator, by operator name, from the `cases.py` of every folder of `hasten.ops`.

    A folder without one defines no operator (panels, programs); its kernels have checks of their own.
    """
    package = importlib.import_module("hasten.ops")
    cases: dict[str, list[Case]] = {}
    for module in pkgutil.iter_modules(package.__path__):
        name = f"hasten.ops.{module.name}.cases"
        if module.ispkg and importlib.util.find_spec(name) is not None:
            for case in importlib.import_module(name).CASES:
                cases.setdefault(case.operator, []).append(case)
    return cases


def select(
    cases: Sequence[Case], *, backward: bool = False, benchmark: bool = False
) -> list[tuple[Case, torch.dtype]]:
    """(case, dtype) pairs for a parametrised test: all, or those with a backward pass; no timed sizes."""
    return [
        (case, dtype)
        for case in cases
        if case.benchmark == benchmark and (case.grads or not backward)
        for dtype in case.dtypes
    ]


def _as_double(tree: Any) -> Any:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_floating_point():
            return leaf.detach().to(torch.float64)
        return torch.float64 if isinstance(leaf, torch.dtype) and leaf.is_floating_point else leaf

    return pytree.tree_map(convert, tree)


def _outputs(function: Callable[..., Any], args: Any, kwargs: Any) -> list[Tensor]:
    return [leaf for leaf in pytree.tree_leaves(function(*args, **kwargs)) if isinstance(leaf, Tensor)]


def _gradients(case: Case, function: Callable[..., Any], inputs: Inputs) -> list[Tensor]:
    args, kwargs = list(inputs[0]), dict(inputs[1])
    leaves: list[Tensor] = []
    for key in case.grads:
        holder: Any = kwargs if isinstance(key, str) else args
        holder[key] = holder[key].detach().requires_grad_()
        leaves.append(holder[key])
    outputs = [out for out in _outputs(function, args, kwargs) if out.requires_grad]
    if not outputs:
        raise AssertionError(f"{case}: no output of {function} carries a gradient")
    generator = torch.Generator().manual_seed(zlib.crc32(f"{case}/gradient".encode()))
    cotangents = [
        torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype) for out in outputs
    ]
    gradients = torch.autograd.grad(outputs, leaves, cotangents, allow_unused=True)
    missing = [key for key, gradient in zip(case.grads, gradients, strict=True) if gradient is None]
    if missing:
        raise AssertionError(f"{case}: {function} gives no gradient for argument {missing}")
    return list(gradients)


def _compare(
    case: Case, dtype: torch.dtype, what: str, truth: list[Tensor], got: list[Tensor], yardstick: list[Tensor]
) -> Report:
    if len(truth) != len(got):
        raise AssertionError(f"{case}: {len(got)} {what}s, the reference has {len(truth)}")
    names = [f"{what} {key}" for key in (case.grads if what == "gradient" else range(len(got)))]
    measured = []
    for index, (name, exact, value) in enumerate(zip(names, truth, got, strict=True)):
        if exact.shape != value.shape:
            shapes = f"{tuple(value.shape)}, the reference {tuple(exact.shape)}"
            raise AssertionError(f"{case}: {name} has shape {shapes}")
        error = _error(exact, value)
        # Plain torch may return fewer outputs (e.g. no log-sum-exp): then the floor alone counts.
        torch_error = _error(exact, yardstick[index]) if index < len(yardstick) else (0.0, 0.0)
        # An output may be narrower than the inputs (a requested dtype) or wider (statistics in float32).
        floor = max(FLOOR[dtype], FLOOR.get(value.dtype, FLOOR[dtype]))
        allowed = (2 * torch_error[0] + floor[0], 2 * torch_error[1] + floor[1])
        measured.append(Measured(name, error, torch_error, allowed))
    report = Report(str(case), dtype, tuple(measured))
    if not report.ok:
        raise AssertionError(f"over the error budget: {report}")
    return report


def _error(truth: Tensor, value: Tensor) -> tuple[float, float]:
    """(largest, root mean square) error relative to `truth`; NaN unless finite in the same places."""
    if truth.numel() == 0:
        return 0.0, 0.0
    if not truth.is_floating_point():
        return (0.0, 0.0) if torch.equal(truth, value.to(truth.dtype)) else (float("nan"), float("nan"))
    value = value.detach().to(torch.float64)
    truth = truth.detach()
    finite = truth.isfinite()
    same = torch.where(finite, value.isfinite(), (truth == value) | (truth.isnan() & value.isnan()))
    if not bool(same.all()):
        return float("nan"), float("nan")
    if not bool(finite.any()):
        return 0.0, 0.0
    exact, difference = truth[finite], (value - truth)[finite]
    scale = max(exact.abs().max().item(), SMALLEST_SCALE)
    rms_scale = max(exact.square().mean().sqrt().item(), SMALLEST_SCALE)
    return difference.abs().max().item() / scale, difference.square().mean().sqrt().item() / rms_scale

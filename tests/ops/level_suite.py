"""A compact suite of the operators for one process of its own: another level, sanitizers, or no kernels.

    HASTEN_ISA=avx2 python tests/ops/level_suite.py [--brgemm] [--smallest | --threads] [--package FOLDER]

Prints one JSON line: what was loaded, how many checks ran, which failed, and how often each kernel was
called. The exit status is 1 if one failed. With --threads the checks are of bits: the same in three runs at
1, 2 and 5 threads, and `differ` names the operators whose kernels make them depend on the number of threads.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cache_checks
import panels_checks
import program_checks
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import hasten
from hasten.base.facts import detect
from hasten.ops import native
from hasten.ops.cases import Case, _gradients, _outputs, all_cases, check_backward, check_forward
from hasten.ops.level import doors

LARGEST = 150_000
"""Input numbers of a case: small enough for the slowest level and for a process under sanitizers."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(case: Case) -> int:
    """How many numbers the case's tensors hold."""
    leaves = pytree.tree_leaves(case.inputs(torch.float32))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def selected(smallest: bool) -> list[tuple[Case, torch.dtype]]:
    """Every operator's small cases in the dtypes that kernels take; `smallest`: the least of each."""
    chosen = []
    for cases in all_cases().values():
        small = sorted((c for c in cases if not c.benchmark and numbers(c) <= LARGEST), key=numbers)
        small = [c for c in small if numbers(c)][:1] if smallest else small
        chosen += [(c, dtype) for c in small for dtype in DTYPES if dtype in c.dtypes or not smallest]
    return chosen


def largest() -> list[tuple[Case, torch.dtype]]:
    """The largest two of each operator that are no larger than four times LARGEST."""
    chosen = []
    for cases in all_cases().values():
        sizes = {c.name: numbers(c) for c in cases}
        fitting = [c for c in cases if sizes[c.name] <= 4 * LARGEST]
        chosen += sorted(fitting, key=lambda c: sizes[c.name])[-2:]
    return [(c, dtype) for c in chosen for dtype in DTYPES]


class Calls:
    """Counts the calls of every kernel: the operators of `hasten_cpu` that return or write a tensor."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        for name in torch._C._dispatch_get_all_op_names():
            space, _, op = name.partition("::")
            if space != "hasten_cpu":
                continue
            _, _, arguments_and_result = str(getattr(torch.ops.hasten_cpu, op).default._schema).partition("(")
            _, _, result = arguments_and_result.rpartition("->")
            if "Tensor" in result or "!" in arguments_and_result:
                self.count[op] = 0
                setattr(torch.ops.hasten_cpu, op, self._counted(op, getattr(torch.ops.hasten_cpu, op)))

    def _counted(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count[name] += 1
            return kernel(*args, **kwargs)

        return call


def check_values(smallest: bool) -> tuple[int, list[str]]:
    """(checks, failures) of the error budgets."""
    failures, checks = [], 0
    for case, dtype in selected(smallest):
        for check in (check_forward, check_backward) if case.grads else (check_forward,):
            checks += 1
            try:
                check(case, dtype)
            except (AssertionError, RuntimeError) as error:
                failures.append(f"{check.__name__} {case} {dtype}: {type(error).__name__}: {error}")
    if native.state().level is not None:
        suites = (panels_checks.suite, program_checks.suite, cache_checks.suite)
        for name, call in (check for suite in suites for check in suite(smallest)):
            checks += 1
            try:
                call()
            except (AssertionError, RuntimeError) as error:
                failures.append(f"{name}: {type(error).__name__}: {error}")
    return checks, failures


def results(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Outputs and gradients."""
    args, kwargs = case.inputs(dtype)
    with torch.no_grad():
        found = _outputs(case.op, args, kwargs)
    return found + (_gradients(case, case.op, case.inputs(dtype)) if case.grads else [])


def same_bits(first: list[Tensor], second: list[Tensor]) -> bool:
    """Equal, NaN included."""

    def bits(tensor: Tensor) -> Tensor:
        return tensor.reshape(-1).view(torch.uint8)

    return all(torch.equal(bits(a), bits(b)) for a, b in zip(first, second, strict=True))


def check_threads() -> tuple[int, list[str], list[str]]:
    """(checks, failures, operators whose bits depend on the number of threads with kernels, not without)."""
    failures, differ, checks = [], set(), 0
    for case, dtype in largest():
        checks += 1
        if differs(case, dtype, 3, failures):
            with native.switched_off():
                if not differs(case, dtype, 1, failures):
                    differ.add(case.operator)
    return checks, failures, sorted(differ)


def differs(case: Case, dtype: torch.dtype, repeats: int, failures: list[str]) -> bool:
    """Whether the bits depend on the number of threads; a difference between runs at one is a failure."""
    by_threads = []
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        runs = [results(case, dtype) for _ in range(repeats)]
        if not all(same_bits(runs[0], other) for other in runs[1:]):
            failures.append(f"{case} {dtype}: other bits in another run at {threads} threads")
        by_threads.append(runs[0])
    return not all(same_bits(by_threads[0], other) for other in by_threads[1:])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--brgemm", action="store_true", help="multiply by torch's brgemm, as with AMX")
    parser.add_argument("--smallest", action="store_true", help="one case of each operator")
    parser.add_argument("--threads", action="store_true", help="compare bits between runs and thread counts")
    parser.add_argument("--package", type=Path, help="where hasten must come from")
    options = parser.parse_args()
    package = Path(hasten.__file__).parent
    if options.package and options.package.resolve() != package.resolve():
        sys.exit(f"hasten comes from {package}, not from {options.package}")
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    torch.set_num_threads(2)
    if options.brgemm:
        library = Path(native.__file__).parent / "_cpu" / f"kernels_{native.state().level}.so"
        torch.ops.hasten_cpu.load(str(library), True, True, 1 << 20, native.state().vnni)
        doors().lend(*native.brgemm())
    calls = Calls()
    differ: list[str] = []
    if options.threads:
        checks, failures, differ = check_threads()
    else:
        checks, failures = check_values(options.smallest)
    print(
        json.dumps(
            {
                "package": str(package),
                "state": native.state().as_dict(),
                "isa": detect().isa.value,
                "checks": checks,
                "failures": failures,
                "differ": differ,
                "calls": calls.count,
            }
        )
    )
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()

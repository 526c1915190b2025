"""A compact suite of the operators for one process of its own: another level, sanitizers, or no kernels.

    HASTEN_ISA=avx2 python tests/ops/level_suite.py [--brgemm] [--smallest]

Prints one JSON line: what was loaded, how many checks ran, which failed, and how often each kernel was called.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

import hasten
from hasten.base.facts import detect
from hasten.ops import native
from hasten.ops.cases import Case, all_cases, check_backward, check_forward

LARGEST = 150_000
"""Input numbers of a case: small enough for the slowest level and for a process under sanitizers."""
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def numbers(case: Case) -> int:
    """How many numbers the case's tensors hold."""
    leaves = pytree.tree_leaves(case.inputs(torch.float32))
    return sum(leaf.numel() for leaf in leaves if isinstance(leaf, Tensor))


def selected(smallest: bool) -> list[tuple[Case, torch.dtype]]:
    """Every operator's small cases in the dtypes that kernels take; `smallest`: the least of each operator."""
    chosen = []
    for cases in all_cases().values():
        small = sorted((c for c in cases if not c.benchmark and numbers(c) <= LARGEST), key=numbers)
        small = [c for c in small if numbers(c)][:1] if smallest else small
        chosen += [(c, dtype) for c in small for dtype in DTYPES if dtype in c.dtypes or not smallest]
    return chosen


class Calls:
    """Counts the calls of every kernel: the operators of `hasten_cpu` that take a tensor."""

    def __init__(self) -> None:
        self.count: dict[str, int] = {}
        for name in torch._C._dispatch_get_all_op_names():
            space, _, op = name.partition("::")
            if space == "hasten_cpu" and "Tensor" in str(getattr(torch.ops.hasten_cpu, op).default._schema):
                self.count[op] = 0
                setattr(torch.ops.hasten_cpu, op, self._counted(op, getattr(torch.ops.hasten_cpu, op)))

    def _counted(self, name: str, kernel: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count[name] += 1
            return kernel(*args, **kwargs)

        return call


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--brgemm", action="store_true", help="multiply by torch's brgemm, as with AMX")
    parser.add_argument("--smallest", action="store_true", help="one case of each operator")
    options = parser.parse_args()
    torch.use_deterministic_algorithms(True)  # fills fresh memory with NaN
    torch.set_num_threads(2)
    if options.brgemm:
        library = Path(native.__file__).parent / "_cpu" / f"kernels_{native.state().level}.so"
        torch.ops.hasten_cpu.load(str(library), True, True, 1 << 20)
    calls = Calls()
    failures, checks = [], 0
    for case, dtype in selected(options.smallest):
        for check in (check_forward, check_backward) if case.grads else (check_forward,):
            checks += 1
            try:
                check(case, dtype)
            except (AssertionError, RuntimeError) as error:
                failures.append(f"{check.__name__} {case} {dtype}: {type(error).__name__}: {error}")
    print(
        json.dumps(
            {
                "package": str(Path(hasten.__file__).parent),
                "state": native.state().as_dict(),
                "isa": detect().isa.value,
                "checks": checks,
                "failures": failures,
                "calls": calls.count,
            }
        )
    )


if __name__ == "__main__":
    main()

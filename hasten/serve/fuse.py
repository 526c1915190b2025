"""Instructions joined where one pass over the rows does for two: gates and residual sums at the end of
products.

Each rule states what it needs; the values are the same up to rounding of the last bit, since rows are fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hasten.serve.program import BINARY, Instruction, Program, Ref


def fuse(program: Program, same_format: Callable[[int, int], bool]) -> Program:
    """The program with fewer instructions.

    same_format: whether two matrices, by index, are stored alike, so that one set of rows serves both.
    """
    instructions = gates_into_products(list(program.instructions), program, same_format)
    instructions = sums_into_products(instructions, program)
    return replace(program, instructions=tuple(instructions))


def gates_into_products(
    instructions: list[Instruction], program: Program, same_format: Callable[[int, int], bool]
) -> list[Instruction]:
    """kind(x G^T) * (x U^T) as one product of two matrices, where nothing else reads the two."""
    users, makers = _users(instructions), _makers(instructions)
    dropped: set[int] = set()
    changed: dict[int, Instruction] = {}
    for i, gated in enumerate(instructions):
        if gated.op != "gated" or gated.n0 != 1 or gated.a is None or gated.b is None or gated.dst is None:
            continue
        pair = [
            _whole_product(ref, gated.n1, instructions, program, users, makers) for ref in (gated.a, gated.b)
        ]
        if None in pair:
            continue
        first, second = (instructions[p] for p in pair)  # type: ignore[index]
        if (
            first.a != second.a
            or first.ints[0] != -1
            or second.ints[0] != -1
            or first.n1 != second.n1
            or not same_format(first.matrix, second.matrix)
            or _written_between(instructions, first, min(pair), i)  # type: ignore[type-var, arg-type]
        ):
            continue
        dropped |= set(pair)  # type: ignore[arg-type]
        changed[i] = replace(first, dst=gated.dst, up=second.matrix, ints=gated.ints, source=gated.source)
    return [changed.get(i, one) for i, one in enumerate(instructions) if i not in dropped]


def sums_into_products(instructions: list[Instruction], program: Program) -> list[Instruction]:
    """x + y W^T as one product that adds x, where nothing else reads the product."""
    users, makers = _users(instructions), _makers(instructions)
    dropped: set[int] = set()
    changed: dict[int, Instruction] = {}
    for i, total in enumerate(instructions):
        if total.op != "binary" or total.ints[0] != BINARY.index("add") or total.n0 != 1:
            continue
        for summand, other in ((total.b, total.a), (total.a, total.b)):
            if summand is None or other is None or other.kind != "root" or other.s1 != 1:
                continue
            at = _whole_product(summand, total.n1, instructions, program, users, makers)
            if at is None or at in dropped or instructions[at].c is not None:
                continue
            if _written_between(instructions, instructions[at], at, i):
                continue
            dropped.add(at)
            changed[i] = replace(instructions[at], dst=total.dst, c=other, source=total.source)
            break
    return [changed.get(i, one) for i, one in enumerate(instructions) if i not in dropped]


def _written_between(instructions: list[Instruction], product: Instruction, at: int, to: int) -> bool:
    """Whether what a product reads is written before, or by, the instruction that would take its place."""
    read = {ref.index for ref in product.reads() if ref.kind == "root"}
    return any(one.dst is not None and one.dst.index in read for one in instructions[at + 1 : to + 1])


def _users(instructions: list[Instruction]) -> Counter[int]:
    """How many operands read each root."""
    return Counter(ref.index for one in instructions for ref in one.reads() if ref.kind == "root")


def _makers(instructions: list[Instruction]) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for i, one in enumerate(instructions):
        if one.dst is not None:
            found.setdefault(one.dst.index, []).append(i)
    return found


def _whole_product(
    ref: Ref,
    width: int,
    instructions: list[Instruction],
    program: Program,
    users: Counter[int],
    makers: dict[int, list[int]],
) -> int | None:
    """The product that alone makes the root that `ref` alone reads whole, by its place."""
    if ref.kind != "root" or ref.offset or ref.s1 != 1 or users[ref.index] != 1:
        return None
    made = makers[ref.index]
    if len(made) != 1 or instructions[made[0]].op != "linear" or program.roots[ref.index].width != width:
        return None
    return made[0] if program.logits != ref.index else None

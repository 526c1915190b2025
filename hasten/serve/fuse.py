"""Instructions joined where one pass over the rows does for two: gates and residual sums at the end of
products; and what only the wanted rows need done for them alone.

Each rule states what it needs; the values are the same up to rounding of the last bit, since rows are fp32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from hasten.serve.program import BINARY, Instruction, Program, Ref, Root

_BY_ROW = {
    "norm", "linear", "binary", "unary", "gated", "where", "reduce", "softmax", "places", "gather", "experts",
}  # fmt: skip


def fuse(program: Program, same_format: Callable[[int, int], bool]) -> Program:
    """The program with fewer instructions.

    same_format: whether two matrices, by index, are stored alike, so that one set of rows serves both.
    """
    instructions = gates_into_products(list(program.instructions), program, same_format)
    instructions = sums_into_products(instructions, program)
    return wanted_rows_alone(replace(program, instructions=tuple(instructions)))


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


def wanted_rows_alone(program: Program) -> Program:
    """Rows are selected as early as can be: behind the last attention only those with wanted logits go on.

    An instruction whose result nothing but a `select` reads takes its place, and what it reads is selected
    instead, where that is complete by then and no operand goes by the row's position.
    """
    instructions, roots = list(program.instructions), list(program.roots)
    while True:
        chosen = [_selected_root(one, roots) for one in instructions]
        places = ((root, _maker_for_wanted_rows(root, instructions)) for root in chosen if root >= 0)
        root, at = next(((root, at) for root, at in places if at is not None), (-1, -1))
        if root < 0:
            return replace(program, instructions=tuple(instructions), roots=tuple(roots))
        maker = instructions[at]
        sources = {ref.index for ref in maker.reads() if ref.kind == "root"}
        twins = {
            source: one.dst.index
            for source, one in zip(chosen, instructions, strict=True)
            if source >= 0 and one.dst is not None
        }
        for source in sorted(sources - set(twins)):
            twins[source] = len(roots)
            roots.append(Root(roots[source].width, True))
        # What selects one of these for a later instruction does so here, for both.
        moved = {i for i, c in enumerate(chosen) if c == root or (c in sources and i > at)}
        selects = [
            _select(source, twins[source], roots, maker.source)
            for source in sorted(sources - set(chosen[:at]))
        ]
        late = _of_wanted_rows(maker, twins)
        instructions = [
            new
            for i, one in enumerate(instructions)
            if i not in moved
            for new in ([*selects, late] if i == at else [one])
        ]


def _selected_root(one: Instruction, roots: list[Root]) -> int:
    """The root of which an instruction selects rows as they are, into a root of their own; -1: of none."""
    if one.op != "select" or one.a is None or one.dst is None or one.a.kind != "root" or one.n0 != 1:
        return -1
    if (one.a.offset, one.a.s1, one.dst.offset, one.dst.s1) != (0, 1, 0, 1):
        return -1
    return one.a.index if one.n1 == roots[one.a.index].width == roots[one.dst.index].width else -1


def _maker_for_wanted_rows(root: int, instructions: list[Instruction]) -> int | None:
    """The instruction that alone makes a root which a `select` alone reads, if it can be done for the wanted
    rows, by its place."""
    users, makers = _users(instructions), _makers(instructions)
    made = makers.get(root, [])
    if len(made) != 1 or users[root] != 1:
        return None
    maker = instructions[made[0]]
    if maker.op not in _BY_ROW or maker.selected:
        return None
    for ref in maker.reads():
        if ref.kind == "table" or (ref.kind == "root" and max(makers[ref.index]) > made[0]):
            return None
    return made[0]


def _select(source: int, to: int, roots: list[Root], name: str) -> Instruction:
    return Instruction(
        "select", 1, roots[source].width, Ref("root", to), Ref("root", source), selected=True, source=name
    )


def _of_wanted_rows(one: Instruction, twins: dict[int, int]) -> Instruction:
    def twin(ref: Ref | None) -> Ref | None:
        return replace(ref, index=twins[ref.index]) if ref is not None and ref.kind == "root" else ref

    return replace(one, dst=twin(one.dst), a=twin(one.a), b=twin(one.b), c=twin(one.c), selected=True)


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

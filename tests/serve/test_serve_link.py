"""Linking: barriers where another thread's work is read, and an arena without two lives in one place."""

from __future__ import annotations

import sys
import weakref
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from hasten.base.errors import InputError, ShapeError
from hasten.bench.memory import resident_bytes
from hasten.ops import native
from hasten.ops.memory import address
from hasten.ops.panels import FLOAT32
from hasten.ops.panels.reference import pack
from hasten.serve import link
from hasten.serve.link import CacheSettings, Linked
from hasten.serve.native_runner import NativeRunner
from hasten.serve.program import Program
from hasten.serve.runner import Step
from hasten.serve.sharing import WAYS, Share, arrange, plan_arena, with_prepare

sys.path.insert(0, str(Path(__file__).parents[1] / "ops"))
import cache_checks
import program_checks

needs_kernels = pytest.mark.skipif(native.state().level is None, reason=native.state().reason)


def program_of(seed: int) -> tuple[program_checks.Builder, Program]:
    builder = program_checks.Builder(seed)
    return builder, builder.program(program_checks.SHAPES[seed % len(program_checks.SHAPES)])


@needs_kernels
@pytest.mark.parametrize("threads", [1, 2, 3])
def test_every_instruction_at_every_number_of_threads(threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        checks = [*program_checks.suite(), *cache_checks.suite()]
        for _, call in checks[:: 1 if threads == 1 else 7]:
            call()
    finally:
        torch.set_num_threads(before)


@needs_kernels
def test_steps_of_another_form_are_refused() -> None:
    builder, program = program_of(0)
    settings = CacheSettings("float32", (14, 14))
    panels = [pack(m, FLOAT32) for m in builder.dense]
    runner = NativeRunner(Linked(program, panels, settings, 8, 8))
    rows, table = np.arange(2, dtype=np.int32), np.arange(14, dtype=np.int32).reshape(2, 7)
    good = {
        "tokens": rows, "positions": np.zeros(2, np.int32), "starts": np.arange(3, dtype=np.int32),
        "tables": (table, table), "wanted": rows,
    }  # fmt: skip
    runner.run(Step(**good))
    wrong = {
        "contiguous int32": [
            {"tokens": rows.astype(np.int64)},
            {"positions": np.zeros(4, np.int32)[::2]},
            {"tables": (table, table.T)},
        ],
        "as many positions as tokens": [{"positions": np.zeros(3, np.int32)}, {"tables": (table,)}],
        r"tables of blocks are \[2 sequences": [{"tables": (table, table[:1])}, {"tables": (table, rows)}],
        "this runner takes 8 and 8": [
            {"tokens": np.zeros(9, np.int32), "positions": np.zeros(9, np.int32)},
            {"wanted": np.zeros(9, np.int32)},
        ],
    }
    for message, changes in wrong.items():
        for change in changes:
            with pytest.raises(ShapeError, match=message):
                runner.run(Step(**good | change))
    with pytest.raises(RuntimeError, match="starts must go from 0 to 2 rows; got 0 to 1"):
        runner.run(Step(**good | {"starts": np.array([0, 1, 1], np.int32)}))
    for interrupt in (np.zeros(1, np.int64), np.zeros(0, np.int32)):
        with pytest.raises(ShapeError, match=r"interrupt is int32 \[1\]"):
            runner.run_greedy(Step(**good), 2, interrupt)
    spoilt = replace(program, vectors=tuple(v.astype(np.float64) for v in program.vectors))
    with pytest.raises(ShapeError, match="contiguous float32; got float64"):
        Linked(spoilt, panels, settings, 8, 8)


@needs_kernels
def test_times_outlive_their_context() -> None:
    """An engine's step may still run when the caller, in another thread, has stopped timing."""
    builder, program = program_of(0)
    panels = [pack(m, FLOAT32) for m in builder.dense]
    runner = NativeRunner(Linked(program, panels, CacheSettings("float32", (7, 7)), 8, 8))
    one, table = np.zeros(1, np.int32), np.arange(7, dtype=np.int32)[None]
    step = Step(one, one, np.arange(2, dtype=np.int32), (table, table), one)
    with runner.timed():
        linked, given = runner._words(step)
        gone = weakref.ref(runner._times)
    assert gone() is not None
    runner._doors.program_run(linked, address(given.words))
    del given
    assert gone() is None


@needs_kernels
def test_same_bits_in_every_run() -> None:
    builder, program = program_of(1)
    panels = [pack(m, FLOAT32) for m in builder.dense]
    tokens = torch.randint(program_checks.VOCABULARY, (60,), generator=builder.generator)
    torch.set_num_threads(2)
    try:
        found = []
        for _ in range(5):
            linked = Linked(program, panels, CacheSettings("float32", (7, 7)), 60, 60)
            found.append(program_checks.logits(NativeRunner(linked), tokens, (50, 10)))
        assert all(torch.equal(found[0], other) for other in found[1:])
    finally:
        torch.set_num_threads(1)


BY_ROWS = {
    "embed", "norm", "prepare", "rotary", "store", "binary", "unary", "gated", "where", "reduce", "softmax",
    "places", "gather", "scatter",
}  # fmt: skip


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_no_instruction_reads_what_another_thread_may_still_write(seed: int, way: str) -> None:
    """Told again from the instructions: a barrier stands between a write that others share and its reading,
    and between a reading and the next write."""
    builder, program = program_of(seed)
    instructions = with_prepare(program.instructions, [FLOAT32] * len(builder.dense))
    found = arrange(instructions, program.logits, way)

    def same_rows(i: int, j: int) -> bool:
        both = [(found.shares[k], instructions[k].selected) for k in (i, j)]
        return both[0] == both[1] and all(
            found.shares[k] is Share.ROWS
            or (found.shares[k] is Share.PARTS and instructions[k].op in BY_ROWS)
            for k in (i, j)
        )

    def meet_between(i: int, j: int, what: str) -> None:
        assert same_rows(i, j) or any(found.meets[i + 1 : j + 1]), (
            what,
            i,
            j,
            instructions[i],
            instructions[j],
        )

    for j, later in enumerate(instructions):
        if way == "few" and later.op == "prepare":
            continue
        reads = {ref.index for ref in later.reads() if ref.kind == "root"} - found.private
        writes = {later.dst.index} - found.private if later.dst is not None else set()
        for i, earlier in enumerate(instructions[:j]):
            made = earlier.dst.index if earlier.dst is not None else -1
            if made in reads | writes:
                meet_between(i, j, "made")
            if {ref.index for ref in earlier.reads() if ref.kind == "root"} & writes:
                meet_between(i, j, "read")
    assert sum(found.meets) < len(instructions)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_keys_are_stored_before_another_thread_attends_to_them(seed: int, way: str) -> None:
    builder, program = program_of(seed)
    instructions = with_prepare(program.instructions, [FLOAT32] * len(builder.dense))
    found = arrange(instructions, program.logits, way)
    for i, store in enumerate(instructions):
        for j, attend in enumerate(instructions):
            if store.op == "store" and attend.op == "attend" and store.ints[0] == attend.ints[0]:
                assert any(found.meets[i + 1 : j + 1]), (store, attend)


@pytest.mark.parametrize("way", WAYS)
def test_what_every_thread_does_is_written_by_nobody_else(way: str) -> None:
    """Rows of a thread's own are whole: all that writes them is done by every thread."""
    builder, program = program_of(2)
    instructions = with_prepare(program.instructions, [FLOAT32] * len(builder.dense))
    found = arrange(instructions, program.logits, way)
    assert bool(found.private) == (way == "few")
    for one, share in zip(instructions, found.shares, strict=True):
        writes_own = one.dst is not None and one.dst.index in found.private
        assert writes_own == (share is Share.EACH), one


def test_fewer_meetings_where_threads_do_more_for_themselves() -> None:
    builder, program = program_of(0)
    instructions = with_prepare(program.instructions, [FLOAT32] * len(builder.dense))
    counts = {way: sum(arrange(instructions, program.logits, way).meets) for way in WAYS}
    assert counts["own"] < counts["few"] < counts["many"], counts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("way", WAYS)
def test_no_two_lives_share_a_place(seed: int, way: str) -> None:
    builder, program = program_of(seed)
    instructions = with_prepare(program.instructions, [FLOAT32] * len(builder.dense))
    found = arrange(instructions, program.logits, way)
    shared = set(range(len(program.roots))) - found.private - {program.logits}
    kept = found.kept or set()
    assert bool(kept) == (way == "own")
    for chosen, between in ((shared, found.meets), (found.private, [True] * len(instructions))):
        offsets, widths = plan_arena(instructions, program.roots, chosen, between, found.kept)
        uses: dict[int, list[int]] = {}
        for i, one in enumerate(instructions):
            for ref in (*one.reads(), *([one.dst] if one.dst is not None else [])):
                if ref.kind == "root" and ref.index in chosen:
                    uses.setdefault(ref.index, []).append(i)
        assert set(uses) == set(offsets)
        for a in uses:
            for b in uses:
                if a >= b or program.roots[a].selected != program.roots[b].selected:
                    continue
                first, second = (a, b) if uses[a][0] <= uses[b][0] else (b, a)
                apart = offsets[a] + program.roots[a].width <= offsets[b] or (
                    offsets[b] + program.roots[b].width <= offsets[a]
                )
                later = any(between[uses[first][-1] + 1 : uses[second][0] + 1])
                # The same lines are the same thread's, who is done with one before it writes the other.
                same_lines = {a, b} <= kept and program.roots[a].width == program.roots[b].width
                in_turn = same_lines and uses[first][-1] < uses[second][0]
                assert apart or later or in_turn, (a, b)
                if found.kept is not None and not apart:
                    assert program.roots[a].width == program.roots[b].width
        total = sum(root.width for i, root in enumerate(program.roots) if not root.selected and i in offsets)
        assert widths[0] < total or not chosen


@needs_kernels
@pytest.mark.parametrize("step_tokens", [9, 33, 40])
def test_prepared_rows_have_room_for_whole_blocks_of_them(step_tokens: int) -> None:
    """Many rows are laid out in blocks of 32, whatever the most of a step: nothing behind it changes."""
    builder, program = program_of(0)
    linked = Linked(
        program, [pack(m, FLOAT32) for m in builder.dense], CacheSettings("float32", (7, 7)), step_tokens, 1
    )
    size = linked.prepared.size
    widest = max(use.K for use in program.matrices)
    assert size >= -(-step_tokens // 32) * 32 * -(-widest // 16) * 16
    guarded = np.full(2 * size + 4096, 7.25, np.float32)
    linked.prepared = guarded
    linked._words_of.clear()
    tokens = torch.randint(program_checks.VOCABULARY, (step_tokens,), generator=builder.generator)
    rows = np.arange(step_tokens, dtype=np.int32)
    tables = tuple(np.arange(7, dtype=np.int32)[None] for _ in program.windows())
    step = Step(
        tokens.numpy().astype(np.int32), rows, np.array([0, step_tokens], np.int32), tables, rows[-1:]
    )
    NativeRunner(linked).run(step)
    assert bool((guarded[size:] == 7.25).all())


def test_a_program_as_data_comes_back_the_same() -> None:
    import json

    _, program = program_of(3)
    data = json.loads(json.dumps(program.as_dict()))
    again = Program.from_dict(data, list(program.vectors), list(program.tables))
    assert again == program


def test_a_pool_is_zeros_and_takes_its_pages_when_they_are_written() -> None:
    pool = link._pool(1 << 30)  # 4 GB
    try:
        resident = resident_bytes()
        assert pool[:: 1 << 28].tolist() == [0.0] * 4
        pool[5] = 1.0
        assert resident_bytes() - resident < 64 << 20
    finally:
        del pool


def test_more_than_the_system_has_is_one_message() -> None:
    with pytest.raises(InputError, match=r"keys and values: .* GB cannot be had: .*less memory"):
        link._pool(1 << 60)

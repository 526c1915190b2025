"""Pools, prefix cache, windows and forks of the paged cache, without a model."""

from __future__ import annotations

import pytest
from fake_model import Sampler, SamplingParams
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hasten.base.errors import ConfigError
from hasten.serve.blocks import BlockManager, Pool, most_blocks
from hasten.serve.runner import Group
from hasten.serve.sequence import Sequence
from hasten.serve.stream import Request, Stream
from hasten.serve.text import TextOutput

FULL = Group(None, 16)


def sequence(tokens: list[int], salt: str = "") -> Sequence:
    params = SamplingParams()
    stream = Stream(Request(tokens), 1, len(tokens), lambda _: None)
    return Sequence(stream, 0, tokens, params, Sampler(params, tokens, 100), TextOutput(None), salt)


def manager(*groups: Group, context: int = 256, cache: bool = True) -> tuple[BlockManager, list]:
    copies: list[tuple[int, list[tuple[int, int]]]] = []
    return BlockManager(
        groups, context, lambda group, pairs: copies.append((group, list(pairs))), cache
    ), copies


def compute(blocks: BlockManager, item: Sequence, end: int | None = None) -> int:
    """Computes tokens up to `end`, all unless given; returns how far it got."""
    reached = blocks.grow(item, len(item.tokens) if end is None else end)
    blocks.advance(item, reached)
    return reached


def held(blocks: BlockManager) -> list[int]:
    return [pool.held for pool in blocks.pools]


def test_a_pool_gives_each_block_once() -> None:
    pool = Pool(3)
    assert sorted(pool.take() for _ in range(3)) == [0, 1, 2]
    assert pool.take() == -1
    pool.release(1)
    assert pool.take() == 1


def test_blocks_that_nobody_has_held_are_named_ahead_once() -> None:
    pool = Pool(6)
    assert pool.take() == 0
    assert [pool.next_untouched(2) for _ in range(3)] == [1, 2, -1]
    # A block that comes back is not new: the lowest new one is still the next that is taken.
    assert pool.take() == 1
    pool.release(0)
    assert pool.take() == 0
    assert [pool.next_untouched(2) for _ in range(2)] == [3, -1]
    assert [pool.take() for _ in range(3)] == [2, 3, 4]
    assert [pool.next_untouched(2) for _ in range(2)] == [5, -1]
    assert pool.take() == 5
    assert pool.next_untouched(2) == -1


def test_the_longest_unused_block_is_written_over_first() -> None:
    pool = Pool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"first")
    pool.publish(second, b"second")
    pool.release(first)
    pool.release(second)
    pool.hold(pool.find(b"first"))  # used again
    pool.release(first)
    assert pool.available == pool.kept == 2
    assert pool.take() == second
    assert pool.find(b"second") == -1
    assert pool.find(b"first") == first


def test_a_key_belongs_to_one_block() -> None:
    pool = Pool(2)
    first, second = pool.take(), pool.take()
    pool.publish(first, b"key")
    pool.publish(second, b"key")
    assert pool.find(b"key") == first
    pool.release(second)
    assert pool.kept == 0
    assert pool.take() == second


def test_the_same_beginning_is_taken_over() -> None:
    blocks, _ = manager(FULL)
    first = sequence(list(range(70)))
    blocks.start(first)
    assert first.computed == 0
    assert compute(blocks, first) == 70
    second = sequence([*range(64), 99, 98])
    blocks.start(second)
    assert second.computed == 64
    assert second.tables[0].blocks[:2].tolist() == first.tables[0].blocks[:2].tolist()
    compute(blocks, second)
    assert second.tables[0].blocks[2] != first.tables[0].blocks[2]
    assert held(blocks) == [4]
    blocks.release(first)
    blocks.release(second)
    assert held(blocks) == [0]
    third = sequence(list(range(70)))
    blocks.start(third)
    assert third.computed == 64


def test_one_token_is_left_to_compute() -> None:
    blocks, _ = manager(FULL)
    first = sequence(list(range(64)))
    blocks.start(first)
    compute(blocks, first)
    second = sequence(list(range(64)))
    blocks.start(second)
    assert second.computed == 32


@pytest.mark.parametrize(
    "other",
    [[1, *range(1, 70)], [*range(31), 99, *range(32, 70)]],
    ids=["first token", "last token of a block"],
)
def test_another_beginning_is_not_taken_over(other: list[int]) -> None:
    blocks, _ = manager(FULL)
    first = sequence(list(range(70)))
    blocks.start(first)
    compute(blocks, first)
    second = sequence(other)
    blocks.start(second)
    assert second.computed == 0


def test_salts_do_not_share() -> None:
    blocks, _ = manager(FULL)
    for salt, hit in (("", 0), ("a", 0), ("b", 0), ("a", 64), ("", 64)):
        item = sequence(list(range(70)), salt)
        blocks.start(item)
        assert item.computed == hit
        compute(blocks, item)
        blocks.release(item)


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    blocks, _ = manager(FULL, cache=False)
    for _ in range(2):
        item = sequence(list(range(70)))
        blocks.start(item)
        assert item.computed == 0
        compute(blocks, item)
        blocks.release(item)
    assert blocks.pools[0].kept == 0


def test_the_end_of_a_sequence_is_written_over_before_its_beginning() -> None:
    blocks, _ = manager(Group(None, 4))
    first = sequence(list(range(128)))
    blocks.start(first)
    compute(blocks, first)
    blocks.release(first)
    other = sequence([500] * 33)
    blocks.start(other)
    compute(blocks, other)
    blocks.release(other)
    again = sequence(list(range(128)))
    blocks.start(again)
    assert again.computed == 64


def test_a_window_gives_blocks_back() -> None:
    blocks, _ = manager(FULL, Group(40, 4))
    item = sequence(list(range(200)))
    blocks.start(item)
    for end in range(20, 201, 20):
        assert compute(blocks, item, end) == end
    table = item.tables[1]
    # The next row, at 200, reads positions 161 to 200.
    assert (table.first, table.end) == (5, 7)
    assert (table.blocks[:5] == -1).all()
    assert held(blocks) == [7, 2]


def test_a_prefix_needs_what_the_window_reads() -> None:
    blocks, _ = manager(FULL, Group(40, 8))
    first = sequence(list(range(200)))
    blocks.start(first)
    compute(blocks, first, 100)
    compute(blocks, first, 200)
    blocks.release(first)
    again = sequence(list(range(200)))
    blocks.start(again)
    assert again.computed == 192
    assert [again.tables[1].first, again.tables[1].end] == [4, 6]
    assert [again.tables[0].first, again.tables[0].end] == [0, 6]
    blocks.release(again)
    # Of the window's blocks the last two are written over: the beginning that is left is shorter.
    windowed = blocks.pools[1]
    for place in (4, 5):
        block = windowed.find(again.keys[place])
        del windowed._by_key[again.keys[place]]
        windowed._key_of[block] = None
        del windowed._kept[block]
        windowed._free.append(block)
    blocks.start(again)
    assert again.computed == 128
    assert [again.tables[1].first, again.tables[1].end] == [2, 4]


def test_a_window_smaller_than_a_block() -> None:
    blocks, _ = manager(Group(2, 2), context=100)
    item = sequence(list(range(99)))
    blocks.start(item)
    for end in range(1, 100):
        assert compute(blocks, item, end) == end
        assert blocks.pools[0].held <= 2
    blocks.release(item)
    assert held(blocks) == [0]


def test_a_fork_copies_before_it_writes() -> None:
    blocks, copies = manager(FULL)
    parent, child = sequence(list(range(40))), sequence(list(range(40)))
    blocks.start(parent)
    compute(blocks, parent)
    blocks.fork(parent, child)
    assert held(blocks) == [2]
    for item in (parent, child):
        item.tokens.append(7)
        compute(blocks, item)
    assert held(blocks) == [3]
    old, new = int(child.tables[0].blocks[1]), int(parent.tables[0].blocks[1])
    assert copies == [(0, [(old, new)])]
    for item in (parent, child):
        item.tokens.append(8)
        compute(blocks, item)
    assert len(copies) == 1
    blocks.release(child)
    blocks.release(parent)
    assert held(blocks) == [0]


def test_a_fork_at_the_edge_of_a_block_copies_nothing() -> None:
    blocks, copies = manager(FULL)
    parent, child = sequence(list(range(64))), sequence(list(range(64)))
    blocks.start(parent)
    compute(blocks, parent)
    blocks.fork(parent, child)
    for item in (parent, child):
        item.tokens.append(7)
        compute(blocks, item)
    assert copies == []
    assert held(blocks) == [4]


def test_growing_stops_where_blocks_end() -> None:
    blocks, _ = manager(Group(None, 3), context=96)
    first, second = sequence(list(range(40))), sequence(list(range(100, 180)))
    blocks.start(first)
    compute(blocks, first)
    blocks.start(second)
    assert compute(blocks, second) == 32
    assert blocks.grow(second, 80) == 32
    blocks.release(first)
    assert compute(blocks, second) == 80


def test_a_cache_that_is_too_small() -> None:
    with pytest.raises(ConfigError, match=r"group 1 with a window of 64 tokens has 2 blocks.*at least 3"):
        manager(FULL, Group(64, 2))
    with pytest.raises(ConfigError, match="at least 1"):
        manager(Group(None, 0))
    blocks, _ = manager(Group(None, 3), context=1000)
    assert blocks.context_tokens == 96


@pytest.mark.parametrize(("tokens", "blocks"), [(1, 1), (2, 2), (32, 2), (33, 2), (34, 3), (65, 3), (66, 4)])
def test_most_blocks_of_a_window(tokens: int, blocks: int) -> None:
    assert most_blocks(tokens) == blocks
    assert blocks == max((start + tokens - 1) // 32 - start // 32 + 1 for start in range(64))


def test_statistics() -> None:
    blocks, _ = manager(FULL)
    for _ in range(2):
        item = sequence(list(range(70)))
        blocks.start(item)
        blocks.count_query(item)
        compute(blocks, item)
        blocks.release(item)
    assert (blocks.query_tokens, blocks.hit_tokens) == (140, 64)
    usage = blocks.usage()[0]
    assert (usage.blocks, usage.held, usage.kept) == (16, 0, 2)
    blocks.forget_prefixes()
    item = sequence(list(range(70)))
    blocks.start(item)
    assert item.computed == 0
    assert blocks.usage()[0].kept == 0


class Life(RuleBasedStateMachine):
    """Random sequences that share beginnings, fork, grow and end, over three groups."""

    @initialize(cache=st.booleans())
    def begin(self, cache: bool) -> None:
        self.blocks, self.copies = manager(
            Group(None, 12), Group(40, 8), Group(5, 4), context=200, cache=cache
        )
        self.items: list[Sequence] = []

    @rule(length=st.integers(1, 150), kind=st.integers(0, 2))
    def arrive(self, length: int, kind: int) -> None:
        item = sequence([token if token < 40 else token + 1000 * kind for token in range(length)])
        self.blocks.start(item)
        assert item.computed < len(item.tokens)
        self.items.append(item)

    @precondition(lambda self: self.items)
    @rule(which=st.integers(0, 100), count=st.integers(1, 60), drafted=st.integers(0, 5))
    def work(self, which: int, count: int, drafted: int) -> None:
        item = self.items[which % len(self.items)]
        if item.remaining == 0:
            item.tokens.append(which)
        end = min(len(item.tokens), item.computed + count)
        reached = self.blocks.grow(item, min(end + drafted, 200))
        self.blocks.advance(item, min(reached, end))

    @precondition(lambda self: self.items)
    @rule(which=st.integers(0, 100))
    def fork(self, which: int) -> None:
        parent = self.items[which % len(self.items)]
        if parent.computed == len(parent.tokens) and len(self.items) < 6:
            child = sequence(list(parent.tokens))
            self.blocks.fork(parent, child)
            self.items.append(child)

    @precondition(lambda self: self.items)
    @rule(which=st.integers(0, 100))
    def leave(self, which: int) -> None:
        self.blocks.release(self.items.pop(which % len(self.items)))

    @invariant()
    def counts_agree(self) -> None:
        for group, pool in enumerate(getattr(self, "blocks", manager(FULL)[0]).pools):
            holders = [0] * pool.count
            for item in getattr(self, "items", []):
                table = item.tables[group]
                for place, block in enumerate(table.blocks.tolist()):
                    assert (block >= 0) == (table.first <= place < table.end)
                    if block >= 0:
                        holders[block] += 1
                window = self.blocks.groups[group].window_tokens
                needed = 0 if window is None else max(0, item.computed - window + 1)
                assert table.first * 32 <= needed
                assert item.computed <= table.end * 32
            assert holders == pool.holders
            assert pool.held + pool.available == pool.count
            assert pool.held == sum(count > 0 for count in holders)
            for key, block in pool._by_key.items():
                assert pool._key_of[block] == key

    def teardown(self) -> None:
        for item in getattr(self, "items", []):
            self.blocks.release(item)
        if hasattr(self, "blocks"):
            assert held(self.blocks) == [0, 0, 0]


TestLife = Life.TestCase
TestLife.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)

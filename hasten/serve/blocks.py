"""Blocks of the paged cache: who holds them, and which of them hold a known beginning of a prompt.

A block has as many holders as sequences whose tables name it. A block that is full of tokens that will not
change gets a key, a hash of all tokens up to its end; a sequence that begins with the same tokens takes it
over. Nobody writes to a block that has a key or a second holder: who must, copies it first. A block without a
holder is free; if it has a key it is kept, and given away only when no other is free, the one not used for
the longest time first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from hasten.base.errors import ConfigError
from hasten.serve.runner import BLOCK_TOKENS, Group
from hasten.serve.sequence import BlockTable, Sequence, blocks_of


class Pool:
    """The blocks of one group. Numbers are 0 .. count - 1."""

    def __init__(self, count: int):
        self.count = count
        self.holders = [0] * count
        self._free = list(range(count - 1, -1, -1))
        self._key_of: list[bytes | None] = [None] * count
        self._by_key: dict[bytes, int] = {}
        self._kept: OrderedDict[int, None] = OrderedDict()
        """Blocks with a key and no holder, the longest unused first."""
        self.used = 0
        """Blocks that were ever held: those of the lowest numbers, since a new one is the next."""
        self._touched = 0

    @property
    def available(self) -> int:
        """Blocks without a holder."""
        return len(self._free) + len(self._kept)

    @property
    def held(self) -> int:
        """Blocks with a holder."""
        return self.count - self.available

    @property
    def kept(self) -> int:
        """Blocks without a holder that can still be found by their key."""
        return len(self._kept)

    def take(self) -> int:
        """A block with one holder, whose content is to be written; -1 if all are held."""
        if self._free:
            block = self._free.pop()
        elif self._kept:
            block, _ = self._kept.popitem(last=False)
            key = self._key_of[block]
            assert key is not None  # only blocks with a key are kept
            del self._by_key[key]
            self._key_of[block] = None
        else:
            return -1
        self.holders[block] = 1
        self.used = max(self.used, block + 1)
        return block

    def next_untouched(self, ahead: int) -> int:
        """The next block that nobody has held yet and that was not given here before, as long as there are
        fewer than `ahead` of these; else -1."""
        block = max(self._touched, self.used)
        if block >= min(self.count, self.used + ahead):
            return -1
        self._touched = block + 1
        return block

    def find(self, key: bytes) -> int:
        """The block of a key, or -1."""
        return self._by_key.get(key, -1)

    def hold(self, block: int) -> None:
        """One holder more."""
        if self.holders[block] == 0:
            del self._kept[block]
        self.holders[block] += 1

    def release(self, block: int) -> None:
        """One holder less."""
        left = self.holders[block] - 1
        self.holders[block] = left
        if left == 0:
            if self._key_of[block] is None:
                self._free.append(block)
            else:
                self._kept[block] = None

    def publish(self, block: int, key: bytes) -> None:
        """Gives a held block its key, unless another block has it already."""
        if key not in self._by_key and self._key_of[block] is None:
            self._by_key[key] = block
            self._key_of[block] = key

    def forget(self) -> None:
        """No key is known any more."""
        self._free.extend(self._kept)
        self._kept.clear()
        self._by_key.clear()
        self._key_of = [None] * self.count


@dataclass(frozen=True)
class PoolUsage:
    """Blocks of one group: in all, held by sequences, and free but still known by their tokens."""

    blocks: int
    held: int
    kept: int


class BlockManager:
    """The pools of all groups, on behalf of sequences."""

    def __init__(
        self,
        groups: Items[Group],
        context_tokens: int,
        copy: Callable[[int, Items[tuple[int, int]]], None],
        prefix_cache: bool = True,
    ):
        """`copy`: the runner's `copy_blocks`.

        Raises:
            ConfigError: a pool cannot hold what one row of its group reads.
        """
        self.groups = tuple(groups)
        self.pools = tuple(Pool(group.blocks) for group in self.groups)
        self._copy = copy
        self._prefix_cache = prefix_cache
        self.context_tokens = context_tokens
        """Longest sequence that the pools can hold when it is alone."""
        for number, group in enumerate(self.groups):
            if group.window_tokens is None:
                self.context_tokens = min(self.context_tokens, group.blocks * BLOCK_TOKENS)
            least = 1 if group.window_tokens is None else most_blocks(group.window_tokens)
            if group.blocks < min(least, blocks_of(context_tokens)):
                raise ConfigError(
                    f"cache group {number} with a window of {group.window_tokens} tokens has {group.blocks} "
                    f"blocks of {BLOCK_TOKENS} tokens; one sequence needs at least {least}: give the cache "
                    "more memory"
                )
        self.most_blocks = blocks_of(self.context_tokens)
        self.query_tokens = 0
        self.hit_tokens = 0
        self.changes = 0
        """Rises whenever blocks become free or known: a sequence that found no room tries again then."""

    # Keys

    def _extend_keys(self, sequence: Sequence, blocks: int) -> None:
        keys, tokens = sequence.keys, sequence.tokens
        for number in range(len(keys), blocks):
            before = keys[number - 1] if number else sequence.salt
            part = array("i", tokens[number * BLOCK_TOKENS : (number + 1) * BLOCK_TOKENS]).tobytes()
            keys.append(hashlib.blake2b(part + before, digest_size=16).digest())

    # A sequence's life

    def start(self, sequence: Sequence) -> None:
        """Gives empty tables, then the blocks of the longest known beginning of its tokens.

        At least the last token is left to compute, and every one where rows of the prompt are scored.
        `computed` is the length of the beginning.
        """
        if not sequence.tables:
            sequence.tables = [BlockTable(self.most_blocks) for _ in self.groups]
        sequence.computed = 0
        if not self._prefix_cache or sequence.scored is not None:
            return
        whole = (len(sequence.tokens) - 1) // BLOCK_TOKENS
        self._extend_keys(sequence, whole)
        found = self._longest(sequence.keys[:whole])
        sequence.computed = found * BLOCK_TOKENS
        for table, pool, group in zip(sequence.tables, self.pools, self.groups, strict=True):
            table.first = min(found, _first_needed(group.window_tokens, sequence.computed))
            table.end = table.published = found
            for place in range(table.first, found):
                block = pool.find(sequence.keys[place])
                pool.hold(block)
                table.blocks[place] = block

    def _longest(self, keys: Items[bytes]) -> int:
        """Most blocks such that every group still has those that the next row reads."""
        best = [True] * (len(keys) + 1)
        for pool, group in zip(self.pools, self.groups, strict=True):
            run = 0  # known blocks in a row up to here
            for place, key in enumerate(keys):
                run = run + 1 if pool.find(key) >= 0 else 0
                end = place + 1
                if run < end - _first_needed(group.window_tokens, end * BLOCK_TOKENS):
                    best[end] = False
        return max(end for end, good in enumerate(best) if good)

    def count_query(self, sequence: Sequence) -> None:
        """Counts what `start` found, once the sequence runs."""
        self.query_tokens += len(sequence.tokens)
        self.hit_tokens += sequence.computed

    def grow(self, sequence: Sequence, end: int) -> int:
        """Makes positions computed .. end - 1 writable, as far as there are blocks.

        Returns: the end that was reached, `computed` if not even one position has room.
        """
        start = sequence.computed
        first = start // BLOCK_TOKENS
        for number, (table, pool) in enumerate(zip(sequence.tables, self.pools, strict=True)):
            if first < table.end:
                block = int(table.blocks[first])
                if pool.holders[block] > 1:
                    own = pool.take()
                    if own < 0:
                        return start
                    # At once: what is copied is still held by another, who may lose it before the step runs.
                    self._copy(number, [(block, own)])
                    table.blocks[first] = own
                    pool.release(block)
            while table.end * BLOCK_TOKENS < end:
                block = pool.take()
                if block < 0:
                    end = table.end * BLOCK_TOKENS
                    break
                table.blocks[table.end] = block
                table.end += 1
        return max(start, end)

    def advance(self, sequence: Sequence, computed: int) -> None:
        """Tokens up to `computed` are in the cache for good: publishes whole blocks, gives back those before
        the window."""
        sequence.computed = computed
        whole = computed // BLOCK_TOKENS
        for table, pool, group in zip(sequence.tables, self.pools, self.groups, strict=True):
            if table.published < whole:
                if self._prefix_cache:
                    self._extend_keys(sequence, whole)
                    for place in range(max(table.first, table.published), whole):
                        pool.publish(int(table.blocks[place]), sequence.keys[place])
                    self.changes += 1
                table.published = whole
            if group.window_tokens is not None:
                needed = _first_needed(group.window_tokens, computed)
                if table.first < needed:
                    for place in range(table.first, needed):
                        pool.release(int(table.blocks[place]))
                    table.blocks[table.first : needed] = -1
                    table.first = needed
                    self.changes += 1

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the blocks of what the parent has computed."""
        child.computed = parent.computed
        child.keys = list(parent.keys)
        child.tables = [BlockTable(self.most_blocks) for _ in self.groups]
        for table, source, pool in zip(child.tables, parent.tables, self.pools, strict=True):
            end = min(source.end, blocks_of(parent.computed))
            table.first, table.end, table.published = source.first, end, source.published
            table.blocks[table.first : end] = source.blocks[table.first : end]
            for block in table.blocks[table.first : end].tolist():
                pool.hold(block)

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks back. The end goes first, so that it is also the first to be written over."""
        for table, pool in zip(sequence.tables, self.pools, strict=bool(sequence.tables)):
            for block in table.blocks[table.first : table.end][::-1].tolist():
                pool.release(block)
            table.clear()
        sequence.computed = 0
        self.changes += 1

    # Room

    @property
    def least_available(self) -> int:
        """Free blocks of the group that has the fewest."""
        return min(pool.available for pool in self.pools)

    def lacking(self, sequence: Sequence) -> list[int]:
        """For each group the blocks that the sequence still needs to compute its tokens and one more."""
        lacks = []
        for table, group in zip(sequence.tables, self.groups, strict=True):
            lack = min(blocks_of(len(sequence.tokens) + 1), self.most_blocks) - table.end
            if group.window_tokens is not None:
                lack = min(lack, most_blocks(group.window_tokens + BLOCK_TOKENS) - (table.end - table.first))
            lacks.append(max(0, lack))
        return lacks

    def usage(self) -> tuple[PoolUsage, ...]:
        """A snapshot of each group."""
        return tuple(PoolUsage(pool.count, pool.held, pool.kept) for pool in self.pools)

    def forget_prefixes(self) -> None:
        """Empties the prefix cache; blocks that are held stay held."""
        for pool in self.pools:
            pool.forget()


def _first_needed(window_tokens: int | None, position: int) -> int:
    """The first block that a row at `position` reads."""
    return 0 if window_tokens is None else max(0, position - window_tokens + 1) // BLOCK_TOKENS


def most_blocks(window_tokens: int) -> int:
    """Most blocks that so many tokens in a row lie in."""
    return (window_tokens + BLOCK_TOKENS - 2) // BLOCK_TOKENS + 1

"""A paged KV cache with prefix reuse, as vLLM's block pool behaves (v1/core/block_pool.py, read at 0.32).

Memory is a fixed number of blocks. Each running request holds a table of them; a block that is full has a
key and can be found by later requests with the same prefix. Blocks held by nobody keep their content and
wait in a free list; a new allocation takes the block that has been free the longest and forgets what it held.

Keys are opaque here: the mock engine uses vLLM's hashes, the simulator the block ids of a trace.
Sans-IO: no clock, no sockets.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol


class BlockTable:
    """The blocks of one request.

    `keys` names its full blocks from the first on, as far as they are known (perhaps further than they are
    computed); `blocks` are the ids that it holds; the first `stored` of them can be found by others.
    """

    __slots__ = ("blocks", "keys", "stored")

    def __init__(self, keys: list[int]) -> None:
        self.keys = keys
        self.blocks: list[int] = []
        self.stored = 0


class CacheListener(Protocol):
    """What is told of every change, in the order in which it happens."""

    def stored(self, table: BlockTable, first: int, last: int) -> None:
        """Blocks `first` (inclusive) to `last` (exclusive) of the table have become findable."""

    def removed(self, key: int) -> None:
        """One copy of the block is gone. There may be others with the same key."""

    def cleared(self) -> None:
        """Nothing is cached any more."""


class BlockCache:
    """`num_blocks` counts one reserved block, as vLLM's `num_gpu_blocks` does: one fewer can hold data."""

    def __init__(self, num_blocks: int, block_size: int, listener: CacheListener | None = None) -> None:
        if num_blocks < 2 or block_size < 1:
            raise ValueError("a block cache needs at least two blocks of at least one token")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.listener = listener
        self._references = [0] * num_blocks
        self._key: list[int | None] = [None] * num_blocks
        # Nearly every key has one block, so the common value is the id itself and not a collection.
        self._holders: dict[int, int | dict[int, None]] = {}
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(1, num_blocks))

    @property
    def free_blocks(self) -> int:
        """Blocks that no request holds; most of them may still be findable."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """Fraction 0..1 of the blocks that requests hold. An idle cache is 0, however warm."""
        return 1.0 - len(self._free) / (self.num_blocks - 1)

    @property
    def resident(self) -> int:
        """Distinct keys that can be found."""
        return len(self._holders)

    def match(self, keys: Sequence[int], limit: int) -> int:
        """How many leading keys, at most `limit`, are resident. Reads only."""
        holders = self._holders
        matched = 0
        for key in keys:
            if matched >= limit or key not in holders:
                break
            matched += 1
        return matched

    def reusable(self, keys: Sequence[int], prompt_tokens: int) -> int:
        """Blocks that a prompt of this length would reuse: its last token is always computed again."""
        return self.match(keys, (prompt_tokens - 1) // self.block_size)

    def fits(self, table: BlockTable, matched: int, tokens: int) -> bool:
        """Whether an empty table that reuses `matched` blocks could grow to `tokens` tokens now."""
        idle = sum(1 for key in table.keys[:matched] if self._references[self._holder(key)] == 0)
        return self._blocks_for(tokens) - matched + idle <= len(self._free)

    def start(self, table: BlockTable, matched: int, tokens: int) -> bool:
        """Give an empty table its `matched` resident blocks and room for its first `tokens` tokens.

        False, with nothing changed, when there are too few free blocks.
        """
        if not self.fits(table, matched, tokens):
            return False
        shared = [self._holder(key) for key in table.keys[:matched]]
        for block in shared:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1
        table.blocks = shared
        table.stored = matched
        return self.grow(table, tokens)

    def grow(self, table: BlockTable, tokens: int) -> bool:
        """Make room for `tokens` tokens in all and let the blocks that they fill be found.

        False, with nothing changed, when there are too few free blocks.
        """
        missing = self._blocks_for(tokens) - len(table.blocks)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            table.blocks.append(self._take())
        self._store(table, min(tokens // self.block_size, len(table.keys)))
        return True

    def release(self, table: BlockTable) -> None:
        """Let go of every block, the tail first, so that a prefix outlives what was built on it.

        A block that nobody can find goes to the front of the free list: reusing it costs nothing.
        """
        for block in reversed(table.blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if self._key[block] is None:
                    self._free.move_to_end(block, last=False)
        table.blocks = []
        table.stored = 0

    def reset(self) -> bool:
        """Forget everything. False, with nothing changed, while any request holds a block."""
        if len(self._free) != self.num_blocks - 1:
            return False
        self._holders.clear()
        self._key = [None] * self.num_blocks
        if self.listener is not None:
            self.listener.cleared()
        return True

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.block_size)

    def _holder(self, key: int) -> int:
        holder = self._holders[key]
        return holder if isinstance(holder, int) else next(iter(holder))

    def _take(self) -> int:
        block, _ = self._free.popitem(last=False)
        key = self._key[block]
        if key is not None:
            self._forget(block, key)
        self._references[block] = 1
        return block

    def _forget(self, block: int, key: int) -> None:
        self._key[block] = None
        holder = self._holders[key]
        if isinstance(holder, int):
            del self._holders[key]
        else:
            del holder[block]
            if len(holder) == 1:
                self._holders[key] = next(iter(holder))
        if self.listener is not None:
            self.listener.removed(key)

    def _store(self, table: BlockTable, full: int) -> None:
        first = table.stored
        if full <= first:
            return
        for block, key in zip(table.blocks[first:full], table.keys[first:full], strict=True):
            self._key[block] = key
            holder = self._holders.get(key)
            if holder is None:
                self._holders[key] = block
            elif isinstance(holder, int):
                # The recomputed last block of a fully cached prompt: a second copy under the same key.
                self._holders[key] = {holder: None, block: None}
            else:
                holder[block] = None
        table.stored = full
        if self.listener is not None:
            self.listener.stored(table, first, full)

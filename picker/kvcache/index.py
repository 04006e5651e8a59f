"""The KV index: which endpoints hold which block, in which tier."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from picker.kvcache.matching import PrefixMatch, Tier, match_prefixes, match_slot, slots_of

# The queue of leaves may have this many keys more than the index has blocks, twice over, before it is cleaned up.
_STALE_LEAVES = 1024


@dataclass(slots=True)
class IndexStats:
    """Monotonic counters. A block counts once per slot and tier, `evicted` once per key."""

    stored: int = 0
    removed: int = 0
    evicted: int = 0
    cleared: int = 0


class KvIndex:
    """Block key -> bit masks of slots, one mask per tier.

    Bounded by `max_blocks` distinct keys. Over that, leaves go first (blocks that no indexed block follows),
    the one added longest ago first, so that what is left of a chain can always be matched from its start.

    All state that grows with the cache is kept in dicts of plain integers, which the garbage collector does
    not walk: a million blocks cost memory, never pauses.

    Forgetting all of a slot takes no longer than forgetting a block: its blocks fade. They count for nothing from
    then on, and whoever hears `on_fading` calls `sweep` until they are gone. Where nobody hears it that is done
    at once.
    """

    def __init__(
        self,
        max_blocks: int = 4_000_000,
        *,
        on_stored: Callable[[int, int], None] | None = None,
        on_cleared: Callable[[int], None] | None = None,
        on_fading: Callable[[], None] | None = None,
    ) -> None:
        if max_blocks < 1:
            raise ValueError(f"max_blocks {max_blocks} is not positive")
        self.max_blocks = max_blocks
        #: Called with (slot, key) for each block stored on a device, also when it was there already: an
        #: engine that computes a block again has finished it again.
        self.on_stored = on_stored
        #: Called with a slot whose cache is found to be empty, or no longer known.
        self.on_cleared = on_cleared
        #: Called when there is something to sweep.
        self.on_fading = on_fading
        self.stats = IndexStats()
        self._holders: tuple[dict[int, int], ...] = ({}, {}, {})
        self._parents: dict[int, int] = {}  # has every key of the index
        self._children: dict[int, int] = {}  # number of indexed blocks that follow; absent = none
        # Every leaf is in here, the one to go first in front, among keys that are no leaves any more.
        self._leaves: deque[int] = deque()
        self._slots: dict[int, dict[int, int]] = {}  # slot -> key -> bits of tiers
        # The same of slots that were dropped; a slot that has blocks again since then is in both, by other keys.
        self._fading: dict[int, dict[int, int]] = {}
        self._fading_mask = 0
        self._litter: list[dict[int, int]] = []

    def __len__(self) -> int:
        """Distinct blocks."""
        faded = {key for entries in self._fading.values() for key in entries if key not in self}
        return len(self._parents) - len(faded)

    def __contains__(self, key: int) -> bool:
        if not self._fading:
            return key in self._parents
        mask = 0
        for holders in self._holders:
            mask |= holders.get(key, 0)
        doubtful = mask & self._fading_mask
        return mask != doubtful or any(key in self._slots.get(slot, ()) for slot in slots_of(doubtful))

    def blocks_of(self, slot: int) -> int:
        """Distinct blocks that the slot holds, in whatever tier."""
        return len(self._slots.get(slot, ()))

    def holds(self, slot: int, key: int, tier: Tier) -> bool:
        return bool(self._slots.get(slot, {}).get(key, 0) >> tier & 1)

    def parent(self, key: int) -> int | None:
        """The key of the block before (or of the root), None if `key` is not in the index."""
        return self._parents.get(key) if key in self else None

    def add(self, slot: int, keys: Sequence[int], parent: int, tier: Tier = Tier.DEVICE) -> None:
        """The slot now holds `keys`, consecutive blocks that follow `parent`. Adding twice is the same as
        once.
        """
        held = self._slots.setdefault(slot, {})
        holders = self._holders[tier]
        parents, children = self._parents, self._children
        bit, tier_bit = 1 << slot, 1 << tier
        if self._fading_mask & bit:
            self._let_go(slot, keys)
        stored = linked = 0
        key = parent
        for key in keys:
            tiers = held.get(key, 0)
            if not tiers & tier_bit:
                held[key] = tiers | tier_bit
                holders[key] = holders.get(key, 0) | bit
                stored += 1
                if key not in parents:
                    parents[key] = parent
                    children[parent] = children.get(parent, 0) + 1
                    linked += 1
            parent = key
        if linked and key not in children:
            # Of consecutive blocks only the last one can be a leaf.
            self._leaves.append(key)
        self.stats.stored += stored
        if self.on_stored is not None and tier is Tier.DEVICE:
            for key in keys:
                self.on_stored(slot, key)
        if len(parents) > self.max_blocks:
            self._make_room()
        elif len(self._leaves) > 2 * len(parents) + _STALE_LEAVES:
            self._leaves = deque(key for key in self._leaves if self._is_leaf(key))

    def remove(self, slot: int, keys: Iterable[int], tier: Tier = Tier.DEVICE) -> None:
        """The slot no longer holds these blocks in this tier. Blocks that it did not hold are ignored."""
        held = self._slots.get(slot)
        if held is None:
            return
        holders = self._holders[tier]
        bit, tier_bit = 1 << slot, 1 << tier
        for key in keys:
            tiers = held.get(key, 0)
            if not tiers & tier_bit:
                continue
            if tiers == tier_bit:
                del held[key]
            else:
                held[key] = tiers ^ tier_bit
            self._release(holders, key, bit)
            self.stats.removed += 1
        if not held:
            del self._slots[slot]

    def find_matches(self, keys: Iterable[int], mask: int) -> dict[int, PrefixMatch]:
        """Slot -> how many of `keys` it holds from block 0 on without a gap. Slots with none are left out.

        Only slots whose bit is in `mask` are looked at. Reads only.
        """
        fading = mask & self._fading_mask
        if not fading:
            return match_prefixes(keys, mask, *self._holders)
        keys = list(keys)
        matches = match_prefixes(keys, mask ^ fading, *self._holders)
        for slot in slots_of(fading):
            # Its bits do not tell the blocks that it has from those that fade.
            if match := match_slot(keys, self._slots.get(slot, {})):
                matches[slot] = match
        return matches

    def clear(self, slot: int) -> None:
        """The slot's cache is empty or unknown: forget its blocks. Costs by that slot's blocks only."""
        self.stats.cleared += 1
        self.drop(slot)
        if self.on_cleared is not None:
            self.on_cleared(slot)

    def drop(self, slot: int) -> None:
        """The slot's endpoint is gone: forget its blocks, so that the slot can serve another endpoint."""
        held = self._slots.pop(slot, None)
        if held is None:
            return
        before = self._fading.setdefault(slot, held)
        if before is not held:
            before.update(held)
        self._fading_mask |= 1 << slot
        self._litter_fell()

    def throw_away(self, table: dict[int, int]) -> None:
        """Empty a dict that nobody needs any more, bit by bit where `sweep` is called."""
        if table:
            self._litter.append(table)
            self._litter_fell()

    def sweep(self, limit: int) -> bool:
        """Forget up to about `limit` blocks of what fades. False when nothing is left."""
        for slot, entries in list(self._fading.items()):
            while entries and limit > 0:
                limit -= 1
                self._release_all(slot, *entries.popitem())
            if entries:
                return True
            del self._fading[slot]
            self._fading_mask ^= 1 << slot
        while self._litter and limit > 0:
            table = self._litter[-1]
            for _ in range(min(limit, len(table))):
                limit -= 1
                table.popitem()
            if not table:
                self._litter.pop()
        return bool(self._litter)

    def _litter_fell(self) -> None:
        if self.on_fading is not None:
            self.on_fading()
        else:
            while self.sweep(self.max_blocks):
                pass

    def _let_go(self, slot: int, keys: Iterable[int]) -> None:
        """The slot gets these blocks again: those of them that fade must be gone first."""
        entries = self._fading[slot]
        for key in keys:
            if tiers := entries.pop(key, 0):
                self._release_all(slot, key, tiers)

    def _release_all(self, slot: int, key: int, tiers: int) -> None:
        bit = 1 << slot
        for tier, holders in enumerate(self._holders):
            if tiers >> tier & 1:
                self._release(holders, key, bit)

    def _release(self, holders: dict[int, int], key: int, bit: int) -> None:
        """Take one holder off a block in one tier, and the block off the index after the last one."""
        if rest := holders[key] & ~bit:
            holders[key] = rest
            return
        del holders[key]
        device, host, disk = self._holders
        if key not in device and key not in host and key not in disk:
            self._unlink(key)

    def _unlink(self, key: int) -> None:
        parent = self._parents.pop(key)
        if siblings := self._children[parent] - 1:
            self._children[parent] = siblings
            return
        del self._children[parent]
        if parent in self._parents:
            # To the front: a chain that began to go from its tail goes on before another one is touched.
            self._leaves.appendleft(parent)

    def _is_leaf(self, key: int) -> bool:
        return key in self._parents and key not in self._children

    def _make_room(self) -> None:
        """What fades goes before what is held."""
        if self._fading:
            self.sweep(len(self._parents) - self.max_blocks)
        if (over := len(self._parents) - self.max_blocks) > 0:
            self._evict(over)

    def _evict(self, count: int) -> None:
        """Forget this many blocks, one leaf after the other, whoever holds them."""
        self.stats.evicted += count
        while count:
            key = self._leaves.popleft()
            if not self._is_leaf(key):
                continue
            count -= 1
            mask = 0
            for holders in self._holders:
                mask |= holders.pop(key, 0)
            for slot in slots_of(mask):
                self._fading.get(slot, {}).pop(key, None)
                held = self._slots.get(slot, {})
                if held.pop(key, None) is not None and not held:
                    del self._slots[slot]
            self._unlink(key)

"""One engine's events, applied to the index: what its hashes mean, and how many copies of a block it has."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from picker.kvcache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from picker.kvcache.index import KvIndex
from picker.kvcache.keys import Extra, chain, pack_tokens, root_key
from picker.kvcache.matching import Tier

_TIERS: Mapping[str, Tier] = {
    "GPU": Tier.DEVICE,
    "CPU": Tier.HOST,
    "CPU_PINNED": Tier.HOST,
    "DISK": Tier.DISK,
    "STORAGE": Tier.DISK,
    "FS": Tier.DISK,
    "OBJ": Tier.DISK,
    "EXTERNAL": Tier.DISK,
}

# Groups whose blocks all stay useful: a prefix is cached if and only if its blocks are. Sliding windows,
# recurrent state and the like keep only some blocks, and say nothing of the prefix.
_WHOLE_PREFIX_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})


class _Place:
    """Where copies of blocks are: one cache group in one medium."""

    __slots__ = ("copies", "tier")

    def __init__(self, medium: str) -> None:
        # A medium that we do not know is taken for the slowest.
        self.tier = _TIERS.get(medium, Tier.DISK)
        self.copies: dict[int, int] = {}  # engine hash -> how many


@dataclass(slots=True)
class BlockStats:
    """Monotonic counters, in blocks unless said otherwise. May be shared by the blocks of several engines."""

    events: int = 0  # events applied
    stored: int = 0
    removed: int = 0
    unknown_removals: int = 0  # of blocks that we did not know of
    parked: int = 0  # whose parent was unknown at the time
    adopted: int = 0  # parked, and indexed once the parent came
    abandoned: int = 0  # parked, and given up for newer ones
    ignored_groups: int = 0  # events of sliding windows, recurrent state and other partial caches
    odd_sized: int = 0  # not of the engine's block size, or tokens and hashes that do not fit together
    malformed: int = 0  # events with contents that make no sense
    overflow: int = 0  # over the limit per engine, not indexed
    clears: int = 0
    late: int = 0  # events after close


@dataclass(frozen=True, slots=True)
class BlockLimits:
    """Bounds per engine, in blocks."""

    blocks: int = 2_000_000
    parked: int = 16_384


class EngineBlocks:
    """The blocks of one endpoint, that is of one (pod, rank), by the hashes that its engine gives them.

    Engine hashes are opaque. Each has a key of ours, computed from the tokens when the block is stored, and a
    count of copies per place: an engine that computes a block a second time stores it again under the same
    hash, and later removes it twice. With `counted` False (engines that keep one copy in a tree) storing
    again changes nothing.

    Learning the key of a hash and learning where it is held are separate: offload tiers store blocks without
    tokens, and after a loss a block may come before its parent. A block is in the index when both are known.
    """

    def __init__(
        self,
        slot: int,
        index: KvIndex,
        *,
        counted: bool = True,
        limits: BlockLimits = BlockLimits(),
        stats: BlockStats | None = None,
        on_block_size: Callable[[int], None] | None = None,
    ) -> None:
        self.slot = slot
        self.stats = stats if stats is not None else BlockStats()
        #: Tokens in a block, from the engine's own events; None before the first one.
        self.block_size: int | None = None
        self._index = index
        self._counted = counted
        self._limits = limits
        self._on_block_size = on_block_size
        self._closed = False
        self._keys: dict[int, int] = {}  # engine hash -> own key, for blocks held somewhere
        self._places: dict[tuple[str, int], _Place] = {}  # by medium and cache group
        self._held = 0  # blocks in all places
        self._parked: OrderedDict[int, list[BlockStored]] = OrderedDict()  # by unknown parent, oldest first
        self._parked_blocks = 0

    def __len__(self) -> int:
        """Blocks known to be held, a block in two places counted twice."""
        return self._held

    @property
    def parked(self) -> int:
        """Blocks that wait for their parent."""
        return self._parked_blocks

    def apply(self, events: Iterable[Event]) -> None:
        """Apply events in the order in which the engine sent them."""
        for event in events:
            if self._closed:
                self.stats.late += 1
                continue
            self.stats.events += 1
            if isinstance(event, BlockStored):
                self._store(event)
            elif isinstance(event, BlockRemoved):
                self._remove(event)
            elif isinstance(event, AllBlocksCleared):
                self.clear()

    def clear(self) -> None:
        """The engine's cache is empty, or what we know of it is not to be trusted."""
        self.stats.clears += 1
        # A restarted engine may have blocks of another size.
        self.block_size = None
        self._forget()
        self._index.clear(self.slot)

    def close(self) -> None:
        """The endpoint is gone. Its slot is free for another one: events that still come are dropped."""
        if not self._closed:
            self._closed = True
            self._forget()
            self._index.drop(self.slot)

    def _forget(self) -> None:
        self._index.throw_away(self._keys)
        for place in self._places.values():
            self._index.throw_away(place.copies)
        self._keys, self._places = {}, {}
        self._held = 0
        self._parked.clear()
        self._parked_blocks = 0

    # Storing

    def _store(self, event: BlockStored) -> None:
        count = len(event.block_hashes)
        if not _is_whole_prefix(event):
            self.stats.ignored_groups += 1
        elif self._held + count > self._limits.blocks:
            self.stats.overflow += count
        elif not event.token_ids:
            self._index_known(event, self._hold(event).tier)
        elif event.block_size < 1 or len(event.token_ids) != event.block_size * count:
            self.stats.odd_sized += count
        elif event.block_size != self.block_size and not self._learn_block_size(event.block_size):
            # A tail: some engines store the rest of a prompt as a short block.
            self.stats.odd_sized += count
        else:
            self._hold(event)
            parent = self._parent_key(event)
            if parent is None:
                self._park(event)
            else:
                self._learn(event, parent)

    def _learn_block_size(self, size: int) -> bool:
        """Take this for the engine's block size, unless a larger one was seen."""
        if self.block_size is not None and size < self.block_size:
            return False
        self.block_size = size
        if self._on_block_size is not None:
            self._on_block_size(size)
        return True

    def _hold(self, event: BlockStored) -> _Place:
        """Count one more copy of each block of the event."""
        self.stats.stored += len(event.block_hashes)
        name = _place_of(event)
        place = self._places.get(name)
        if place is None:
            place = self._places[name] = _Place(name[0])
        copies = place.copies
        before = len(copies)
        if self._counted:
            for block_hash in event.block_hashes:
                copies[block_hash] = copies.get(block_hash, 0) + 1
        else:
            copies.update(dict.fromkeys(event.block_hashes, 1))
        self._held += len(copies) - before
        return place

    def _index_known(self, event: BlockStored, tier: Tier) -> None:
        """Index blocks that came without tokens, as far as their keys are known from elsewhere."""
        for block_hash in event.block_hashes:
            key = self._keys.get(block_hash)
            parent = None if key is None else self._index.parent(key)
            if key is not None and parent is not None:
                self._index.add(self.slot, (key,), parent, tier)

    def _learn(self, event: BlockStored, parent: int) -> None:
        """Index the event's blocks, and then what has waited for them, and what has waited for that."""
        keys = self._index_blocks(event, parent)
        if not self._parked:
            return
        waited_for = [*zip(event.block_hashes, keys, strict=False)]
        while waited_for:
            parent_hash, parent = waited_for.pop()
            for child in self._parked.pop(parent_hash, ()):
                self._parked_blocks -= len(child.block_hashes)
                self.stats.adopted += len(child.block_hashes)
                waited_for += zip(child.block_hashes, self._index_blocks(child, parent), strict=False)

    def _parent_key(self, event: BlockStored) -> int | None:
        """The key that the event's first block follows, None if the engine's parent hash is unknown."""
        parent = event.parent_block_hash
        if parent is not None and (key := self._keys.get(parent)) is not None:
            return key
        # Some simulators write 0 for "no parent". A real block hash of 0 would be in the map.
        return None if parent else root_key(event.block_size, _adapter(event))

    def _index_blocks(self, event: BlockStored, parent: int) -> list[int]:
        """Compute the keys of the event's blocks, and index them wherever the blocks are held.

        No keys where the event has tokens or extra keys that make no sense.
        """
        try:
            keys = chain(parent, pack_tokens(event.token_ids), event.block_size, _extras(event))
        except (ValueError, TypeError):
            self.stats.malformed += 1
            return []
        hashes = event.block_hashes
        for place in self._places.values():
            copies = place.copies
            if all(map(copies.__contains__, hashes)):
                self._keys.update(zip(hashes, keys, strict=True))
                self._index.add(self.slot, keys, parent, place.tier)
                continue
            previous = parent
            for block_hash, key in zip(hashes, keys, strict=True):
                if block_hash in copies:
                    self._keys[block_hash] = key
                    self._index.add(self.slot, (key,), previous, place.tier)
                previous = key
        return keys

    def _park(self, event: BlockStored) -> None:
        assert event.parent_block_hash is not None
        self.stats.parked += len(event.block_hashes)
        self._parked.setdefault(event.parent_block_hash, []).append(event)
        self._parked_blocks += len(event.block_hashes)
        while self._parked_blocks > self._limits.parked:
            _parent, events = self._parked.popitem(last=False)
            lost = sum(len(parked.block_hashes) for parked in events)
            self._parked_blocks -= lost
            self.stats.abandoned += lost

    # Removing

    def _remove(self, event: BlockRemoved) -> None:
        name = _place_of(event)
        place = self._places.get(name)
        if place is None:
            self.stats.unknown_removals += len(event.block_hashes)
            return
        copies = place.copies
        for block_hash in event.block_hashes:
            count = copies.get(block_hash)
            if count is None:
                self.stats.unknown_removals += 1
                continue
            self.stats.removed += 1
            if count > 1:
                copies[block_hash] = count - 1
                continue
            del copies[block_hash]
            self._held -= 1
            self._release(block_hash, place.tier)
        if not copies:
            del self._places[name]

    def _release(self, block_hash: int, tier: Tier) -> None:
        """The last copy at one place is gone; the block may still be at another."""
        tiers = [place.tier for place in self._places.values() if block_hash in place.copies]
        key = self._keys.get(block_hash) if tiers else self._keys.pop(block_hash, None)
        if key is not None and tier not in tiers:
            self._index.remove(self.slot, (key,), tier)


def _is_whole_prefix(event: BlockStored) -> bool:
    kind = event.kv_cache_spec_kind
    if kind is None:
        # Engines that do not name the kind: their first group is the one to follow.
        return not event.group_idx
    return kind in _WHOLE_PREFIX_KINDS


def _place_of(event: BlockStored | BlockRemoved) -> tuple[str, int]:
    return event.medium or "GPU", event.group_idx or 0


def _adapter(event: BlockStored) -> str | None:
    """The LoRA name. Old engines send only a number: such blocks get keys that no request asks for."""
    if event.lora_name is None and event.lora_id is not None:
        return f"\0{event.lora_id}"
    return event.lora_name


def _extras(event: BlockStored) -> dict[int, Extra]:
    """What the event's blocks hold beside tokens, by block number, in the form of `keys.chain`.

    vLLM's extra keys of a block are `[LoRA name?, media..., salt?]` without tags: a first string equal to the
    event's LoRA name is that, and is in the root already. Media are strings or `[id, offset]`; the offset
    depends on the chunking and is dropped. Raises TypeError for anything else.
    """
    extras: dict[int, Extra] = {}
    keys = event.extra_keys
    for number, entries in enumerate(keys) if keys and any(keys) else ():
        if entries:
            if not isinstance(entries, list):
                raise TypeError("the extra keys of a block are a list")
            if entries[0] == event.lora_name:
                entries = entries[1:]
            extras[number] = tuple(_extra_text(entry) for entry in entries)
    if event.cache_salt and not event.parent_block_hash:
        extras[0] = (*extras.get(0, ()), event.cache_salt)
    return extras


def _extra_text(entry: object) -> str:
    if isinstance(entry, list) and entry:
        entry = entry[0]
    if isinstance(entry, bytes):
        return entry.hex()
    if isinstance(entry, str):
        return entry
    raise TypeError("an extra key is a string, or a list that starts with one")

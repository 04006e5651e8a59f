"""What endpoints probably have cached because requests were routed there: for engines without events, and for
the moments before the event comes.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from picker.kvcache.index import KvIndex
from picker.kvcache.matching import PrefixMatch, match_on_device


@dataclass(slots=True)
class PredictedStats:
    """Monotonic counters, in blocks."""

    predicted: int = 0
    renewed: int = 0
    expired: int = 0
    evicted: int = 0  # for newer ones, at the endpoint's capacity


class PredictedIndex:
    """Block key -> slots that were sent a prompt with that block a short time ago.

    A block lives as long as the latest prediction of it says, so that one request's prediction never takes
    another's away. Each slot is bounded to what its engine can hold, least recently predicted first, a
    prompt's tail before its head. Times are the caller's clock, in seconds.
    """

    def __init__(self) -> None:
        self.stats = PredictedStats()
        self._holders: dict[int, int] = {}
        # Slot -> key -> when it expires. Both the order of use and the order of expiry: see `predict`.
        self._slots: dict[int, OrderedDict[int, float]] = {}
        self._next_expiry = math.inf  # no entry expires before this

    def __len__(self) -> int:
        """Distinct blocks."""
        return len(self._holders)

    def blocks_of(self, slot: int) -> int:
        return len(self._slots.get(slot, ()))

    def predict(self, slot: int, keys: Sequence[int], now: float, *, ttl: float, capacity: int) -> None:
        """A prompt with these blocks was routed to the slot, whose engine has room for `capacity` blocks.

        `ttl` belongs to the slot more than to the request: long without events, short with them. When it
        becomes shorter, earlier predictions for the slot are cut to it too: whatever made it shorter holds
        for them as well.
        """
        entries = self._slots.setdefault(slot, OrderedDict())
        expiry = now + ttl
        self._cut(entries, expiry)
        bit = 1 << slot
        # The tail first: the head, which more prompts share, is then the last to go.
        for key in reversed(keys[:capacity]):
            if key in entries:
                self.stats.renewed += 1
            else:
                self.stats.predicted += 1
                self._holders[key] = self._holders.get(key, 0) | bit
            entries[key] = expiry
            entries.move_to_end(key)
        while len(entries) > capacity:
            self._forget_oldest(slot, entries)
            self.stats.evicted += 1
        if not entries:
            del self._slots[slot]
        self._next_expiry = min(self._next_expiry, expiry)

    def expire(self, now: float) -> None:
        """Forget what has expired by `now`. Costs next to nothing when nothing has."""
        if now < self._next_expiry:
            return
        self._next_expiry = math.inf
        for slot, entries in list(self._slots.items()):
            while entries and (oldest := next(iter(entries.values()))) <= now:
                self._forget_oldest(slot, entries)
                self.stats.expired += 1
            if entries:
                self._next_expiry = min(self._next_expiry, oldest)
            else:
                del self._slots[slot]

    def find_matches(self, keys: Iterable[int], mask: int) -> dict[int, PrefixMatch]:
        """As `KvIndex.find_matches`; everything predicted is taken to be on the device."""
        return match_on_device(keys, mask, self._holders)

    def drop(self, slot: int) -> None:
        """The slot's endpoint is gone, or its cache is known to be empty."""
        entries = self._slots.pop(slot, None)
        while entries:
            self._forget_oldest(slot, entries)

    def _cut(self, entries: OrderedDict[int, float], expiry: float) -> None:
        """Let no entry live longer than `expiry`. As entries are in order of expiry, these are the last ones."""
        for key in reversed(entries):
            if entries[key] <= expiry:
                break
            entries[key] = expiry

    def _forget_oldest(self, slot: int, entries: OrderedDict[int, float]) -> None:
        key, _expiry = entries.popitem(last=False)
        if rest := self._holders[key] & ~(1 << slot):
            self._holders[key] = rest
        else:
            del self._holders[key]


class CombinedIndex:
    """What engines reported and what was predicted, as one."""

    def __init__(self, reported: KvIndex, predicted: PredictedIndex) -> None:
        self.reported = reported
        self.predicted = predicted

    def find_matches(self, keys: Sequence[int], mask: int) -> dict[int, PrefixMatch]:
        """As `KvIndex.find_matches`: per slot the better one of both."""
        return merge(self.reported.find_matches(keys, mask), self.predicted.find_matches(keys, mask))


def merge(some: Mapping[int, PrefixMatch], others: Mapping[int, PrefixMatch]) -> dict[int, PrefixMatch]:
    """Per slot the match that is worth more."""
    merged = dict(some)
    for slot, match in others.items():
        if slot not in merged or match.weighted > merged[slot].weighted:
            merged[slot] = match
    return merged

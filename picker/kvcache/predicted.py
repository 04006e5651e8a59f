"""What endpoints probably have cached because requests were routed there: for engines without events, and for
the moments before the event comes.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, takewhile

import msgspec

from picker.kvcache.index import KvIndex
from picker.kvcache.matching import PrefixMatch, match_on_device, slots_of

# Of a longer prompt the rest is entered in later turns, where there is somebody to sweep.
_AT_ONCE = 1024
# Slots tidy up when their predictions have this many keys more than twice what they need.
_STALE_KEYS = 4096


@dataclass(slots=True)
class PredictedStats:
    """Monotonic counters, in blocks."""

    predicted: int = 0
    renewed: int = 0
    expired: int = 0
    evicted: int = 0  # for newer ones, at the endpoint's capacity
    retracted: int = 0  # of requests that never reached their engine


class Prediction(msgspec.Struct, eq=False):
    """What one request's prompt makes its endpoint hold. `confirm` or `retract` says whether it came to that.

    `older` is what was predicted before of the same blocks, as runs from the prompt's start: (prediction or
    None, blocks). It is needed until this one is confirmed.
    """

    slot: int
    number: int
    expiry: float
    keys: array[int] = msgspec.field(default_factory=lambda: array("Q"))
    older: tuple[tuple[Prediction | None, int], ...] = ()
    confirmed: bool = False
    # It does not hold: retracted, expired, or forgotten with its endpoint.
    void: bool = False

    def holds_at(self, place: int) -> bool:
        """Does this or an older prediction still say that the prompt's block number `place` is there?"""
        claim: Prediction | None = self
        while claim is not None and claim.void:
            claim = claim._older_at(place)
        return claim is not None

    def _older_at(self, place: int) -> Prediction | None:
        for older, blocks in self.older:
            if place < blocks:
                return older
            place -= blocks
        return None


@dataclass(slots=True)
class _Slot:
    """One endpoint's predictions by number, oldest first, which is also the order in which they expire.

    `entries`: key -> number of its latest prediction. Plain integers, which the garbage collector passes over.
    """

    bit: int
    entries: dict[int, int] = field(default_factory=dict)
    predictions: dict[int, Prediction] = field(default_factory=dict)
    keys: int = 0  # in all predictions together
    tidy_at: int = _STALE_KEYS

    def oldest(self) -> Prediction:
        return next(iter(self.predictions.values()))


class PredictedIndex:
    """Block key -> slots that were sent a prompt with that block a short time ago.

    A block lives as long as the latest prediction of it says, so that one request's prediction never takes
    another's away. Each slot is bounded to what its engine can hold, least recently predicted first, a
    prompt's tail before its head. Times are the caller's clock, in seconds.

    As with `KvIndex`, a dropped slot's blocks fade, and `on_fading` asks for `sweep`. Where that is heard, of a very
    long prompt only the head is known at once.
    """

    def __init__(self, *, on_fading: Callable[[], None] | None = None) -> None:
        self.stats = PredictedStats()
        #: Called when there is something to sweep.
        self.on_fading = on_fading
        self._holders: dict[int, int] = {}
        self._slots: dict[int, _Slot] = {}
        self._fading: dict[int, list[_Slot]] = {}
        self._fading_mask = 0
        # The tails of long prompts: where, what, and from which block on they are still to be entered.
        self._tails: deque[tuple[_Slot, Prediction, Sequence[int], int, int]] = deque()
        self._last = 0  # number of the latest prediction
        self._next_expiry = math.inf  # no entry expires before this

    def __len__(self) -> int:
        """Distinct blocks."""
        faded = {key for slots in self._fading.values() for slot in slots for key in slot.entries}
        held = sum(any(key in slot.entries for slot in self._slots.values()) for key in faded)
        return len(self._holders) - len(faded) + held

    def blocks_of(self, slot: int) -> int:
        state = self._slots.get(slot)
        return len(state.entries) if state is not None else 0

    def predict(self, slot: int, keys: Sequence[int], now: float, *, ttl: float, capacity: int) -> Prediction:
        """A prompt with these blocks was routed to the slot, whose engine has room for `capacity` blocks.

        `ttl` belongs to the slot more than to the request: long without events, short with them. When it
        becomes shorter, earlier predictions for the slot are cut to it too: whatever made it shorter holds
        for them as well.
        """
        keys = keys[:capacity]
        self._last += 1
        expiry = now + ttl
        prediction = Prediction(slot, self._last, expiry)
        if not keys:
            prediction.void = True
            return prediction
        state = self._slots.get(slot)
        if state is None:
            state = self._slots[slot] = _Slot(1 << slot)
        _cut(state, expiry)
        state.predictions[prediction.number] = prediction
        self._next_expiry = min(self._next_expiry, expiry)
        if self.on_fading is None or len(keys) <= _AT_ONCE:
            self._enter(state, prediction, keys, capacity)
        else:
            self._enter(state, prediction, keys[:_AT_ONCE], capacity)
            self._tails.append((state, prediction, keys, _AT_ONCE, capacity))
            self.on_fading()
        return prediction

    def confirm(self, prediction: Prediction) -> None:
        """The request has reached its engine."""
        prediction.confirmed = True
        prediction.older = ()

    def retract(self, prediction: Prediction) -> None:
        """The request never reached its engine. What others predicted of the same blocks stays, be it newer or
        older, unless that was retracted too.
        """
        state = self._slots.get(prediction.slot)
        if prediction.confirmed or prediction.void or state is None:
            return
        prediction.void = True
        for place, key in enumerate(prediction.keys):
            number = state.entries.get(key)
            if number is not None and not state.predictions[number].holds_at(place):
                self._forget(state, key)
                self.stats.retracted += 1

    def sweep(self, now: float, limit: float = math.inf) -> bool:
        """Enter the tails of long prompts, and forget what fades or has expired by `now`: up to about `limit` blocks.
        False when nothing is left. Costs next to nothing when there is nothing to do.
        """
        while self._tails:
            if limit <= 0:
                return True
            limit -= self._enter_tail(int(min(limit, _AT_ONCE)))
        for slot, states in list(self._fading.items()):
            while states:
                limit -= self._spend(states[-1], limit)
                if not states[-1].predictions:
                    states.pop()
                if limit <= 0:
                    return True
            del self._fading[slot]
            self._fading_mask ^= 1 << slot
        return now >= self._next_expiry and self._expire(now, limit)

    def find_matches(self, keys: Iterable[int], mask: int) -> dict[int, PrefixMatch]:
        """As `KvIndex.find_matches`; everything predicted is taken to be on the device."""
        fading = mask & self._fading_mask
        if not fading:
            return match_on_device(keys, mask, self._holders)
        keys = list(keys)
        matches = match_on_device(keys, mask ^ fading, self._holders)
        for slot in slots_of(fading):
            # Its bits do not tell the blocks that it has from those that fade.
            state = self._slots.get(slot)
            if state is not None and (depth := sum(1 for _ in takewhile(state.entries.__contains__, keys))):
                matches[slot] = PrefixMatch(depth)
        return matches

    def drop(self, slot: int) -> None:
        """The slot's endpoint is gone, or its cache is known to be empty."""
        state = self._slots.pop(slot, None)
        if state is None:
            return
        self._fading.setdefault(slot, []).append(state)
        self._fading_mask |= state.bit
        if self.on_fading is not None:
            self.on_fading()
        else:
            self.sweep(-math.inf)

    def _enter_tail(self, limit: int) -> int:
        """Enter up to `limit` blocks of the tail that has waited longest. Returns how many."""
        state, prediction, keys, start, capacity = self._tails.popleft()
        if self._slots.get(prediction.slot) is not state or len(prediction.keys) != start or prediction.void:
            # Dropped, retracted, or cut short by the capacity meanwhile.
            return 0
        end = start + limit
        self._enter(state, prediction, keys[start:end], capacity)
        if end < len(keys):
            self._tails.appendleft((state, prediction, keys, end, capacity))
        return limit

    def _enter(self, state: _Slot, prediction: Prediction, keys: Sequence[int], capacity: int) -> None:
        entries, holders, bit = state.entries, self._holders, state.bit
        fresh = [key for key in keys if key not in entries]
        if len(fresh) < len(keys) and not prediction.confirmed:
            prediction.older += _runs(state, prediction, keys)
        prediction.keys.extend(keys)
        for faded in self._fading.get(state.bit.bit_length() - 1, ()):
            for key in fresh:
                faded.entries.pop(key, None)
        new = [key for key in fresh if key not in holders]
        if len(new) < len(fresh):
            for key in filter(holders.__contains__, fresh):
                holders[key] |= bit
        holders.update(dict.fromkeys(new, bit))
        entries.update(dict.fromkeys(keys, prediction.number))
        state.keys += len(keys)
        self.stats.predicted += len(fresh)
        self.stats.renewed += len(keys) - len(fresh)
        while (over := len(entries) - capacity) > 0:
            self._spend(state, over)
            self.stats.evicted += over - (len(entries) - capacity)
        if state.keys > state.tidy_at:
            _tidy(state)

    def _expire(self, now: float, limit: float) -> bool:
        self._next_expiry = math.inf
        for slot, state in list(self._slots.items()):
            while state.predictions and state.oldest().expiry <= now:
                if limit <= 0:
                    self._next_expiry = -math.inf
                    return True
                before = len(state.entries)
                limit -= self._spend(state, limit)
                self.stats.expired += before - len(state.entries)
            if state.predictions:
                self._next_expiry = min(self._next_expiry, state.oldest().expiry)
            else:
                del self._slots[slot]
        return False

    def _spend(self, state: _Slot, limit: float) -> int:
        """Let go of the oldest prediction, or of up to `limit` keys at its tail. Returns how many keys."""
        prediction = state.oldest()
        spent = int(min(limit, len(prediction.keys)))
        for _ in range(spent):
            key = prediction.keys.pop()
            if state.entries.get(key) == prediction.number:
                self._forget(state, key)
        state.keys -= spent
        if not prediction.keys:
            _remove(state, prediction)
        return spent

    def _forget(self, state: _Slot, key: int) -> None:
        del state.entries[key]
        if rest := self._holders[key] & ~state.bit:
            self._holders[key] = rest
        else:
            del self._holders[key]


def _runs(
    state: _Slot, prediction: Prediction, keys: Sequence[int]
) -> tuple[tuple[Prediction | None, int], ...]:
    """Who has predicted these blocks last, which follow those that the prediction has already."""
    missing = len(prediction.keys) - sum(blocks for _, blocks in prediction.older)
    runs = [
        (None if number is None else state.predictions[number], sum(1 for _ in run))
        for number, run in groupby(map(state.entries.get, keys))
    ]
    return ((None, missing), *runs)


def _cut(state: _Slot, expiry: float) -> None:
    """Let no entry live longer than `expiry`."""
    for prediction in reversed(state.predictions.values()):
        if prediction.expiry <= expiry:
            break
        prediction.expiry = expiry


def _remove(state: _Slot, prediction: Prediction) -> None:
    del state.predictions[prediction.number]
    prediction.void, prediction.older = True, ()


def _tidy(state: _Slot) -> None:
    """Let predictions that nobody can retract any more forget the keys that newer ones have taken over."""
    for prediction in list(state.predictions.values()):
        if prediction.confirmed:
            own = (key for key in prediction.keys if state.entries.get(key) == prediction.number)
            prediction.keys = array("Q", own)
            if not prediction.keys:
                _remove(state, prediction)
    state.keys = sum(len(prediction.keys) for prediction in state.predictions.values())
    state.tidy_at = 2 * state.keys + _STALE_KEYS


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

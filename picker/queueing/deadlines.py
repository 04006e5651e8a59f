"""Instants at which waiting requests must be looked at."""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from picker.queueing.work import Work

_Entry = tuple[float, int, Work]


@dataclass(slots=True)
class Deadlines:
    """One instant a request, the earliest at hand. O(log n) amortised; what was discarded is let go of soon."""

    _heap: list[_Entry] = field(default_factory=list)
    _entries: dict[Work, _Entry] = field(default_factory=dict)
    _serial: count[int] = field(default_factory=count)

    def __len__(self) -> int:
        return len(self._entries)

    def set(self, work: Work, at: float) -> None:
        """Infinity: never."""
        if at == inf:
            self.discard(work)
            return
        entry = self._entries[work] = (at, next(self._serial), work)
        heappush(self._heap, entry)

    def discard(self, work: Work) -> None:
        if self._entries.pop(work, None) is not None and len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def first(self) -> float:
        """The earliest instant; infinity when there is none."""
        heap = self._heap
        while heap:
            at, _, work = heap[0]
            if self._entries.get(work) is heap[0]:
                return at
            heappop(heap)
        return inf

    def pop_due(self, now: float) -> Work | None:
        """Take out a request whose instant has come."""
        if self.first() > now:
            return None
        work = heappop(self._heap)[2]
        del self._entries[work]
        return work

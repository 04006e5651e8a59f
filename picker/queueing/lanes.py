"""Lanes: one queue for each set of constraints, so that a head that must wait blocks only its own kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import count
from math import inf

from msgspec import Struct

from picker.kvcache.matching import slots_of
from picker.queueing.request_queue import Rank, RequestQueue
from picker.queueing.work import Work
from picker.selection.constraints import Constraints
from picker.selection.selector import Demand


class Lane(Struct, eq=False):
    """Requests with equal constraints, in the class's order.

    `eligible` is the mask of endpoints that the head may use; of `partners`, if there are any, one must have room as
    well. `blocked` lanes had a head that nobody could take
    when they were last looked at; they are looked at again when an endpoint of theirs changes.
    """

    queue: RequestQueue
    constraints: Constraints | None
    # Who is next in it; None: it is empty.
    head: Work | None = None
    eligible: int = 0
    partners: int = 0
    blocked: bool = False
    # Grows with every change of head, so that older entries of the candidate heap can be told from the latest.
    stamp: int = 0
    indexed: int = 0


# Rank of the head, a serial number for ties, the lane's stamp then, the lane.
_Candidate = tuple[Rank, int, int, Lane]


@dataclass(slots=True)
class LaneStats:
    """examined: how often a lane's head was tested for dispatchability. overflowed: requests in the common lane."""

    examined: int = 0
    overflowed: int = 0


@dataclass(slots=True)
class Lanes:
    """The lanes of one flow, with the best dispatchable head at hand.

    At most `max_lanes` exist. Further constraints share one overflow lane, where the head's constraints decide:
    no order is broken and nobody starves, only its requests can block one another. While requests with certain
    constraints wait there, later ones with the same join them, even if there is room for a lane by then.
    """

    make_queue: Callable[[], RequestQueue]
    eligible: Callable[[Constraints], int]
    max_lanes: int
    partners: Callable[[Constraints], int] = lambda constraints: 0
    stats: LaneStats = field(default_factory=LaneStats)
    _lanes: dict[Constraints, Lane] = field(default_factory=dict)
    _overflow: Lane | None = None
    # The only lane, where there is just one: the usual case, which needs no heap.
    _sole: Lane | None = None
    _overflowed: Counter[Constraints] = field(default_factory=Counter)
    _where: dict[Work, Lane] = field(default_factory=dict)
    _candidates: list[_Candidate] = field(default_factory=list)
    _by_slot: dict[int, dict[Lane, None]] = field(default_factory=dict)
    _serial: Iterator[int] = field(default_factory=count)

    def __len__(self) -> int:
        return len(self._where)

    def __iter__(self) -> Iterator[Work]:
        """All waiting requests, lane by lane, each lane in service order."""
        for lane in self._all():
            yield from lane.queue

    def backlog(self, constraints: Constraints) -> bool:
        """Is anybody waiting in the lane that such a request would join?"""
        return self._lane_of(constraints) is not None

    def add(self, work: Work) -> None:
        self._join(work, returned=False)

    def give_back(self, work: Work) -> None:
        """A popped request returns to the front."""
        self._join(work, returned=True)

    def remove(self, work: Work) -> None:
        """Take a waiting request out. KeyError when it does not wait here."""
        lane = self._where[work]
        lane.queue.remove(work)
        self._forget(work, lane)
        self._look(lane)

    def move(self, work: Work, demand: Demand) -> None:
        """What a waiting request asks of its endpoint is another now: it goes on waiting at its place, in the lane of
        its kind.
        """
        lane = self._where[work]
        self._forget(work, lane)
        work.demand = demand
        other = self._lane_for(demand.constraints)
        self._where[work] = other
        if other is not lane:
            lane.queue.hand_over(work, other.queue)
            self._settle(lane)
        self._settle(other)

    def candidate(self, busy: int, now: float) -> Lane | None:
        """The lane whose head is first in the class's order among those that can be dispatched now."""
        sole = self._sole
        if sole is not None:
            return sole if self._can_go(sole, busy, now) else None
        heap = self._candidates
        while heap:
            lane = heap[0][3]
            if _is_latest(heap[0]):
                if self._can_go(lane, busy, now):
                    return lane
                lane.blocked = True
                self._index(lane, lane.eligible | lane.partners)
            heappop(heap)
        return None

    def pop(self, lane: Lane) -> Work:
        work = lane.queue.pop()
        self._forget(work, lane)
        self._settle(lane)
        return work

    def wake(self, freed: int) -> None:
        """Endpoints can take more: the blocked lanes that they serve are candidates again."""
        if self._sole is not None:
            return
        for slot in list(self._by_slot) if freed < 0 else slots_of(freed):
            for lane in self._by_slot.get(slot, ()):
                if lane.blocked:
                    self._offer(lane)

    def refresh(self, now: float) -> bool:
        """Let orders that follow time or cache look again; their lanes may have other heads, or be held no more.
        True when anything may have changed.
        """
        changed = False
        for lane in self._all():
            if lane.queue.refresh(now):
                self._settle(lane)
                changed = True
        return changed

    def reexamine(self, *, adapters_only: bool) -> list[Work]:
        """The pool, or only what adapters its engines use, has changed: ask anew who may use what. Returns, removed,
        those that nobody can take now.
        """
        stranded: list[Work] = []
        lanes = [lane for lane in self._all() if not adapters_only or _has_adapter(lane)]
        for lane in lanes:
            if lane.constraints is None:
                stranded += (work for work in lane.queue if not self.eligible(work.demand.constraints))
            elif not self.eligible(lane.constraints):
                stranded += lane.queue
        for work in stranded:
            self.remove(work)
        for lane in lanes:
            if lane.queue:
                if lane.constraints is not None:
                    self._ask(lane, lane.constraints)
                self._settle(lane)
        return stranded

    def reach(self) -> int:
        """The endpoints that any lane's head may use."""
        mask = 0
        for lane in self._all():
            mask |= lane.eligible | lane.partners
        return mask

    def held_until(self, now: float) -> float:
        """When the first head may go that is held now; infinity if none is."""
        return min((until for lane in self._all() if (until := lane.queue.held_until()) > now), default=inf)

    def _join(self, work: Work, *, returned: bool) -> None:
        lane = self._lane_for(work.demand.constraints)
        if returned:
            lane.queue.prepend(work)
        else:
            lane.queue.add(work)
        self._where[work] = lane
        self._look(lane)

    def _lane_of(self, constraints: Constraints) -> Lane | None:
        """The lane where requests with these constraints wait now, if any do."""
        return self._lanes.get(constraints) or (self._overflow if constraints in self._overflowed else None)

    def _lane_for(self, constraints: Constraints) -> Lane:
        lane = self._lane_of(constraints)
        if lane is None:
            before = self._sole
            if len(self._lanes) < self.max_lanes:
                lane = self._lanes[constraints] = Lane(self.make_queue(), constraints)
                self._ask(lane, constraints)
            else:
                lane = self._overflow = self._overflow or Lane(self.make_queue(), None)
            self._count_lanes()
            if before is not None:
                self._offer(before)
        if lane is self._overflow:
            self.stats.overflowed += 1
            self._overflowed[constraints] += 1
        return lane

    def _forget(self, work: Work, lane: Lane) -> None:
        del self._where[work]
        if lane is self._overflow:
            constraints = work.demand.constraints
            self._overflowed[constraints] -= 1
            if not self._overflowed[constraints]:
                del self._overflowed[constraints]

    def _look(self, lane: Lane) -> None:
        """Somebody has come or gone: the lane may have another head."""
        if (lane.queue.peek() if lane.queue else None) is not lane.head:
            self._settle(lane)

    def _settle(self, lane: Lane) -> None:
        """After a change of a lane's head: offer it as a candidate, or drop the lane when it is empty."""
        lane.stamp += 1
        head = lane.head = lane.queue.peek() if lane.queue else None
        if head is not None:
            if lane.constraints is None:
                self._ask(lane, head.demand.constraints)
            if self._sole is None:
                self._offer(lane)
            return
        self._index(lane, 0)
        if lane.constraints is None:
            self._overflow = None
        else:
            del self._lanes[lane.constraints]
        self._count_lanes()

    def _count_lanes(self) -> None:
        """A lane has come or gone."""
        alone = len(self._lanes) == 1 and self._overflow is None
        self._sole = next(iter(self._lanes.values())) if alone else None
        if alone or not self._where:
            self._candidates.clear()

    def _can_go(self, lane: Lane, busy: int, now: float) -> bool:
        self.stats.examined += 1
        if not lane.eligible & ~busy or (lane.partners and not lane.partners & ~busy):
            return False
        # Only an order that follows time holds anybody.
        return not lane.queue.dynamic or lane.queue.held_until() <= now

    def _ask(self, lane: Lane, constraints: Constraints) -> None:
        """Who may take the lane's head."""
        lane.eligible = self.eligible(constraints)
        lane.partners = self.partners(constraints)

    def _offer(self, lane: Lane) -> None:
        lane.blocked = False
        heappush(self._candidates, (lane.queue.head_rank(), next(self._serial), lane.stamp, lane))
        if len(self._candidates) > 4 * len(self._lanes) + 64:
            self._candidates = [entry for entry in self._candidates if _is_latest(entry)]
            heapify(self._candidates)

    def _index(self, lane: Lane, mask: int) -> None:
        """Make `wake` find a blocked lane. Lanes that never block, the usual ones, never pay for this."""
        changed = lane.indexed ^ mask
        lane.indexed = mask
        for slot in slots_of(changed):
            if mask >> slot & 1:
                self._by_slot.setdefault(slot, {})[lane] = None
            else:
                members = self._by_slot[slot]
                del members[lane]
                if not members:
                    del self._by_slot[slot]

    def _all(self) -> Iterator[Lane]:
        yield from self._lanes.values()
        if self._overflow is not None:
            yield self._overflow


def _has_adapter(lane: Lane) -> bool:
    """Does it matter to the lane, or may it, which adapters the engines use?"""
    return lane.constraints is None or lane.constraints.adapter is not None


def _is_latest(entry: _Candidate) -> bool:
    _, _, stamp, lane = entry
    return stamp == lane.stamp and not lane.blocked

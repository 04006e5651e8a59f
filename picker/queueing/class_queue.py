"""The waiting requests of one policy class: its lanes, or one set of lanes for each of its tenants."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from picker.policy.model import PolicyClass
from picker.queueing.busy import BusyGate
from picker.queueing.class_stats import ClassStats, DrainRate
from picker.queueing.drr import DeficitRoundRobin, Flow, Turn
from picker.queueing.lanes import Lane, Lanes
from picker.queueing.work import Work
from picker.selection.selector import Demand

# Tenants beyond the limit share the turns of this one.
OTHER_TENANTS = "(other)"


@dataclass(slots=True)
class Tick:
    """What time it is in the current call, for everybody who has to know."""

    now: float = 0.0


@dataclass(slots=True, eq=False)
class TenantQueue:
    """The lanes of one tenant, or of a whole class where tenants are not told apart."""

    lanes: Lanes
    gate: BusyGate
    tick: Tick
    candidate: Lane | None = None

    def head(self) -> int | None:
        """The cost of what would be sent next; `candidate` is then its lane."""
        lane = self.candidate = self.lanes.candidate(self.gate.busy, self.tick.now)
        return lane.head.cost if lane is not None and lane.head is not None else None


@dataclass(slots=True, eq=False)
class ClassQueue:
    """One class in the ring.

    With `fair_tenants` its turns are shared between tenants by the same deficit round robin, every tenant with
    the class's quantum. A tenant that does not wait is forgotten, so that nobody saves up credit.
    """

    policy_class: PolicyClass
    gate: BusyGate
    make_lanes: Callable[[], Lanes]
    max_tenants: int
    tick: Tick
    # The order changes with time or cache: look again in every tick.
    dynamic: bool
    stats: ClassStats = field(default_factory=ClassStats)
    drain: DrainRate = field(default_factory=DrainRate)
    # Kept by `BlockedTime`.
    counted_until: float = 0.0
    counted_dispatches: int = 0
    given_before: int = 0
    _tenants: dict[str, Flow[TenantQueue]] = field(default_factory=dict)
    _tenant_of: dict[Work, str] = field(default_factory=dict)
    # (arrival, sequence, request), the earliest in front, among some that do not wait any more.
    _arrivals: list[tuple[float, int, Work]] = field(default_factory=list)
    _ring: DeficitRoundRobin[TenantQueue] = field(default_factory=DeficitRoundRobin)
    # Whose turn it is among the tenants, where they are told apart; and what the request that goes next costs.
    _turn: Turn[TenantQueue] | None = None
    _head: int | None = None
    # `_head` and `_turn` hold until requests come or go, or an endpoint of the gate turns busy or free.
    _stale: bool = True
    _seen_busy: int = 0
    _seen_mark: int = 0
    _refreshed_at: float = -inf

    def __len__(self) -> int:
        return self.stats.waiting_requests

    def __iter__(self) -> Iterator[Work]:
        for flow in self._tenants.values():
            yield from flow.queue.lanes

    def backlog(self, work: Work) -> bool:
        """Is anybody waiting where this request would join?"""
        flow = self._tenants.get(self._tenant_for(work))
        return flow is not None and flow.queue.lanes.backlog(work.demand.constraints)

    def add(self, work: Work) -> None:
        lanes = self._join(work).lanes
        before = lanes.stats.overflowed
        lanes.add(work)
        self.stats.shared_lane += lanes.stats.overflowed - before
        self.stats.shared_tenant += self._tenant_of[work] not in ("", work.tenant)

    def give_back(self, work: Work) -> None:
        """A dispatch failed after the pop: the request returns to the front."""
        self._join(work).lanes.give_back(work)

    def remove(self, work: Work) -> None:
        """A waiting request leaves without being served. KeyError when it does not wait here."""
        self._tenants[self._tenant_of[work]].queue.lanes.remove(work)
        self._left(work)

    def move(self, work: Work, demand: Demand) -> None:
        """What a waiting request asks of its endpoint is another now; its place is the same."""
        self._tenants[self._tenant_of[work]].queue.lanes.move(work, demand)
        self._stale = True

    def head(self) -> int | None:
        """The cost of what this class would send next; None when nothing can go. Changes no deficit."""
        gate = self.gate
        if self.dynamic and self._refreshed_at != self.tick.now:
            self._refresh()
        if self._stale or gate.busy != self._seen_busy or gate.mark != self._seen_mark:
            self._look()
        return self._head

    def pop(self) -> tuple[Work, int]:
        """Take out what `head` spoke of, charge its tenant, and tell the mask of endpoints that may serve it."""
        if self._head is None:
            raise IndexError("no request of this class can go")
        if self._turn is None:
            flow = self._tenants[""]
        else:
            flow = self._turn.flow
            self._ring.charge(self._turn)
        lane = flow.queue.candidate
        if lane is None:
            raise IndexError("no request of this tenant can go")
        eligible = lane.eligible
        work = flow.queue.lanes.pop(lane)
        work.tenant_period = flow.period
        self._left(work)
        return work, eligible

    def correct(self, work: Work, amount: int) -> None:
        """The charge of a request that has gone turns out too high by `amount`: its tenant gets that back."""
        if not self.policy_class.fair_tenants:
            return
        flow = self._tenants.get(work.tenant) or self._tenants.get(OTHER_TENANTS)
        if flow is not None:
            self._ring.correct(flow, work.tenant_period, amount)
            self._stale = True

    def reexamine(self, *, adapters_only: bool) -> list[Work]:
        """The pool, or only what adapters its engines use, has changed. Returns, removed, the requests that no endpoint
        can take now.
        """
        stranded: list[Work] = []
        for flow in self._tenants.values():
            stranded += flow.queue.lanes.reexamine(adapters_only=adapters_only)
        for work in stranded:
            self._left(work)
        self._stale = True
        return stranded

    def held_until(self) -> float:
        """When the first held head may go, infinity if none is held. A hold that is over does not count, even
        where nobody has had room to see that.
        """
        held = (flow.queue.lanes.held_until(self.tick.now) for flow in self._tenants.values())
        return min(held, default=inf)

    def reach(self) -> int:
        """The endpoints that any of the requests that are next in their lanes may use."""
        mask = 0
        for flow in self._tenants.values():
            mask |= flow.queue.lanes.reach()
        return mask

    def adopt(self, policy_class: PolicyClass, gate: BusyGate) -> None:
        """Live on under a class with other numbers but the same order."""
        self.policy_class, self.gate = policy_class, gate
        self._seen_mark = -1
        for work in self:
            work.policy_class = policy_class
        for flow in self._tenants.values():
            flow.quantum = policy_class.quantum
            flow.queue.gate = gate

    @property
    def tenants(self) -> int:
        """How many tenants wait now (1 at most where they are not told apart)."""
        return sum(1 for flow in self._tenants.values() if len(flow.queue.lanes))

    @property
    def oldest_arrival(self) -> float:
        """When the request came that has waited longest; infinity when none waits."""
        while self._arrivals and self._arrivals[0][2] not in self._tenant_of:
            heappop(self._arrivals)
        return self._arrivals[0][0] if self._arrivals else inf

    def lane_stats(self) -> tuple[int, int]:
        """(lane heads examined, requests sent to an overflow lane) by the tenants that are known now."""
        stats = [flow.queue.lanes.stats for flow in self._tenants.values()]
        return sum(each.examined for each in stats), sum(each.overflowed for each in stats)

    def _refresh(self) -> None:
        """Let an order that follows time or cache look again."""
        self._refreshed_at = self.tick.now
        for flow in self._tenants.values():
            if flow.queue.lanes.refresh(self.tick.now):
                self._stale = True

    def _look(self) -> None:
        """Find the candidate anew."""
        gate = self.gate
        if gate.mark != self._seen_mark:
            freed = gate.freed_since(self._seen_mark)
            for flow in self._tenants.values():
                flow.queue.lanes.wake(freed)
        self._seen_mark, self._seen_busy = gate.mark, gate.busy
        self._stale = False
        if self.policy_class.fair_tenants:
            self._turn = self._ring.choose()
            self._head = self._turn.cost if self._turn else None
        else:
            only = self._tenants.get("")
            self._head = only.queue.head() if only else None

    def _tenant_for(self, work: Work) -> str:
        if not self.policy_class.fair_tenants:
            return ""
        known = work.tenant in self._tenants or len(self._tenants) < self.max_tenants
        return work.tenant if known else OTHER_TENANTS

    def _join(self, work: Work) -> TenantQueue:
        tenant = self._tenant_of[work] = self._tenant_for(work)
        flow = self._tenants.get(tenant)
        if flow is None:
            queue = TenantQueue(self.make_lanes(), self.gate, self.tick)
            flow = self._tenants[tenant] = Flow(queue, self.policy_class.quantum)
            self._ring.join(flow)
        self.stats.count(work, 1)
        heappush(self._arrivals, (work.arrival, work.sequence, work))
        self._stale = True
        return flow.queue

    def _left(self, work: Work) -> None:
        tenant = self._tenant_of.pop(work)
        flow = self._tenants[tenant]
        if self.policy_class.fair_tenants and not len(flow.queue.lanes):
            del self._tenants[tenant]
            self._ring.leave(flow)
        self.stats.count(work, -1)
        self._stale = True
        if len(self._arrivals) > 2 * len(self._tenant_of) + 64:
            self._arrivals = [(each.arrival, each.sequence, each) for each in self._tenant_of]
            heapify(self._arrivals)

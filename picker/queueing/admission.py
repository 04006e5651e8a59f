"""The admission queue: requests in, decisions out. The deciding core that server, simulator and tests drive.

It holds no clock, task or socket. Every call says what time it is and returns what became of whom; the driver
calls `poll` whenever something may have freed capacity, and no later than `next_wakeup`.

There is one way to be dispatched: to wait, if only for the length of this call, and to be chosen by deficit
round robin. A request that finds capacity and no backlog is therefore charged like any other, and as its class
is then empty again, the charge leaves no debt and no credit behind.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import count
from math import inf

from picker.policy.model import CostWeights, Policy, PolicyClass
from picker.pool.endpoint import Endpoint
from picker.pool.pool import PoolChange
from picker.queueing.busy import BusyGate, BusyGates
from picker.queueing.class_queue import ClassQueue, Tick
from picker.queueing.drr import DeficitRoundRobin, Flow, Turn
from picker.queueing.lanes import Lanes
from picker.queueing.orders import order_named
from picker.queueing.request_queue import CacheLook, OrderContext, RequestQueue
from picker.queueing.work import Dropped, DropReason, Outcome, Released, Work, WorkState
from picker.selection.constraints import Constraints, Ineligible
from picker.selection.selector import Eligibility, Selector

_DEFAULT_WEIGHTS = CostWeights()


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds that no policy can lift. `retry_after` (seconds) is told when the drain rate is not known yet."""

    max_lanes: int = 1024
    max_tenants: int = 1024
    min_retry_after: float = 1.0
    max_retry_after: float = 60.0
    retry_after: float = 5.0


@dataclass(frozen=True, slots=True)
class _Limit:
    """One of a class's three limits: what of it is used, and what a request must find."""

    reason: DropReason
    what: str
    used: int
    per_endpoint: int | None


class AdmissionQueue:
    """All waiting requests, the ring of their classes, and the dispatch of what can go.

    `selector` brings the pool, the ledger and the index. The queue listens to the ledger and the pool itself.
    """

    def __init__(self, policy: Policy, selector: Selector, limits: QueueLimits = QueueLimits()) -> None:
        self.limits = limits
        self.selector = selector
        self.shutting_down = False
        self._pool = selector.pool
        self._ledger = selector.ledger
        self._tick = Tick()
        self._gates = BusyGates()
        self._ring: DeficitRoundRobin[ClassQueue] = DeficitRoundRobin()
        self._flows: dict[tuple[str, str], Flow[ClassQueue]] = {}
        self._deadlines: list[tuple[float, int, Work]] = []
        self._serial = count()
        self._stranded: list[Work] = []
        self._everybody = sum(endpoint.bit for endpoint in self._pool)
        self.policy = policy
        self.reload(policy, 0.0)
        self._ledger.on_change = self._load_changed
        self._pool.subscribe(self._pool_changed)

    # --- requests ---------------------------------------------------------------------------------------

    def submit(self, work: Work, now: float) -> list[Outcome]:
        """A request joins. Its own outcome is among those returned unless it has to wait."""
        work.sequence = next(self._serial)
        flow = self._flows[work.policy_class.key]
        flow.queue.stats.arrived += 1
        refusal = self._refusal(work, flow.queue, now)
        if refusal is not None:
            return [self._drop(work, *refusal, now)]
        flow.queue.add(work)
        work.state = WorkState.WAITING
        if work.deadline < inf:
            heappush(self._deadlines, (work.deadline, work.sequence, work))
        return self.poll(now)

    def cancel(self, work: Work) -> bool:
        """The client is gone: a waiting request leaves at once and is never charged. False if it did not wait."""
        if work.state is not WorkState.WAITING:
            return False
        flow = self._flows[work.policy_class.key]
        self._take_out(work, flow)
        work.state = WorkState.CANCELLED
        flow.queue.stats.cancelled += 1
        return True

    def give_back(self, released: Released, now: float) -> list[Outcome]:
        """A dispatch failed after the fact: refund the charge, free the booking, and let the request go first."""
        work = released.work
        self._ledger.release(released.booking)
        flow = self._flows[work.policy_class.key]
        flow.queue.give_back(work)
        flow.queue.stats.refunded += 1
        flow.deficit += work.cost
        work.state = WorkState.WAITING
        return self.poll(now)

    def withdraw(self, released: Released) -> None:
        """The client left in the moment of its dispatch: nobody is charged and nothing is booked."""
        work = released.work
        self._ledger.release(released.booking)
        flow = self._flows.get(work.policy_class.key)
        if flow is not None:
            flow.queue.stats.cancelled += 1
            if len(flow.queue):
                flow.deficit += work.cost
        work.state = WorkState.CANCELLED

    def settle(self, work: Work, output_tokens: int) -> None:
        """The output of a request charged by estimate is known: its class pays or gets the difference."""
        charge = work.policy_class.output_charge
        flow = self._flows.get(work.policy_class.key)
        if charge and flow is not None and len(flow.queue):
            flow.deficit -= round(charge * (output_tokens - work.expected_output_tokens))

    # --- time and change --------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Outcome]:
        """End the waits that are over and dispatch everything that can go."""
        outcomes: list[Outcome] = [self._no_endpoint(work, now) for work in self._drain_stranded()]
        outcomes.extend(self._expire(now))
        self._tick.now = now
        while not self._gates.saturated(self._everybody) and (turn := self._ring.choose()) is not None:
            outcomes.append(self._dispatch(turn, now))
        return outcomes

    def reported(self, endpoint: Endpoint) -> None:
        """An engine's report has come; it may be busy or free by its own figures."""
        self._load_changed(endpoint)

    def next_wakeup(self) -> float:
        """When `poll` must be called at the latest: the end of a wait or of a hold. Infinity: never."""
        while self._deadlines and self._deadlines[0][2].state is not WorkState.WAITING:
            heappop(self._deadlines)
        first = self._deadlines[0][0] if self._deadlines else inf
        held = (flow.queue.held_until() for flow in self._ring.flows if flow.queue.dynamic)
        return min(first, min(held, default=inf))

    def shut_down(self, now: float) -> list[Outcome]:
        """Refuse everybody who waits, and whoever comes from now on."""
        self.shutting_down = True
        waiting = [work for flow in self._ring.flows for work in flow.queue]
        outcomes: list[Outcome] = []
        for work in waiting:
            self._take_out(work, self._flows[work.policy_class.key])
            outcomes.append(
                self._drop(work, DropReason.SHUTTING_DOWN, "the endpoint picker is shutting down", now)
            )
        return outcomes

    def reload(self, policy: Policy, now: float) -> list[Outcome]:
        """Take a new policy. Nobody is lost: a class that keeps its order keeps its queue and its deficit, the
        requests of others join the classes that they now resolve to, in order of arrival.
        """
        old, homeless = self._flows, []
        self._gates = BusyGates()
        self._flows = {}
        for policy_class in policy.classes():
            kept = old.pop(policy_class.key, None)
            if kept is not None and _same_order(kept.queue.policy_class, policy_class):
                self._adopt(kept, policy_class)
            else:
                if kept is not None:
                    homeless += list(kept.queue)
                self._flows[policy_class.key] = self._new_flow(policy_class)
        homeless += [work for flow in old.values() for work in flow.queue]
        self._rebuild_ring()
        self.policy = policy
        for work in sorted(homeless, key=lambda work: work.sequence):
            profile = policy.profile(work.model)
            work.policy_class = profile.resolve(work.class_hint, work.uncached_tokens)
            self._flows[work.policy_class.key].queue.add(work)
        return self.poll(now)

    # --- for those who look -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(len(flow.queue) for flow in self._ring.flows)

    def flows(self) -> list[Flow[ClassQueue]]:
        """The classes in the policy's order, with their deficits. Read only."""
        return list(self._flows.values())

    def retry_after(self, policy_class: PolicyClass, now: float) -> float:
        """Seconds until what waits in the class now is served at the rate at which it lately was."""
        queue = self._flows[policy_class.key].queue
        rate = queue.drain.per_second(now)
        waiting = queue.stats.waiting_tokens - queue.stats.waiting_cached_tokens
        seconds = waiting / rate if rate > 0 else self.limits.retry_after
        return min(max(seconds, self.limits.min_retry_after), self.limits.max_retry_after)

    # --- how --------------------------------------------------------------------------------------------

    def _refusal(self, work: Work, queue: ClassQueue, now: float) -> tuple[DropReason, str] | None:
        """Why a request cannot even wait, in the order in which the causes are looked for."""
        if self.shutting_down:
            return DropReason.SHUTTING_DOWN, "the endpoint picker is shutting down"
        eligibility = self.selector.eligible(work.demand.constraints)
        if not eligibility.mask:
            return self._nobody(work.demand.constraints, eligibility)
        if now >= work.deadline:
            return DropReason.DEADLINE, "the request's time in the queue is over"
        if queue.backlog(work) or not eligibility.mask & ~queue.gate.busy:
            return self._over_limit(queue)
        return None

    def _nobody(self, constraints: Constraints, eligibility: Eligibility) -> tuple[DropReason, str]:
        if constraints.pin is not None and constraints.allow:
            pinned = Constraints(pin=constraints.pin)
            for endpoint in self._pool:
                named = pinned.refuse(endpoint) is not Ineligible.NOT_PINNED
                if named and eligibility.refused.get(endpoint.slot) is Ineligible.NOT_ALLOWED:
                    return (
                        DropReason.PIN_NOT_ALLOWED,
                        "the pinned endpoint is not in the request's allow-list",
                    )
        if not len(self._pool):
            return DropReason.NO_ENDPOINT, "the pool has no endpoints"
        tally: dict[str, int] = {}
        for reason in eligibility.refused.values():
            tally[reason] = tally.get(reason, 0) + 1
        reasons = ", ".join(f"{number} {reason}" for reason, number in sorted(tally.items()))
        return DropReason.NO_ENDPOINT, f"no endpoint may take this request ({reasons})"

    def _over_limit(self, queue: ClassQueue) -> tuple[DropReason, str] | None:
        """Limits are value x endpoints and are compared before adding: who finds room is let in whole."""
        stats, policy_class = queue.stats, queue.policy_class
        endpoints = len(self._pool)
        for limit in (
            _Limit(
                DropReason.QUEUE_FULL_REQUESTS,
                "requests",
                stats.waiting_requests,
                policy_class.request_queue_limit_per_worker,
            ),
            _Limit(
                DropReason.QUEUE_FULL_RAW_TOKENS,
                "prompt tokens",
                stats.waiting_tokens,
                policy_class.raw_isl_token_queue_limit_per_worker,
            ),
            _Limit(
                DropReason.QUEUE_FULL_CACHED_TOKENS,
                "cached prompt tokens",
                stats.waiting_cached_tokens,
                policy_class.cached_token_queue_limit_per_worker,
            ),
        ):
            if limit.per_endpoint is not None and limit.used >= limit.per_endpoint * endpoints:
                return limit.reason, (
                    f"class {policy_class.label} has {limit.used} {limit.what} waiting, its limit for"
                    f" {endpoints} endpoints is {limit.per_endpoint * endpoints}"
                )
        return None

    def _dispatch(self, turn: Turn, now: float) -> Released:
        flow = self._ring.flows[turn.position]
        queue = flow.queue
        before, after = self._ring.charge(turn)
        work, eligible = queue.pop()
        if not len(queue):
            flow.emptied()
        weights = queue.policy_class.selection or _DEFAULT_WEIGHTS
        decision = self.selector.choose(work.demand, eligible & ~queue.gate.full, weights)
        booking = self._ledger.book(decision.endpoint, decision.chosen.uncached_tokens, now)
        work.state = WorkState.RELEASED
        queue.stats.dispatched_requests += 1
        queue.stats.dispatched_cost += work.cost
        queue.stats.dispatched_tokens += work.demand.raw_tokens
        queue.drain.add(work.cost, now)
        return Released(work, decision, booking, now - work.arrival, before, after)

    def _expire(self, now: float) -> Iterator[Outcome]:
        while self._deadlines and self._deadlines[0][0] <= now:
            work = heappop(self._deadlines)[2]
            if work.state is WorkState.WAITING:
                self._take_out(work, self._flows[work.policy_class.key])
                waited = f"the request waited {now - work.arrival:.1f} s in class {work.policy_class.label}"
                yield self._drop(work, DropReason.DEADLINE, f"{waited}, its limit", now)

    def _drop(self, work: Work, reason: DropReason, message: str, now: float) -> Dropped:
        work.state = WorkState.DROPPED
        dropped = self._flows[work.policy_class.key].queue.stats.dropped
        dropped[reason] = dropped.get(reason, 0) + 1
        hopeless = reason in (DropReason.NO_ENDPOINT, DropReason.PIN_NOT_ALLOWED)
        retry_after = None if hopeless else self.retry_after(work.policy_class, now)
        return Dropped(work, reason, message, retry_after)

    def _no_endpoint(self, work: Work, now: float) -> Dropped:
        constraints = work.demand.constraints
        return self._drop(work, *self._nobody(constraints, self.selector.eligible(constraints)), now)

    def _take_out(self, work: Work, flow: Flow[ClassQueue]) -> None:
        flow.queue.remove(work)
        if not len(flow.queue):
            flow.emptied()

    def _drain_stranded(self) -> list[Work]:
        stranded, self._stranded = self._stranded, []
        return [work for work in stranded if work.state is WorkState.WAITING]

    # --- what the engines, the ledger and the pool tell ---------------------------------------------------------------

    def _load_changed(self, endpoint: Endpoint) -> None:
        load = self._ledger.load(endpoint.slot)
        for gate in self._gates:
            gate.update(endpoint, load)

    def _pool_changed(self, change: PoolChange) -> None:
        for endpoint in change.removed:
            for gate in self._gates:
                gate.forget(endpoint)
        for endpoint in (*change.added, *change.changed):
            self._load_changed(endpoint)
        self._everybody = sum(endpoint.bit for endpoint in self._pool)
        for flow in self._ring.flows:
            self._stranded += flow.queue.reexamine()
            if not len(flow.queue):
                flow.emptied()

    # --- building ---------------------------------------------------------------------------------------

    def _new_flow(self, policy_class: PolicyClass) -> Flow[ClassQueue]:
        context = OrderContext(policy_class, self._look)
        order = order_named(policy_class.queue_policy)

        def make_queue() -> RequestQueue:
            return order(context)

        def make_lanes() -> Lanes:
            return Lanes(make_queue, self._waiting_mask, self.limits.max_lanes)

        gate = self._gate(policy_class)
        queue = ClassQueue(policy_class, gate, make_lanes, self.limits.max_tenants, self._tick, order.dynamic)
        return Flow(queue, policy_class.quantum)

    def _adopt(self, flow: Flow[ClassQueue], policy_class: PolicyClass) -> None:
        """A class that lives on under new numbers, with its requests and its deficit."""
        flow.queue.adopt(policy_class, self._gate(policy_class))
        flow.quantum = policy_class.quantum
        self._flows[policy_class.key] = flow

    def _gate(self, policy_class: PolicyClass) -> BusyGate:
        gate = self._gates.of(policy_class)
        for endpoint in self._pool:
            gate.update(endpoint, self._ledger.load(endpoint.slot))
        return gate

    def _rebuild_ring(self) -> None:
        self._ring = DeficitRoundRobin()
        for flow in self._flows.values():
            self._ring.add(flow)

    def _waiting_mask(self, constraints: Constraints) -> int:
        return self.selector.eligible(constraints, waiting=True).mask

    def _look(self, work: Work) -> CacheLook:
        mask = self._waiting_mask(work.demand.constraints)
        block_size = min(self._pool.block_sizes(), default=self._pool.default_block_size)
        blocks = self.selector.best_cached(work.demand, mask) / block_size
        chains = work.demand.prompt.blocks(block_size)
        matched = int(blocks)
        cold = chains[0][matched] if chains and matched < len(chains[0]) else None
        return CacheLook(blocks, cold)


def _same_order(old: PolicyClass, new: PolicyClass) -> bool:
    """Can a queue live on under the new class? Only if its requests would stand in the same order."""
    unlike = ("queue_policy", "affinity", "wspt_aging", "high_priority_first", "fair_tenants")
    same = all(getattr(old, name) == getattr(new, name) for name in unlike)
    return same and (old.wspt_aging is None or old.quantum == new.quantum)

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
from itertools import count
from math import inf

from msgspec.structs import replace

from picker.policy.model import CostWeights, Policy, PolicyClass, Profile
from picker.pool.endpoint import Endpoint
from picker.pool.ledger import Load
from picker.pool.pool import PoolChange
from picker.queueing.blocked import BlockedTime
from picker.queueing.busy import BusyGate, BusyGates
from picker.queueing.class_queue import ClassQueue, Tick
from picker.queueing.deadlines import Deadlines
from picker.queueing.drr import DeficitRoundRobin, Flow, Turn
from picker.queueing.lanes import Lanes
from picker.queueing.orders import order_named
from picker.queueing.refusals import SHUTTING_DOWN, Refusal, no_endpoint, over_limit, wait_is_over
from picker.queueing.request_queue import CacheLook, OrderContext, RequestQueue
from picker.queueing.work import Dropped, DropReason, Outcome, Prefill, Released, Work, WorkState
from picker.selection.constraints import Constraints
from picker.selection.disaggregation import Disaggregation
from picker.selection.endpoint_share import Claim
from picker.selection.selector import Decision, Demand, Selector

_DEFAULT_WEIGHTS = CostWeights()
# Of a request whose tokens are only estimated.
_NOTHING_KNOWN = CacheLook(0.0, None)
_HOPELESS = (DropReason.NO_ENDPOINT, DropReason.PIN_NOT_ALLOWED)


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """Bounds that no policy can lift. `retry_after` (seconds) is told when the drain rate is not known yet.
    `outcomes_a_poll`: one poll decides no more, and asks by `next_wakeup` to be called again at once.
    """

    max_lanes: int = 1024
    max_tenants: int = 1024
    outcomes_a_poll: float = inf
    min_retry_after: float = 1.0
    max_retry_after: float = 60.0
    retry_after: float = 5.0


class AdmissionQueue:
    """All waiting requests, the ring of their classes, and the dispatch of what can go.

    `selector` brings the pool, the ledger and the index. The queue listens to the ledger and the pool itself.
    """

    def __init__(self, policy: Policy, selector: Selector, limits: QueueLimits = QueueLimits()) -> None:
        self.limits = limits
        self.selector = selector
        self.disaggregation = Disaggregation(selector)
        self.shutting_down = False
        self._pool = selector.pool
        self._ledger = selector.ledger
        self._tick = Tick()
        self._gates = BusyGates()
        # The classes with a backlog, and all classes in the policy's order.
        self._ring: DeficitRoundRobin[ClassQueue] = DeficitRoundRobin()
        self._flows: dict[tuple[str, str], Flow[ClassQueue]] = {}
        self._deadlines = Deadlines()
        self._blocked = BlockedTime()
        self._serial = count()
        # What has changed since the last poll: the pool, only the adapters that its engines use, or anything that may
        # let a waiting request go.
        self._pool_moved = False
        self._adapters_moved = False
        self._unsettled = False
        # The last poll stopped at its limit.
        self._more = False
        self._everybody = sum(endpoint.bit for endpoint in self._pool)
        # Does any class have an order that may hold its head?
        self._holds = False
        self.policy = policy
        self.reload(policy, 0.0)
        self._ledger.on_change = self._load_changed
        self._pool.subscribe(self._pool_changed)

    # --- requests ---------------------------------------------------------------------------------------

    def submit(self, work: Work, now: float) -> list[Outcome]:
        """A request joins. Its own outcome is among those returned unless it has to wait."""
        outcomes = self.poll(now) if self._unsettled or self._deadlines.first() <= now else []
        self._tick.now = now
        work.sequence = next(self._serial)
        flow = self._flow_of(work)
        flow.queue.stats.arrived += 1
        refusal = self._hopeless(work, now) or self._no_room(work, flow.queue)
        if refusal is not None:
            outcomes.append(self._drop(work, refusal, now))
            return outcomes
        self._wait(work, flow)
        outcomes += self.poll(now)
        return outcomes

    def cancel(self, work: Work) -> bool:
        """The client is gone: a waiting request leaves at once and is never charged. False if it did not wait."""
        if work.state is not WorkState.WAITING:
            return False
        flow = self._flow_of(work)
        self._take_out(work, flow)
        work.state = WorkState.CANCELLED
        flow.queue.stats.cancelled += 1
        return True

    def give_back(self, released: Released, now: float) -> list[Outcome]:
        """A dispatch failed after the fact: refund the charge, free the booking, and let the request go first."""
        work = released.work
        self._free(released)
        self._tick.now = now
        self._refund(work)
        flow = self._flow_of(work)
        work.demand = self._demand(work)
        refusal = self._hopeless(work, now, waiting=True)
        if refusal is not None:
            return [self._drop(work, refusal, now), *self.poll(now)]
        self._wait(work, flow, returned=True)
        return self.poll(now)

    def withdraw(self, released: Released) -> None:
        """The client left in the moment of its dispatch: nobody is charged and nothing is booked."""
        work = released.work
        self._free(released)
        self._refund(work)
        self._flow_of(work).queue.stats.cancelled += 1
        work.state = WorkState.CANCELLED

    def settle(self, work: Work, output_tokens: int) -> None:
        """The output of a request charged by estimate is known: its class pays or gets the difference."""
        flow = self._flows.get(work.policy_class.key)
        if flow is None or not work.output_charge:
            return
        too_much = work.cost - work.cost_of(output_tokens)
        flow.queue.stats.settled_cost -= too_much
        self._correct(work, flow, too_much)

    # --- time and change --------------------------------------------------------------------------------

    def poll(self, now: float) -> list[Outcome]:
        """End the waits that are over and dispatch everything that can go, up to the limit."""
        self._tick.now = now
        outcomes: list[Outcome] = []
        if self._pool_moved or self._adapters_moved:
            outcomes.extend(self._strand(now))
        if self._deadlines.first() <= now:
            outcomes.extend(self._expire(now))
        self._more = False
        while not self._gates.saturated(self._everybody) and (turn := self._ring.choose()) is not None:
            if len(outcomes) >= self.limits.outcomes_a_poll:
                self._more = True
                return outcomes
            outcomes.append(self._dispatch(turn, now))
        self._unsettled = False
        self._blocked.look(self._ring, self._everybody, now)
        return outcomes

    def reported(self, endpoint: Endpoint) -> None:
        """An engine's report has come; it may be busy or free by its own figures."""
        self._load_changed(endpoint, self._ledger.load(endpoint.slot))

    def next_wakeup(self) -> float:
        """When `poll` must be called at the latest: the end of a wait or of a hold. Infinity: never."""
        if self._more:
            return -inf
        first = self._deadlines.first()
        return min([first, *(flow.queue.held_until() for flow in self._ring)]) if self._holds else first

    def shut_down(self, now: float) -> list[Outcome]:
        """Refuse everybody who waits, and whoever comes from now on."""
        self.shutting_down = True
        self._tick.now = now
        waiting = [(work, flow) for flow in self._ring for work in flow.queue]
        outcomes: list[Outcome] = []
        for work, flow in waiting:
            self._take_out(work, flow)
            outcomes.append(self._drop(work, SHUTTING_DOWN, now))
        return outcomes

    def reload(self, policy: Policy, now: float) -> list[Outcome]:
        """Take a new policy. Nobody is lost: a class that keeps its order keeps its queue and its deficit, the
        requests of others join the classes that they now resolve to, in order of arrival. Who may use no endpoint
        under the new constraints is refused.
        """
        self._tick.now = now
        before, self.policy = self.policy, policy
        self._gates = BusyGates()
        old, self._flows = self._flows, {}
        homeless: list[Work] = []
        for policy_class in policy.classes():
            kept = old.pop(policy_class.key, None)
            if kept is not None and _same_order(kept.queue.policy_class, policy_class):
                self._adopt(kept, policy_class, before)
            else:
                homeless += self._evict(kept) if kept is not None else []
                self._flows[policy_class.key] = self._new_flow(policy_class, kept)
        for gone in old.values():
            homeless += self._evict(gone)
        self._holds = any(flow.queue.dynamic for flow in self._flows.values())
        for work in sorted(homeless, key=lambda work: work.sequence):
            flow = self._resolve(work)
            work.demand = self._demand(work)
            self._wait(work, flow)
        self._pool_moved = True
        return self.poll(now)

    # --- for those who look -----------------------------------------------------------------------------

    def __len__(self) -> int:
        return sum(len(flow.queue) for flow in self._ring)

    def flows(self) -> list[Flow[ClassQueue]]:
        """The classes in the policy's order, with their deficits. Read only."""
        return list(self._flows.values())

    def retry_after(self, policy_class: PolicyClass, now: float) -> float:
        """Seconds until what waits in the class now is served at the rate at which it lately was."""
        queue = self._flows[policy_class.key].queue
        rate = queue.drain.per_second(now)
        seconds = queue.stats.waiting_cost / rate if rate > 0 else self.limits.retry_after
        return min(max(seconds, self.limits.min_retry_after), self.limits.max_retry_after)

    # --- coming -----------------------------------------------------------------------------------------

    def _flow_of(self, work: Work) -> Flow[ClassQueue]:
        """The request's class as it is now; one that a reload has removed or renumbered is resolved again."""
        flow = self._flows.get(work.policy_class.key)
        if flow is None:
            return self._resolve(work)
        work.policy_class = flow.queue.policy_class
        return flow

    def _resolve(self, work: Work) -> Flow[ClassQueue]:
        """Find the request's class anew."""
        work.policy_class = self.policy.profile(work.model).resolve(work.class_hint, work.uncached_tokens)
        return self._flows[work.policy_class.key]

    def constraints(
        self, demand: Demand, own: Constraints, profile: Profile, policy_class: PolicyClass
    ) -> Constraints:
        """What a request asks of its endpoint in this class: beside its `own`, what class and profile ask."""
        narrowed = own.within(policy_class)
        rule = profile.disaggregation
        return narrowed if rule is None else self.disaggregation.narrowed(demand, narrowed, rule)

    def _demand(self, work: Work) -> Demand:
        """The request's demand under the policy and in the class of now."""
        profile = self.policy.profile(work.model)
        constraints = self.constraints(work.demand, work.own, profile, work.policy_class)
        return replace(work.demand, constraints=constraints)

    def _hopeless(self, work: Work, now: float, *, waiting: bool = False) -> Refusal | None:
        """Why a request cannot even wait, in the order in which the causes are looked for."""
        if self.shutting_down:
            return SHUTTING_DOWN
        constraints = work.demand.constraints
        eligibility = self.selector.eligible(constraints, waiting=waiting)
        if not eligibility.mask:
            return no_endpoint(self._pool, constraints, eligibility)
        until, reason = self._end_of_wait(work)
        return wait_is_over(work.policy_class, now - work.arrival, reason) if now >= until else None

    def _no_room(self, work: Work, queue: ClassQueue) -> Refusal | None:
        """Who would have to wait must find the class below its limits."""
        if not queue.policy_class.has_queue_limit:
            return None
        constraints, free = work.demand.constraints, ~queue.gate.busy
        partners = self.disaggregation.mask(constraints)
        has_room = self.selector.eligible(constraints).mask & free and (not partners or partners & free)
        if queue.backlog(work) or not has_room:
            return over_limit(queue.stats, queue.policy_class, len(self._pool))
        return None

    def _wait(self, work: Work, flow: Flow[ClassQueue], *, returned: bool = False) -> None:
        if not flow.period:
            self._ring.join(flow)
            self._blocked.begin(flow.queue, self._tick.now)
        if returned:
            flow.queue.give_back(work)
        else:
            flow.queue.add(work)
        work.state = WorkState.WAITING
        look_at = work.deadline
        if work.policy_class.shed_unreachable:
            # No later than the target, even if nobody knows yet how long its prefill takes.
            look_at = min(self._end_of_wait(work)[0], work.ttft_deadline)
        self._deadlines.set(work, look_at)

    def _end_of_wait(self, work: Work) -> tuple[float, DropReason]:
        """When the request must be refused if it still waits then, and why."""
        at, reason = work.deadline, DropReason.DEADLINE
        if work.policy_class.shed_unreachable and work.ttft_deadline < inf:
            constraints = work.demand.constraints
            mask = self.disaggregation.mask(constraints) or self._waiting_mask(constraints)
            seconds = self.selector.prefill_seconds(work.uncached_tokens, mask)
            if seconds is not None and work.ttft_deadline - seconds < at:
                at, reason = work.ttft_deadline - seconds, DropReason.TTFT_UNREACHABLE
        return at, reason

    # --- going ------------------------------------------------------------------------------------------

    def _dispatch(self, turn: Turn[ClassQueue], now: float) -> Released:
        flow = turn.flow
        queue = flow.queue
        before, after = self._ring.charge(turn)
        work, eligible = queue.pop()
        work.state = WorkState.RELEASED
        work.period = flow.period
        self._gone(work, flow)
        policy_class = queue.policy_class
        weights = policy_class.selection or _DEFAULT_WEIGHTS
        decision = self.selector.choose(
            work.demand,
            eligible & ~queue.gate.full,
            weights,
            waiting=True,
            claim=_claim(policy_class, weights),
        )
        endpoint = decision.chosen.endpoint
        # A role is asked of who decodes where prompts may be read apart.
        apart = work.demand.constraints.role is not None
        prefill = self._prefill(work, decision, queue.gate.full, now) if apart else None
        uncached = decision.chosen.uncached_tokens if prefill is None else 0
        booking = self._ledger.book(endpoint, uncached, now, policy_class.label, policy_class.quantum)
        if work.demand.session is not None:
            self.selector.sessions.sent(work.demand.session, endpoint.spec.uid, now)
        self._blocked.given |= endpoint.bit
        queue.stats.dispatched(work)
        queue.drain.add(work.cost, now)
        return Released(work, decision, booking, now - work.arrival, before, after, prefill)

    def _prefill(self, work: Work, decode: Decision, full: int, now: float) -> Prefill | None:
        """Have the prompt read elsewhere, if the profile wants that and it is worth it."""
        rule = self.policy.profile(work.model).disaggregation
        if rule is None:
            return None
        policy_class = work.policy_class
        weights = policy_class.selection or _DEFAULT_WEIGHTS
        decision = self.disaggregation.choose(work.demand, decode, full, weights, rule.min_uncached_tokens)
        if decision is None:
            return None
        endpoint, uncached = decision.chosen.endpoint, decision.chosen.uncached_tokens
        self._blocked.given |= endpoint.bit
        booking = self._ledger.book(endpoint, uncached, now, policy_class.label, policy_class.quantum)
        return Prefill(decision, booking)

    def _free(self, released: Released) -> None:
        self._ledger.release(released.booking)
        if released.prefill is not None:
            self._ledger.release(released.prefill.booking)

    def _expire(self, now: float) -> Iterator[Outcome]:
        while (work := self._deadlines.pop_due(now)) is not None:
            until, reason = self._end_of_wait(work)
            if until > now:
                self._deadlines.set(work, until)
                continue
            self._take_out(work, self._flow_of(work))
            yield self._drop(work, wait_is_over(work.policy_class, now - work.arrival, reason), now)

    def _strand(self, now: float) -> Iterator[Outcome]:
        """The pool has changed: refuse those whom nobody can take any more."""
        adapters_only = not self._pool_moved
        self._pool_moved = self._adapters_moved = False
        for flow in list(self._ring):
            for work in flow.queue.reexamine(adapters_only=adapters_only):
                self._gone(work, flow)
                constraints = work.demand.constraints
                eligibility = self.selector.eligible(constraints, waiting=True)
                yield self._drop(work, no_endpoint(self._pool, constraints, eligibility), now)

    def _drop(self, work: Work, refusal: Refusal, now: float) -> Dropped:
        work.state = WorkState.DROPPED
        self._flow_of(work).queue.stats.drop(refusal.reason)
        retry_after = None if refusal.reason in _HOPELESS else self.retry_after(work.policy_class, now)
        return Dropped(work, refusal.reason, refusal.message, retry_after)

    def _take_out(self, work: Work, flow: Flow[ClassQueue]) -> None:
        """A waiting request leaves the queue without being served; what it held up may go at the next poll."""
        flow.queue.remove(work)
        self._gone(work, flow)
        self._unsettled = True

    def _gone(self, work: Work, flow: Flow[ClassQueue]) -> None:
        """A request has left its queue, which may be empty now."""
        self._deadlines.discard(work)
        if not flow.queue.stats.waiting_requests and flow.period:
            self._blocked.count(flow.queue, self._everybody, self._tick.now)
            self._ring.leave(flow)

    def _refund(self, work: Work) -> None:
        flow = self._flows.get(work.policy_class.key)
        if flow is None:
            return
        flow.queue.stats.refund(work)
        flow.queue.drain.add(-work.cost, self._tick.now)
        self._correct(work, flow, work.cost)

    def _correct(self, work: Work, flow: Flow[ClassQueue], amount: int) -> None:
        self._ring.correct(flow, work.period, amount)
        flow.queue.correct(work, amount)

    # --- what the ledger and the pool tell ---------------------------------------------------------------

    def _load_changed(self, endpoint: Endpoint, load: Load) -> None:
        for gate in self._gates.all:
            gate.update(endpoint, load)
        self._unsettled = True

    def _pool_changed(self, change: PoolChange) -> None:
        if change.adapted:
            self._adapters_moved = self._unsettled = True
            return
        for endpoint in change.removed:
            for gate in self._gates.all:
                gate.forget(endpoint)
        for endpoint in (*change.added, *change.changed, *change.shifted):
            self._load_changed(endpoint, self._ledger.load(endpoint.slot))
        self._everybody = sum(endpoint.bit for endpoint in self._pool)
        self._pool_moved = self._unsettled = True

    # --- building ---------------------------------------------------------------------------------------

    def _new_flow(self, policy_class: PolicyClass, predecessor: Flow[ClassQueue] | None) -> Flow[ClassQueue]:
        """A class without requests; the counters of an (evicted) one of that name go on."""
        context = OrderContext(policy_class, self._look)
        order = order_named(policy_class.queue_policy)

        def make_queue() -> RequestQueue:
            return order(context)

        def make_lanes() -> Lanes:
            return Lanes(make_queue, self._waiting_mask, self.limits.max_lanes, self.disaggregation.mask)

        gate = self._gate(policy_class)
        queue = ClassQueue(policy_class, gate, make_lanes, self.limits.max_tenants, self._tick, order.dynamic)
        if predecessor is not None:
            queue.stats, queue.drain = predecessor.queue.stats, predecessor.queue.drain
        return Flow(queue, policy_class.quantum)

    def _evict(self, flow: Flow[ClassQueue]) -> list[Work]:
        """Take everybody out of a class that is no more."""
        works = list(flow.queue)
        for work in works:
            self._take_out(work, flow)
        return works

    def _adopt(self, flow: Flow[ClassQueue], policy_class: PolicyClass, before: Policy) -> None:
        """A class that lives on under new numbers, with its requests and its deficit."""
        same_endpoints = _same_endpoints(flow.queue.policy_class, policy_class)
        flow.queue.adopt(policy_class, self._gate(policy_class))
        flow.quantum = policy_class.quantum
        self._flows[policy_class.key] = flow
        for work in list(flow.queue):
            rules = [policy.profile(work.model).disaggregation for policy in (before, self.policy)]
            if not same_endpoints or rules[0] != rules[1]:
                flow.queue.move(work, self._demand(work))

    def _gate(self, policy_class: PolicyClass) -> BusyGate:
        gate = self._gates.of(policy_class)
        for endpoint in self._pool:
            gate.update(endpoint, self._ledger.load(endpoint.slot))
        return gate

    def _waiting_mask(self, constraints: Constraints) -> int:
        return self.selector.eligible(constraints, waiting=True).mask

    def _look(self, work: Work) -> CacheLook:
        if not work.demand.prompt.lengths:
            return _NOTHING_KNOWN
        constraints = work.demand.constraints
        mask = self._waiting_mask(constraints) | self.disaggregation.mask(constraints)
        block_size = min(self._pool.block_sizes(), default=self._pool.default_block_size)
        blocks = self.selector.best_cached(work.demand, mask) / block_size
        chains = work.demand.prompt.blocks(block_size)
        matched = int(blocks)
        cold = chains[0][matched] if chains and matched < len(chains[0]) else None
        return CacheLook(blocks, cold)


def _claim(policy_class: PolicyClass, weights: CostWeights) -> Claim | None:
    bound = policy_class.endpoint_share_bound
    if bound is None:
        return None
    return Claim(policy_class.label, policy_class.quantum, bound, weights.over_share)


def _same_endpoints(old: PolicyClass, new: PolicyClass) -> bool:
    return (old.allowed_endpoints, old.tolerations) == (new.allowed_endpoints, new.tolerations)


def _same_order(old: PolicyClass, new: PolicyClass) -> bool:
    """Can a queue live on under the new class? Only if its requests would stand in the same order."""
    unlike = ("queue_policy", "affinity", "wspt_aging", "high_priority_first", "fair_tenants")
    same = all(getattr(old, name) == getattr(new, name) for name in unlike)
    return same and (old.wspt_aging is None or old.quantum == new.quantum)

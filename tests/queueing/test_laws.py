"""The queue against its model, over random requests, capacities, constraints, pool changes and policy changes, and
with requests that are cancelled, withdrawn or given back.

PICKER_LAW_EXAMPLES sets how many random histories are tried, each of up to 50 steps.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from msgspec import structs

from picker.policy.constraints import LabelSelector, Taint, TaintEffect
from picker.policy.model import PolicyClass, QueuePolicy
from picker.queueing.work import Dropped, DropReason, Released, Work, WorkState
from picker.selection.constraints import Constraints
from tests.queueing.fleet import Fleet, policy_of, spec
from tests.queueing.model import ORDERS, ModelClass, ModelRing

ENGINES = ("a", "b", "c")
CONSTRAINTS = (
    Constraints(),
    Constraints(pin="a"),
    Constraints(pin="b"),
    Constraints(selector=LabelSelector.of({"zone": "west"})),
    Constraints(allow=(frozenset({"b", "c"}),)),
)

costs = st.one_of(st.integers(1, 40), st.integers(1, 3000))
class_settings = st.builds(
    dict,
    quantum=st.integers(1, 900),
    max_running_per_worker=st.integers(1, 3),
    queue_policy=st.sampled_from([QueuePolicy(order) for order in ORDERS]),
    max_queue_wait=st.one_of(st.none(), st.floats(0.5, 20.0)),
    allowed_endpoints=st.one_of(st.none(), st.sampled_from([{"zone": "west"}, {"zone": "east"}])),
    tolerations=st.sampled_from([(), ("spot",)]),
)


class QueueMachine(RuleBasedStateMachine):
    @initialize(settings=st.lists(class_settings, min_size=1, max_size=4))
    def start(self, settings: list[dict[str, object]]) -> None:
        policies = [PolicyClass(name=f"class{number}", **each) for number, each in enumerate(settings)]  # type: ignore[arg-type]
        self.specs = {
            name: spec(name, labels={"zone": "west" if name == "c" else "east"}) for name in ENGINES
        }
        self.specs["b"] = replace(self.specs["b"], taints=(Taint("spot", effect=TaintEffect.NO_EXECUTE),))
        self.fleet = Fleet(policies, list(self.specs.values()))
        self.ring = ModelRing([ModelClass(policy) for policy in policies])
        self.running: dict[str, list[Released]] = {name: [] for name in ENGINES}
        self.charged_in: dict[Work, int] = {}
        self.arrived = self.served = self.dropped = self.cancelled = 0

    # --- what happens ---

    @rule(
        which=st.integers(0, 3),
        cost=costs,
        constraints=st.sampled_from(CONSTRAINTS),
        strict=st.integers(0, 1),
        priority=st.integers(-2, 3),
    )
    def arrive(self, which: int, cost: int, constraints: Constraints, strict: int, priority: int) -> None:
        flow = self.ring.classes[which % len(self.ring.classes)]
        wait = flow.policy.max_queue_wait
        work = self.fleet.work(
            flow.policy.name,
            cost,
            constraints=constraints,
            strict=strict,
            priority=priority,
            **({"deadline": self.fleet.now + wait} if wait else {}),
        )
        work.demand = structs.replace(work.demand, constraints=constraints.within(flow.policy))
        self.arrived += 1
        outcomes = self.fleet.queue.submit(work, self.fleet.now)
        if not self.eligible(work):
            assert [(each.work, each.reason) for each in outcomes] == [(work, DropReason.NO_ENDPOINT)]
            self.dropped += 1
            return
        self.ring.add(flow, work)
        self.expect(outcomes)

    @rule(number=st.integers(0, 99))
    @precondition(lambda self: any(self.running.values()))
    def finish(self, number: int) -> None:
        self.fleet.ledger.release(self.take_running(number).booking)
        self.expect(self.fleet.queue.poll(self.fleet.now))

    @rule(number=st.integers(0, 99))
    @precondition(lambda self: any(self.running.values()))
    def give_back(self, number: int) -> None:
        released = self.take_running(number)
        flow = self.refund(released.work)
        outcomes = self.fleet.queue.give_back(released, self.fleet.now)
        self.ring.add(flow, released.work, returned=True)
        self.expect(outcomes)

    @rule(number=st.integers(0, 99))
    @precondition(lambda self: any(self.running.values()))
    def withdraw(self, number: int) -> None:
        released = self.take_running(number)
        self.refund(released.work)
        self.fleet.queue.withdraw(released)
        self.cancelled += 1
        self.expect(self.fleet.queue.poll(self.fleet.now))

    @rule(number=st.integers(0, 99))
    @precondition(lambda self: any(flow.waiting for flow in self.ring.classes))
    def cancel(self, number: int) -> None:
        everything = [(flow, work) for flow in self.ring.classes for work in flow.waiting]
        flow, work = everything[number % len(everything)]
        assert self.fleet.queue.cancel(work)
        assert not self.fleet.queue.cancel(work)
        self.ring.remove(flow, work)
        self.cancelled += 1
        self.expect(self.fleet.queue.poll(self.fleet.now))

    @rule(seconds=st.floats(0.0, 8.0))
    def wait(self, seconds: float) -> None:
        self.fleet.now += seconds
        self.expect(self.fleet.queue.poll(self.fleet.now))

    @rule(name=st.sampled_from(ENGINES), ready=st.booleans())
    def flap(self, name: str, ready: bool) -> None:
        self.specs[name] = replace(self.specs[name], ready=ready)
        self.fleet.set_engines(*self.specs.values())
        self.expect(self.fleet.queue.poll(self.fleet.now))

    @rule(which=st.integers(0, 3), settings=class_settings)
    def change_a_class(self, which: int, settings: dict[str, object]) -> None:
        """A class with another order takes its requests over, as if they came now; one with other numbers goes on,
        and where it binds its requests to other endpoints they change their lanes.
        """
        flow = self.ring.classes[which % len(self.ring.classes)]
        before = flow.policy
        flow.policy = PolicyClass(name=before.name, **settings)  # type: ignore[arg-type]
        self.fleet.classes[before.name] = flow.policy
        if before.queue_policy != flow.policy.queue_policy:
            moving = sorted(flow.waiting, key=lambda work: work.sequence)
            for work in moving:
                self.ring.remove(flow, work)
            for work in moving:
                self.ring.add(flow, work)
        policy = policy_of(*(each.policy for each in self.ring.classes))
        self.expect(self.fleet.queue.reload(policy, self.fleet.now))

    @rule()
    def poll_for_nothing(self) -> None:
        assert self.fleet.queue.poll(self.fleet.now) == []

    @invariant()
    def who_waits_is_bound_by_the_class_of_now(self) -> None:
        for flow in self.ring.classes:
            for work in flow.waiting:
                assert work.demand.constraints == work.own.within(flow.policy)

    # --- what the model says ---

    def take_running(self, number: int) -> Released:
        everything = [(name, each) for name in ENGINES for each in self.running[name]]
        name, released = everything[number % len(everything)]
        self.running[name].remove(released)
        return released

    def flow_of(self, work: Work) -> ModelClass:
        return next(each for each in self.ring.classes if each.policy.name == work.policy_class.name)

    def refund(self, work: Work) -> ModelClass:
        """The charge is undone, unless the backlog in which it was made has ended."""
        flow = self.flow_of(work)
        if flow.waiting and flow.period == self.charged_in[work]:
            flow.deficit += work.cost
        self.served -= 1
        return flow

    def eligible(self, work: Work) -> list[str]:
        refuse = work.demand.constraints.refuse
        return [name for name in ENGINES if refuse(self.fleet.engine(name)) is None]

    def expect(self, outcomes: list[Released | Dropped]) -> None:
        """Drops first (nobody can take it, the wait is over), then exactly the model's dispatches, in order."""
        drops = [each for each in outcomes if isinstance(each, Dropped)]
        gone = {
            work: DropReason.NO_ENDPOINT if not self.eligible(work) else DropReason.DEADLINE
            for flow in self.ring.classes
            for work in flow.waiting
            if not self.eligible(work) or work.deadline <= self.fleet.now
        }
        assert {each.work: each.reason for each in drops} == gone
        for flow in self.ring.classes:
            for work in [each for each in flow.waiting if each in gone]:
                self.ring.remove(flow, work)
        self.dropped += len(gone)
        for outcome in outcomes[len(drops) :]:
            assert isinstance(outcome, Released)
            flow = self.flow_of(outcome.work)
            self.charged_in[outcome.work] = flow.period
            assert self.ring.serve(lambda work: self.free_for(work)) is outcome.work
            name = outcome.decision.endpoint.spec.name
            assert name in self.free_for(outcome.work)
            self.running[name].append(outcome)
            self.served += 1
            if flow.waiting:
                assert outcome.deficit_after == flow.deficit
        assert self.ring.serve(lambda work: self.free_for(work)) is None, "the queue was not work-conserving"

    def free_for(self, work: Work) -> list[str]:
        limit = work.policy_class.max_running_per_worker
        assert limit is not None
        return [name for name in self.eligible(work) if len(self.running[name]) < limit]

    @invariant()
    def nothing_is_lost(self) -> None:
        waiting = sum(len(flow.waiting) for flow in self.ring.classes)
        assert len(self.fleet.queue) == waiting
        assert self.served + self.dropped + self.cancelled + waiting == self.arrived
        stats = [flow.queue.stats for flow in self.fleet.queue.flows()]
        assert sum(each.arrived for each in stats) == self.arrived
        assert sum(each.dispatched_requests - each.refunded for each in stats) == self.served
        assert sum(each.cancelled for each in stats) == self.cancelled
        assert sum(sum(each.dropped.values()) for each in stats) == self.dropped

    @invariant()
    def gauges_are_true(self) -> None:
        for flow, model in zip(self.fleet.queue.flows(), self.ring.classes, strict=True):
            stats = flow.queue.stats
            assert flow.deficit == model.deficit
            assert stats.waiting_requests == len(model.waiting)
            assert stats.waiting_tokens == sum(work.demand.raw_tokens for work in model.waiting)
            assert {work.state for work in flow.queue} <= {WorkState.WAITING}
            assert flow.deficit >= 0
            assert stats.waiting_cost == sum(work.cost for work in model.waiting)
            assert bool(flow.period) == bool(model.waiting)
        for name in ENGINES:
            load = self.fleet.ledger.load(self.fleet.engine(name).slot)
            assert load.running == len(self.running[name])
            assert load.prefill_tokens == sum(each.booking.prefill_tokens for each in self.running[name])


QueueMachine.TestCase.settings = settings(
    max_examples=int(os.environ.get("PICKER_LAW_EXAMPLES", "40")),
    stateful_step_count=50,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestQueueAgainstModel = pytest.mark.filterwarnings("ignore")(QueueMachine.TestCase)

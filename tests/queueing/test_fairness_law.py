"""The fairness bound of `drr`, over any interval: by hypothesis, and by long random runs.

PICKER_LAW_DECISIONS sets how many decisions the long runs make in all.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.queueing.drr import DeficitRoundRobin, Flow
from picker.queueing.fairness import FairnessMeter

DECISIONS = int(os.environ.get("PICKER_LAW_DECISIONS", "30000"))


@dataclass(eq=False)
class Heads:
    """Costs that wait; the order is arrival, or the least first, where a newcomer may become the head."""

    least_first: bool
    waiting: list[int] = field(default_factory=list)
    blocked: bool = False

    def head(self) -> int | None:
        return self.first() if self.waiting and not self.blocked else None

    def first(self) -> int:
        return min(self.waiting) if self.least_first else self.waiting[0]


@dataclass
class Interval:
    """Two flows since something last came between them, and how far one was ahead of the other in it, in rounds."""

    account: tuple[int, ...]
    lowest: float = 0.0
    highest: float = 0.0
    start: float = 0.0


class Shares:
    """A ring of flows under observation: every pair, over every interval that ends now."""

    def __init__(self, flows: list[tuple[int, bool]]) -> None:
        self.flows = [Flow(Heads(least_first), quantum) for quantum, least_first in flows]
        self.ring: DeficitRoundRobin[Heads] = DeficitRoundRobin()
        self.largest = dict.fromkeys(self.flows, 0)
        self.intervals: dict[tuple[Flow[Heads], Flow[Heads]], Interval] = {}
        self.meter = FairnessMeter(window=7)
        self.decisions = 0
        self.closest = 0.0

    def arrive(self, number: int, cost: int) -> None:
        flow = self.flows[number % len(self.flows)]
        if not flow.queue.waiting:
            self.ring.join(flow)
            self.largest[flow] = 0
        flow.queue.waiting.append(cost)
        self.look_at_heads()

    def cancel(self, number: int) -> None:
        flow = self.flows[number % len(self.flows)]
        if flow.queue.waiting:
            flow.queue.waiting.pop(number % len(flow.queue.waiting))
            self.after_leaving(flow)

    def block(self, number: int, *, blocked: bool) -> None:
        self.flows[number % len(self.flows)].queue.blocked = blocked

    def poll(self, capacity: int) -> None:
        """Serve so many, if there are so many that can go."""
        for _ in range(capacity):
            turn = self.ring.choose()
            if turn is None:
                assert not any(flow.queue.head() for flow in self.flows), "not work-conserving"
                return
            before, after = self.ring.charge(turn)
            assert before >= turn.cost == before - after
            self.decisions += 1
            turn.flow.queue.waiting.remove(turn.cost)
            self.after_leaving(turn.flow)
            self.check()
            if self.decisions % 3 == 0:
                self.meter.sample(self.flows)
        assert self.meter.worst.rounds <= self.meter.worst.bound

    def after_leaving(self, flow: Flow[Heads]) -> None:
        if not flow.queue.waiting:
            self.ring.leave(flow)
        self.look_at_heads()

    def look_at_heads(self) -> None:
        for flow in self.flows:
            if flow.queue.waiting:
                self.largest[flow] = max(self.largest[flow], flow.queue.first())

    def check(self) -> None:
        for flow in self.flows:
            assert 0 <= flow.deficit < self.largest[flow] + flow.quantum or not flow.period
        for place, one in enumerate(self.flows):
            for other in self.flows[place + 1 :]:
                self.check_pair(one, other)

    def check_pair(self, one: Flow[Heads], other: Flow[Heads]) -> None:
        account = (one.period, one.disturbed, other.period, other.disturbed)
        ahead = one.charged / one.quantum - other.charged / other.quantum
        interval = self.intervals.get((one, other))
        if interval is None or interval.account != account or not one.period or not other.period:
            self.intervals[one, other] = Interval(account, ahead, ahead, ahead)
            return
        interval.lowest = min(interval.lowest, ahead)
        interval.highest = max(interval.highest, ahead)
        gap = interval.highest - interval.lowest
        bound = 2 + self.largest[one] / one.quantum + self.largest[other] / other.quantum
        assert gap <= bound + 1e-6
        self.closest = max(self.closest, gap / bound)


flows = st.lists(st.tuples(st.integers(1, 2000), st.booleans()), min_size=2, max_size=5)
costs = st.one_of(st.integers(1, 30), st.integers(1, 5000))
steps = st.lists(
    st.one_of(
        st.tuples(st.just("arrive"), st.integers(0, 9), costs),
        st.tuples(st.just("fill"), st.integers(0, 9), costs),
        st.tuples(st.just("cancel"), st.integers(0, 99), st.just(0)),
        st.tuples(st.just("block"), st.integers(0, 9), st.booleans()),
        st.tuples(st.just("nothing can go"), st.integers(1, 9), st.just(0)),
        st.tuples(st.just("serve"), st.integers(1, 12), st.just(0)),
    ),
    max_size=60,
)


@given(flows=flows, steps=steps)
@settings(deadline=None, max_examples=int(os.environ.get("PICKER_LAW_EXAMPLES", "100")))
def test_no_interval_breaks_the_bound(
    flows: list[tuple[int, bool]], steps: list[tuple[str, int, int]]
) -> None:
    shares = Shares(flows)
    for what, number, value in steps:
        match what:
            case "arrive":
                shares.arrive(number, value)
            case "fill":
                for _ in range(10):
                    shares.arrive(number, value)
            case "cancel":
                shares.cancel(number)
            case "block":
                shares.block(number, blocked=bool(value))
            case "nothing can go":
                before = [(flow.queue.blocked, flow.deficit) for flow in shares.flows]
                for flow in shares.flows:
                    flow.queue.blocked = True
                shares.poll(number)
                assert [flow.deficit for flow in shares.flows] == [deficit for _, deficit in before]
                for flow, (blocked, _) in zip(shares.flows, before, strict=True):
                    flow.queue.blocked = blocked
            case "serve":
                shares.poll(number)


@pytest.mark.parametrize("seed", range(6))
def test_long_runs_stay_inside_the_bound_and_come_near_it(seed: int) -> None:
    """Backlogs that never end, orders in which newcomers overtake, capacity in bursts, polls that find nothing."""
    random = Random(seed)
    shares = Shares([(random.randint(1, 4000), random.random() < 0.5) for _ in range(4)])
    sizes = [1, 40, 700, 9000]
    while shares.decisions < DECISIONS / 6:
        for number, flow in enumerate(shares.flows):
            while len(flow.queue.waiting) < 5:
                shares.arrive(number, random.randint(1, random.choice(sizes)))
        if random.random() < 0.02:
            shares.block(random.randrange(4), blocked=random.random() < 0.4)
        shares.poll(random.choice([0, 1, 1, 1, 7]))
        if all(flow.queue.blocked for flow in shares.flows):
            shares.block(random.randrange(4), blocked=False)
    assert shares.closest > 0.5, "the bound is never approached: nothing was tested"


def test_the_meter_sees_shares_that_collapse() -> None:
    """Weights of 4:1 that come out as 1:1."""
    ring: DeficitRoundRobin[Heads] = DeficitRoundRobin()
    flows = [Flow(Heads(least_first=False, waiting=[100]), quantum) for quantum in (4000, 1000)]
    for flow in flows:
        ring.join(flow)
        flow.largest = 100
    meter = FairnessMeter()
    meter.sample(flows)
    for _ in range(100):
        for flow in flows:
            flow.charged += 100
    gap = meter.sample(flows)
    assert gap.rounds == pytest.approx(7.5)
    assert gap.rounds > gap.bound == pytest.approx(2 + 0.1 + 0.025)
    assert meter.worst == gap


def test_the_meter_does_not_compare_across_a_disturbance() -> None:
    ring: DeficitRoundRobin[Heads] = DeficitRoundRobin()
    flows = [Flow(Heads(least_first=False, waiting=[100]), 1000) for _ in range(3)]
    for flow in flows:
        ring.join(flow)
    meter = FairnessMeter()
    meter.sample(flows)
    flows[0].charged += 90_000
    flows[0].disturbed += 1
    assert meter.sample(flows).rounds == 0.0
    ring.leave(flows[1])
    assert meter.sample(flows).rounds == 0.0, (
        "one is left of those that could be compared: a new window begins"
    )
    flows[0].charged += 500
    assert meter.sample(flows).rounds == pytest.approx(0.5)

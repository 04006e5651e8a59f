"""Lanes at scale: what a poll examines does not grow with what it does not touch."""

from __future__ import annotations

from picker.policy.model import PolicyClass
from picker.queueing.lanes import Lanes
from picker.queueing.orders import order_named
from picker.queueing.request_queue import CacheLook, OrderContext, RequestQueue
from picker.queueing.work import Work
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand

POLICY = PolicyClass(name="x", quantum=1)
LANES = 10_000


def fcfs() -> RequestQueue:
    return order_named("fcfs")(OrderContext(POLICY, lambda work: CacheLook(0.0, None)))


def own_bit(constraints: Constraints) -> int:
    """Each endpoint is named by its slot, and each lane is pinned to one."""
    assert constraints.pin is not None
    return 1 << int(constraints.pin)


def full_of_lanes() -> Lanes:
    lanes = Lanes(fcfs, own_bit, max_lanes=LANES)
    for slot in range(LANES):
        demand = Demand(1, PromptKeys.unknown(), Constraints(pin=str(slot)))
        lanes.add(Work(str(slot), float(slot), demand, POLICY, sequence=slot))
    return lanes


def drain(lanes: Lanes, busy: int) -> list[int]:
    order = []
    while (lane := lanes.candidate(busy, 0.0)) is not None:
        order.append(int(lanes.pop(lane).id))
    return order


def test_alternating_lanes_pop_in_linear_work() -> None:
    lanes = full_of_lanes()
    busy = sum(1 << slot for slot in range(0, LANES, 2))
    assert drain(lanes, busy) == list(range(1, LANES, 2))
    assert lanes.stats.examined <= LANES


def test_a_freed_endpoint_re_examines_only_its_own_lane() -> None:
    lanes = full_of_lanes()
    everything = (1 << LANES) - 1
    assert drain(lanes, everything) == []
    before = lanes.stats.examined
    for _ in range(1000):
        assert lanes.candidate(everything, 0.0) is None
    lanes.wake(1 << 77)
    assert drain(lanes, everything & ~(1 << 77)) == [77]
    assert lanes.stats.examined - before == 1

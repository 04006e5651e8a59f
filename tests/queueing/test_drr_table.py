"""The right answers of the design, through the whole admission queue."""

from __future__ import annotations

import pytest

from picker.policy.model import PolicyClass
from tests.queueing.fleet import Fleet

SHARES = [
    # quantum a, quantum b, cost of every request
    (4096, 1024, 512),
    (2048, 512, 256),
    (2048, 512, 512),
    (2048, 512, 2048),
    (512, 128, 64),
    (512, 128, 128),
    (512, 128, 384),
    (512, 128, 512),
    (512, 128, 1024),
]


def contended(quantum_a: int, quantum_b: int, cost: int) -> Fleet:
    """One engine that takes one request at a time, busy, and two classes with 60 requests each."""
    classes = [
        PolicyClass(name="a", quantum=quantum_a, max_running_per_worker=1),
        PolicyClass(name="b", quantum=quantum_b, max_running_per_worker=1),
    ]
    fleet = Fleet(classes)
    fleet.submit("a", cost)
    for _ in range(60):
        fleet.submit("a", cost)
        fleet.submit("b", cost)
    assert len(fleet.released) == 1
    return fleet


@pytest.mark.parametrize(("quantum_a", "quantum_b", "cost"), SHARES)
def test_weights_hold_when_capacity_comes_one_at_a_time(quantum_a: int, quantum_b: int, cost: int) -> None:
    order = contended(quantum_a, quantum_b, cost).serve_one_by_one(40)
    assert (order.count("a"), order.count("b")) == (32, 8)


def test_weights_hold_at_the_smallest_quanta_and_cost() -> None:
    order = contended(1, 3, 1).serve_one_by_one(40)
    assert (order.count("a"), order.count("b")) == (10, 30)


def test_weights_hold_when_a_burst_drains_at_once() -> None:
    fleet = contended(512, 128, 128)
    order = []
    for _ in range(5):
        order += fleet.serve_one_by_one(8)
        for _ in range(100):
            fleet.poll()
    assert (order.count("a"), order.count("b")) == (32, 8)

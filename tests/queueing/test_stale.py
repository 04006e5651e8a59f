"""C47: endpoints that are not heard any more are passed over while others are heard, and used when none is."""

from __future__ import annotations

from picker.policy.model import PolicyClass
from picker.selection.constraints import Constraints, Ineligible
from tests.queueing.fleet import Fleet

FREE = PolicyClass(name="free", quantum=512)
NARROW = PolicyClass(name="free", quantum=512, max_running_per_worker=1)


def where(fleet: Fleet) -> set[str]:
    return {each.decision.endpoint.spec.name for each in fleet.released}


def test_the_heard_ones_take_everything() -> None:
    fleet = Fleet([FREE], ["a", "b", "c"])
    fleet.pool.mark_stale({"a"})
    for _ in range(30):
        fleet.submit("free")
    assert where(fleet) == {"b", "c"}
    assert fleet.released[0].decision.eligibility.refused == {fleet.engine("a"): Ineligible.STALE}


def test_with_nobody_heard_all_are_used() -> None:
    fleet = Fleet([FREE], ["a", "b"])
    fleet.pool.mark_stale({"a", "b"})
    for _ in range(30):
        fleet.submit("free")
    assert where(fleet) == {"a", "b"}


def test_a_request_waits_for_a_heard_one_and_not_for_luck() -> None:
    fleet = Fleet([NARROW], ["a", "b"])
    fleet.submit("free")
    fleet.submit("free")
    third = fleet.submit("free")
    on_b = next(each for each in fleet.released if each.decision.endpoint.spec.name == "b")
    fleet.pool.mark_stale({"b"})
    assert not fleet.finish(on_b), "b is free and silent, a is heard and busy"
    fleet.pool.mark_stale(set())
    fleet.poll()
    assert [each.work.id for each in fleet.released][-1] == third.id


def test_a_pinned_request_goes_where_it_must() -> None:
    fleet = Fleet([FREE], ["a", "b"])
    fleet.pool.mark_stale({"a"})
    fleet.submit("free", constraints=Constraints(pin="a"))
    assert where(fleet) == {"a"}

"""Engines in which too many requests wait are passed over, by themselves again later, and never all at once."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from picker.policy.model import PolicyClass
from picker.pool.endpoint import EngineReport
from picker.selection.constraints import Constraints, Ineligible
from tests.queueing.fleet import Fleet

FREE = PolicyClass(name="free", quantum=512)


def fleet(*names: str, limit: int | None = 8) -> Fleet:
    made = Fleet([FREE], names)
    made.pool.overload_waiting = limit
    return made


def report(fleet: Fleet, name: str, waiting: int | None) -> None:
    fleet.pool.report(name, EngineReport(at=fleet.now, running=4, waiting=waiting))


def where(fleet: Fleet, requests: int = 30) -> set[str]:
    for _ in range(requests):
        fleet.submit("free")
    return {each.decision.endpoint.spec.name for each in fleet.released[-requests:]}


@pytest.mark.parametrize(
    ("waiting", "is_passed_over"),
    [
        ([7], False),
        ([8], True),
        ([8, 5], True),
        ([8, 5, 4], False),
        ([8, 4, 5], False),
        ([5], False),
        ([8, None], False),
    ],
)
def test_it_is_passed_over_from_the_limit_until_half_of_it(
    waiting: Sequence[int | None], is_passed_over: bool
) -> None:
    busy = fleet("a", "b")
    for each in waiting:
        report(busy, "a", each)
    assert where(busy) == ({"b"} if is_passed_over else {"a", "b"})
    assert busy.pool.stats.overloads == (8 in waiting)
    if is_passed_over:
        refused = busy.released[-1].decision.eligibility.refused
        assert refused == {busy.engine("a"): Ineligible.OVERLOADED}


def test_where_all_are_nobody_is_refused_for_it() -> None:
    busy = fleet("a", "b")
    for name in "ab":
        report(busy, name, 20)
    assert where(busy) == {"a", "b"}
    assert not busy.dropped


def test_who_may_go_nowhere_else_goes_there() -> None:
    busy = fleet("a", "b")
    report(busy, "a", 20)
    busy.submit("free", constraints=Constraints(pin="a"))
    assert busy.released[-1].decision.endpoint.spec.name == "a"


def test_an_engine_that_is_heard_no_more_is_not_known_to_be() -> None:
    busy = fleet("a", "b")
    report(busy, "a", 20)
    busy.pool.mark_stale({"a", "b"})
    assert where(busy) == {"a", "b"}


def test_without_a_limit_it_is_never_looked_at() -> None:
    busy = fleet("a", "b", limit=None)
    report(busy, "a", 10_000)
    assert busy.pool.overloaded_mask == 0

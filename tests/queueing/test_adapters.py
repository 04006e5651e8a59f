"""LoRA adapters: who has one, or a place for it, comes first; where nobody has, a request waits and is not lost."""

from __future__ import annotations

from picker.policy.model import PolicyClass
from picker.pool.endpoint import EngineReport
from picker.selection.constraints import Constraints, Ineligible
from tests.queueing.fleet import Fleet

FREE = PolicyClass(name="free", quantum=512)
NARROW = PolicyClass(name="free", quantum=512, max_running_per_worker=1)
LORA = Constraints(adapter="lora")


def uses(fleet: Fleet, engine: str, *adapters: str, places: int | None = 2) -> None:
    fleet.pool.report(
        engine, EngineReport(at=fleet.now, adapters=frozenset(adapters), max_adapters=places, running=0)
    )


def where(fleet: Fleet) -> list[str]:
    return [each.decision.endpoint.spec.name for each in fleet.released]


def test_who_has_it_or_a_place_for_it_comes_first() -> None:
    fleet = Fleet([FREE], ["has", "place", "full", "none"])
    uses(fleet, "has", "lora", "x")
    uses(fleet, "place", "x")
    uses(fleet, "full", "x", "y")
    uses(fleet, "none", places=None)
    for _ in range(30):
        fleet.submit("free", constraints=LORA)
    assert set(where(fleet)) == {"has", "place"}
    assert fleet.released[0].decision.eligibility.refused == {
        fleet.engine("full"): Ineligible.ADAPTER_FULL,
        fleet.engine("none"): Ineligible.ADAPTER,
    }


def test_where_every_place_is_in_use_the_engine_lets_it_wait() -> None:
    fleet = Fleet([FREE], ["a", "b"])
    for name in "ab":
        uses(fleet, name, "x", "y")
    fleet.submit("free", constraints=LORA)
    assert len(fleet.released) == 1
    assert not fleet.dropped


def test_who_waits_is_not_refused_because_the_places_are_taken_meanwhile() -> None:
    fleet = Fleet([NARROW], ["a"])
    uses(fleet, "a", "lora")
    fleet.submit("free")
    waiting = fleet.submit("free", constraints=LORA)
    uses(fleet, "a", "x", "y")
    assert not fleet.poll()
    fleet.finish(fleet.released[0])
    assert fleet.released[-1].work is waiting
    assert not fleet.dropped


def test_who_waits_takes_a_place_that_becomes_free_elsewhere() -> None:
    fleet = Fleet([NARROW], ["a", "b"])
    uses(fleet, "a", "lora")
    uses(fleet, "b", "x", "y")
    fleet.submit("free", constraints=LORA)
    second = fleet.submit("free", constraints=LORA)
    assert where(fleet) == ["a"], "b could take it and has no place for its adapter"
    uses(fleet, "b", "x")
    fleet.poll()
    assert (fleet.released[-1].work, where(fleet)) == (second, ["a", "b"])


def test_an_engine_that_loads_adapters_no_more_strands_who_waits_for_it() -> None:
    fleet = Fleet([NARROW], ["a"])
    uses(fleet, "a", "lora")
    fleet.submit("free")
    fleet.submit("free", constraints=LORA)
    uses(fleet, "a", places=None)
    fleet.poll()
    assert len(fleet.dropped) == 1


def test_other_lanes_are_not_looked_at_when_the_adapters_in_use_change() -> None:
    """Engines name the adapters of the requests that they run: that is news with almost every scrape."""
    fleet = Fleet([NARROW], ["a", "b"])
    uses(fleet, "a", "lora")
    fleet.submit("free", constraints=Constraints(pin="a"))
    for number in range(500):
        fleet.submit("free", constraints=Constraints(allow=(frozenset({"a", f"other-{number}"}),)))
    fleet.submit("free", constraints=LORA)
    fleet.poll()
    [flow] = fleet.queue.flows()
    before, _ = flow.queue.lane_stats()
    for turn in range(100):
        uses(fleet, "a", "lora", f"x{turn}", places=8)
        assert not fleet.poll()
    examined = flow.queue.lane_stats()[0] - before
    assert examined <= 2 * 100

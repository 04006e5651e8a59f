"""What waiting requests wait for, how long that is counted, and when it makes no sense any more."""

from __future__ import annotations

from math import inf
from typing import Any

import pytest

from picker.policy.model import AffinitySettings, PolicyClass, QueuePolicy
from picker.queueing.class_stats import Blocked
from picker.queueing.deadlines import Deadlines
from picker.queueing.work import DropReason
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import PromptKeys
from tests.queueing.fleet import Fleet, spec


def one_at_a_time(name: str = "only", **changes: Any) -> PolicyClass:
    return PolicyClass(**{"name": name, "quantum": 512, "max_running_per_worker": 1, **changes})


class TestShedding:
    def fleet(self, *, shed: bool = True, rate: float | None = 1000.0) -> Fleet:
        fleet = Fleet([one_at_a_time(shed_unreachable=shed)])
        for _ in range(8 if rate else 0):
            fleet.selector.calibration.observe(0, 1000, 1000 / (rate or 1.0))
        fleet.submit("only", 10)
        return fleet

    def test_who_cannot_make_its_target_any_more_is_dropped_at_that_moment(self) -> None:
        fleet = self.fleet()
        work = fleet.submit("only", 3000, ttft_deadline=10.0)
        assert fleet.queue.next_wakeup() == pytest.approx(7.0), "3,000 tokens take 3 s"
        fleet.now = 6.9
        fleet.poll()
        assert not fleet.dropped
        fleet.now = 7.1
        fleet.poll()
        assert [(each.work, each.reason) for each in fleet.dropped] == [(work, DropReason.TTFT_UNREACHABLE)]

    def test_a_target_that_nobody_could_make_is_refused_at_once(self) -> None:
        fleet = self.fleet()
        fleet.submit("only", 30_000, ttft_deadline=10.0)
        assert [each.reason for each in fleet.dropped] == [DropReason.TTFT_UNREACHABLE]

    @pytest.mark.parametrize(("shed", "rate"), [(False, 1000.0), (True, None)])
    def test_nothing_is_shed_without_the_option_or_before_rates_are_known(
        self, shed: bool, rate: float | None
    ) -> None:
        fleet = self.fleet(shed=shed, rate=rate)
        fleet.submit("only", 30_000, ttft_deadline=1.0)
        fleet.now = 60.0
        fleet.poll()
        assert (len(fleet.queue), fleet.dropped) == (1, [])

    def test_rates_that_have_become_better_give_it_longer(self) -> None:
        fleet = self.fleet()
        fleet.submit("only", 3000, ttft_deadline=10.0)
        for _ in range(64):
            fleet.selector.calibration.observe(0, 3000, 1.0)
        fleet.now = 7.5
        fleet.poll()
        assert not fleet.dropped
        assert fleet.queue.next_wakeup() == pytest.approx(9.0)

    def test_rates_that_are_learned_while_it_waits_count(self) -> None:
        fleet = self.fleet(rate=None)
        fleet.submit("only", 3000, ttft_deadline=10.0)
        for _ in range(8):
            fleet.selector.calibration.observe(0, 1000, 1.0)
        fleet.now = 10.0
        fleet.poll()
        assert [each.reason for each in fleet.dropped] == [DropReason.TTFT_UNREACHABLE]

    def test_an_earlier_end_of_the_wait_comes_first(self) -> None:
        fleet = self.fleet()
        fleet.submit("only", 3000, ttft_deadline=10.0, deadline=5.0)
        fleet.now = 5.0
        fleet.poll()
        assert [each.reason for each in fleet.dropped] == [DropReason.DEADLINE]


class TestBlockedTime:
    def blocked(self, fleet: Fleet, number: int = 0) -> dict[str, float]:
        return {
            reason: round(seconds, 3)
            for reason, seconds in fleet.queue.flows()[number].queue.stats.blocked.items()
        }

    def test_going_at_once_is_no_wait(self) -> None:
        fleet = Fleet([one_at_a_time()])
        for _ in range(5):
            fleet.submit("only")
            fleet.now += 1.0
            fleet.finish(fleet.released[-1])
        assert self.blocked(fleet) == {}

    def test_waiting_for_a_busy_pool(self) -> None:
        fleet = Fleet([one_at_a_time()])
        fleet.submit("only")
        fleet.now = 1.0
        fleet.submit("only")
        for _ in range(10):
            fleet.now += 0.3
            fleet.poll()
        assert self.blocked(fleet) == {Blocked.NO_CAPACITY: 3.0}
        fleet.now += 0.1
        fleet.finish(fleet.released[0])
        assert self.blocked(fleet) == {Blocked.NO_CAPACITY: 3.1}, "the end of the backlog is counted too"

    def test_waiting_for_the_one_endpoint_that_will_do(self) -> None:
        fleet = Fleet([one_at_a_time()], ["a", "b"])
        for _ in range(2):
            fleet.submit("only", constraints=Constraints(pin="a"))
        fleet.now = 2.0
        fleet.poll()
        assert self.blocked(fleet) == {Blocked.NO_ELIGIBLE: 2.0}

    def test_waiting_while_others_have_their_turn(self) -> None:
        fleet = Fleet([one_at_a_time("one", quantum=10_000), one_at_a_time("two", quantum=100)])
        for name in ("one", "one", "one", "one", "two"):
            fleet.submit(name, 1000)
        fleet.now = 0.5
        fleet.poll()
        for _ in range(3):
            fleet.now += 1.0
            fleet.finish(fleet.released[-1])
        assert self.blocked(fleet, 1) == {Blocked.NO_CAPACITY: 0.5, Blocked.DEFICIT: 3.0}

    def test_waiting_for_another_that_warms_the_prefix(self) -> None:
        policy = one_at_a_time(
            queue_policy=QueuePolicy.CACHE_AFFINITY, affinity=AffinitySettings(leader_wait=3.0)
        )
        fleet = Fleet([policy], ["a", "b"])
        prompts = [PromptKeys.of_tokens([range(64)]) for _ in range(4)]
        for name in "ab":
            fleet.submit("only", constraints=Constraints(pin=name))
        fleet.submit("only", 64, prompt=prompts[0])
        fleet.submit("only", 64, prompt=prompts[1])
        fleet.finish(fleet.released[0])
        assert len(fleet.queue) == 1, "the other endpoint is busy still"
        fleet.finish(fleet.released[1])
        assert len(fleet.queue) == 1, "there is room, but the prefix is on its way"
        assert fleet.queue.next_wakeup() == 3.0
        fleet.now = 2.0
        fleet.poll()
        assert self.blocked(fleet) == {Blocked.HELD: 2.0}
        fleet.now = 3.0
        fleet.poll()
        assert len(fleet.queue) == 0


def test_a_hold_that_ends_while_nobody_has_room_wakes_nobody() -> None:
    """Else the driver would be told to poll at once, again and again."""
    policy = one_at_a_time(
        queue_policy=QueuePolicy.CACHE_AFFINITY, affinity=AffinitySettings(leader_wait=3.0)
    )
    fleet = Fleet([policy])
    fleet.submit("only")
    for _ in range(2):
        fleet.submit("only", 64, prompt=PromptKeys.of_tokens([range(64)]))
    fleet.finish(fleet.released[0])
    assert len(fleet.queue) == 1
    for now in (3.0, 4.0):
        fleet.now = now
        fleet.poll()
        assert fleet.queue.next_wakeup() == inf


def test_deadlines_let_go_of_what_is_discarded() -> None:
    fleet = Fleet([one_at_a_time()], [spec("a")])
    deadlines = Deadlines()
    works = [fleet.work("only", 1) for _ in range(1000)]
    for number, work in enumerate(works):
        deadlines.set(work, 100.0 - number / 1000)
        deadlines.discard(works[number - 1])
    assert len(deadlines) == 1
    assert len(deadlines._heap) < 64
    assert deadlines.pop_due(99.0) is None
    assert deadlines.pop_due(99.1) is works[-1]
    assert deadlines.first() == inf


def test_the_oldest_arrival_is_known_through_every_way_out() -> None:
    fleet = Fleet([one_at_a_time(queue_policy=QueuePolicy.WSPT)])
    fleet.submit("only", 10)
    (flow,) = fleet.queue.flows()
    assert flow.queue.oldest_arrival == inf
    waiting = []
    for second in (1.0, 2.0, 3.0):
        fleet.now = second
        waiting.append(fleet.submit("only", 100))
    assert flow.queue.oldest_arrival == 1.0
    fleet.queue.cancel(waiting[0])
    assert flow.queue.oldest_arrival == 2.0
    fleet.finish(fleet.released[0])
    assert flow.queue.oldest_arrival == min(work.arrival for work in flow.queue)

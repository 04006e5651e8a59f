"""Every order through the RequestQueue interface: what it serves first, and what all orders have in common."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from picker.policy.model import AffinitySettings, PolicyClass, QueuePolicy
from picker.queueing.orders import order_named
from picker.queueing.request_queue import CacheLook, OrderContext, Rank, RankedQueue, RequestQueue
from picker.queueing.work import Work
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand

ORDERS = [policy.value for policy in QueuePolicy]
COLD = CacheLook(0.0, None)


def queue_of(
    policy: str, look: Callable[[Work], CacheLook] = lambda work: COLD, **changes: Any
) -> RequestQueue:
    policy_class = PolicyClass(name="x", quantum=512, queue_policy=QueuePolicy(policy), **changes)
    return order_named(policy)(OrderContext(policy_class, look))


def work(number: int, *, cost: int = 100, arrival: float | None = None, **changes: Any) -> Work:
    return Work(
        id=str(number),
        arrival=float(number) if arrival is None else arrival,
        demand=Demand(cost, PromptKeys.unknown()),
        policy_class=PolicyClass(name="x", quantum=512),
        sequence=number,
        **changes,
    )


def drain(queue: RequestQueue) -> list[str]:
    return [queue.pop().id for _ in range(len(queue))]


@pytest.mark.parametrize("policy", ORDERS)
class TestEveryOrder:
    def test_an_empty_queue_has_nothing_to_give(self, policy: str) -> None:
        queue = queue_of(policy)
        assert not queue
        assert len(queue) == 0
        assert list(queue) == []
        with pytest.raises(IndexError):
            queue.pop()
        with pytest.raises(IndexError):
            queue.peek()

    def test_peek_is_what_pop_gives(self, policy: str) -> None:
        queue = queue_of(policy)
        for number in (3, 1, 2):
            queue.add(work(number, cost=number))
        while queue:
            assert queue.peek() is queue.pop()

    def test_iteration_is_service_order_and_disturbs_nothing(self, policy: str) -> None:
        queue = queue_of(policy)
        for number in (3, 1, 4, 2):
            queue.add(work(number, cost=number))
        seen = [each.id for each in queue]
        assert [each.id for each in queue] == seen
        assert drain(queue) == seen

    def test_remove_takes_out_and_complains_of_strangers(self, policy: str) -> None:
        queue = queue_of(policy)
        works = [work(number) for number in range(5)]
        for each in works:
            queue.add(each)
        queue.remove(works[2])
        assert works[2] not in queue
        with pytest.raises(ValueError, match=r".*"):
            queue.remove(works[2])
        queue.remove_many([works[0], works[2], work(9)])
        assert drain(queue) == ["1", "3", "4"]

    def test_a_removed_request_may_join_again(self, policy: str) -> None:
        queue = queue_of(policy)
        once = work(1)
        queue.add(once)
        queue.remove(once)
        queue.add(once)
        assert [queue.pop(), len(queue)] == [once, 0]


@pytest.mark.parametrize("policy", ["fcfs", "wspt", "edf", "cache_affinity"])
def test_returned_requests_come_first_the_last_given_back_before_all(policy: str) -> None:
    queue = queue_of(policy)
    queue.add(work(1, cost=1))
    queue.prepend(work(7, cost=900))
    queue.prepend_many([work(8, cost=900), work(9, cost=900)])
    assert drain(queue) == ["9", "8", "7", "1"]


def test_priority_has_no_front() -> None:
    queue = queue_of("priority")
    queue.add(work(1, priority=0))
    queue.prepend(work(2, priority=5))
    assert drain(queue) == ["1", "2"]


def test_an_unknown_policy_is_a_value_error_that_names_the_known() -> None:
    with pytest.raises(ValueError, match=r"unknown queue policy 'lifo'; known are .*fcfs"):
        order_named("lifo")


def test_a_new_order_is_one_class_and_nothing_else_knows() -> None:
    class LastComeFirstServed(RankedQueue, policy="lcfs-for-this-test"):
        def rank(self, work: Work) -> Rank:
            return (-work.arrival,)

    queue = order_named("lcfs-for-this-test")(OrderContext(PolicyClass(name="x", quantum=1), lambda _: COLD))
    for number in range(3):
        queue.add(work(number))
    assert drain(queue) == ["2", "1", "0"]


def test_fcfs_counts_a_unit_of_priority_as_a_second_of_head_start() -> None:
    queue = queue_of("fcfs")
    for each in (
        work(1),
        work(2, priority=0.5),
        work(3, priority=2.5),
        work(4, priority=-50),
        work(5, strict=1),
    ):
        queue.add(each)
    assert drain(queue) == ["5", "3", "1", "2", "4"]


def test_strict_tier_beats_any_head_start() -> None:
    queue = queue_of("fcfs")
    queue.add(work(1, priority=10_000))
    queue.add(work(2, strict=1))
    assert drain(queue) == ["2", "1"]


def test_wspt_serves_the_least_cost_for_its_weight() -> None:
    """The order that a Dynamo 1.6.1 selection service gave for the same requests."""
    queue = queue_of("wspt")
    for each in (work(1, cost=500), work(2, cost=10), work(3, cost=100), work(4, cost=500, priority=1000)):
        queue.add(each)
    assert drain(queue) == ["4", "2", "3", "1"]


def test_priority_is_lower_first_unless_turned() -> None:
    works = [work(1, priority=2), work(2, priority=-1), work(3, priority=2)]
    for high_first, expected in ((False, ["2", "1", "3"]), (True, ["1", "3", "2"])):
        queue = queue_of("priority", high_priority_first=high_first)
        for each in works:
            queue.add(each)
        assert drain(queue) == expected


def test_edf_serves_the_first_due_and_those_without_a_deadline_last() -> None:
    queue = queue_of("edf")
    for each in (work(1), work(2, deadline=30.0), work(3, ttft_deadline=10.0, deadline=90.0)):
        queue.add(each)
    assert drain(queue) == ["3", "2", "1"]


@given(
    st.lists(st.tuples(st.floats(0, 100), st.integers(1, 10**9)), min_size=2, max_size=30),
    st.floats(0.1, 50),
)
def test_aged_wspt_lets_nobody_be_overtaken_by_one_that_came_much_later(
    arrivals: list[tuple[float, int]], aging: float
) -> None:
    queue = queue_of("wspt", wspt_aging=aging)
    for number, (arrival, cost) in enumerate(arrivals):
        queue.add(work(number, cost=cost, arrival=arrival))
    order = list(queue)
    for place, later in enumerate(order):
        for earlier in order[place + 1 :]:
            assert later.arrival <= earlier.arrival + aging + 1e-9


def test_aged_wspt_is_wspt_among_those_who_came_together() -> None:
    queue = queue_of("wspt", wspt_aging=10.0)
    for number, cost in enumerate((500, 10, 100)):
        queue.add(work(number, cost=cost, arrival=0.0))
    assert drain(queue) == ["1", "2", "0"]


class TestCacheAffinity:
    def queue(self, cached: dict[str, float], **affinity: Any) -> RequestQueue:
        def look(each: Work) -> CacheLook:
            return CacheLook(cached.get(each.id, 0.0), None)

        return queue_of("cache_affinity", look, affinity=AffinitySettings(**affinity))

    def test_warm_requests_go_first_by_bucket_and_arrival_inside_one(self) -> None:
        queue = self.queue({"1": 3, "2": 4, "3": 15, "4": 16, "5": 64, "6": 300, "7": 256})
        for number in range(8):
            queue.add(work(number))
        assert drain(queue) == ["6", "7", "5", "4", "2", "3", "0", "1"]

    def test_few_blocks_count_as_none(self) -> None:
        queue = self.queue({"2": 5}, edges=(1,), min_blocks=6)
        for number in (1, 2):
            queue.add(work(number))
        assert drain(queue) == ["1", "2"]

    def test_affinity_never_crosses_priority_or_tier(self) -> None:
        queue = self.queue({"1": 300})
        for each in (work(1, priority=5), work(2, priority=0), work(3, priority=9, strict=1)):
            queue.add(each)
        assert drain(queue) == ["3", "2", "1"]

    def test_who_waited_longer_than_the_limit_goes_first_by_arrival(self) -> None:
        queue = self.queue({"3": 300}, max_wait=5.0)
        for number in (1, 2, 3):
            queue.add(work(number))
        queue.refresh(6.0)
        assert queue.peek().id == "3", "nobody has waited more than 5 s yet"
        queue.refresh(7.5)
        assert drain(queue) == ["1", "2", "3"]

    def test_scores_follow_the_cache(self) -> None:
        cached = {"1": 4.0}
        queue = self.queue(cached, max_wait=100.0)
        for number in (1, 2):
            queue.add(work(number))
        cached["2"] = 64.0
        queue.refresh(1.0)
        assert drain(queue) == ["2", "1"]

    def test_only_a_window_is_scored(self) -> None:
        looks: list[str] = []

        def look(each: Work) -> CacheLook:
            looks.append(each.id)
            return CacheLook(float(each.id), None)

        queue = queue_of("cache_affinity", look, affinity=AffinitySettings(window=4, max_wait=1000.0))
        for number in range(1000):
            queue.add(work(number))
        assert sorted(looks) == ["0", "1", "2", "3"]
        looks.clear()
        for _ in range(10):
            queue.refresh(50.0)
        assert len(looks) <= 4, "a score is good for a while"

    def test_a_better_placed_newcomer_enters_a_full_window(self) -> None:
        queue = self.queue({}, window=2)
        for number in (1, 2, 3):
            queue.add(work(number, priority=5))
        queue.add(work(4, priority=0))
        assert drain(queue) == ["4", "1", "2", "3"]

    def test_what_was_returned_stays_first_even_beyond_the_window(self) -> None:
        queue = self.queue({}, window=2)
        for number in range(3):
            queue.add(work(number))
        queue.prepend_many(work(number) for number in (10, 11, 12))
        assert drain(queue) == ["12", "11", "10", "0", "1", "2"]

    @given(st.lists(st.integers(0, 5), min_size=1, max_size=60), st.integers(1, 6), st.randoms())
    def test_the_first_is_always_the_first_of_the_window(
        self, steps: list[int], window: int, random: Any
    ) -> None:
        """What is kept between calls (the head, the last of the window) must be what a full scan would find."""
        cached: dict[str, float] = {}
        queue = self.queue(cached, window=window, max_wait=3.0)
        waiting: list[Work] = []
        for number, step in enumerate(steps):
            if step <= 1 or not waiting:
                cached[str(number)] = random.choice([0.0, 5.0, 20.0, 300.0])
                waiting.append(work(number, priority=random.randint(0, 1)))
                queue.add(waiting[-1])
            elif step == 2:
                waiting.remove(queue.pop())
            elif step == 3:
                queue.remove(waiting.pop(random.randrange(len(waiting))))
            elif step == 4:
                queue.refresh(number + random.random())
            else:
                back = queue.pop()
                queue.prepend(back)
            assert len(queue) == len(waiting)
            assert set(queue) == set(waiting)
            assert not waiting or queue.peek() is next(iter(queue))

    def test_one_leads_and_the_others_wait_for_its_blocks(self) -> None:
        cached: dict[str, CacheLook] = {str(number): CacheLook(0, 77) for number in (1, 2)}
        cached["3"] = CacheLook(0, 88)
        queue = queue_of(
            "cache_affinity",
            lambda each: cached[each.id],
            affinity=AffinitySettings(leader_wait=2.0, max_wait=100.0),
        )
        for number in (1, 2, 3):
            queue.add(work(number))
        queue.refresh(10.0)
        assert queue.pop().id == "1"
        assert (queue.peek().id, queue.held_until()) == ("3", 0.0), "who shares nothing is not held"
        queue.pop()
        assert queue.held_until() == 12.0
        cached["2"] = CacheLook(16, 99)
        queue.refresh(11.0)
        assert queue.held_until() == 0.0, "the leader's blocks have come"
        assert queue.pop().id == "2"

    def test_a_follower_goes_when_the_leader_takes_too_long(self) -> None:
        queue = queue_of(
            "cache_affinity",
            lambda each: CacheLook(0, 77),
            affinity=AffinitySettings(leader_wait=2.0, max_wait=100.0),
        )
        for number in (1, 2):
            queue.add(work(number))
        queue.refresh(10.0)
        queue.pop()
        queue.refresh(12.5)
        assert queue.held_until() == 0.0

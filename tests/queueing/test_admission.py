"""What becomes of requests: limits, ends of waits, cancellation, lanes, taints, shutdown, policy changes."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf
from random import Random
from typing import Any

import pytest
from msgspec import structs

from picker.policy.constraints import LabelSelector, Taint, TaintEffect, Toleration
from picker.policy.model import PolicyClass, QueuePolicy
from picker.pool.endpoint import EngineReport
from picker.queueing.admission import QueueLimits
from picker.queueing.work import DropReason, Released, Work, WorkState
from picker.selection.constraints import Constraints
from tests.queueing.fleet import Fleet, policy_of, spec


def one_at_a_time(name: str = "only", **changes: Any) -> PolicyClass:
    return PolicyClass(**{"name": name, "quantum": 512, "max_running_per_worker": 1, **changes})


def ids(released: list[Released]) -> list[str]:
    return [each.work.id for each in released]


class TestGoingAndWaiting:
    def test_a_request_goes_at_once_where_there_is_room(self) -> None:
        fleet = Fleet([one_at_a_time()])
        work = fleet.submit("only")
        assert (ids(fleet.released), work.state) == ([work.id], WorkState.RELEASED)

    def test_without_thresholds_nobody_ever_waits(self) -> None:
        fleet = Fleet([PolicyClass(name="free", quantum=1)])
        for _ in range(50):
            fleet.submit("free", 10**6)
        assert len(fleet.released) == 50

    def test_a_newcomer_joins_its_classes_backlog(self) -> None:
        fleet = Fleet([one_at_a_time()])
        first, second, third = (fleet.submit("only") for _ in range(3))
        fleet.finish(fleet.released[0])
        assert ids(fleet.released) == [first.id, second.id]
        assert third.state is WorkState.WAITING

    def test_prefill_tokens_over_the_threshold_make_busy_until_the_prefill_is_done(self) -> None:
        fleet = Fleet([PolicyClass(name="p", quantum=512, prefill_busy_threshold=1000)])
        for _ in range(4):
            fleet.submit("p", 500)
        assert len(fleet.released) == 3, "1,000 booked tokens are not over 1,000"
        fleet.ledger.prefill_done(fleet.released[0].booking)
        fleet.poll()
        assert len(fleet.released) == 4

    def test_the_fraction_counts_the_engines_own_batch_size(self) -> None:
        policy = PolicyClass(name="p", quantum=512, prefill_busy_threshold_frac=0.5)
        fleet = Fleet([policy], [spec("small", max_num_batched_tokens=1000)])
        for _ in range(5):
            fleet.submit("p", 300)
        assert len(fleet.released) == 2

    def test_decisions_of_one_tick_see_each_other(self) -> None:
        """C27: 40 requests at once, two engines that take four each, and scrapes that say nothing."""
        fleet = Fleet([one_at_a_time(max_running_per_worker=4)], ["a", "b", spec("c", ready=False)])
        for name in "abc":
            fleet.pool.report(name, EngineReport(at=0.0, running=0, waiting=0))
        for _ in range(40):
            fleet.submit("only")
        where = Counter(each.decision.endpoint.spec.name for each in fleet.released)
        assert (where, len(fleet.queue)) == ({"a": 4, "b": 4}, 32)

    def test_a_late_scrape_does_not_count_our_own_requests_twice(self) -> None:
        fleet = Fleet([one_at_a_time(max_running_per_worker=4)])
        for _ in range(3):
            fleet.submit("only")
        fleet.ledger.correct(fleet.engine("a"), EngineReport(at=1.0, running=3, waiting=0))
        assert fleet.ledger.load(0).foreign == 0
        fleet.ledger.correct(fleet.engine("a"), EngineReport(at=1.0, running=3, waiting=1))
        fleet.submit("only")
        assert (len(fleet.released), len(fleet.queue)) == (3, 1), "one foreign request takes the fourth place"


class TestLimits:
    @pytest.mark.parametrize(
        ("limit", "reason"),
        [
            ({"request_queue_limit_per_worker": 2}, DropReason.QUEUE_FULL_REQUESTS),
            ({"raw_isl_token_queue_limit_per_worker": 300}, DropReason.QUEUE_FULL_RAW_TOKENS),
            ({"cached_token_queue_limit_per_worker": 100}, DropReason.QUEUE_FULL_CACHED_TOKENS),
        ],
    )
    def test_each_limit_is_compared_before_adding(self, limit: dict[str, int], reason: DropReason) -> None:
        fleet = Fleet([one_at_a_time(**limit)])
        fleet.submit("only")
        for _ in range(2):
            fleet.submit("only", 100, cached_tokens=50)
        assert not fleet.dropped, "300 waiting tokens are reached, not passed, by the second"
        fleet.submit("only", 100, cached_tokens=50)
        assert [each.reason for each in fleet.dropped] == [reason]
        assert "limit" in fleet.dropped[0].message

    def test_limits_are_per_endpoint_and_follow_the_pool_without_evicting(self) -> None:
        fleet = Fleet([one_at_a_time(request_queue_limit_per_worker=1)], ["a", "b"])
        for _ in range(4):
            fleet.submit("only")
        assert (len(fleet.queue), len(fleet.dropped)) == (2, 0)
        fleet.set_engines("a")
        fleet.poll()
        assert len(fleet.queue) == 2
        fleet.submit("only")
        assert fleet.dropped[-1].reason is DropReason.QUEUE_FULL_REQUESTS
        fleet.set_engines("a", "b", "c")
        fleet.poll()
        assert not fleet.queue
        fleet.submit("only")
        assert len(fleet.queue) == 1

    def test_capacity_that_nobody_has_polled_for_goes_to_those_who_wait(self) -> None:
        """Else the newcomer finds no backlog of its own and room, is let in past its limit, and waits after all."""
        fleet = Fleet([one_at_a_time("old"), one_at_a_time("hasty", request_queue_limit_per_worker=0)])
        first, waiting = fleet.submit("old"), fleet.submit("old")
        fleet.ledger.release(fleet.released[0].booking)
        newcomer = fleet.submit("hasty")
        assert ids(fleet.released) == [first.id, waiting.id]
        assert [(each.work, each.reason) for each in fleet.dropped] == [
            (newcomer, DropReason.QUEUE_FULL_REQUESTS)
        ]

    def test_limit_zero_never_waits_but_goes_where_there_is_room(self) -> None:
        fleet = Fleet([one_at_a_time(request_queue_limit_per_worker=0)])
        fleet.submit("only")
        fleet.submit("only")
        assert (len(fleet.released), len(fleet.dropped), len(fleet.queue)) == (1, 1, 0)

    def test_retry_after_is_the_backlog_over_the_rate_of_late(self) -> None:
        fleet = Fleet([one_at_a_time(request_queue_limit_per_worker=10)])
        fleet.submit("only", 3000)
        for _ in range(10):
            fleet.submit("only", 3000)
        for _ in range(100):
            fleet.now += 1.0
            fleet.finish(fleet.released[-1])
            fleet.submit("only", 3000)
        fleet.submit("only", 3000)
        retry_after = fleet.dropped[-1].retry_after
        assert retry_after is not None
        assert 9.0 < retry_after < 11.5, "10 requests wait, one a second is served"


class TestEndOfWaits:
    def test_a_wait_over_its_limit_ends_with_the_class_and_the_time(self) -> None:
        fleet = Fleet([one_at_a_time()])
        fleet.submit("only")
        late = fleet.submit("only", deadline=5.0)
        assert fleet.queue.next_wakeup() == 5.0
        fleet.now = 5.0
        fleet.poll()
        assert [(each.work, each.reason) for each in fleet.dropped] == [(late, DropReason.DEADLINE)]
        assert fleet.queue.next_wakeup() == float("inf")

    def test_a_deadline_that_passed_before_the_queue_is_the_same_refusal(self) -> None:
        """C22: the same cause gives the same answer, whatever the instant."""
        fleet = Fleet([one_at_a_time()])
        fleet.now = 9.0
        fleet.submit("only", arrival=0.0, deadline=5.0)
        assert fleet.dropped[0].reason is DropReason.DEADLINE

    def test_an_empty_pool_refuses_at_once_whatever_else_is_wrong(self) -> None:
        fleet = Fleet([one_at_a_time(request_queue_limit_per_worker=0)], [])
        fleet.submit("only", deadline=-1.0)
        assert fleet.dropped[0].reason is DropReason.NO_ENDPOINT
        assert fleet.dropped[0].message == "the pool has no endpoints"

    def test_a_pool_that_empties_sends_the_waiting_away(self) -> None:
        """C16: the last allowed endpoint is gone, another one exists."""
        fleet = Fleet([one_at_a_time()], ["a", "b"])
        for name in "ab":
            fleet.submit("only", constraints=Constraints(pin=name))
        waiting = fleet.submit("only", constraints=Constraints(allow=(frozenset({"a"}),)))
        fleet.set_engines("b")
        fleet.poll()
        assert [(each.work, each.reason) for each in fleet.dropped] == [(waiting, DropReason.NO_ENDPOINT)]

    def test_between_a_change_of_the_pool_and_the_next_poll_nobody_is_lost(self) -> None:
        fleet = Fleet([one_at_a_time()], ["a", "b"])
        fleet.submit("only", constraints=Constraints(pin="a"))
        cancelled, refused, moved = (fleet.submit("only", constraints=Constraints(pin="a")) for _ in range(3))
        fleet.set_engines("b")
        assert fleet.queue.cancel(cancelled)
        fleet.take(fleet.queue.reload(policy_of(one_at_a_time("new")), fleet.now))
        assert [each.work for each in fleet.dropped] == [refused, moved]
        assert len(fleet.queue) == 0

    def test_an_endpoint_that_is_back_before_the_next_poll_costs_nobody_a_thing(self) -> None:
        fleet = Fleet([one_at_a_time()], ["a", "b"])
        fleet.submit("only", constraints=Constraints(pin="a"))
        waiting = fleet.submit("only", constraints=Constraints(pin="a"))
        fleet.set_engines(spec("a", ready=False), "b")
        fleet.set_engines("a", "b")
        fleet.poll()
        fleet.finish(fleet.released[0])
        assert fleet.released[-1].work is waiting

    def test_shutting_down_refuses_the_waiting_and_the_coming(self) -> None:
        fleet = Fleet([one_at_a_time()])
        for _ in range(3):
            fleet.submit("only")
        fleet.take(fleet.queue.shut_down(fleet.now))
        fleet.submit("only")
        assert [each.reason for each in fleet.dropped] == [DropReason.SHUTTING_DOWN] * 3
        assert len(fleet.queue) == 0


class TestCancellation:
    def test_a_cancelled_head_blocks_and_costs_nobody(self) -> None:
        """C23: X is dropped while it waits at the head; Y heads its class now, and nobody is charged for X."""
        fleet = Fleet([one_at_a_time("one"), one_at_a_time("two")])
        fleet.submit("one")
        x, y, z = fleet.submit("one"), fleet.submit("one"), fleet.submit("two")
        assert fleet.queue.cancel(x)
        assert len(fleet.queue) == 2
        fleet.finish(fleet.released[0])
        fleet.finish(fleet.released[1])
        assert ids(fleet.released)[1:] == [y.id, z.id]
        assert sum(flow.queue.stats.dispatched_cost for flow in fleet.queue.flows()) == 300

    def test_a_client_that_leaves_in_the_moment_of_its_dispatch_is_not_charged(self) -> None:
        fleet = Fleet([one_at_a_time("one"), one_at_a_time("two")])
        fleet.submit("one")
        x, y = fleet.submit("one", 300), fleet.submit("one", 300)
        deficit = fleet.queue.flows()[0].deficit
        fleet.finish(fleet.released[0])
        released = fleet.released[-1]
        assert released.work is x
        assert not fleet.queue.cancel(x)
        fleet.queue.withdraw(released)
        assert fleet.queue.flows()[0].deficit >= deficit
        fleet.poll()
        assert fleet.released[-1].work is y
        assert fleet.ledger.load(0).running == 1

    def test_random_drops_leave_no_count_behind(self) -> None:
        random = Random(5)
        fleet = Fleet([one_at_a_time("one"), one_at_a_time("two", quantum=100)], ["a", "b"])
        waiting: list[Work] = []
        for _ in range(1000):
            waiting.append(fleet.submit(random.choice(["one", "two"]), random.randint(1, 2000)))
            if random.random() < 0.4:
                fleet.queue.cancel(random.choice(waiting))
            if random.random() < 0.6 and (running := [each for each in fleet.released if each.booking.open]):
                fleet.finish(random.choice(running))
        for work in waiting:
            fleet.queue.cancel(work)
        for released in fleet.released:
            fleet.ledger.release(released.booking)
        for flow in fleet.queue.flows():
            stats = flow.queue.stats
            left = (stats.waiting_requests, stats.waiting_tokens, stats.waiting_cached_tokens, flow.deficit)
            assert left == (0, 0, 0, 0)
        assert all(fleet.ledger.load(slot).running == 0 for slot in (0, 1))

    def test_a_failed_dispatch_is_refunded_and_goes_first(self) -> None:
        fleet = Fleet([one_at_a_time("one"), one_at_a_time("two")])
        fleet.submit("one")
        x, _ = fleet.submit("one"), fleet.submit("one")
        fleet.finish(fleet.released[0])
        fleet.take(fleet.queue.give_back(fleet.released[-1], fleet.now))
        assert fleet.released[-1].work is x
        assert fleet.ledger.load(0).running == 1


class TestLanes:
    def test_a_head_pinned_to_a_busy_engine_blocks_only_its_lane(self) -> None:
        """C24: A is full and B idle; r1 waits for A, r2 and r3 do not wait for r1."""
        fleet = Fleet([one_at_a_time(max_running_per_worker=2)], ["A", "B"])
        for _ in range(2):
            fleet.submit("only", constraints=Constraints(pin="A"))
        r1 = fleet.submit("only", constraints=Constraints(pin="A"), strict=1)
        r2 = fleet.submit("only", strict=2)
        r3 = fleet.submit("only", constraints=Constraints(pin="B"))
        assert [each.work for each in fleet.released[2:]] == [r2, r3]
        assert {each.decision.endpoint.spec.name for each in fleet.released[2:]} == {"B"}
        later = fleet.submit("only", constraints=Constraints(pin="A"))
        fleet.finish(fleet.released[0])
        assert fleet.released[-1].work is r1
        assert fleet.released[-1].decision.endpoint.spec.name == "A"
        assert later.state is WorkState.WAITING

    def test_constraints_beyond_the_limit_share_a_lane_and_all_are_served(self) -> None:
        fleet = Fleet([one_at_a_time()], ["a", "b", "c"], QueueLimits(max_lanes=2))
        for name in "abc":
            fleet.submit("only", constraints=Constraints(pin=name))
        for _ in range(3):
            for name in "abc":
                fleet.submit("only", constraints=Constraints(pin=name))
        assert fleet.queue.flows()[0].queue.stats.shared_lane == 3, "two have lanes of their own"
        for _ in range(9):
            fleet.finish(next(each for each in fleet.released if each.booking.open))
        served = Counter(each.decision.endpoint.spec.name for each in fleet.released)
        assert served == {"a": 4, "b": 4, "c": 4}
        assert all(
            each.work.demand.constraints.pin == each.decision.endpoint.spec.name for each in fleet.released
        )

    def test_requests_that_overflowed_are_not_overtaken_by_their_own_kind(self) -> None:
        fleet = Fleet([one_at_a_time()], ["a", "b", "c"], QueueLimits(max_lanes=1))
        for name in "abc":
            fleet.submit("only", constraints=Constraints(pin=name))
        on_a, on_c = Constraints(pin="a"), Constraints(pin="c")
        fleet.submit("only", constraints=on_a)
        fleet.submit("only", constraints=Constraints(pin="b"))
        first = fleet.submit("only", constraints=on_c)
        fleet.finish(fleet.released[0])
        assert len(fleet.queue) == 2, "the only lane of its own is free again, two wait in the common one"
        second = fleet.submit("only", constraints=on_c)
        for _ in range(3):
            fleet.finish(next(each for each in fleet.released if each.booking.open))
        order = [each.work for each in fleet.released if each.work in (first, second)]
        assert order[0] is first


class TestTaints:
    def pinned_and_waiting(self) -> tuple[Fleet, Work]:
        fleet = Fleet([one_at_a_time()], ["a", "b"])
        fleet.submit("only", constraints=Constraints(pin="a"))
        return fleet, fleet.submit("only", constraints=Constraints(pin="a"))

    def test_no_schedule_does_not_send_away_who_already_waits_for_the_endpoint(self) -> None:
        fleet, waiting = self.pinned_and_waiting()
        fleet.set_engines(spec("a", taints=(Taint.parse("drain:NoSchedule"),)), "b")
        fleet.poll()
        assert not fleet.dropped
        fleet.submit("only", constraints=Constraints(pin="a"))
        assert fleet.dropped[0].reason is DropReason.NO_ENDPOINT, "a newcomer is repelled"
        fleet.finish(fleet.released[0])
        assert fleet.released[-1].work is waiting

    def test_no_execute_sends_the_waiting_away(self) -> None:
        fleet, waiting = self.pinned_and_waiting()
        fleet.set_engines(spec("a", taints=(Taint.parse("drain:NoExecute"),)), "b")
        fleet.poll()
        assert [(each.work, each.reason) for each in fleet.dropped] == [(waiting, DropReason.NO_ENDPOINT)]

    def test_a_required_taint_that_nobody_has_is_refused_at_once(self) -> None:
        """C25."""
        fleet = Fleet([one_at_a_time()], ["a"])
        fleet.submit("only", constraints=Constraints(required_taints=frozenset({"gpu=h100"})))
        assert fleet.dropped[0].reason is DropReason.NO_ENDPOINT
        assert "required_taint" in fleet.dropped[0].message

    def test_tolerated_and_lifted_taints_let_requests_through(self) -> None:
        tainted = spec("a", taints=(Taint.parse("spot=yes:NoSchedule"),))
        fleet = Fleet([one_at_a_time()], [tainted, "b"])
        fleet.submit("only", constraints=Constraints(tolerations=(Toleration.parse("spot"),), pin="a"))
        assert len(fleet.released) == 1
        for _ in range(2):
            fleet.submit("only")
        assert (len(fleet.released), len(fleet.queue)) == (2, 1)
        fleet.finish(fleet.released[0])
        assert len(fleet.queue) == 1, "a is free, but repels"
        fleet.set_engines("a", "b")
        fleet.poll()
        assert not fleet.queue

    def test_a_pin_outside_the_allow_list_is_the_clients_mistake(self) -> None:
        fleet = Fleet([one_at_a_time()], ["a", "b"])
        fleet.submit("only", constraints=Constraints(pin="a", allow=(frozenset({"b"}),)))
        assert fleet.dropped[0].reason is DropReason.PIN_NOT_ALLOWED


class TestFlapping:
    def test_bookings_stay_with_the_endpoint_that_flaps_and_never_go_negative(self) -> None:
        """C28: same uid, so what runs there still counts when it is ready again."""
        fleet = Fleet([one_at_a_time(max_running_per_worker=9)], ["pod-0"])
        r1 = fleet.submit("only")
        fleet.set_engines(spec("pod-0", ready=False))
        fleet.set_engines("pod-0")
        r2 = fleet.submit("only")
        load = fleet.ledger.load(fleet.engine("pod-0").slot)
        assert load.running == 2
        by_work = {each.work: each for each in fleet.released}
        fleet.finish(by_work[r1])
        assert load.running == 1
        fleet.finish(by_work[r1])
        assert load.running == 1
        fleet.finish(by_work[r2])
        assert load.running == 0

    def test_what_runs_for_long_without_a_word_stays_booked(self) -> None:
        """C28: no byte for ten minutes, while the engine says that it runs; it keeps its place until its end."""
        fleet = Fleet([one_at_a_time()], ["pod-0"])
        fleet.submit("only")
        second = fleet.submit("only")
        pod = fleet.engine("pod-0")
        for _ in range(600):
            fleet.now += 1.0
            fleet.ledger.correct(pod, EngineReport(at=fleet.now, running=1, waiting=0))
            fleet.poll()
        assert fleet.ledger.load(pod.slot).running == 1
        assert len(fleet.queue) == 1
        fleet.finish(fleet.released[0])
        assert second.state is WorkState.RELEASED

    def test_a_replaced_endpoint_starts_clean(self) -> None:
        fleet = Fleet([one_at_a_time(max_running_per_worker=9)], ["pod-0"])
        fleet.submit("only")
        fleet.set_engines(spec("pod-0", uid="another"))
        load = fleet.ledger.load(fleet.engine("another").slot)
        fleet.finish(fleet.released[0])
        assert (load.running, load.prefill_tokens) == (0, 0)


class TestShares:
    def test_many_classes_large_and_small_items_all_get_their_share(self) -> None:
        """C26: five classes with equal quanta, 10,000 releases."""
        fleet = Fleet([one_at_a_time(f"c{n}", quantum=500) for n in range(5)])
        fleet.submit("c0")
        for n in range(5):
            for _ in range(2100):
                fleet.submit(f"c{n}", 100)
        order = Counter(fleet.serve_one_by_one(10_000))
        assert max(order.values()) - min(order.values()) <= (500 + 100) / 100

    def test_a_large_item_goes_after_as_many_rounds_as_it_has_quanta(self) -> None:
        fleet = Fleet([one_at_a_time("large", quantum=500), one_at_a_time("small", quantum=500)])
        fleet.submit("small", 500)
        fleet.submit("large", 10_000)
        for _ in range(60):
            fleet.submit("small", 500)
        order = fleet.serve_one_by_one(40)
        assert order.index("large") in (19, 20)

    def test_an_idle_hour_gives_no_credit(self) -> None:
        fleet = Fleet([one_at_a_time("busy"), one_at_a_time("idle")])
        fleet.submit("busy")
        for _ in range(100):
            fleet.submit("busy", 512)
        fleet.serve_one_by_one(50)
        fleet.now += 3600.0
        fleet.poll()
        for _ in range(40):
            fleet.submit("idle", 512)
        order = fleet.serve_one_by_one(20)
        assert abs(order.count("busy") - order.count("idle")) <= 1

    def test_direct_dispatches_leave_neither_debt_nor_credit(self) -> None:
        fleet = Fleet([one_at_a_time("a"), one_at_a_time("b")])
        for _ in range(30):
            fleet.submit("a", 700)
            fleet.finish(fleet.released[-1])
            assert [flow.deficit for flow in fleet.queue.flows()] == [0, 0]

    def test_small_newcomers_do_not_cost_a_wspt_class_its_quantum(self) -> None:
        """A small request that the leftover deficit covers must not use up the class's whole turn."""
        wspt = one_at_a_time("wspt", quantum=1000, queue_policy=QueuePolicy.WSPT)
        fleet = Fleet([wspt, one_at_a_time("fcfs", quantum=1000)])
        fleet.submit("fcfs", 100)
        for _ in range(300):
            fleet.submit("wspt", 900)
            fleet.submit("fcfs", 900)
        for _ in range(250):
            if fleet.released[-1].work.policy_class.name == "fcfs":
                fleet.submit("wspt", 10)
            fleet.finish(fleet.released[-1])
        served = {
            flow.queue.policy_class.name: flow.queue.stats.dispatched_cost for flow in fleet.queue.flows()
        }
        assert abs(served["wspt"] - served["fcfs"]) <= (2 + 0.9 + 0.9) * 1000


class TestTenants:
    def fleet(self) -> Fleet:
        return Fleet(
            [one_at_a_time("shared", fair_tenants=True, quantum=1000), one_at_a_time("other", quantum=1000)]
        )

    def test_tenants_of_a_class_share_its_turns_by_cost(self) -> None:
        fleet = self.fleet()
        fleet.submit("shared", tenant="first")
        for _ in range(400):
            fleet.submit("shared", 300, tenant="small")
        for _ in range(40):
            fleet.submit("shared", 3000, tenant="large")
        fleet.serve_one_by_one(100)
        served: Counter[str] = Counter()
        for each in fleet.released[1:]:
            served[each.work.tenant] += each.work.cost
        assert abs(served["small"] - served["large"]) <= 3000 + 1000

    def test_class_weights_stay_exact_above_the_tenants(self) -> None:
        fleet = self.fleet()
        fleet.submit("other")
        for n in range(300):
            fleet.submit("shared", 250, tenant=f"t{n % 7}")
            fleet.submit("other", 250)
        order = fleet.serve_one_by_one(200)
        assert abs(order.count("shared") - order.count("other")) <= 4

    def test_who_was_idle_has_saved_nothing_up(self) -> None:
        fleet = self.fleet()
        fleet.submit("shared", tenant="steady")
        for _ in range(300):
            fleet.submit("shared", 500, tenant="steady")
        fleet.serve_one_by_one(100)
        for _ in range(100):
            fleet.submit("shared", 500, tenant="returning")
        fleet.serve_one_by_one(40)
        late = Counter(each.work.tenant for each in fleet.released[-40:])
        assert abs(late["steady"] - late["returning"]) <= 2

    def test_tenants_beyond_the_limit_share_the_turns_of_one(self) -> None:
        classes = [one_at_a_time("shared", fair_tenants=True)]
        fleet = Fleet(classes, ["a"], QueueLimits(max_tenants=3))
        fleet.submit("shared", tenant="x")
        for n in range(50):
            fleet.submit("shared", tenant=f"t{n}")
        assert fleet.queue.flows()[0].queue.tenants <= 4
        assert fleet.queue.flows()[0].queue.stats.shared_tenant == 47
        fleet.serve_one_by_one(50)
        assert len(fleet.queue) == 0


class TestReload:
    def waiting_fleet(self) -> Fleet:
        fleet = Fleet([one_at_a_time("a"), one_at_a_time("b")])
        fleet.submit("a")
        for number in range(6):
            fleet.submit("ab"[number % 2])
        return fleet

    def test_a_class_under_new_numbers_keeps_its_requests_and_deficit(self) -> None:
        fleet = self.waiting_fleet()
        before = [flow.deficit for flow in fleet.queue.flows()]
        new = policy_of(one_at_a_time("a", quantum=2048), one_at_a_time("b"))
        fleet.take(fleet.queue.reload(new, fleet.now))
        assert [flow.deficit for flow in fleet.queue.flows()] == before
        assert [flow.quantum for flow in fleet.queue.flows()] == [2048, 512]
        assert {work.policy_class.quantum for work in fleet.queue.flows()[0].queue} == {2048}

    def test_a_removed_class_moves_its_requests_in_order_of_arrival(self) -> None:
        fleet = self.waiting_fleet()
        waiting = sorted(
            (work for flow in fleet.queue.flows() for work in flow.queue), key=lambda w: w.sequence
        )
        fleet.take(fleet.queue.reload(policy_of(one_at_a_time("new")), fleet.now))
        assert list(fleet.queue.flows()[0].queue) == waiting
        order = []
        for _ in waiting:
            fleet.finish(fleet.released[-1])
            order.append(fleet.released[-1].work)
        assert order == waiting

    def test_a_new_order_takes_the_requests_over(self) -> None:
        fleet = Fleet([one_at_a_time("a")])
        fleet.submit("a")
        large, small = fleet.submit("a", 900), fleet.submit("a", 10)
        fleet.take(
            fleet.queue.reload(policy_of(one_at_a_time("a", queue_policy=QueuePolicy.WSPT)), fleet.now)
        )
        assert list(fleet.queue.flows()[0].queue) == [small, large]

    def test_a_wider_gate_lets_the_waiting_go_at_once(self) -> None:
        fleet = self.waiting_fleet()
        wide = [one_at_a_time(name, max_running_per_worker=100) for name in "ab"]
        fleet.take(fleet.queue.reload(policy_of(*wide), fleet.now))
        assert (len(fleet.released), len(fleet.queue)) == (7, 0)

    def test_counters_of_a_class_with_a_new_order_go_on(self) -> None:
        fleet = self.waiting_fleet()
        before = fleet.queue.flows()[0].queue.stats
        arrived = before.arrived
        policy = policy_of(one_at_a_time("a", queue_policy=QueuePolicy.WSPT), one_at_a_time("b"))
        fleet.take(fleet.queue.reload(policy, fleet.now))
        after = fleet.queue.flows()[0].queue.stats
        assert (after.arrived, after.waiting_requests) == (arrived, 3)

    def test_a_dispatch_that_fails_after_its_class_was_removed_waits_in_another(self) -> None:
        fleet = self.waiting_fleet()
        failed = fleet.released[0]
        fleet.take(fleet.queue.reload(policy_of(one_at_a_time("new")), fleet.now))
        fleet.take(fleet.queue.give_back(failed, fleet.now))
        assert fleet.released[-1].work is failed.work
        assert fleet.released[-1].work.policy_class.name == "new"

    @pytest.mark.parametrize("order", QueuePolicy)
    def test_a_class_that_is_bound_to_other_endpoints_takes_those_who_wait_along(
        self, order: QueuePolicy
    ) -> None:
        """Each at its place: what was given back first, then as the class orders them."""
        east, west = spec("a", labels={"zone": "east"}), spec("b", labels={"zone": "west"})
        classes = {
            zone: one_at_a_time("p", queue_policy=order, allowed_endpoints={"zone": zone})
            for zone in ("east", "west")
        }
        fleet = Fleet([classes["east"]], [east, west])
        queue = fleet.queue

        def submit(cost: int, own: Constraints = Constraints()) -> Work:
            work = fleet.work("p", cost, constraints=own)
            work.demand = structs.replace(work.demand, constraints=own.within(classes["east"]))
            fleet.take(queue.submit(work, fleet.now))
            return work

        submit(100)
        waiting = [submit(cost) for cost in (90, 80, 95)]
        pinned = submit(50, Constraints(pin="a"))
        (flow,) = queue.flows()
        before = [work for work in flow.queue if work is not pinned]
        deficit = flow.deficit
        fleet.take(queue.reload(policy_of(classes["west"]), fleet.now))
        # The one in front goes to the other endpoint at once; the pinned one has nowhere to go any more.
        assert [each.decision.endpoint.spec.name for each in fleet.released] == ["a", "b"]
        assert [(each.work, each.reason) for each in fleet.dropped] == [(pinned, DropReason.NO_ENDPOINT)]
        assert flow is queue.flows()[0]
        assert fleet.released[-1].deficit_before >= deficit
        assert [fleet.released[-1].work, *flow.queue] == before
        assert {work.demand.constraints for work in waiting} == {Constraints().within(classes["west"])}
        while len(queue):
            fleet.finish(fleet.released[-1])
        assert [each.work for each in fleet.released[1:]] == before

    def test_what_was_given_back_stays_in_front_when_the_class_is_bound_anew(self) -> None:
        """Although by the class's order it would be last."""
        least_first = {"queue_policy": QueuePolicy.WSPT}
        fleet = Fleet([one_at_a_time("p", **least_first)], [spec("a", labels={"zone": "x"})])
        failed = fleet.submit("p", 900)
        small = [fleet.submit("p", cost) for cost in (100, 200)]
        fleet.ledger.book(fleet.engine("a"), 1, 0.0)
        fleet.take(fleet.queue.give_back(fleet.released[0], fleet.now))
        bound = one_at_a_time("p", allowed_endpoints={"zone": "x"}, **least_first)
        fleet.take(fleet.queue.reload(policy_of(bound), fleet.now))
        assert list(fleet.queue.flows()[0].queue) == [failed, *small]

    def test_tolerations_of_a_class_hold_for_those_who_wait_already(self) -> None:
        """And no longer, when the policy takes them away; a request that tolerates by itself stays."""
        spot = spec("a", taints=(Taint("spot", effect=TaintEffect.NO_EXECUTE),))
        tolerant = one_at_a_time("p", tolerations=("spot",))
        fleet = Fleet([tolerant], [spot])
        own = Constraints(tolerations=(Toleration("spot"),))
        for constraints in (own, Constraints(), own):
            work = fleet.work("p", 100, constraints=constraints)
            work.demand = structs.replace(work.demand, constraints=constraints.within(tolerant))
            fleet.take(fleet.queue.submit(work, fleet.now))
        fleet.take(fleet.queue.reload(policy_of(one_at_a_time("p")), fleet.now))
        assert [each.work.id for each in fleet.dropped] == ["2"]
        assert [work.id for work in fleet.queue.flows()[0].queue] == ["3"]

    def test_a_failed_dispatch_comes_back_under_the_constraints_of_the_new_policy(self) -> None:
        fleet = self.waiting_fleet()
        fleet.take(
            fleet.queue.reload(policy_of(one_at_a_time("a", allowed_endpoints={"zone": "none"})), fleet.now)
        )
        fleet.take(fleet.queue.give_back(fleet.released[0], fleet.now))
        assert fleet.dropped[-1].work is fleet.released[0].work
        assert fleet.dropped[-1].reason is DropReason.NO_ENDPOINT

    def test_tenants_keep_their_turns_when_their_class_is_bound_anew(self) -> None:
        fleet = Fleet([one_at_a_time("p", fair_tenants=True)], [spec("a", labels={"zone": "x"})])
        fleet.submit("p")
        for number in range(12):
            fleet.submit("p", 100 + number, tenant=f"t{number % 3}")
        fleet.serve_one_by_one(4)
        queue = fleet.queue.flows()[0].queue
        before = {tenant: flow.deficit for tenant, flow in queue._tenants.items()}
        bound = one_at_a_time("p", fair_tenants=True, allowed_endpoints={"zone": "x"})
        fleet.take(fleet.queue.reload(policy_of(bound), fleet.now))
        assert {tenant: flow.deficit for tenant, flow in queue._tenants.items()} == before
        fleet.serve_one_by_one(8)
        assert len(fleet.queue) == 0

    def test_cancelling_still_finds_a_request_that_moved(self) -> None:
        fleet = self.waiting_fleet()
        waiting = [work for flow in fleet.queue.flows() for work in flow.queue]
        fleet.take(fleet.queue.reload(policy_of(one_at_a_time("new")), fleet.now))
        assert all(fleet.queue.cancel(work) for work in waiting)
        assert len(fleet.queue) == 0


def test_ties_do_not_all_fall_on_one_endpoint() -> None:
    """C29: prompts shorter than a block, one after another and all at once."""
    fleet = Fleet([PolicyClass(name="p", quantum=512)], ["a", "b", "c"])
    for _ in range(30):
        fleet.submit("p", 5)
        fleet.finish(fleet.released[-1])
    one_by_one = Counter(each.decision.endpoint.spec.name for each in fleet.released)
    assert max(one_by_one.values()) <= 15
    fleet.released.clear()
    for _ in range(30):
        fleet.submit("p", 5)
    at_once = Counter(each.decision.endpoint.spec.name for each in fleet.released)
    assert all(9 <= count <= 11 for count in at_once.values())


def test_a_class_selector_keeps_its_requests_on_its_endpoints() -> None:
    west = Constraints(selector=LabelSelector.of({"zone": "west"}))
    fleet = Fleet([one_at_a_time()], [spec("a", labels={"zone": "east"}), spec("b", labels={"zone": "west"})])
    fleet.submit("only", constraints=west)
    fleet.submit("only", constraints=west)
    assert [each.decision.endpoint.spec.name for each in fleet.released] == ["b"]
    moved = replace(fleet.engine("a").spec, labels={"zone": "west"})
    fleet.set_engines(moved, fleet.engine("b").spec)
    fleet.poll()
    assert [each.decision.endpoint.spec.name for each in fleet.released] == ["b", "a"]


def test_two_classes_that_share_one_endpoint_both_get_their_share_while_a_third_uses_another() -> None:
    """A blocked class keeps its place: else the ring passes from `i` to `k` while `j` is blocked, every time."""
    on_a, on_b = Constraints(pin="a"), Constraints(pin="b")
    fleet = Fleet([one_at_a_time(name) for name in "ijk"], ["a", "b"])
    for _ in range(300):
        fleet.submit("i", 100, constraints=on_a)
        fleet.submit("k", 100, constraints=on_b)
        fleet.submit("j", 100, constraints=on_a)
    for _ in range(200):
        for name in "ab":
            done = next(
                each
                for each in fleet.released
                if each.booking.open and each.decision.endpoint.spec.name == name
            )
            fleet.finish(done)
    served = Counter(each.work.policy_class.name for each in fleet.released)
    assert abs(served["i"] - served["j"]) * 100 <= 2 * 512 + 100 + 100


class TestManyAtOnce:
    def test_one_poll_decides_no_more_than_its_limit_and_the_order_is_that_of_a_poll_without(self) -> None:
        """A hundred places become free together; the event loop has others to serve in between."""

        def fleet(**limits: float) -> Fleet:
            classes = [
                PolicyClass(name=name, quantum=quantum, max_running_per_worker=100)
                for name, quantum in (("p", 300), ("q", 100))
            ]
            fleet = Fleet(classes, ("a",), QueueLimits(**limits))
            for _ in range(100):
                fleet.submit("p")
            for number in range(100):
                fleet.submit("pq"[number % 2], 50 + number)
            for released in fleet.released:
                fleet.ledger.release(released.booking)
            fleet.released.clear()
            return fleet

        whole, limited = fleet(), fleet(outcomes_a_poll=30)
        assert (len(whole.poll()), whole.queue.next_wakeup()) == (100, inf)
        sizes = []
        while limited.queue.next_wakeup() == -inf or not sizes:
            sizes.append(len(limited.poll()))
        assert sizes == [30, 30, 30, 10]
        orders = [[each.work.id for each in served.released] for served in (whole, limited)]
        assert orders[0] == orders[1]

"""Charges that turn out wrong: refunds, settlements, and accounts that have been closed meanwhile."""

from __future__ import annotations

from collections import Counter
from typing import Any

from picker.policy.model import PolicyClass
from picker.queueing.work import DropReason, WorkState
from picker.selection.constraints import Constraints
from tests.queueing.fleet import Fleet


def one_at_a_time(name: str, **changes: Any) -> PolicyClass:
    return PolicyClass(**{"name": name, "quantum": 1000, "max_running_per_worker": 1, **changes})


def output_fleet() -> Fleet:
    return Fleet([one_at_a_time("p", output_charge=2.0), one_at_a_time("q", output_charge=2.0)])


def deficit(fleet: Fleet, number: int = 0) -> int:
    return fleet.queue.flows()[number].deficit


class TestSettlement:
    def test_the_estimate_is_charged_and_settled(self) -> None:
        fleet = output_fleet()
        fleet.submit("p")
        first = fleet.submit("p", 100, expected_output_tokens=200)
        for _ in range(2):
            fleet.submit("p", 100, expected_output_tokens=200)
        assert first.cost == 500
        fleet.finish(fleet.released[-1])
        before = deficit(fleet)
        fleet.queue.settle(first, 50)
        assert deficit(fleet) == before + 300
        stats = fleet.queue.flows()[0].queue.stats
        assert (stats.settled_cost, stats.served_cost) == (-300, 100 + 500 - 300)

    def test_no_limit_of_output_that_a_client_writes_costs_more_than_the_estimate_may(self) -> None:
        """It would block its lane for as long, and come back as credit for its class when it is settled."""
        fleet = output_fleet()
        assert fleet.submit("p", 100, expected_output_tokens=2**53).cost == 100 + 2 * 4096

    def test_a_long_answer_leaves_a_debt_that_is_paid_off(self) -> None:
        fleet = output_fleet()
        fleet.submit("p")
        for _ in range(40):
            fleet.submit("p", 500)
            fleet.submit("q", 500)
        fleet.serve_one_by_one(4)
        late = next(each.work for each in fleet.released[1:] if each.work.policy_class.name == "p")
        fleet.queue.settle(late, 2000)
        assert deficit(fleet) < -3000
        order = Counter(fleet.serve_one_by_one(20))
        assert order["q"] - order["p"] >= 4000 // 500 - 2
        assert order["p"] > 0

    def test_what_an_idle_class_was_charged_too_much_gives_it_no_credit(self) -> None:
        """Each of these was charged 2,100 for 100, but an idle class pays nothing in the end, and saves nothing."""
        fleet = Fleet([one_at_a_time("p", output_charge=2.0), one_at_a_time("q")])
        done = []
        for _ in range(50):
            done.append(fleet.submit("p", 100, expected_output_tokens=1000))
            fleet.finish(fleet.released[-1])
        fleet.submit("q", 500)
        for _ in range(60):
            fleet.submit("p", 500)
            fleet.submit("q", 500)
        for work in done:
            fleet.queue.settle(work, 0)
        assert deficit(fleet) == 0
        order = Counter(fleet.serve_one_by_one(40))
        assert abs(order["p"] - order["q"]) <= 4

    def test_a_tenant_settles_with_its_own_account(self) -> None:
        fleet = Fleet([one_at_a_time("p", output_charge=1.0, fair_tenants=True)])
        fleet.submit("p", tenant="x")
        for _ in range(30):
            for tenant in "xy":
                fleet.submit("p", 500, tenant=tenant)
        fleet.serve_one_by_one(4)
        late = next(each.work for each in fleet.released[1:] if each.work.tenant == "x")
        fleet.queue.settle(late, 3000)
        fleet.released.clear()
        fleet.submit("p", 500, tenant="x")
        fleet.ledger.release(fleet.ledger.load(0).bookings.copy().pop())
        fleet.poll()
        fleet.serve_one_by_one(15)
        served = Counter(each.work.tenant for each in fleet.released)
        assert served["y"] - served["x"] >= 3000 // 500 - 2

    def test_a_new_price_does_not_change_what_was_charged_under_the_old_one(self) -> None:
        fleet = output_fleet()
        work = fleet.work("p", 100, expected_output_tokens=100)
        work.policy_class = one_at_a_time("p", output_charge=50.0)
        assert work.cost == work.cost_of(100) == 300


class TestRefunds:
    def test_a_withdrawn_request_is_in_no_count_of_what_was_served(self) -> None:
        fleet = Fleet([one_at_a_time("p")])
        fleet.submit("p", 300)
        fleet.queue.withdraw(fleet.released[0])
        stats = fleet.queue.flows()[0].queue.stats
        assert (stats.arrived, stats.dispatched_requests, stats.refunded, stats.cancelled) == (1, 1, 1, 1)
        assert stats.served_cost == 0
        assert (stats.waiting_requests, fleet.ledger.load(0).running) == (0, 0)

    def test_a_refund_to_a_class_that_was_idle_since_gives_no_credit(self) -> None:
        fleet = Fleet([one_at_a_time("p"), one_at_a_time("q")])
        fleet.submit("p", 50_000)
        lost = fleet.released[0]
        for _ in range(3):
            fleet.submit("p", 500)
        assert deficit(fleet) == 0
        fleet.queue.withdraw(lost)
        assert deficit(fleet) == 0

    def test_a_failed_dispatch_gets_its_charge_back_once(self) -> None:
        fleet = Fleet([one_at_a_time("p"), one_at_a_time("q")])
        fleet.submit("q", 100)
        for _ in range(3):
            fleet.submit("p", 700)
            fleet.submit("q", 700)
        fleet.finish(fleet.released[0])
        failed = fleet.released[-1]
        name = failed.work.policy_class.name
        number = "pq".index(name)
        fleet.submit(name, 100)
        assert deficit(fleet, number) == 300
        fleet.take(fleet.queue.give_back(failed, fleet.now))
        again = fleet.released[-1]
        assert again.work is failed.work
        assert (again.deficit_before, again.deficit_after) == (1000, 300)
        assert fleet.queue.flows()[number].queue.stats.served_cost == sum(
            each.work.cost
            for each in fleet.released
            if each.work.policy_class.name == name and each is not failed
        )

    def test_a_failed_dispatch_whose_endpoint_is_gone_is_refused_not_parked(self) -> None:
        fleet = Fleet([one_at_a_time("p")], ["a", "b"])
        fleet.submit("p", constraints=Constraints(pin="a"))
        failed = fleet.released[0]
        fleet.set_engines("b")
        fleet.take(fleet.queue.give_back(failed, fleet.now))
        assert [each.reason for each in fleet.dropped] == [DropReason.NO_ENDPOINT]
        assert len(fleet.queue) == 0

    def test_a_failed_dispatch_still_has_its_deadline(self) -> None:
        fleet = Fleet([one_at_a_time("p")])
        work = fleet.submit("p", deadline=5.0)
        failed = fleet.released[0]
        fleet.ledger.release(failed.booking)
        fleet.submit("p")
        fleet.take(fleet.queue.give_back(failed, fleet.now))
        assert work.state is WorkState.WAITING
        fleet.now = fleet.queue.next_wakeup()
        fleet.poll()
        assert [(each.work, each.reason) for each in fleet.dropped] == [(work, DropReason.DEADLINE)]


def test_the_rate_of_a_class_is_known_after_its_first_seconds() -> None:
    """A window that is not full yet must not count as one in which little was done."""
    fleet = Fleet([one_at_a_time("p", request_queue_limit_per_worker=5)])
    for _ in range(6):
        fleet.submit("p", 1000)
    for _ in range(4):
        fleet.now += 0.5
        fleet.finish(fleet.released[-1])
        fleet.submit("p", 1000)
    fleet.submit("p", 1000)
    retry_after = fleet.dropped[-1].retry_after
    assert retry_after is not None
    assert 1.5 < retry_after < 3.0, "5 wait, 2 a second are served"

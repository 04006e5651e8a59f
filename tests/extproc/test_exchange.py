"""Routed requests whose end nobody tells: what is kept of them goes when the ledger gives their bookings up."""

from __future__ import annotations

from picker.extproc.exchange import Exchanges
from picker.policy.model import PolicyClass
from picker.pool.calibration import Calibration
from picker.pool.endpoint import EngineReport
from tests.queueing.fleet import Fleet


def routed(fleet: Fleet, count: int) -> Exchanges:
    """Requests on their way to the fleet's only engine."""
    exchanges = Exchanges(fleet.pool, fleet.ledger, Calibration(), lambda: fleet.now, lambda: None)
    for number in range(count):
        fleet.submit("only")
        exchanges.begin(fleet.released[-1], observes_response=False, last_block=number)
    assert exchanges.stats.open == len(exchanges) == count
    return exchanges


def test_of_an_engine_that_has_long_been_idle() -> None:
    """The gateway died, and its access log with it."""
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = routed(fleet, 3)
    for second in range(1, 5):
        fleet.ledger.correct(fleet.engine("a"), EngineReport(at=float(second), running=0, waiting=0))
    exchanges.forget_reaped()
    assert exchanges.stats.open == len(exchanges) == 0
    assert (fleet.ledger.stats.reaped, fleet.ledger.load(0).running) == (3, 0)
    exchanges.block_stored(0, 1)
    assert exchanges.stats.prefills_by_kv_event == 0


def test_of_an_engine_that_has_left_the_pool() -> None:
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = routed(fleet, 3)
    fleet.set_engines("b")
    exchanges.forget_reaped()
    assert len(exchanges) == 0
    assert fleet.ledger.stats.reaped == 3
    assert fleet.ledger.stats.booked == fleet.ledger.stats.released + fleet.ledger.stats.reaped


def test_those_that_still_run_are_kept() -> None:
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = routed(fleet, 3)
    fleet.ledger.correct(fleet.engine("a"), EngineReport(at=1.0, running=3, waiting=0))
    exchanges.forget_reaped()
    assert len(exchanges) == 3


def test_of_a_client_that_left_before_our_answer_was_taken_up() -> None:
    """The gateway's log then knows the request by the id of its own; another's id ends nobody's request."""
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = Exchanges(fleet.pool, fleet.ledger, Calibration(), lambda: fleet.now, lambda: None)
    for gateway_id in ("first", "same", "same"):
        fleet.submit("only")
        exchanges.begin(fleet.released[-1], observes_response=False, last_block=None, gateway_id=gateway_id)
    exchanges.logged("first", None)
    exchanges.logged("first", None)
    exchanges.logged("nobody", None)
    assert (len(exchanges), exchanges.stats.unknown_access_log_entries) == (2, 2)
    assert fleet.ledger.load(0).running == 2
    exchanges.logged("same", None)
    for released in fleet.released:
        exchanges.logged(released.work.id, None)
    assert (len(exchanges), fleet.ledger.load(0).running) == (0, 0)

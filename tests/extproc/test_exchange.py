"""Routed requests whose end nobody tells: what is kept of them goes when the ledger gives their bookings up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest

from picker.extproc.exchange import Exchanges
from picker.extproc.following import Followed
from picker.kvcache.keys import block_keys
from picker.kvcache.predicted import Prediction
from picker.policy.model import PolicyClass
from picker.pool.calibration import Calibration
from picker.pool.endpoint import Endpoint, EngineReport
from picker.queueing.work import Released
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
    for second in range(1, 6):
        fleet.ledger.correct(fleet.engine("a"), EngineReport(at=float(second), running=0, waiting=0))
    exchanges.expire(fleet.now)
    assert exchanges.stats.open == len(exchanges) == 0
    assert (fleet.ledger.stats.reaped, fleet.ledger.load(0).running) == (3, 0)
    exchanges.block_stored(0, 1)
    assert exchanges.stats.prefills_by_kv_event == 0


def test_of_an_engine_that_has_left_the_pool() -> None:
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = routed(fleet, 3)
    fleet.set_engines("b")
    exchanges.expire(fleet.now)
    assert len(exchanges) == 0
    assert fleet.ledger.stats.reaped == 3
    assert fleet.ledger.stats.booked == fleet.ledger.stats.released + fleet.ledger.stats.reaped


def test_those_that_still_run_are_kept() -> None:
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = routed(fleet, 3)
    fleet.ledger.correct(fleet.engine("a"), EngineReport(at=1.0, running=3, waiting=0))
    exchanges.expire(fleet.now)
    assert len(exchanges) == 3


def test_of_a_request_that_is_older_than_any_may_be() -> None:
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = routed(fleet, 1)
    exchanges.longest_request = 100.0
    fleet.now += 60.0
    fleet.submit("only")
    exchanges.begin(fleet.released[-1], observes_response=False, last_block=None)
    exchanges.expire(fleet.now + 30.0)
    assert len(exchanges) == 2
    exchanges.expire(fleet.now + 50.0)
    assert (len(exchanges), fleet.ledger.load(0).running, exchanges.stats.given_up) == (1, 1, 1)


def test_of_a_decision_that_the_gateway_never_got() -> None:
    """Nobody is charged for it: the class has its deficit back, and nothing is booked."""
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = Exchanges(
        fleet.pool,
        fleet.ledger,
        Calibration(),
        lambda: fleet.now,
        lambda: None,
        on_never_sent=fleet.queue.withdraw,
    )
    fleet.submit("only")
    exchange = exchanges.begin(fleet.released[-1], observes_response=False, last_block=3)
    exchange.finished(False, None)
    stats = fleet.queue.flows()[0].queue.stats
    assert (len(exchanges), fleet.ledger.load(0).running) == (0, 0)
    assert (stats.served_cost, stats.refunded, stats.cancelled) == (0, 1, 1)


def test_of_a_client_that_left_before_our_answer_was_taken_up() -> None:
    """The gateway's log then knows the request by the id of its own; another's id ends nobody's request."""
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = Exchanges(fleet.pool, fleet.ledger, Calibration(), lambda: fleet.now, lambda: None)
    for gateway_id in ("first", "same", "same"):
        fleet.submit("only")
        exchanges.begin(fleet.released[-1], observes_response=False, last_block=None, gateway_id=gateway_id)
    exchanges.logged("first", True)
    exchanges.logged("first", True)
    exchanges.logged("nobody", True)
    assert (len(exchanges), exchanges.stats.unknown_access_log_entries) == (2, 2)
    assert fleet.ledger.load(0).running == 2
    exchanges.logged("same", True)
    for released in fleet.released:
        exchanges.logged(released.work.id, True)
    assert (len(exchanges), fleet.ledger.load(0).running) == (0, 0)


def accounted(fleet: Fleet) -> Exchanges:
    """An engine that is known to prefill 1,000 tokens a second."""
    calibration = Calibration()
    for _ in range(8):
        calibration.observe(0, 1000, 1.0)
    return Exchanges(fleet.pool, fleet.ledger, calibration, lambda: fleet.now, lambda: None)


def test_the_time_to_the_first_token_is_compared_with_what_was_expected() -> None:
    """Once a request, by the first signal; a request served elsewhere says nothing of either endpoint."""
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = accounted(fleet)
    fleet.submit("only", 3000)
    exchange = exchanges.begin(fleet.released[-1], observes_response=True, last_block=7)
    fleet.now += 4.0
    exchanges.block_stored(0, 7)
    fleet.now += 1.0
    exchange.prefilled(fleet.now)
    account = exchanges.accounts.of(fleet.engine("a"))
    assert (account.prompt_tokens, account.cached_tokens) == (3000, 0)
    assert (account.timed, account.predicted_ttft, account.observed_ttft) == (1, 3.0, 4.0)


def test_a_request_that_was_served_elsewhere_says_nothing_of_speed() -> None:
    fleet = Fleet([PolicyClass(name="only", quantum=512)], engines=("a", "b"))
    exchanges = accounted(fleet)
    fleet.submit("only", 3000)
    released = fleet.released[-1]
    (other,) = [each for each in released.decision.candidates if each is not released.decision.chosen][:1]
    moves = []

    def moved(released: Released, endpoint: Endpoint) -> Sequence[Prediction]:
        moves.append((released, endpoint))
        return ()

    exchanges.on_moved = moved
    exchange = exchanges.begin(released, observes_response=True, last_block=7)
    exchange.served(released.decision.endpoint.spec.authority)
    exchange.served(other.endpoint.spec.authority)
    assert moves == [(released, other.endpoint)]
    exchanges.block_stored(released.decision.endpoint.slot, 7)
    assert exchange.booking.prefill_tokens == 3000, (
        "a block that the first choice has stored is another request's"
    )
    exchanges.block_stored(other.endpoint.slot, 7)
    assert (exchange.booking.endpoint, exchange.booking.prefill_tokens) == (other.endpoint, 0)
    assert [exchanges.accounts.of(fleet.engine(name)).timed for name in "ab"] == [0, 0]


def test_an_account_goes_with_its_endpoint_and_burdens_no_other() -> None:
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = accounted(fleet)
    gone = fleet.engine("a")
    exchanges.accounts.of(gone).timed = 5
    fleet.set_engines()
    fleet.set_engines("b")
    exchanges.accounts.of(gone).timed += 1
    assert fleet.engine("b").slot == gone.slot
    assert exchanges.accounts.of(fleet.engine("b")).timed == 0


PROMPT = block_keys(range(4), 1)
EVENT_STREAM = [("content-type", "text/event-stream")]


def predicting(
    *, observes_response: bool = True, last_block: int | None = None
) -> tuple[Exchanges, Followed]:
    """A request on its way to an engine that is taken to have its prompt cached because of it."""
    fleet = Fleet([PolicyClass(name="only", quantum=512)])
    exchanges = accounted(fleet)
    fleet.submit("only")
    exchange = exchanges.begin(
        fleet.released[-1], observes_response=observes_response, last_block=last_block, gateway_id="id"
    )
    exchange.predictions = [exchanges.predicted.predict(0, PROMPT, fleet.now, ttl=60.0, capacity=100)]
    return exchanges, Followed(exchange, lambda: fleet.now)


def served(exchange: Followed) -> None:
    exchange.response_headers(200, [("content-type", "application/json")], None)


def stream_begun(exchange: Followed) -> None:
    """An engine's headers come before it has read the prompt."""
    exchange.response_headers(200, EVENT_STREAM, None)


def first_event(exchange: Followed) -> None:
    stream_begun(exchange)
    exchange.response_chunk(b"data: {}\n\n")


def refused(exchange: Followed) -> None:
    """The gateway's own answer: it could not connect."""
    exchange.response_headers(503, [("content-type", "text/plain")], None)


def refused_in_a_stream(exchange: Followed) -> None:
    exchange.response_headers(429, EVENT_STREAM, None)


def silent(exchange: Followed) -> None:
    pass


@pytest.mark.parametrize(
    ("happens", "delivered", "cached"),
    [
        (served, True, 4),
        (first_event, True, 4),
        (stream_begun, True, 0),
        (refused, True, 0),
        (refused_in_a_stream, True, 0),
        (silent, True, 0),
        (silent, False, 0),
    ],
)
def test_who_was_never_served_leaves_no_prediction(
    happens: Callable[[Followed], None], delivered: bool, cached: int
) -> None:
    exchanges, exchange = predicting()
    happens(exchange)
    exchange.finished(delivered)
    assert exchanges.predicted.blocks_of(0) == cached


@pytest.mark.parametrize(("was_served", "cached"), [(True, 4), (False, 0)])
def test_the_access_log_tells_too_whether_a_request_was_served(was_served: bool, cached: int) -> None:
    exchanges, exchange = predicting(observes_response=False)
    exchange.finished(True)
    assert exchanges.predicted.blocks_of(0) == 4
    exchanges.logged("id", was_served)
    assert exchanges.predicted.blocks_of(0) == cached


def test_a_stored_block_shows_that_a_request_has_arrived() -> None:
    exchanges, _ = predicting(observes_response=False, last_block=PROMPT[-1])
    exchanges.block_stored(0, PROMPT[-1])
    exchanges.logged("id", False)
    assert exchanges.predicted.blocks_of(0) == 4

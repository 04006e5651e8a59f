"""What frees a booking's prefill, what times it, and what ends it."""

from __future__ import annotations

from picker.extproc.exchange import Exchanges
from picker.extproc.following import Followed
from picker.policy.model import PolicyClass
from tests.queueing.fleet import Fleet

EVENT_STREAM = [("content-type", "text/event-stream; charset=utf-8")]
JSON = [("content-type", "application/json")]


class OneRequest:
    """One request of 1,000 tokens on one engine, decided at 0 s."""

    def __init__(self, *, observes_response: bool = True, last_block: int | None = None) -> None:
        self.fleet = Fleet([PolicyClass(name="p", quantum=512)])
        self.exchanges = Exchanges(
            self.fleet.pool,
            self.fleet.ledger,
            self.fleet.selector.calibration,
            lambda: self.fleet.now,
            lambda: None,
        )
        self.fleet.submit("p", 1000)
        routed = self.exchanges.begin(
            self.fleet.released[0], observes_response=observes_response, last_block=last_block
        )
        self.exchange = Followed(routed, lambda: self.fleet.now)

    @property
    def load(self) -> tuple[int, int]:
        load = self.fleet.ledger.load(0)
        return load.running, load.prefill_tokens

    @property
    def timings(self) -> list[float]:
        """Tokens per second that the calibration was told of."""
        return [
            rate for samples in self.fleet.selector.calibration.rates.samples.values() for rate in samples
        ]


def test_a_stream_is_prefilled_at_its_first_event_not_at_its_headers() -> None:
    followed = OneRequest()
    followed.exchange.response_headers(200, EVENT_STREAM, None)
    assert followed.load == (1, 1000)
    followed.exchange.response_chunk(b"")
    assert followed.load == (1, 1000)
    followed.fleet.now = 0.5
    followed.exchange.response_chunk(b"data: {}\n\n")
    assert (followed.load, followed.timings) == ((1, 0), [2000.0])


def test_an_answer_in_one_piece_frees_the_prefill_and_times_nothing() -> None:
    followed = OneRequest()
    followed.fleet.now = 9.0
    followed.exchange.response_headers(200, JSON, None)
    assert (followed.load, followed.timings) == ((1, 0), [])


def test_an_error_frees_the_prefill_too() -> None:
    followed = OneRequest()
    followed.exchange.response_headers(500, [], None)
    assert followed.load == (1, 0)


def test_the_pods_own_event_tells_of_the_prefill_and_times_it() -> None:
    followed = OneRequest(observes_response=False, last_block=77)
    followed.fleet.now = 0.25
    followed.exchanges.block_stored(0, 76)
    assert followed.load == (1, 1000)
    followed.exchanges.block_stored(0, 77)
    assert (followed.load, followed.timings) == ((1, 0), [4000.0])
    followed.exchanges.block_stored(0, 77)
    assert followed.exchanges.stats.prefills_by_kv_event == 1


def test_a_prefill_that_nothing_tells_of_is_over_after_twice_its_time() -> None:
    """By the rate that was learned, else by the one that is assumed; also what was booked before it takes its time."""
    followed = OneRequest(observes_response=False)
    followed.exchanges.expire(0.99)
    assert followed.load == (1, 1000)
    followed.exchanges.expire(1.0)
    assert (followed.load, followed.exchanges.stats.prefills_by_time) == ((1, 0), 1)
    for _ in range(8):
        followed.fleet.selector.calibration.observe(0, 1000, 2.0)
    followed.fleet.submit("p", 600)
    followed.fleet.submit("p", 400)
    for released in followed.fleet.released[1:]:
        followed.exchanges.begin(released, observes_response=False, last_block=None)
    followed.exchanges.expire(2.4)
    assert followed.load == (3, 400)
    followed.exchanges.expire(4.0)
    assert followed.load == (3, 0)


def test_a_prefill_that_was_told_of_in_time_does_not_end_again() -> None:
    followed = OneRequest(observes_response=False, last_block=77)
    followed.exchanges.block_stored(0, 77)
    followed.exchanges.expire(100.0)
    assert followed.exchanges.stats.prefills_by_time == 0
    followed.exchange.finished(True)
    followed.exchanges.logged(followed.fleet.released[0].work.id, True)
    assert followed.load == (0, 0)


def test_the_stream_ends_what_passes_through_it_and_the_log_what_does_not() -> None:
    through, beside = OneRequest(), OneRequest(observes_response=False, last_block=77)
    for followed in (through, beside):
        followed.exchange.finished(True)
    assert (through.load, beside.load) == ((0, 0), (1, 1000))
    beside.exchanges.logged("nobody's", True)
    beside.exchanges.logged(beside.fleet.released[0].work.id, True)
    assert (beside.load, len(beside.exchanges)) == ((0, 0), 0)
    assert beside.exchanges.stats.unknown_access_log_entries == 1
    beside.exchanges.block_stored(0, 77)
    assert beside.load == (0, 0)


def test_what_the_gateway_never_got_is_over_at_once() -> None:
    followed = OneRequest(observes_response=False)
    followed.exchange.finished(False)
    followed.exchange.finished(True)
    assert followed.load == (0, 0)


def test_an_error_has_generated_nothing() -> None:
    """What was charged for its output by estimate is settled to nothing."""
    followed, told = OneRequest(), []
    followed.exchanges.on_usage = lambda released, usage: told.append(usage)
    followed.exchange.response_headers(500, JSON, None)
    followed.exchange.finished(True)
    assert [usage.output_tokens for usage in told] == [0]

"""From the decision to the end of a request: what its booking waits for, and who tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import inf

from msgspec import Struct

from picker.extproc.endpoint_accounts import EndpointAccounts
from picker.extproc.usage import Usage
from picker.kvcache.predicted import PredictedIndex, Prediction
from picker.pool.calibration import Calibration
from picker.pool.endpoint import Endpoint
from picker.pool.ledger import Booking, Ledger
from picker.pool.pool import Pool
from picker.queueing.deadlines import Deadlines
from picker.queueing.work import Released
from picker.selection.weighing import Candidate


@dataclass(slots=True)
class ExchangeStats:
    """Ends by the signal that told of them, or that none did (`given_up`), and prefills that a KV event told of first
    or whose time was over. `open` is a gauge.
    """

    open: int = 0
    ended_by_stream: int = 0
    ended_by_access_log: int = 0
    never_sent: int = 0
    given_up: int = 0
    prefills_by_kv_event: int = 0
    prefills_by_time: int = 0
    unknown_access_log_entries: int = 0


class RoutedExchange(Struct, eq=False):
    """One routed request, the `Progress` of which is heard here. Its booking is released once, by whichever signal
    of its end comes first.
    """

    book: Exchanges
    released: Released
    booking: Booking
    observes_response: bool
    gateway_id: str | None = None
    awaited_block: tuple[int, int] | None = None
    # As the engine reported it; None: not known.
    output_tokens: int | None = None
    # The end of its prefill has been seen.
    timed: bool = False
    # What is taken to be cached because of it, until there is a sign that it got there.
    predictions: Sequence[Prediction] = ()

    @property
    def is_reading(self) -> bool:
        """Is its prompt booked as still to be read?"""
        prefill = self.released.prefill
        return (self.booking if prefill is None else prefill.booking).prefill_tokens > 0

    def served(self, authority: str) -> None:
        """The gateway fell back to another endpoint of the list: all that is kept of the request follows."""
        chosen = self.released.decision.endpoint
        if authority == chosen.spec.authority:
            return
        for candidate in self.released.decision.candidates:
            if candidate.endpoint.spec.authority == authority:
                self.book.move(self, candidate)
                return

    def answered(self, ok: bool) -> None:
        if ok:
            self.reached()
        self.book.ledger.prefill_done(self.booking)
        if self.released.prefill is not None:
            self.book.ledger.release(self.released.prefill.booking)
        self.book.kick()

    def prefilled(self, at: float) -> None:
        """It streams, or has stored the last block."""
        if not self.timed:
            self.timed = True
            self.book.time(self, at - self.released.booking.booked_at)
        self.answered(True)

    def finished(self, delivered: bool, usage: Usage | None) -> None:
        """The ext_proc stream is over. That is the request's end where responses pass through it, or if the
        gateway never got the answer; otherwise the access log will tell.
        """
        stats = self.book.stats
        if not delivered:
            stats.never_sent += 1
            self.book.on_never_sent(self.released)
        elif self.observes_response:
            stats.ended_by_stream += 1
            self._report(usage)
        else:
            return
        self.book.end(self)

    def reached(self) -> None:
        """The endpoint has served it: what was predicted of it stands."""
        for prediction in self.predictions:
            self.book.predicted.confirm(prediction)
        self.predictions = ()

    def missed(self) -> None:
        """There will be no sign any more that the endpoint has served it."""
        for prediction in self.predictions:
            self.book.predicted.retract(prediction)
        self.predictions = ()

    def _report(self, usage: Usage | None) -> None:
        if usage is not None:
            self.output_tokens = usage.output_tokens
            self.book.on_usage(self.released, usage)


@dataclass(slots=True)
class Exchanges:
    """The routed requests that have not ended, by their ids."""

    pool: Pool
    ledger: Ledger
    calibration: Calibration
    clock: Callable[[], float]
    kick: Callable[[], None]
    # Hears what an engine reported of a request.
    on_usage: Callable[[Released, Usage], None] = lambda released, usage: None
    # Hears of requests that the gateway served elsewhere than where they were sent, and where; predicts for there.
    on_moved: Callable[[Released, Endpoint], Sequence[Prediction]] = lambda released, endpoint: ()
    # Hears of decisions that the gateway never got.
    on_never_sent: Callable[[Released], None] = lambda released: None
    # Hears of each request once, when it is over.
    on_end: Callable[[RoutedExchange], None] = lambda exchange: None
    # Where the exchanges' predictions are.
    predicted: PredictedIndex = field(default_factory=PredictedIndex)
    # Tokens a second that endpoints are taken to prefill while none has been timed.
    assumed_rate: float = 2000.0
    # Seconds after which a request is over, whatever nobody has told.
    longest_request: float = inf
    stats: ExchangeStats = field(default_factory=ExchangeStats)
    accounts: EndpointAccounts = field(init=False)
    _open: dict[str, RoutedExchange] = field(default_factory=dict)
    _by_gateway_id: dict[str, RoutedExchange] = field(default_factory=dict)
    _awaited: dict[tuple[int, int], list[RoutedExchange]] = field(default_factory=dict)
    # When the prefills of those that are open count as done at the latest.
    _prefills: Deadlines = field(default_factory=Deadlines)

    def __post_init__(self) -> None:
        self.accounts = EndpointAccounts(self.pool)
        self.pool.subscribe(self.accounts.pool_changed)

    def __len__(self) -> int:
        return len(self._open)

    def begin(
        self,
        released: Released,
        *,
        observes_response: bool,
        last_block: int | None,
        gateway_id: str | None = None,
    ) -> RoutedExchange:
        """Follow a request that is about to be sent. last_block: the key that its prefill will store last.

        gateway_id: the id that the gateway gave the request at ingress. A client may leave after our answer is
        written and before the gateway takes it up; the access log then knows the request by this id only.
        """
        exchange = RoutedExchange(self, released, released.booking, observes_response, gateway_id)
        reader = released.reader
        account = self.accounts.of(reader.endpoint)
        account.prompt_tokens += released.work.demand.raw_tokens
        account.cached_tokens += reader.held_tokens
        if gateway_id is not None:
            self._by_gateway_id[gateway_id] = exchange
        self._open[released.work.id] = exchange
        self.stats.open = len(self._open)
        if last_block is not None:
            self._await(exchange, reader.endpoint.slot, last_block)
        if reader.chosen.uncached_tokens:
            self._prefills.set(released.work, released.booking.booked_at + self._patience(reader.chosen))
        return exchange

    def _patience(self, chosen: Candidate) -> float:
        """Seconds within which a prefill is over. The learned rate is a median, so about half of all take longer than
        it says: twice that time is allowed.
        """
        rate = self.calibration.rate(chosen.endpoint.slot) or self.assumed_rate
        return 2 * _ahead(chosen) / rate

    def expire(self, now: float) -> None:
        """Take for granted what nobody tells: the end of prefills whose time is over, and of requests that have been
        open for too long, or whose bookings the ledger has given up.
        """
        while (work := self._prefills.pop_due(now)) is not None:
            exchange = self._open[work.id]
            if exchange.is_reading:
                self.stats.prefills_by_time += 1
                exchange.answered(False)
        old = takewhile(lambda each: each.booking.booked_at < now - self.longest_request, self._open.values())
        for exchange in list(old):
            self.stats.given_up += 1
            self.end(exchange)
        for exchange in [each for each in self._open.values() if not each.booking.open]:
            self.end(exchange)

    def move(self, exchange: RoutedExchange, candidate: Candidate) -> None:
        """The request is at this endpoint instead."""
        endpoint = candidate.endpoint
        exchange.booking = self.ledger.move(
            exchange.booking, endpoint, candidate.uncached_tokens, self.clock()
        )
        exchange.missed()
        exchange.predictions = self.on_moved(exchange.released, endpoint)
        if exchange.awaited_block is not None and exchange.released.prefill is None:
            _, block = exchange.awaited_block
            self._await_no_more(exchange)
            self._await(exchange, endpoint.slot, block)

    def _await(self, exchange: RoutedExchange, slot: int, block: int) -> None:
        exchange.awaited_block = (slot, block)
        self._awaited.setdefault(exchange.awaited_block, []).append(exchange)

    def _await_no_more(self, exchange: RoutedExchange) -> None:
        awaited, exchange.awaited_block = exchange.awaited_block, None
        if awaited is not None:
            self._awaited[awaited].remove(exchange)
            if not self._awaited[awaited]:
                del self._awaited[awaited]

    def block_stored(self, slot: int, key: int) -> None:
        """A pod has stored a block: the prefills that it is the last of are done."""
        for exchange in self._awaited.pop((slot, key), ()):
            exchange.awaited_block = None
            self.stats.prefills_by_kv_event += 1
            exchange.prefilled(self.clock())

    def time(self, exchange: RoutedExchange, seconds: float) -> None:
        """Compare with what was to be expected, and learn from it. The endpoint must be the one that was chosen."""
        chosen = exchange.released.reader.chosen
        if exchange.released.prefill is None and exchange.booking.endpoint is not chosen.endpoint:
            return
        ahead = _ahead(chosen)
        rate = self.calibration.rate(chosen.endpoint.slot)
        if rate is not None:
            account = self.accounts.of(chosen.endpoint)
            account.timed += 1
            account.predicted_ttft += ahead / rate
            account.observed_ttft += seconds
        self.calibration.observe(chosen.endpoint.slot, ahead, seconds)

    def logged(self, request_id: str, ok: bool) -> None:
        """The gateway's access log: a request is over. ok: with an answer that is no error. Its first byte upstream
        is that of the headers, which tells nothing of the prefill.
        """
        exchange = self._open.get(request_id) or self._by_gateway_id.get(request_id)
        if exchange is None:
            self.stats.unknown_access_log_entries += 1
            return
        self.stats.ended_by_access_log += 1
        if ok:
            exchange.reached()
        self.end(exchange)

    def end(self, exchange: RoutedExchange) -> None:
        """Release the booking; safe to say twice."""
        if self._open.pop(exchange.released.work.id, None) is None:
            return
        if exchange.gateway_id is not None and self._by_gateway_id.get(exchange.gateway_id) is exchange:
            del self._by_gateway_id[exchange.gateway_id]
        self.stats.open = len(self._open)
        self._await_no_more(exchange)
        self._prefills.discard(exchange.released.work)
        self.ledger.release(exchange.booking)
        if exchange.released.prefill is not None:
            self.ledger.release(exchange.released.prefill.booking)
        exchange.missed()
        self.on_end(exchange)
        self.kick()


def _ahead(chosen: Candidate) -> int:
    """Tokens to prefill before the request's first one can come: those booked before it, and its own."""
    return chosen.booked_prefill_tokens + chosen.uncached_tokens

"""From the decision to the end of a request: what its booking waits for, and who tells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from picker.extproc.endpoint_accounts import EndpointAccounts
from picker.extproc.usage import Usage
from picker.kvcache.predicted import PredictedIndex, Prediction
from picker.pool.calibration import Calibration
from picker.pool.endpoint import Endpoint
from picker.pool.ledger import Booking, Ledger
from picker.pool.pool import Pool
from picker.queueing.work import Released


@dataclass(slots=True)
class ExchangeStats:
    """Ends by the signal that told of them, and prefills that a KV event told of first. `open` is a gauge."""

    open: int = 0
    ended_by_stream: int = 0
    ended_by_access_log: int = 0
    never_sent: int = 0
    prefills_by_kv_event: int = 0
    unknown_access_log_entries: int = 0


@dataclass(slots=True, eq=False)
class RoutedExchange:
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

    def served(self, authority: str) -> None:
        """The gateway fell back to another endpoint of the list: the booking follows."""
        chosen = self.released.decision.endpoint
        if authority == chosen.spec.authority:
            return
        for candidate in self.released.decision.candidates:
            if candidate.endpoint.spec.authority == authority:
                self.booking = self.book.ledger.move(self.booking, candidate.endpoint, self.book.clock())
                self.book.on_moved(self.released, candidate.endpoint)
                self.missed()
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
    # Hears of requests that the gateway served elsewhere than where they were sent, and where.
    on_moved: Callable[[Released, Endpoint], None] = lambda released, endpoint: None
    # Hears of each request once, when it is over.
    on_end: Callable[[RoutedExchange], None] = lambda exchange: None
    # Where the exchanges' predictions are.
    predicted: PredictedIndex = field(default_factory=PredictedIndex)
    stats: ExchangeStats = field(default_factory=ExchangeStats)
    accounts: EndpointAccounts = field(init=False)
    _open: dict[str, RoutedExchange] = field(default_factory=dict)
    _by_gateway_id: dict[str, RoutedExchange] = field(default_factory=dict)
    _awaited: dict[tuple[int, int], list[RoutedExchange]] = field(default_factory=dict)

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
            exchange.awaited_block = (reader.endpoint.slot, last_block)
            self._awaited.setdefault(exchange.awaited_block, []).append(exchange)
        return exchange

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
        ahead = chosen.booked_prefill_tokens + chosen.uncached_tokens
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

    def forget_reaped(self) -> None:
        """Let go of requests whose bookings the ledger has given up: nothing will tell of their end any more."""
        for exchange in [each for each in self._open.values() if not each.booking.open]:
            self.end(exchange)

    def end(self, exchange: RoutedExchange) -> None:
        """Release the booking; safe to say twice."""
        if self._open.pop(exchange.released.work.id, None) is None:
            return
        if exchange.gateway_id is not None and self._by_gateway_id.get(exchange.gateway_id) is exchange:
            del self._by_gateway_id[exchange.gateway_id]
        self.stats.open = len(self._open)
        awaited = exchange.awaited_block
        if awaited is not None:
            waiting = self._awaited.get(awaited, [])
            if exchange in waiting:
                waiting.remove(exchange)
            if not waiting:
                self._awaited.pop(awaited, None)
        self.ledger.release(exchange.booking)
        if exchange.released.prefill is not None:
            self.ledger.release(exchange.released.prefill.booking)
        exchange.missed()
        self.on_end(exchange)
        self.kick()

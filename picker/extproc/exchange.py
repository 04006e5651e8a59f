"""From the decision to the end of a request: what its booking waits for, and who tells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from picker.extproc.endpoint_accounts import EndpointAccounts
from picker.extproc.usage import Usage, UsageReader
from picker.pool.calibration import Calibration
from picker.pool.ledger import Booking, Ledger
from picker.pool.pool import Pool
from picker.queueing.work import Released

if TYPE_CHECKING:
    from picker.extproc.handler import Headers


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
    """One routed request. Its booking is released once, by whichever signal of its end comes first."""

    book: Exchanges
    released: Released
    booking: Booking
    observes_response: bool
    gateway_id: str | None = None
    usage: UsageReader | None = None
    awaited_block: tuple[int, int] | None = None
    # As the engine reported it; None: not known.
    output_tokens: int | None = None
    # The end of its prefill has been seen.
    timed: bool = False

    # A stream has begun whose first event is still to come.
    streaming: bool = False

    def response_headers(self, status: int, headers: Headers, served: str | None) -> None:
        """Engines send the headers of a stream at once and its first event when the prompt is read; of an answer
        in one piece they send the headers when all of it is written, which times no prefill.
        """
        if served:
            self.book.served_by(self, served)
        self.streaming = any(
            name == "content-type" and value.startswith("text/event-stream") for name, value in headers
        )
        if not self.streaming:
            self.book.answered(self)

    @property
    def wants_response_body(self) -> bool:
        return self.usage is not None

    def response_chunk(self, data: bytes) -> None:
        if self.streaming and data:
            self.streaming = False
            self.book.prefilled(self, self.book.clock() - self.released.booking.booked_at)
        if self.usage is not None:
            self.usage.feed(data)

    def finished(self, delivered: bool) -> None:
        """The ext_proc stream is over. That is the request's end where responses pass through it, or if the
        gateway never got the answer; otherwise the access log will tell.
        """
        stats = self.book.stats
        if not delivered:
            stats.never_sent += 1
        elif self.observes_response:
            stats.ended_by_stream += 1
            self._report()
        else:
            return
        self.book.end(self)

    def _report(self) -> None:
        usage = self.usage.usage() if self.usage else None
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
    # Whether responses that pass by are read for what engines report, and who is told.
    reads_usage: bool = False
    on_usage: Callable[[Released, Usage], None] = lambda released, usage: None
    # Hears of each request once, when it is over.
    on_end: Callable[[RoutedExchange], None] = lambda exchange: None
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
        account = self.accounts.of(released.decision.endpoint)
        account.prompt_tokens += released.work.demand.raw_tokens
        account.cached_tokens += released.decision.chosen.cached_tokens
        if gateway_id is not None:
            self._by_gateway_id[gateway_id] = exchange
        if self.reads_usage and observes_response:
            exchange.usage = UsageReader()
        self._open[released.work.id] = exchange
        self.stats.open = len(self._open)
        if last_block is not None:
            exchange.awaited_block = (released.decision.endpoint.slot, last_block)
            self._awaited.setdefault(exchange.awaited_block, []).append(exchange)
        return exchange

    def block_stored(self, slot: int, key: int) -> None:
        """A pod has stored a block: the prefills that it is the last of are done."""
        for exchange in self._awaited.pop((slot, key), ()):
            exchange.awaited_block = None
            self.stats.prefills_by_kv_event += 1
            self.prefilled(exchange, self.clock() - exchange.released.booking.booked_at)

    def prefilled(self, exchange: RoutedExchange, seconds: float) -> None:
        """The engine has read the prompt, `seconds` after the decision: it streams, or has stored the last block."""
        if not exchange.timed:
            exchange.timed = True
            self._time(exchange, seconds)
        self.answered(exchange)

    def answered(self, exchange: RoutedExchange) -> None:
        """The engine has read the prompt, at the latest now."""
        self.ledger.prefill_done(exchange.booking)
        self.kick()

    def _time(self, exchange: RoutedExchange, seconds: float) -> None:
        """Compare with what was to be expected, and learn from it. The endpoint must be the one that was chosen."""
        chosen = exchange.released.decision.chosen
        if exchange.booking.endpoint is not chosen.endpoint:
            return
        ahead = chosen.booked_prefill_tokens + chosen.uncached_tokens
        rate = self.calibration.rate(chosen.endpoint.slot)
        if rate is not None:
            account = self.accounts.of(chosen.endpoint)
            account.timed += 1
            account.predicted_ttft += ahead / rate
            account.observed_ttft += seconds
        self.calibration.observe(chosen.endpoint.slot, ahead, seconds)

    def served_by(self, exchange: RoutedExchange, authority: str) -> None:
        """The gateway fell back to another endpoint of the list: the booking follows."""
        chosen = exchange.released.decision.endpoint
        if authority == chosen.spec.authority:
            return
        for candidate in exchange.released.decision.candidates:
            if candidate.endpoint.spec.authority == authority:
                exchange.booking = self.ledger.move(exchange.booking, candidate.endpoint, self.clock())
                return

    def logged(self, request_id: str) -> None:
        """The gateway's access log: a request is over. Its first byte upstream is that of the headers, which tells
        nothing of the prefill.
        """
        exchange = self._open.get(request_id) or self._by_gateway_id.get(request_id)
        if exchange is None:
            self.stats.unknown_access_log_entries += 1
            return
        self.stats.ended_by_access_log += 1
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
        self.on_end(exchange)
        self.kick()

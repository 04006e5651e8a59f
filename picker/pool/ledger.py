"""What has been sent where and is not finished: the load that the next decision sees.

A booking is made at the decision, in the same step, so that two decisions in one tick see each other. Engine
reports correct the picture (work that did not come through here); they never replace it between scrapes.
"""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from msgspec import Struct

from picker.pool.endpoint import Endpoint, EngineReport
from picker.pool.pool import PoolChange


class Held(Struct, eq=False):
    """What one holder (a policy class) has on one endpoint. `weight` is what it was last booked with."""

    weight: int
    prefill_tokens: int = 0
    requests: int = 0


@dataclass(slots=True, eq=False)
class Load:
    """One endpoint's booked work. Never negative; it dies with its endpoint, whatever ends later."""

    prefill_tokens: int = 0
    # Requests with tokens to prefill, and all.
    prefilling: int = 0
    running: int = 0
    # Requests that the engine reports beyond our own: other gateways, batch jobs, probes.
    foreign: int = 0
    # The engine's latest reports: when, and how many bookings there were then beyond what it had.
    surplus: deque[tuple[float, int]] = field(default_factory=deque)
    bookings: set[Booking] = field(default_factory=set)
    # The same work by who holds it; nobody without a request is in it.
    held: dict[str, Held] = field(default_factory=dict)
    # Whose load this is, once the pool has told.
    owner: Endpoint | None = None


class Booking(Struct, eq=False):
    """One request's place on an endpoint. `prefill_tokens` is what is still to prefill, 0 once that is done."""

    endpoint: Endpoint
    load: Load
    prefill_tokens: int
    booked_at: float
    holder: str
    held: Held
    open: bool = True


@dataclass(slots=True)
class LedgerStats:
    """Counters since the start."""

    booked: int = 0
    released: int = 0
    reaped: int = 0
    moved: int = 0


class Columns:
    """What every decision looks at of every load, by slot and side by side: read from the loads one after the other,
    behind a gateway that shares the processor's caches, it takes several times as long.
    """

    def __init__(self) -> None:
        self.prefill_tokens = array("q")
        self.prefilling = array("q")
        # The foreign ones too.
        self.running = array("q")

    def note(self, slot: int, load: Load) -> None:
        self.prefill_tokens[slot] = load.prefill_tokens
        self.prefilling[slot] = load.prefilling
        self.running[slot] = load.running + load.foreign

    def reach(self, slot: int) -> None:
        """Have a place for the slot."""
        for column in (self.prefill_tokens, self.prefilling, self.running):
            column.extend([0] * (slot + 1 - len(column)))


class Ledger:
    """Loads by slot, and what decisions need of them by column. `on_change` hears of every endpoint whose load has
    changed, and the load.
    """

    def __init__(self, *, reports_to_reap: int = 5) -> None:
        self.on_change: Callable[[Endpoint, Load], None] = lambda endpoint, load: None
        self.stats = LedgerStats()
        self.columns = Columns()
        self._reports_to_reap = reports_to_reap
        self._by_slot: dict[int, Load] = {}

    def load(self, slot: int) -> Load:
        """The load of the endpoint in this slot, live: read it, do not write it."""
        load = self._by_slot.get(slot)
        if load is None:
            load = self._enter(slot, Load())
        return load

    def loads(self, endpoints: Iterable[Endpoint]) -> list[Load]:
        """The loads of several endpoints of the pool, in their order."""
        by_slot = self._by_slot
        return [by_slot.get(endpoint.slot) or self.load(endpoint.slot) for endpoint in endpoints]

    def book(
        self, endpoint: Endpoint, uncached_tokens: int, now: float, holder: str = "", weight: int = 1
    ) -> Booking:
        """Charge one request of `uncached_tokens` to prefill to an endpoint, on the account of its class there.

        On an endpoint that has left (a late move to it) it is nobody's load, even if the slot is another's by now.
        """
        load = self._by_slot.get(endpoint.slot) or self.load(endpoint.slot)
        if load.owner is not None and load.owner is not endpoint:
            load = Load(owner=endpoint)
        load.prefill_tokens += uncached_tokens
        load.prefilling += uncached_tokens > 0
        load.running += 1
        held = load.held.get(holder)
        if held is None:
            held = load.held[holder] = Held(weight)
        held.weight = weight
        held.prefill_tokens += uncached_tokens
        held.requests += 1
        booking = Booking(endpoint, load, uncached_tokens, now, holder, held)
        load.bookings.add(booking)
        self.stats.booked += 1
        self._changed(booking)
        return booking

    def prefill_done(self, booking: Booking) -> None:
        """The engine has read the prompt: only the running request is left. Safe to say twice."""
        if booking.prefill_tokens:
            booking.load.prefill_tokens -= booking.prefill_tokens
            booking.load.prefilling -= 1
            booking.held.prefill_tokens -= booking.prefill_tokens
            booking.prefill_tokens = 0
            self._changed(booking)

    def release(self, booking: Booking) -> None:
        """The request has ended, however it ended. Safe to say twice."""
        if not booking.open:
            return
        self._close(booking)
        self.stats.released += 1
        self._changed(booking)

    def move(self, booking: Booking, endpoint: Endpoint, uncached_tokens: int, now: float) -> Booking:
        """The gateway served the request elsewhere (a fallback), where so many tokens are not cached: the booking
        follows it.
        """
        if not booking.open or booking.endpoint is endpoint:
            return booking
        tokens = uncached_tokens if booking.prefill_tokens else 0
        self.release(booking)
        self.stats.moved += 1
        return self.book(endpoint, tokens, now, booking.holder, booking.held.weight)

    def correct(self, endpoint: Endpoint, report: EngineReport) -> None:
        """Take an engine's own count in.

        What it holds beyond our bookings is foreign work. Bookings that it holds no request for, over several
        reports in a row, have lost the news of their end.
        """
        if report.running is None:
            return
        load = self.load(endpoint.slot)
        held = report.running + (report.waiting or 0)
        booked_by_then = sum(1 for booking in load.bookings if booking.booked_at <= report.at)
        foreign = max(0, held - booked_by_then)
        changed = foreign != load.foreign
        load.foreign = foreign
        load.surplus.append((report.at, booked_by_then - held))
        if len(load.surplus) >= self._reports_to_reap:
            changed |= self._reap_surplus(load)
            load.surplus.popleft()
        if changed:
            self.columns.note(endpoint.slot, load)
            self.on_change(endpoint, load)

    def pool_changed(self, change: PoolChange) -> None:
        """Forget the loads of endpoints that have left, and end what is booked on them: it is nobody's load."""
        for endpoint in change.removed:
            load = self._by_slot.pop(endpoint.slot, None)
            if load is not None:
                self._reap(list(load.bookings))
        for endpoint in change.added:
            self._enter(endpoint.slot, Load(owner=endpoint))

    def _enter(self, slot: int, load: Load) -> Load:
        self._by_slot[slot] = load
        self.columns.reach(slot)
        self.columns.note(slot, load)
        return load

    def _reap_surplus(self, load: Load) -> bool:
        """Give up, the oldest first, as many bookings as were too many in each of the reports, of those that are older
        than all of these. Which of them are the lost ones nobody can tell; their number is right.
        """
        surplus = min(surplus for _, surplus in load.surplus)
        if surplus <= 0:
            return False
        first = load.surplus[0][0]
        older = sorted(
            (booking for booking in load.bookings if booking.booked_at < first),
            key=lambda booking: booking.booked_at,
        )
        self._reap(older[:surplus])
        return bool(older)

    def _reap(self, bookings: list[Booking]) -> None:
        for booking in bookings:
            self._close(booking)
        self.stats.reaped += len(bookings)

    def _close(self, booking: Booking) -> None:
        load = booking.load
        load.prefill_tokens -= booking.prefill_tokens
        load.prefilling -= booking.prefill_tokens > 0
        load.running -= 1
        load.bookings.discard(booking)
        held = booking.held
        held.prefill_tokens -= booking.prefill_tokens
        held.requests -= 1
        if not held.requests:
            load.held.pop(booking.holder, None)
        booking.prefill_tokens = 0
        booking.open = False

    def _changed(self, booking: Booking) -> None:
        endpoint, load = booking.endpoint, booking.load
        if self._by_slot.get(endpoint.slot) is load:
            self.columns.note(endpoint.slot, load)
            self.on_change(endpoint, load)

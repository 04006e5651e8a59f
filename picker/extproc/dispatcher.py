"""Drives the admission queue on the event loop: tells each request of its outcome, and has one timer for all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from math import inf

from picker.queueing.admission import AdmissionQueue
from picker.queueing.work import Outcome, Released, Work


class Dispatcher:
    """`on_outcome` hears of every outcome, before the request that it is about."""

    def __init__(
        self, queue: AdmissionQueue, clock: Callable[[], float], on_outcome: Callable[[Outcome], None]
    ) -> None:
        self.queue = queue
        self._clock = clock
        self._on_outcome = on_outcome
        self._waiting: dict[Work, Callable[[Outcome], None]] = {}
        self._poll_soon: asyncio.Handle | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._wakes_at = inf

    def submit(self, work: Work, tell: Callable[[Outcome], None]) -> None:
        """Have the request wait for its turn, if only for the length of this call. `tell` hears of its outcome, once,
        and must not raise.
        """
        self._waiting[work] = tell
        self.deliver(self.queue.submit(work, self._clock()))

    def cancel(self, work: Work) -> None:
        """The client left: who still waits is taken out without a charge, and hears of nothing more."""
        if self._waiting.pop(work, None) is not None:
            self.queue.cancel(work)
            self.kick()

    def kick(self) -> None:
        """Something may have freed capacity: poll once this tick's other work is done, if anybody waits for it."""
        if self._waiting and self._poll_soon is None:
            self._poll_soon = asyncio.get_running_loop().call_soon(self._poll)

    def deliver(self, outcomes: Iterable[Outcome]) -> None:
        """Tell everybody concerned what became of their requests."""
        for outcome in outcomes:
            self._on_outcome(outcome)
            tell = self._waiting.pop(outcome.work, None)
            if tell is not None:
                tell(outcome)
            elif isinstance(outcome, Released):
                self.queue.withdraw(outcome)
                self.kick()
        self._set_timer()

    def close(self) -> None:
        for handle in (self._poll_soon, self._timer):
            if handle is not None:
                handle.cancel()

    def _poll(self) -> None:
        self._poll_soon = None
        self.deliver(self.queue.poll(self._clock()))

    def _set_timer(self) -> None:
        """Wake up in time. A timer that is set for earlier stays, though whom it was set for may have gone."""
        wakeup = self.queue.next_wakeup()
        if wakeup >= self._wakes_at:
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, wakeup - self._clock())
        self._timer = asyncio.get_running_loop().call_later(delay, self._wake)
        self._wakes_at = wakeup

    def _wake(self) -> None:
        self._wakes_at = inf
        self.kick()

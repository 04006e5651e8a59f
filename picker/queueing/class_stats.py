"""What is counted of one policy class."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from math import exp, expm1

from picker.queueing.work import Work


class Blocked(StrEnum):
    """What a class with a backlog waits for."""

    # Every endpoint is busy for the class.
    NO_CAPACITY = "no_capacity"
    # There is room, but none that the requests which are next in their lanes may use.
    NO_ELIGIBLE = "no_eligible"
    # Room that they could have used went to other classes, whose turn it was.
    DEFICIT = "deficit"
    # They could go, but wait for another request to warm their prefix.
    HELD = "held"


@dataclass(slots=True)
class ClassStats:
    """Gauges of now (`waiting_*`) and counters since the start, which never fall.

    A charge that is undone (the request was given back or withdrawn) is counted in `refunded*`, one that turns
    out too low or too high when the output is known in `settled_cost`, which has a sign. `blocked` is seconds.
    """

    waiting_requests: int = 0
    waiting_tokens: int = 0
    waiting_cached_tokens: int = 0
    waiting_cost: int = 0
    arrived: int = 0
    dispatched_requests: int = 0
    dispatched_cost: int = 0
    dispatched_tokens: int = 0
    cancelled: int = 0
    # Requests that wait in the common lane, or share turns with other tenants, because a limit was reached.
    shared_lane: int = 0
    shared_tenant: int = 0
    refunded: int = 0
    refunded_cost: int = 0
    settled_cost: int = 0
    dropped: dict[str, int] = field(default_factory=dict)
    blocked: dict[str, float] = field(default_factory=dict)

    @property
    def served_cost(self) -> int:
        """What the class was charged in the end."""
        return self.dispatched_cost - self.refunded_cost + self.settled_cost

    def count(self, work: Work, sign: int) -> None:
        """A request waits from now on (1), or no more (-1)."""
        self.waiting_requests += sign
        self.waiting_tokens += sign * work.demand.raw_tokens
        self.waiting_cached_tokens += sign * work.cached_tokens
        self.waiting_cost += sign * work.cost

    def dispatched(self, work: Work) -> None:
        self.dispatched_requests += 1
        self.dispatched_cost += work.cost
        self.dispatched_tokens += work.demand.raw_tokens

    def refund(self, work: Work) -> None:
        self.refunded += 1
        self.refunded_cost += work.cost

    def drop(self, reason: str) -> None:
        self.dropped[reason] = self.dropped.get(reason, 0) + 1

    def block(self, reason: str, seconds: float) -> None:
        self.blocked[reason] = self.blocked.get(reason, 0.0) + seconds


@dataclass(slots=True)
class DrainRate:
    """How much a class has sent lately: cost per second, exponentially forgotten over `horizon` seconds."""

    horizon: float = 30.0
    _total: float = 0.0
    _at: float = 0.0
    _since: float | None = None

    def add(self, cost: int, now: float) -> None:
        self._total = self._decayed(now) + cost
        self._at = now
        if self._since is None:
            self._since = now

    def per_second(self, now: float) -> float:
        """The mean over the horizon, or over what there is of it, but not over less than a second."""
        if self._since is None:
            return 0.0
        known = max(1.0, now - self._since)
        return self._decayed(now) / (self.horizon * -expm1(-known / self.horizon))

    def _decayed(self, now: float) -> float:
        age = now - self._at
        return self._total * exp(-age / self.horizon) if age > 0 else self._total

"""Which endpoint each session was last sent to: a preference, for a bounded number of sessions and a bounded time."""

from __future__ import annotations

from collections import Counter, OrderedDict
from dataclasses import dataclass, field

# The name of a session: the tenant that it belongs to ("" where tenants are not told apart), and its id. Another
# tenant that presents the same id has a session of its own.
SessionKey = tuple[str, str]


@dataclass(slots=True)
class SessionStats:
    """`known` is a gauge. `moved` counts requests that went elsewhere than the one before in their session."""

    known: int = 0
    started: int = 0
    kept: int = 0
    moved: int = 0
    # By cause: finished, expired, evicted.
    ended: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Sessions:
    """Endpoints by session, by uid: a pod that is replaced at the same address is another.

    `ttl` (seconds) runs from a session's last request. Past `max_sessions` the one that was used least lately goes.
    sticky: a session's endpoint is taken whenever it can take the request, whatever it costs.
    """

    ttl: float = 1800.0
    max_sessions: int = 100_000
    sticky: bool = False
    stats: SessionStats = field(default_factory=SessionStats)
    # uid and time of the last request, the least recent first.
    _last: OrderedDict[SessionKey, tuple[str, float]] = field(default_factory=OrderedDict)

    def endpoint_of(self, session: SessionKey) -> str | None:
        """The uid of the endpoint that served it last; it may have left the pool since."""
        last = self._last.get(session)
        return last[0] if last is not None else None

    def sent(self, session: SessionKey, uid: str, now: float) -> None:
        """A request of the session goes to this endpoint."""
        self.expire(now)
        last = self._last.pop(session, None)
        if last is None:
            self.stats.started += 1
            if len(self._last) >= self.max_sessions:
                self._last.popitem(last=False)
                self.stats.ended["evicted"] += 1
        elif last[0] == uid:
            self.stats.kept += 1
        else:
            self.stats.moved += 1
        self._last[session] = (uid, now)
        self.stats.known = len(self._last)

    def served_by(self, session: SessionKey, uid: str) -> None:
        """The gateway served the latest request of the session elsewhere than where it was sent."""
        last = self._last.get(session)
        if last is not None:
            self._last[session] = (uid, last[1])

    def finish(self, session: SessionKey) -> None:
        """The session is over: forget it. Unknown ones are none."""
        if self._last.pop(session, None) is not None:
            self.stats.ended["finished"] += 1
            self.stats.known = len(self._last)

    def expire(self, now: float) -> None:
        """Forget the sessions that have been silent for too long."""
        while self._last:
            session, (_, at) = next(iter(self._last.items()))
            if at + self.ttl > now:
                break
            del self._last[session]
            self.stats.ended["expired"] += 1
        self.stats.known = len(self._last)

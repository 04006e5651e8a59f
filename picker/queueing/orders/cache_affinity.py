"""Cache affinity: among equals, requests whose prefix is cached go first."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from math import inf
from operator import attrgetter
from typing import Any, Self

from picker.queueing.request_queue import OrderContext, Rank, RankedQueue, RequestQueue
from picker.queueing.work import Work


class _ArrivalOrder(RankedQueue):
    """The base order that affinity only perturbs: strict tier, priority (lower first), arrival."""

    def rank(self, work: Work) -> Rank:
        priority = -work.priority if self.context.policy_class.high_priority_first else work.priority
        return (-work.strict, priority, work.arrival, work.sequence)


@dataclass(slots=True, eq=False)
class _Scored:
    """A request in the window with its last score. `order` is where that puts it; see `place`."""

    work: Work
    base: Rank
    scored_at: float = 0.0
    bucket: int = 0
    cold: int | None = None
    starved: bool = False
    # Follows a leader that was sent to warm the same prefix; 0: it does not.
    held_until: float = 0.0
    rank: Rank = ()
    order: tuple[Any, ...] = ()

    def place(self) -> None:
        """Returned ones first; then tier and priority; then the starved by arrival; then warm before cold. Who
        is held comes after all who are not.
        """
        if self.base[0] == 0:
            self.rank = self.base
        else:
            joined, strict, priority, *arrival = self.base
            affinity = (0, 0) if self.starved else (1, -self.bucket)
            self.rank = (joined, strict, priority, *affinity, *arrival)
        self.order = (self.held_until, self.rank)


_ORDER = attrgetter("order")
_BASE = attrgetter("base")


class CacheAffinityQueue(RequestQueue, policy="cache_affinity"):
    """Requests by how much of them is cached, bounded three ways.

    Scores are whole cached blocks, below `min_blocks` 0, put in buckets by `edges`. Affinity orders requests of
    the same strict tier and priority, never across. A request that has waited longer than `max_wait` goes
    before all of its tier and priority. Only the first `window` requests in arrival order are scored, and a
    refresh scores at most `_RESCORE` of them anew, those whose score is older than `_SCORE_AGE` seconds, the
    oldest first, so that a poll's work does not grow with the queue.

    With `leader_wait`, requests whose first cold block is the same do not all compute it: the first to go leads,
    the others are passed over, and if there is nobody else held, until the block is cached or the wait is over.
    """

    dynamic = True
    _RESCORE = 4
    _SCORE_AGE = 0.1

    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._settings = context.policy_class.affinity
        self._rest = _ArrivalOrder(context)
        # Insertion order is the order of rescoring.
        self._window: dict[Work, _Scored] = {}
        # The first and, by arrival order, the last of the window, where they are known.
        self._head: _Scored | None = None
        self._last: _Scored | None = None
        self._now = 0.0
        # When somebody in the window will have waited too long.
        self._starves_at = inf
        # First cold block -> until when its leader is waited for.
        self._leaders: dict[int, float] = {}

    def add(self, work: Work) -> None:
        self._rest.add(work)
        self._fill()

    def prepend(self, work: Work) -> None:
        self._rest.prepend(work)
        self._fill()

    def pop(self) -> Work:
        scored = self._first()
        if self._settings.leader_wait and scored.cold is not None:
            self._leaders[scored.cold] = self._now + self._settings.leader_wait
            self._follow()
        self.remove(scored.work)
        return scored.work

    def peek(self) -> Work:
        return self._first().work

    def head_rank(self) -> Rank:
        return self._first().rank

    def remove(self, work: Work) -> None:
        scored = self._window.pop(work, None)
        if scored is None:
            self._rest.remove(work)
            return
        self._forget(scored)
        self._fill()

    def hand_over(self, work: Work, other: Self) -> None:
        scored = self._window.get(work)
        if scored is None:
            self._rest.hand_over(work, other._rest)
        else:
            other._rest.restore(work, scored.base)
            self.remove(work)
        other._fill()

    def refresh(self, now: float) -> bool:
        """Score the least recently scored of the window anew and mark who has waited too long."""
        self._now = now
        changed = False
        for scored in list(islice(self._window.values(), self._RESCORE)):
            if now - scored.scored_at < self._SCORE_AGE:
                break
            self._score(scored)
            self._window[scored.work] = self._window.pop(scored.work)
            changed = True
        if now > self._starves_at:
            self._starve()
            changed = True
        if self._leaders:
            self._leaders = {block: until for block, until in self._leaders.items() if until > now}
            self._follow()
            changed = True
        if changed:
            self._head = None
        return changed

    def held_until(self) -> float:
        return self._first().held_until if self._window else 0.0

    def __contains__(self, work: object) -> bool:
        return work in self._window or work in self._rest

    def __bool__(self) -> bool:
        return bool(self._window)

    def __len__(self) -> int:
        return len(self._window) + len(self._rest)

    def __iter__(self) -> Iterator[Work]:
        yield from (scored.work for scored in sorted(self._window.values(), key=_ORDER))
        yield from self._rest

    def _first(self) -> _Scored:
        if self._head is None:
            if not self._window:
                raise IndexError("the queue is empty")
            self._head = min(self._window.values(), key=_ORDER)
        return self._head

    def _fill(self) -> None:
        """Keep the best `window` requests by arrival order in the window."""
        while self._rest and len(self._window) < self._settings.window:
            self._take_in()
        if self._rest:
            if self._last is None:
                self._last = max(self._window.values(), key=_BASE)
            if self._rest.head_rank() < self._last.base:
                last = self._last
                del self._window[last.work]
                self._forget(last)
                self._take_in()
                self._rest.restore(last.work, last.base)

    def _take_in(self) -> None:
        base = self._rest.head_rank()
        scored = _Scored(self._rest.pop(), base)
        self._score(scored)
        self._window[scored.work] = scored
        self._starves_at = min(self._starves_at, scored.work.arrival + self._settings.max_wait)
        if self._head is not None and scored.order < self._head.order:
            self._head = scored
        if self._last is not None and scored.base > self._last.base:
            self._last = scored

    def _forget(self, scored: _Scored) -> None:
        """It is not in the window any more."""
        if scored is self._head:
            self._head = None
        if scored is self._last:
            self._last = None

    def _score(self, scored: _Scored) -> None:
        scored.scored_at = self._now
        look = self.context.look(scored.work)
        warm = look.blocks >= self._settings.min_blocks
        scored.bucket = bisect_right(self._settings.edges, look.blocks) if warm else 0
        scored.cold = look.cold
        scored.held_until = self._hold(scored)
        scored.place()

    def _starve(self) -> None:
        """Mark who has waited longer than `max_wait`, and find out who will be the next."""
        self._starves_at = inf
        for scored in self._window.values():
            starves_at = scored.work.arrival + self._settings.max_wait
            if self._now > starves_at:
                scored.starved = True
                scored.place()
            else:
                self._starves_at = min(self._starves_at, starves_at)

    def _follow(self) -> None:
        """Hold those whose cold block a leader is computing; nobody who has waited too long is held."""
        for scored in self._window.values():
            held_until = self._hold(scored)
            if held_until != scored.held_until:
                scored.held_until = held_until
                scored.place()

    def _hold(self, scored: _Scored) -> float:
        if scored.starved or scored.cold is None:
            return 0.0
        return self._leaders.get(scored.cold, 0.0)

"""The order of requests inside a lane: one interface, one small class an order.

A new order is a subclass of `RequestQueue` that names its policy; nothing else has to know of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import count
from typing import Any, ClassVar, NamedTuple, Self

from picker.policy.model import PolicyClass
from picker.queueing.work import Work

# Ranks compare, lower first, only among queues of one order.
Rank = tuple[Any, ...]


class CacheLook(NamedTuple):
    """What the caches hold of a request now: `blocks` on its best endpoint, and the key of the first block that
    this endpoint lacks (None: it lacks no full block, or the tokens are not known).
    """

    blocks: float
    cold: int | None


@dataclass(frozen=True, slots=True)
class OrderContext:
    """What an order may use: its class, and a read-only look at the caches."""

    policy_class: PolicyClass
    look: Callable[[Work], CacheLook]


class RequestQueue(ABC):
    """Requests in service order. `pop` and `peek` raise IndexError when empty."""

    # Does the order of waiting requests change with time or cache? Only then is it asked to `refresh`, and how long it
    # holds its head.
    dynamic: ClassVar[bool] = False
    orders: ClassVar[dict[str, type[RequestQueue]]] = {}

    def __init_subclass__(cls, *, policy: str | None = None, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if policy is not None:
            RequestQueue.orders[policy] = cls

    def __init__(self, context: OrderContext) -> None:
        self.context = context

    @abstractmethod
    def add(self, work: Work) -> None:
        """Let a request join at its place."""

    @abstractmethod
    def pop(self) -> Work:
        """Take the next request out."""

    @abstractmethod
    def peek(self) -> Work:
        """The next request, which stays."""

    @abstractmethod
    def prepend(self, work: Work) -> None:
        """Give a request back that was popped: it is served before all that were never popped."""

    def prepend_many(self, works: Iterable[Work]) -> None:
        """Prepend one by one: the last given is served first."""
        for work in works:
            self.prepend(work)

    @abstractmethod
    def remove(self, work: Work) -> None:
        """Take a request out wherever it stands. ValueError when it is not here."""

    def hand_over(self, work: Work, other: Self) -> None:
        """Let a waiting request change to another lane of the class, where it keeps its place."""
        self.remove(work)
        other.add(work)

    def remove_many(self, works: Iterable[Work]) -> None:
        """Take out those that are here; others are ignored."""
        for work in works:
            if work in self:
                self.remove(work)

    @abstractmethod
    def head_rank(self) -> Rank:
        """The head's rank: the class serves the lane with the lowest. IndexError when empty."""

    def refresh(self, now: float) -> bool:
        """Let an order that depends on time or cache look again. True when the head may have changed."""
        return False

    def held_until(self) -> float:
        """The head stays, although it could go, until this time. 0: it is not held."""
        return 0.0

    @abstractmethod
    def __contains__(self, work: object) -> bool: ...

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __iter__(self) -> Iterator[Work]:
        """Service order, without disturbing the queue."""

    def __bool__(self) -> bool:
        return len(self) > 0


_Entry = tuple[Rank, int, Work]


class RankedQueue(RequestQueue):
    """An order that ranks a request once, when it joins: a heap with lazy removal.

    add, pop and remove are O(log n) amortised. A removed entry stays in the heap until it surfaces or until the
    dead outnumber the living.
    """

    _RETURNED: ClassVar[int] = 0
    _JOINED: ClassVar[int] = 1
    # One for all, so that what was returned to different lanes compares.
    _returns: ClassVar[Iterator[int]] = count()

    def __init__(self, context: OrderContext) -> None:
        super().__init__(context)
        self._heap: list[_Entry] = []
        self._entries: dict[Work, _Entry] = {}
        self._serial = count()

    @abstractmethod
    def rank(self, work: Work) -> Rank:
        """The request's place: the lowest is served first, ties by arrival at the queue."""

    def add(self, work: Work) -> None:
        self._enter((self._JOINED, *self.rank(work)), work)

    def prepend(self, work: Work) -> None:
        self._enter((self._RETURNED, -next(self._returns)), work)

    def pop(self) -> Work:
        work = self._head()[2]
        heappop(self._heap)
        del self._entries[work]
        return work

    def peek(self) -> Work:
        return self._head()[2]

    def head_rank(self) -> Rank:
        return self._head()[0]

    def remove(self, work: Work) -> None:
        if self._entries.pop(work, None) is None:
            raise ValueError("the request is not in this queue")
        if len(self._heap) > 2 * len(self._entries) + 16:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def hand_over(self, work: Work, other: Self) -> None:
        rank = self._entries[work][0]
        self.remove(work)
        other.restore(work, rank)

    def restore(self, work: Work, rank: Rank) -> None:
        """Take a request in at the place that it had before."""
        self._enter(rank, work)

    def __contains__(self, work: object) -> bool:
        return work in self._entries

    def __bool__(self) -> bool:
        return bool(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Work]:
        return (work for _, _, work in sorted(self._entries.values()))

    def _enter(self, rank: Rank, work: Work) -> None:
        entry = (rank, next(self._serial), work)
        self._entries[work] = entry
        heappush(self._heap, entry)

    def _head(self) -> _Entry:
        while self._heap:
            entry = self._heap[0]
            if self._entries.get(entry[2]) is entry:
                return entry
            heappop(self._heap)
        raise IndexError("the queue is empty")

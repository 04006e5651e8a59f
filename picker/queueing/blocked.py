"""How long classes wait, by what they wait for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from picker.queueing.class_queue import ClassQueue
from picker.queueing.class_stats import Blocked
from picker.queueing.drr import Flow


@dataclass(slots=True)
class BlockedTime:
    """Attributes the time of every backlog to a reason, by looking at it at most once in `every` seconds.

    `given` is the mask of endpoints that took a request of any class since the last look.
    """

    every: float = 0.25
    given: int = 0
    _due: float = -inf

    def begin(self, queue: ClassQueue, now: float) -> None:
        """A class has a backlog from now on."""
        queue.counted_until = now
        queue.counted_dispatches = queue.stats.dispatched_requests
        queue.given_before = self.given

    def look(self, waiting: Iterable[Flow[ClassQueue]], everybody: int, now: float) -> None:
        """To be called when all that could go has gone, with the mask of all endpoints."""
        if now < self._due:
            return
        for flow in waiting:
            self.count(flow.queue, everybody, now)
        self.given = 0
        self._due = now + self.every

    def count(self, queue: ClassQueue, everybody: int, now: float) -> None:
        """Attribute what has passed since this class was last looked at."""
        seconds = now - queue.counted_until
        if seconds > 0:
            queue.stats.block(self._reason(queue, everybody), seconds)
            queue.counted_until = now
            queue.counted_dispatches = queue.stats.dispatched_requests
            queue.given_before = 0

    def _reason(self, queue: ClassQueue, everybody: int) -> Blocked:
        served = queue.stats.dispatched_requests != queue.counted_dispatches
        given = self.given & ~queue.given_before
        if given and not served and given & queue.reach():
            return Blocked.DEFICIT
        if not everybody & ~queue.gate.busy or not len(queue) or queue.head() is not None:
            return Blocked.NO_CAPACITY
        return Blocked.HELD if queue.held_until() < inf else Blocked.NO_ELIGIBLE

"""Priority order, as vLLM's scheduler has it."""

from __future__ import annotations

from picker.queueing.request_queue import Rank, RankedQueue
from picker.queueing.work import Work


class PriorityQueue(RankedQueue, policy="priority"):
    """Strict tier, then priority (lower number first; `high_priority_first` turns it), then arrival.

    There is no front: a request that is given back joins at its place.
    """

    def rank(self, work: Work) -> Rank:
        priority = -work.priority if self.context.policy_class.high_priority_first else work.priority
        return (-work.strict, priority, work.arrival, work.sequence)

    def prepend(self, work: Work) -> None:
        self.add(work)

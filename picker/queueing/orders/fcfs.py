"""First come, first served."""

from __future__ import annotations

from picker.queueing.request_queue import Rank, RankedQueue
from picker.queueing.work import Work


class FcfsQueue(RankedQueue, policy="fcfs"):
    """Strict tier, then arrival. One unit of priority is one second of head start, as in Dynamo."""

    def rank(self, work: Work) -> Rank:
        return (-work.strict, work.arrival - max(work.priority, 0), work.sequence)

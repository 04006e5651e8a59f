"""Earliest deadline first."""

from __future__ import annotations

from picker.queueing.request_queue import Rank, RankedQueue
from picker.queueing.work import Work


class EarliestDeadlineQueue(RankedQueue, policy="edf"):
    """Strict tier, then the earlier of TTFT target and end of wait; requests without either come last."""

    def rank(self, work: Work) -> Rank:
        return (-work.strict, min(work.ttft_deadline, work.deadline), work.arrival, work.sequence)

"""Weighted shortest processing time, with optional ageing."""

from __future__ import annotations

from picker.queueing.request_queue import Rank, RankedQueue
from picker.queueing.work import Work


class WsptQueue(RankedQueue, policy="wspt"):
    """Strict tier, then the least cost for its weight 1 + priority (Smith's rule, 1956).

    With `wspt_aging` of A seconds a request has a virtual due time: its arrival plus A * c / (c + quantum), c
    the weighted cost. Among requests that came together the cheaper one is due earlier; as no due time is more
    than A after its arrival, nobody is overtaken by a request that came more than A seconds later.
    """

    def rank(self, work: Work) -> Rank:
        policy_class = self.context.policy_class
        weighted = work.cost / (1 + max(work.priority, 0))
        if policy_class.wspt_aging is None:
            return (-work.strict, weighted, work.sequence)
        due = work.arrival + policy_class.wspt_aging * weighted / (weighted + policy_class.quantum)
        return (-work.strict, due, work.sequence)

"""A plain, obviously right model of the queue: lists, full scans, and rounds walked one by one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from picker.policy.model import PolicyClass
from picker.queueing.work import Work

# The order inside a class, as the design states it: strict tier, then the order's own key, then sequence.
ORDERS: dict[str, Callable[[Work], tuple[float, ...]]] = {
    "fcfs": lambda work: (-work.strict, work.arrival - max(work.priority, 0), work.sequence),
    "wspt": lambda work: (-work.strict, work.cost / (1 + max(work.priority, 0)), work.sequence),
    "priority": lambda work: (-work.strict, work.priority, work.arrival, work.sequence),
    "edf": lambda work: (-work.strict, min(work.ttft_deadline, work.deadline), work.arrival, work.sequence),
}


@dataclass
class ModelClass:
    policy: PolicyClass
    waiting: list[Work] = field(default_factory=list)
    deficit: int = 0

    def candidate(self, can_go: Callable[[Work], bool]) -> Work | None:
        """The best head of a lane (requests with equal constraints) that somebody can take."""
        key = ORDERS[self.policy.queue_policy]
        heads: dict[object, Work] = {}
        for work in sorted(self.waiting, key=key):
            heads.setdefault(work.demand.constraints, work)
        able = [head for head in heads.values() if can_go(head)]
        return min(able, key=key, default=None)


@dataclass
class ModelRing:
    """Textbook deficit round robin: the quantum comes when the flow is reached and cannot pay."""

    classes: list[ModelClass]
    cursor: int = 0
    credited: bool = False

    def serve(self, can_go: Callable[[Work], bool]) -> Work | None:
        """Take out and charge the request that is served next, None when nothing can go."""
        candidates = [each.candidate(can_go) for each in self.classes]
        if not any(candidates):
            return None
        while True:
            flow, work = self.classes[self.cursor], candidates[self.cursor]
            if work is not None and flow.deficit >= work.cost:
                flow.deficit -= work.cost
                self.remove(flow, work)
                return work
            if work is not None and not self.credited:
                flow.deficit += flow.policy.quantum
                self.credited = True
                continue
            self.cursor = (self.cursor + 1) % len(self.classes)
            self.credited = False

    @staticmethod
    def remove(flow: ModelClass, work: Work) -> None:
        flow.waiting.remove(work)
        if not flow.waiting:
            flow.deficit = 0

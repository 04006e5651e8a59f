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


@dataclass(eq=False)
class ModelClass:
    policy: PolicyClass
    waiting: list[Work] = field(default_factory=list)
    # Those that were given back, in that order.
    returned: list[Work] = field(default_factory=list)
    deficit: int = 0
    credited: bool = False
    # Counts its backlogs.
    period: int = 0

    def rank(self, work: Work) -> tuple[float, ...]:
        """Its place: what was given back goes first, the last one before all; `priority` knows no front."""
        if work in self.returned and self.policy.queue_policy != "priority":
            return (0, -self.returned.index(work))
        return (1, *ORDERS[self.policy.queue_policy](work))

    def candidate(self, can_go: Callable[[Work], bool]) -> Work | None:
        """The best head of a lane (requests with equal constraints) that somebody can take."""
        heads: dict[object, Work] = {}
        for work in sorted(self.waiting, key=self.rank):
            heads.setdefault(work.demand.constraints, work)
        able = [head for head in heads.values() if can_go(head)]
        return min(able, key=self.rank, default=None)


@dataclass
class ModelRing:
    """Textbook deficit round robin: the quantum comes when the flow is reached and cannot pay, and who cannot pay
    after that goes to the end of the ring. Who is blocked is passed over."""

    classes: list[ModelClass]
    turns: list[ModelClass] = field(default_factory=list)

    def serve(self, can_go: Callable[[Work], bool]) -> Work | None:
        """Take out and charge the request that is served next, None when nothing can go."""
        candidates = {flow: flow.candidate(can_go) for flow in self.turns}
        if not any(candidates.values()):
            return None
        place = 0
        while True:
            flow = self.turns[place]
            work = candidates[flow]
            if work is None:
                place += 1
            elif flow.deficit >= work.cost:
                flow.deficit -= work.cost
                self.remove(flow, work)
                return work
            elif not flow.credited:
                flow.deficit += flow.policy.quantum
                flow.credited = True
            else:
                flow.credited = False
                self.turns.append(self.turns.pop(place))

    def add(self, flow: ModelClass, work: Work, *, returned: bool = False) -> None:
        if not flow.waiting:
            self.turns.append(flow)
            flow.period += 1
        flow.waiting.append(work)
        if returned:
            flow.returned.append(work)

    def remove(self, flow: ModelClass, work: Work) -> None:
        flow.waiting.remove(work)
        if work in flow.returned:
            flow.returned.remove(work)
        if not flow.waiting:
            self.turns.remove(flow)
            flow.deficit = 0
            flow.credited = False

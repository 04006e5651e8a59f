"""Deficit round robin over flows whose head may be blocked (Shreedhar and Varghese, 1995, with blocking).

A flow's turn is worth one quantum. The quantum is credited when the flow is reached and its deficit does not
cover its head; a deficit that does cover it (left by a turn that blocking cut short) is spent first. A turn
lasts until the head is not covered any more, also across polls that find everything blocked, or until another
flow is served while this one is blocked. A flow that empties loses its deficit; a blocked one keeps it and gets
nothing.

Rounds in which nobody could be served are not walked but computed: `choose` finds in one pass the flow that the
walk would serve first, and `charge` credits every flow what the walk would have credited.

Fairness. Over an interval in which flows i and j are always backlogged and dispatchable, let n be the quanta
credited and D the deficit: S = n q + D_start - D_end. Turns alternate, so the n differ by at most 1. Between
turns 0 <= D < Cmax, hence at ends of turns |S_i/q_i - S_j/q_j| <= 1 + Cmax_i/q_i + Cmax_j/q_j. In the middle of
a turn one of the two holds up to a quantum more, at the start or at the end: 2 instead of 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, NamedTuple, Protocol, TypeVar


class Backlog(Protocol):
    """What waits in a flow."""

    def head(self) -> int | None:
        """The cost of the best request that could be dispatched now; None when empty or blocked."""


Queue = TypeVar("Queue", bound=Backlog)


@dataclass(slots=True, eq=False)
class Flow(Generic[Queue]):
    """One queue in the ring. Quantum and deficit are costs (tokens)."""

    queue: Queue
    quantum: int
    deficit: int = 0

    def emptied(self) -> None:
        """The last request has left: an idle flow has no credit."""
        self.deficit = 0


class Turn(NamedTuple):
    """Whom the walk serves next: the flow at `position` in the ring, reached `steps` after the start, in `round`.

    `credit` is the number of quanta it needs by then, 0 when its deficit covers its head of `cost` already.
    """

    position: int
    steps: int
    round: int
    credit: int
    cost: int


class DeficitRoundRobin(Generic[Queue]):
    """The ring: flows, a cursor, and whether the flow at the cursor has had this turn's quantum."""

    def __init__(self) -> None:
        self.flows: list[Flow[Queue]] = []
        self.cursor = 0
        self._credited = False

    def add(self, flow: Flow[Queue]) -> None:
        """A new flow is reached last: just behind the cursor."""
        self.flows.insert(self.cursor, flow)
        self.cursor = (self.cursor + 1) % len(self.flows)

    def remove(self, flow: Flow[Queue]) -> None:
        index = self.flows.index(flow)
        del self.flows[index]
        if index < self.cursor:
            self.cursor -= 1
        elif index == self.cursor:
            self._credited = False
            self.cursor %= max(1, len(self.flows))

    def choose(self) -> Turn | None:
        """The next turn, or None when no flow has a dispatchable head. Changes nothing; O(flows)."""
        flows, count, start = self.flows, len(self.flows), self._start()
        best: Turn | None = None
        for steps in range(count):
            index = (start + steps) % count
            flow = flows[index]
            cost = flow.queue.head()
            if cost is None:
                continue
            lack = cost - flow.deficit
            if lack <= flow.quantum:
                return Turn(index, steps, 1, 0 if lack <= 0 else 1, cost)
            rounds = -(-lack // flow.quantum)
            if best is None or rounds < best.round:
                best = Turn(index, steps, rounds, rounds, cost)
        return best

    def charge(self, turn: Turn) -> tuple[int, int]:
        """Credit what the walk credits on its way to `turn`, and charge the head's cost to its flow.

        To be called before anything else changes. Returns the flow's deficit before and after the charge.
        """
        flows, count, start = self.flows, len(self.flows), self._start()
        winner = flows[turn.position]
        for steps in range(count if turn.round > 1 else turn.steps):
            flow = flows[(start + steps) % count]
            if steps != turn.steps and flow.queue.head() is not None:
                flow.deficit += flow.quantum * (turn.round if steps < turn.steps else turn.round - 1)
        before = winner.deficit + winner.quantum * turn.credit
        winner.deficit = before - turn.cost
        same_turn = turn.position == self.cursor and start == self.cursor
        self._credited = turn.credit > 0 or (same_turn and self._credited)
        self.cursor = turn.position
        return before, winner.deficit

    def _start(self) -> int:
        """Where the walk starts: at the cursor, or behind it when the turn there is spent."""
        if not self.flows or not self._credited:
            return self.cursor
        flow = self.flows[self.cursor]
        cost = flow.queue.head()
        spent = cost is not None and cost > flow.deficit
        return (self.cursor + 1) % len(self.flows) if spent else self.cursor

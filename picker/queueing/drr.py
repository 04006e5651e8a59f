"""Deficit round robin over flows whose head may be blocked (Shreedhar and Varghese, 1995, with blocking).

The ring holds the flows that have a backlog, in the order in which their turns come. A turn is worth one
quantum. The quantum is credited when the flow is reached and its deficit does not cover its head; a deficit
that does cover it already is spent first. A turn lasts until the head is not covered any more, also across
polls that find everything blocked; then the flow goes to the end of the ring. A flow that empties leaves the
ring and its deficit is forgotten; when it comes back it joins at the end.

A blocked flow is passed over: it keeps its place and its deficit, and gets nothing. It must keep its place. With a
cursor that moves on instead, two flows that share one endpoint while a third uses another can meet the cursor
so that one of the two is blocked whenever it is reached, and starves.

Rounds in which nobody can be served are not walked but computed: `choose` finds in one pass the flow that the
walk would serve first, and `charge` credits every flow what the walk would have credited.

Fairness. Take an interval in which flows i and j always have a backlog and neither is passed over while blocked.
S is the cost that a flow is charged in it, q its quantum, Cmax the largest head that it has had in its backlog,
D its deficit, and n how often it is credited: S = n q + D_start - D_end. Between turns 0 <= D < Cmax, in the
middle of one 0 <= D < Cmax + q. Turns alternate and each is credited once. If the last credit was i's, then
n_i <= n_j + 1 and j is between turns; if it was j's, then n_i <= n_j and j may hold up to a quantum more in D_end.
Either way that is one round, and a start in the middle of i's turn is another one:
|S_i/q_i - S_j/q_j| <= 2 + Cmax_i/q_i + Cmax_j/q_j, and 1 instead of 2 where the interval starts between turns.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, count
from typing import Generic, Protocol, TypeVar

from msgspec import Struct


class Backlog(Protocol):
    """What waits in a flow."""

    def head(self) -> int | None:
        """The cost of the best request that could be dispatched now; None when empty or blocked."""


Queue = TypeVar("Queue", bound=Backlog)


@dataclass(slots=True, eq=False)
class Flow(Generic[Queue]):
    """One queue in the ring. Quantum, deficit, `charged` and `largest` are costs (tokens)."""

    queue: Queue
    quantum: int
    deficit: int = 0
    # Has it had the quantum of its present turn?
    credited: bool = False
    # The number of the present backlog, unique in the ring; 0: it has none.
    period: int = 0
    # All that it was ever charged, and the largest head that was looked at in this period.
    charged: int = 0
    largest: int = 0
    # How often something came between it and its exact share: it was passed over, or an old charge corrected.
    disturbed: int = 0


class Turn(Struct, Generic[Queue]):
    """Whom the walk serves next: `flow`, reached in `round`, for a head of `cost`.

    `credit` is the number of quanta it needs by then, 0 when its deficit covers its head already.
    """

    flow: Flow[Queue]
    round: int
    credit: int
    cost: int


class DeficitRoundRobin(Generic[Queue]):
    """The ring."""

    def __init__(self) -> None:
        self._flows: OrderedDict[Flow[Queue], None] = OrderedDict()
        self._periods = count(1)

    def __len__(self) -> int:
        return len(self._flows)

    def __iter__(self) -> Iterator[Flow[Queue]]:
        """The flows with a backlog, in the order in which they are reached."""
        return iter(self._flows)

    def join(self, flow: Flow[Queue]) -> None:
        """The flow has a backlog from now on. It is reached last, and with no credit from before."""
        self._flows[flow] = None
        flow.period = next(self._periods)
        flow.largest = 0

    def leave(self, flow: Flow[Queue]) -> None:
        """The last request has gone."""
        del self._flows[flow]
        flow.deficit = flow.period = 0
        flow.credited = False

    def choose(self) -> Turn[Queue] | None:
        """The next turn, or None when no flow has a dispatchable head. O(flows).

        Turns that are found spent end here; nothing else changes.
        """
        best: Turn[Queue] | None = None
        spent: list[Flow[Queue]] = []
        for flow in chain(self._flows, spent):
            cost = flow.queue.head()
            if cost is None:
                continue
            lack = cost - flow.deficit
            if lack <= 0:
                best = Turn(flow, 1, 0, cost)
                break
            if flow.credited:
                flow.credited = False
                spent.append(flow)
                continue
            rounds = -(-lack // flow.quantum)
            if best is None or rounds < best.round:
                best = Turn(flow, rounds, rounds, cost)
                if rounds == 1:
                    break
        for flow in spent:
            self._flows.move_to_end(flow)
        return best

    def charge(self, turn: Turn[Queue]) -> tuple[int, int]:
        """Credit what the walk credits on its way to `turn`, and charge the head's cost to its flow.

        To be called before anything else changes. Returns the flow's deficit before and after the charge.
        """
        winner = turn.flow
        self._walk_to(winner, turn.round)
        before = winner.deficit + winner.quantum * turn.credit
        winner.deficit = before - turn.cost
        winner.credited = winner.credited or turn.credit > 0
        winner.charged += turn.cost
        winner.largest = max(winner.largest, turn.cost)
        return before, winner.deficit

    def correct(self, flow: Flow[Queue], period: int, amount: int) -> None:
        """A charge of the given period turns out too high by `amount` (too low, where negative).

        An idle flow's account is closed: what was charged in a backlog that has ended is not corrected.
        """
        if flow.period == period:
            flow.deficit += amount
            flow.disturbed += 1

    def _walk_to(self, winner: Flow[Queue], rounds: int) -> None:
        """Credit the flows that cannot pay `rounds` times where they come before the winner, else once less."""
        ahead: list[Flow[Queue]] = []
        behind: list[Flow[Queue]] = []
        passed = ahead
        for flow in self._flows:
            if flow is winner:
                if rounds == 1:
                    break
                passed = behind
                passed.append(flow)
            elif (cost := flow.queue.head()) is None:
                flow.disturbed += 1
            else:
                flow.deficit += flow.quantum * (rounds if passed is ahead else rounds - 1)
                flow.largest = max(flow.largest, cost)
                passed.append(flow)
        for flow in chain(behind, ahead):
            self._flows.move_to_end(flow)

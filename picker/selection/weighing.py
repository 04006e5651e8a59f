"""What a decision weighs, by column: a place for each endpoint. There are many endpoints and few are looked at, so a
row is made only of those.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import exp, tanh
from typing import NamedTuple

from msgspec import Struct

from picker.policy.constraints import TaintEffect
from picker.policy.model import CostWeights
from picker.pool.endpoint import Endpoint
from picker.pool.ledger import Columns, Load
from picker.selection.constraints import Constraints
from picker.selection.endpoint_share import Claim


class Candidate(Struct, frozen=True, gc=False):
    """One endpoint's terms in a decision, in tokens, but for `running` (requests).

    The last six are weighted tokens: what it costs because those who decode there hold it up (where their pace is
    learned), and on top because its prefill would hold up those who come after, because others should have a turn at a
    cold prompt, because the class is over its share there, and because the session was elsewhere; and the cost in all.
    """

    endpoint: Endpoint
    cached_tokens: int
    uncached_tokens: int
    booked_prefill_tokens: int
    running: int
    interference: float
    crowding: float
    cold_turn: float
    over_share: float
    off_session: float
    cost: float


class Members(NamedTuple):
    """The endpoints that a decision is made among, their slots and live loads, and the places of those that have
    taints.
    """

    endpoints: Sequence[Endpoint]
    slots: Sequence[int]
    loads: Sequence[Load]
    tainted: Sequence[int]


class Weighed(Struct, eq=False):
    """The endpoints of one decision about `raw` tokens, their loads then, and their costs so far, in weighted tokens.

    slow: seconds a token, by those of a typical endpoint; empty where all are alike. crowd: what a token of prefill
    costs those who come after. The columns of further terms are empty where nobody pays them.
    """

    raw: int
    members: Members
    uncached: list[int]
    booked: list[int]
    running: list[int]
    slow: Sequence[float]
    crowd: float
    costs: list[float]
    interference: Sequence[float] = ()
    turns: Sequence[float] = ()
    over: Sequence[float] = ()
    off: Sequence[float] = ()

    def candidate(self, place: int) -> Candidate:
        """The row of one endpoint."""
        uncached = self.uncached[place]
        return Candidate(
            self.members.endpoints[place],
            self.raw - uncached,
            uncached,
            self.booked[place],
            self.running[place],
            self.interference[place] if self.interference else 0.0,
            self.crowd * uncached * (self.slow[place] if self.slow else 1.0),
            self.turns[place] if self.turns else 0.0,
            self.over[place] if self.over else 0.0,
            self.off[place] if self.off else 0.0,
            self.costs[place],
        )

    def by_cost(self) -> list[int]:
        """The places, the cheapest endpoint first."""
        return sorted(range(len(self.costs)), key=self.costs.__getitem__)

    def add_decoding(self, weights: CostWeights, typical: float, gaps: Mapping[int, float]) -> None:
        """Those who decode there: by the seconds between their tokens where these are known, else by their number.

        typical: tokens a second that an endpoint prefills. gaps: seconds between two tokens, by slot.
        """
        price, weight = weights.running_tokens, weights.decode_interference * typical
        if not weight or not gaps:
            if price:
                self._add([price * running for running in self.running])
            return
        pairs = list(zip(map(gaps.get, self.members.slots), self.running, strict=True))
        self.interference = [weight * gap * running if gap is not None else 0.0 for gap, running in pairs]
        self._add([weight * gap * running if gap is not None else price * running for gap, running in pairs])

    def add_kv_usage(self, weights: CostWeights) -> None:
        reports = [endpoint.report for endpoint in self.members.endpoints]
        self._add([weights.kv_usage_tokens * ((report and report.kv_usage) or 0.0) for report in reports])

    def apply_taints(
        self, constraints: Constraints, preferred: Sequence[tuple[str, float]], weights: CostWeights
    ) -> None:
        for place in self.members.tainted:
            endpoint = self.members.endpoints[place]
            self.costs[place] = _with_taints(self.costs[place], endpoint, constraints, preferred, weights)

    def add_turns(self, standing: Sequence[float], weight: float) -> None:
        """Whose turn it is at a cold prompt."""
        self.turns = [weight * place for place in standing]
        self._add(self.turns)

    def add_claim(self, claim: Claim) -> None:
        """What the class is over its share of each endpoint."""
        pairs = zip(self.members.loads, self.uncached, strict=True)
        self.over = [claim.surcharge(load, uncached) for load, uncached in pairs]
        self._add(self.over)

    def add_away_from(self, home: Endpoint, price: float) -> None:
        """All but the endpoint of the session's earlier requests."""
        self.off = [0.0 if endpoint is home else price for endpoint in self.members.endpoints]
        self._add(self.off)

    def _add(self, terms: Sequence[float]) -> None:
        self.costs = [cost + term for cost, term in zip(self.costs, terms, strict=True)]


def weigh_prefill(
    raw: int,
    members: Members,
    columns: Columns,
    cached: Mapping[int, int],
    slowness: Mapping[int, float],
    weights: CostWeights,
) -> Weighed:
    """The prefill that comes before the first token of a request with `raw` tokens: what is booked, and its own.

    cached: its cached tokens, and slowness: see `Weighed.slow`; both by slot, and who is not there has 0 and 1.
    """
    slots = members.slots
    uncached = [raw] * len(slots)
    if cached:
        uncached = [raw - min(cached.get(slot, 0), raw) for slot in slots]
    booked = list(map(columns.prefill_tokens.__getitem__, slots))
    running = list(map(columns.running.__getitem__, slots))
    crowd = _crowd(columns, slots, weights)
    own, ahead = weights.uncached + crowd, weights.prefill_load
    slow: Sequence[float] = ()
    if slowness:
        slow = [slowness.get(slot, 1.0) for slot in slots]
        terms = zip(uncached, booked, slow, strict=True)
        costs = [(own * mine + ahead * theirs) * rate for mine, theirs, rate in terms]
    else:
        costs = [own * mine + ahead * theirs for mine, theirs in zip(uncached, booked, strict=True)]
    return Weighed(raw, members, uncached, booked, running, slow, crowd, costs)


def _crowd(columns: Columns, slots: Sequence[int], weights: CostWeights) -> float:
    """What a token of prefill costs those who will wait for it: as many as wait for theirs on such an endpoint now."""
    if not weights.crowding or not slots:
        return 0.0
    return weights.crowding * sum(map(columns.prefilling.__getitem__, slots)) / len(slots)


def _with_taints(
    cost: float,
    endpoint: Endpoint,
    constraints: Constraints,
    preferred: Sequence[tuple[str, float]],
    weights: CostWeights,
) -> float:
    """Untolerated PreferNoSchedule taints add tokens; preferred taints scale by exp(-tanh(sum of weights))."""
    for taint in endpoint.spec.taints:
        if taint.effect is TaintEffect.PREFER_NO_SCHEDULE and not constraints.tolerates(taint):
            cost += weights.prefer_no_schedule_tokens
    if preferred:
        carried = {
            text for taint in endpoint.spec.taints for text in (taint.key, f"{taint.key}={taint.value}")
        }
        attraction = sum(weight for text, weight in preferred if text in carried)
        cost *= exp(-tanh(attraction))
    return cost

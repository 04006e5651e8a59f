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
from picker.pool.ledger import Load
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
    """The endpoints that a decision is made among, their live loads, and the places of those that have taints."""

    endpoints: Sequence[Endpoint]
    loads: Sequence[Load]
    tainted: Sequence[int]


class Weighed(Struct, eq=False):
    """The endpoints of one decision about `raw` tokens, their loads then, and their costs so far, in weighted tokens.

    slow: seconds a token, by those of a typical endpoint; empty where all are alike. crowd: what a token of prefill
    costs those who come after. The columns of further terms are empty where nobody pays them.
    """

    raw: int
    endpoints: Sequence[Endpoint]
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
            self.endpoints[place],
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
        known = [gaps.get(endpoint.slot) for endpoint in self.endpoints]
        pairs = list(zip(known, self.running, strict=True))
        self.interference = [weight * gap * running if gap is not None else 0.0 for gap, running in pairs]
        self._add([weight * gap * running if gap is not None else price * running for gap, running in pairs])

    def add_kv_usage(self, weights: CostWeights) -> None:
        reports = [endpoint.report for endpoint in self.endpoints]
        self._add([weights.kv_usage_tokens * ((report and report.kv_usage) or 0.0) for report in reports])

    def apply_taints(
        self,
        tainted: Sequence[int],
        constraints: Constraints,
        preferred: Sequence[tuple[str, float]],
        weights: CostWeights,
    ) -> None:
        """tainted: the places of those that have taints."""
        for place in tainted:
            endpoint = self.endpoints[place]
            self.costs[place] = _with_taints(self.costs[place], endpoint, constraints, preferred, weights)

    def add_turns(self, standing: Mapping[int, float], weight: float) -> None:
        """Whose turn it is at a cold prompt, by slot."""
        self.turns = [weight * standing.get(endpoint.slot, 0.0) for endpoint in self.endpoints]
        self._add(self.turns)

    def add_claim(self, claim: Claim, loads: Sequence[Load]) -> None:
        """What the class is over its share of each endpoint."""
        self.over = [
            claim.surcharge(load, uncached) for load, uncached in zip(loads, self.uncached, strict=True)
        ]
        self._add(self.over)

    def add_away_from(self, home: Endpoint, price: float) -> None:
        """All but the endpoint of the session's earlier requests."""
        self.off = [0.0 if endpoint is home else price for endpoint in self.endpoints]
        self._add(self.off)

    def _add(self, terms: Sequence[float]) -> None:
        self.costs = [cost + term for cost, term in zip(self.costs, terms, strict=True)]


def weigh_prefill(
    raw: int,
    members: Members,
    cached: Mapping[int, int],
    slowness: Mapping[int, float],
    weights: CostWeights,
) -> Weighed:
    """The prefill that comes before the first token of a request with `raw` tokens: what is booked, and its own.

    cached: its cached tokens, and slowness: see `Weighed.slow`; both by slot, and who is not there has 0 and 1.
    """
    endpoints, loads, _ = members
    uncached = [raw] * len(endpoints)
    if cached:
        uncached = [raw - min(cached.get(endpoint.slot, 0), raw) for endpoint in endpoints]
    booked = [load.prefill_tokens for load in loads]
    running = [load.running + load.foreign for load in loads]
    slow: Sequence[float] = ()
    if slowness:
        slow = [slowness.get(endpoint.slot, 1.0) for endpoint in endpoints]
    own, ahead = weights.uncached, weights.prefill_load
    costs = [own * mine + ahead * theirs for mine, theirs in zip(uncached, booked, strict=True)]
    if slow:
        costs = [cost * rate for cost, rate in zip(costs, slow, strict=True)]
    crowd = _crowd(loads, weights)
    if crowd:
        rates = slow or [1.0] * len(endpoints)
        costs = [cost + crowd * mine * rate for cost, mine, rate in zip(costs, uncached, rates, strict=True)]
    return Weighed(raw, endpoints, uncached, booked, running, slow, crowd, costs)


def _crowd(loads: Sequence[Load], weights: CostWeights) -> float:
    """What a token of prefill costs those who will wait for it: as many as wait for theirs on such an endpoint now."""
    if not weights.crowding or not loads:
        return 0.0
    return weights.crowding * sum([load.prefilling for load in loads]) / len(loads)


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

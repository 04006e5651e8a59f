"""The choice: (what a request needs, the endpoints and their load) -> a decision that explains itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from math import exp, tanh
from random import Random

from picker.policy.constraints import TaintEffect
from picker.policy.model import CostWeights
from picker.pool.calibration import Calibration
from picker.pool.endpoint import Endpoint
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.selection.constraints import Constraints, Ineligible
from picker.selection.prompt_keys import PrefixIndex, PromptKeys, cached_tokens


@dataclass(frozen=True, slots=True)
class Demand:
    """What one request asks of an endpoint: `raw_tokens` to have in its KV cache, and where it may go.

    preferred_taints: (taint key or `key=value`, signed weight); a positive weight attracts.
    """

    raw_tokens: int
    prompt: PromptKeys
    constraints: Constraints = Constraints()
    preferred_taints: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Candidate:
    """One endpoint's terms in a decision; tokens, but for `running` (requests) and `cost` (weighted tokens)."""

    endpoint: Endpoint
    cached_tokens: int
    uncached_tokens: int
    booked_prefill_tokens: int
    running: int
    cost: float


@dataclass(frozen=True, slots=True)
class Eligibility:
    """The endpoints that constraints admit, as a mask, and why each other one is refused, by slot."""

    mask: int
    refused: Mapping[int, Ineligible]


@dataclass(frozen=True, slots=True)
class Decision:
    """The chosen candidate first, then the rest by rising cost."""

    candidates: tuple[Candidate, ...]
    eligibility: Eligibility

    @property
    def chosen(self) -> Candidate:
        return self.candidates[0]

    @property
    def endpoint(self) -> Endpoint:
        return self.candidates[0].endpoint

    def destinations(self, choices: int) -> str:
        """The value of the destination header: up to `choices` endpoints in order of preference."""
        return ",".join(candidate.endpoint.spec.authority for candidate in self.candidates[:choices])


@dataclass(slots=True)
class Selector:
    """Weighs every admitted endpoint; the lowest cost wins, ties at random."""

    pool: Pool
    ledger: Ledger
    index: PrefixIndex
    calibration: Calibration = field(default_factory=Calibration)
    random: Random = field(default_factory=Random)
    max_remembered_constraints: int = 4096
    _eligible: dict[tuple[Constraints, bool], Eligibility] = field(default_factory=dict)
    _eligible_version: int = -1

    def eligible(self, constraints: Constraints, *, waiting: bool = False) -> Eligibility:
        """Who may take such a request now, remembered until the pool changes."""
        if (
            self._eligible_version != self.pool.version
            or len(self._eligible) > self.max_remembered_constraints
        ):
            self._eligible.clear()
            self._eligible_version = self.pool.version
        key = (constraints, waiting)
        found = self._eligible.get(key)
        if found is None:
            found = self._eligible[key] = self._examine(constraints, waiting)
        return found

    def cached(self, demand: Demand, mask: int) -> dict[int, int]:
        """Cached tokens of the request by slot, for endpoints in the mask that hold any."""
        found: dict[int, int] = {}
        for block_size, members in self.pool.block_sizes().items():
            if members & mask:
                found.update(cached_tokens(demand.prompt, self.index, block_size, members & mask))
        return found

    def best_cached(self, demand: Demand, mask: int) -> int:
        """The most cached tokens that any endpoint of the mask holds of the request."""
        return min(max(self.cached(demand, mask).values(), default=0), demand.raw_tokens)

    def choose(self, demand: Demand, mask: int, weights: CostWeights) -> Decision:
        """Decide among the endpoints of a mask that has at least one (ValueError otherwise)."""
        cached = self.cached(demand, mask)
        candidates = [
            self._weigh(endpoint, demand, cached.get(endpoint.slot, 0), weights)
            for endpoint in self.pool.in_mask(mask)
        ]
        if not candidates:
            raise ValueError("no endpoint in the mask")
        chosen = self._draw(candidates, weights.temperature)
        rest = sorted((other for other in candidates if other is not chosen), key=lambda other: other.cost)
        return Decision((chosen, *rest), self.eligible(demand.constraints))

    def _examine(self, constraints: Constraints, waiting: bool) -> Eligibility:
        mask, refused = 0, {}
        for endpoint in self.pool:
            reason = constraints.refuse(endpoint, waiting=waiting)
            if reason is None:
                mask |= endpoint.bit
            else:
                refused[endpoint.slot] = reason
        return Eligibility(mask, refused)

    def _weigh(self, endpoint: Endpoint, demand: Demand, cached: int, weights: CostWeights) -> Candidate:
        """Cost = predicted prefill work before the first token + decode interference + taint preference.

        In tokens of prefill on a typical endpoint: an endpoint that is learned to be twice as fast pays half
        for the same tokens.
        """
        load = self.ledger.load(endpoint.slot)
        cached = min(cached, demand.raw_tokens)
        uncached = demand.raw_tokens - cached
        running = load.running + load.foreign
        prefill = weights.uncached * uncached + weights.prefill_load * load.prefill_tokens
        cost = prefill / self.calibration.relative_speed(endpoint.slot) + weights.running_tokens * running
        if weights.kv_usage_tokens and endpoint.report and endpoint.report.kv_usage:
            cost += weights.kv_usage_tokens * endpoint.report.kv_usage
        if endpoint.spec.taints:
            cost = _with_taints(cost, endpoint, demand, weights)
        return Candidate(endpoint, cached, uncached, load.prefill_tokens, running, cost)

    def _draw(self, candidates: list[Candidate], temperature: float) -> Candidate:
        lowest = min(candidate.cost for candidate in candidates)
        if temperature <= 0:
            ties = [candidate for candidate in candidates if candidate.cost == lowest]
            return ties[0] if len(ties) == 1 else self.random.choice(ties)
        spread = max(candidate.cost for candidate in candidates) - lowest or 1.0
        odds = [exp(-(candidate.cost - lowest) / spread / temperature) for candidate in candidates]
        return self.random.choices(candidates, odds)[0]


def _with_taints(cost: float, endpoint: Endpoint, demand: Demand, weights: CostWeights) -> float:
    """Untolerated PreferNoSchedule taints add tokens; preferred taints scale by exp(-tanh(sum of weights))."""
    for taint in endpoint.spec.taints:
        if taint.effect is TaintEffect.PREFER_NO_SCHEDULE and not demand.constraints.tolerates(taint):
            cost += weights.prefer_no_schedule_tokens
    if demand.preferred_taints:
        carried = {
            text for taint in endpoint.spec.taints for text in (taint.key, f"{taint.key}={taint.value}")
        }
        attraction = sum(weight for text, weight in demand.preferred_taints if text in carried)
        cost *= exp(-tanh(attraction))
    return cost

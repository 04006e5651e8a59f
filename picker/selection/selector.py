"""The choice: (what a request needs, the endpoints and their load) -> a decision that explains itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import exp
from random import Random

from msgspec import Struct

from picker.policy.model import CostWeights
from picker.pool.calibration import Calibration
from picker.pool.endpoint import Endpoint
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.selection.cold_turns import ColdTurns
from picker.selection.constraints import Constraints, Ineligible, has_adapter_place
from picker.selection.endpoint_share import Claim
from picker.selection.prompt_keys import PrefixIndex, PromptKeys, cached_tokens
from picker.selection.sessions import SessionKey, Sessions
from picker.selection.weighing import Candidate, Members, Weighed, weigh_prefill

_DEFAULT_WEIGHTS = CostWeights()
# Busy endpoints come and go, and with them the masks that are asked about.
_REMEMBERED_MASKS = 64
# What an idle pool may have of a prompt that is cold all the same: many begin with one system prompt.
_COLD_PART = 0.1


class Demand(Struct, frozen=True, array_like=True):
    """What one request asks of an endpoint: `raw_tokens` to have in its KV cache, and where it may go.

    preferred_taints: (taint key or `key=value`, signed weight); a positive weight attracts. session: what to look
    up the endpoint of its earlier requests by.
    """

    raw_tokens: int
    prompt: PromptKeys
    constraints: Constraints = Constraints()
    preferred_taints: tuple[tuple[str, float], ...] = ()
    session: SessionKey | None = None


@dataclass(frozen=True, slots=True)
class Eligibility:
    """The endpoints that constraints admit, as a mask, and why each other one is refused."""

    mask: int
    refused: Mapping[Endpoint, Ineligible]


class Decision(Struct, eq=False):
    """The chosen candidate, and the others as they were found. Nobody pays for their order who does not ask.

    held_tokens: what the chosen endpoint holds of the prompt, without the discount of slower tiers that is in its
    `cached_tokens`. It is what its engine should report.
    """

    chosen: Candidate
    weighed: Weighed
    eligibility: Eligibility
    held_tokens: int

    @property
    def endpoint(self) -> Endpoint:
        return self.chosen.endpoint

    @property
    def candidates(self) -> tuple[Candidate, ...]:
        """The chosen one first, then the rest by rising cost."""
        return self.first(len(self.weighed.members.endpoints))

    def first(self, number: int) -> tuple[Candidate, ...]:
        """The first so many of the candidates."""
        chosen, endpoints = self.chosen.endpoint, self.weighed.members.endpoints
        others = [place for place in self.weighed.by_cost()[:number] if endpoints[place] is not chosen]
        return (self.chosen, *map(self.weighed.candidate, others[: number - 1]))

    def destinations(self, choices: int) -> str:
        """The value of the destination header: up to `choices` endpoints in order of preference."""
        if choices == 1:
            return self.chosen.endpoint.spec.authority
        return ",".join(candidate.endpoint.spec.authority for candidate in self.first(choices))


@dataclass(slots=True)
class Selector:
    """Weighs every admitted endpoint; the lowest cost wins, ties at random."""

    pool: Pool
    ledger: Ledger
    index: PrefixIndex
    calibration: Calibration = field(default_factory=Calibration)
    random: Random = field(default_factory=Random)
    sessions: Sessions = field(default_factory=Sessions)
    cold_turns: ColdTurns = field(default_factory=ColdTurns)
    # Seconds on any clock, and who is told how many of them a choice took.
    timer: Callable[[], float] | None = None
    observe: Callable[[float], None] = lambda seconds: None
    max_remembered_constraints: int = 4096
    _eligible: dict[Constraints, Eligibility] = field(default_factory=dict)
    _eligible_waiting: dict[Constraints, Eligibility] = field(default_factory=dict)
    _by_mask: dict[int, Members] = field(default_factory=dict)
    _pool_version: int = -1
    _adapters_version: int = -1

    def __post_init__(self) -> None:
        self.pool.subscribe(self.cold_turns.pool_changed)

    def eligible(self, constraints: Constraints, *, waiting: bool = False) -> Eligibility:
        """Who may take such a request now, remembered until the pool changes."""
        if self._pool_version != self.pool.version:
            self._forget_pool()
        elif constraints.adapter is not None and self._adapters_version != self.pool.adapters_version:
            self._forget_adapters()
        # To wait makes a difference only for a request that is pinned.
        remembered = self._eligible_waiting if waiting and constraints.pin is not None else self._eligible
        found = remembered.get(constraints)
        if found is None:
            if len(remembered) >= self.max_remembered_constraints:
                remembered.clear()
            found = remembered[constraints] = self._examine(constraints, waiting)
        return found

    def _forget_pool(self) -> None:
        self._eligible.clear()
        self._eligible_waiting.clear()
        self._by_mask.clear()
        self._pool_version = self.pool.version
        self._adapters_version = self.pool.adapters_version

    def _forget_adapters(self) -> None:
        for remembered in (self._eligible, self._eligible_waiting):
            for constraints in [each for each in remembered if each.adapter is not None]:
                del remembered[constraints]
        self._adapters_version = self.pool.adapters_version

    def cached(
        self,
        demand: Demand,
        mask: int,
        weights: CostWeights = _DEFAULT_WEIGHTS,
        discounts: dict[int, int] | None = None,
    ) -> dict[int, int]:
        """Cached tokens of the request by slot, for endpoints in the mask that hold any. Discounts: see
        `cached_tokens`.
        """
        if not demand.prompt.lengths:
            return {}
        if discounts is None:
            discounts = {}
        found: dict[int, int] = {}
        for block_size, members in self.pool.block_sizes().items():
            if members := members & mask:
                found.update(
                    cached_tokens(demand.prompt, self.index, block_size, members, weights, discounts)
                )
        return found

    def best_cached(self, demand: Demand, mask: int) -> int:
        """The most cached tokens that any endpoint of the mask holds of the request."""
        return min(max(self.cached(demand, mask).values(), default=0), demand.raw_tokens)

    def prefill_seconds(self, tokens: int, mask: int) -> float | None:
        """How long the fastest endpoint of the mask takes to prefill so many tokens; None: nobody knows yet."""
        rates = (self.calibration.rate(endpoint.slot) for endpoint in self.pool.in_mask(mask))
        fastest = max((rate for rate in rates if rate is not None), default=None)
        return None if fastest is None else tokens / fastest

    def backlog_seconds(self, slot: int) -> float:
        """How long the endpoint will take over all the prefill that is booked there; 0 while nobody knows its speed."""
        rate = self.calibration.rate(slot)
        return 0.0 if rate is None else self.ledger.load(slot).prefill_tokens / rate

    def choose(
        self,
        demand: Demand,
        mask: int,
        weights: CostWeights,
        *,
        waiting: bool = False,
        claim: Claim | None = None,
    ) -> Decision:
        """Decide among the endpoints of a mask that has at least one (ValueError otherwise).

        Cost = predicted prefill work before the first token + decode interference + taint preference, in tokens
        of prefill on a typical endpoint: an endpoint that is learned to be twice as fast pays half for the same
        tokens. waiting: the request had to wait, so that what binds it is what binds the waiting. claim: for a
        class whose part of an endpoint is bounded.
        """
        started = self.timer() if self.timer is not None else 0.0
        home = self._home(demand.session)
        if home is not None and self.sessions.sticky and home.bit & mask:
            mask = home.bit
        discounts: dict[int, int] = {}
        weighed, cold = self._weigh(demand, mask, weights, claim, home, discounts)
        if not weighed.costs:
            raise ValueError("no endpoint in the mask")
        chosen = weighed.candidate(self._draw(weighed.costs, weights.temperature))
        if cold:
            self.cold_turns.took(chosen.endpoint)
        eligibility = self.eligible(demand.constraints, waiting=waiting)
        if self.timer is not None:
            self.observe(self.timer() - started)
        held = min(chosen.cached_tokens + discounts.get(chosen.endpoint.slot, 0), demand.raw_tokens)
        return Decision(chosen, weighed, eligibility, held)

    def _home(self, session: SessionKey | None) -> Endpoint | None:
        """The endpoint that served the session last, if it is still in the pool."""
        uid = self.sessions.endpoint_of(session) if session is not None else None
        return self.pool.get(uid) if uid is not None else None

    def _weigh(
        self,
        demand: Demand,
        mask: int,
        weights: CostWeights,
        claim: Claim | None,
        home: Endpoint | None,
        discounts: dict[int, int],
    ) -> tuple[Weighed, int]:
        """The terms of every endpoint of the mask, and how much of the prompt is cold."""
        cached = self.cached(demand, mask, weights, discounts)
        members, calibration = self._members(mask), self.calibration
        weighed = weigh_prefill(
            demand.raw_tokens, members, self.ledger.columns, cached, calibration.slowness, weights
        )
        weighed.add_decoding(weights, calibration.rates.typical or 0.0, calibration.inter_token.known)
        if weights.kv_usage_tokens:
            weighed.add_kv_usage(weights)
        weighed.apply_taints(demand.constraints, demand.preferred_taints, weights)
        cold = _cold_tokens(demand, cached, weighed.running)
        if cold and weights.cold_turn:
            weighed.add_turns(self.cold_turns.standing(members.slots), weights.cold_turn * cold)
        if claim is not None:
            weighed.add_claim(claim)
        # Who cannot take the request now draws it no more, and repels it from nobody.
        if home is not None and home.bit & mask:
            weighed.add_away_from(home, weights.session_tokens)
        return weighed, cold

    def _members(self, mask: int) -> Members:
        """Who is in the mask, remembered until the pool changes."""
        if self._pool_version != self.pool.version:
            self._forget_pool()
        found = self._by_mask.get(mask)
        if found is None:
            if len(self._by_mask) >= _REMEMBERED_MASKS:
                self._by_mask.clear()
            endpoints = self.pool.in_mask(mask)
            tainted = [place for place, endpoint in enumerate(endpoints) if endpoint.spec.taints]
            slots = [endpoint.slot for endpoint in endpoints]
            found = self._by_mask[mask] = Members(endpoints, slots, self.ledger.loads(endpoints), tainted)
        return found

    def _examine(self, constraints: Constraints, waiting: bool) -> Eligibility:
        mask, refused = 0, dict[Endpoint, Ineligible]()
        for endpoint in self.pool:
            reason = constraints.refuse(endpoint, waiting=waiting)
            if reason is None:
                mask |= endpoint.bit
            else:
                refused[endpoint] = reason
        for passed_over, reason in (
            (self.pool.stale_mask, Ineligible.STALE),
            (self.pool.overloaded_mask, Ineligible.OVERLOADED),
            (self._full_mask(constraints.adapter), Ineligible.ADAPTER_FULL),
        ):
            others = mask & ~passed_over
            if others and others != mask:
                refused |= dict.fromkeys(self.pool.in_mask(mask & ~others), reason)
                mask = others
        return Eligibility(mask, refused)

    def _full_mask(self, adapter: str | None) -> int:
        """The endpoints where the adapter would have to wait for a place."""
        if adapter is None:
            return 0
        return sum(endpoint.bit for endpoint in self.pool if not has_adapter_place(endpoint, adapter))

    def _draw(self, costs: list[float], temperature: float) -> int:
        """The position of the lowest cost, ties at random; with a temperature, of any cost, by softmax over the
        costs scaled to 0..1."""
        lowest = min(costs)
        if temperature <= 0:
            if costs.count(lowest) == 1:
                return costs.index(lowest)
            return self.random.choice([position for position, cost in enumerate(costs) if cost == lowest])
        spread = max(costs) - lowest or 1.0
        odds = [exp(-(cost - lowest) / spread / temperature) for cost in costs]
        return self.random.choices(range(len(costs)), odds)[0]


def _cold_tokens(demand: Demand, cached: Mapping[int, int], running: Sequence[int]) -> int:
    """The tokens that nobody has of a prompt that is cold; 0 of any other, and of one whose tokens nobody knows, as it
    may be cached somewhere.

    In an idle pool, one with fewer requests than endpoints, a prompt is cold while nobody has more than a little of it.
    All else is equal there, and so little would gather all that begins alike on one endpoint. Where there is work, that
    sends them elsewhere.
    """
    if not demand.prompt.lengths:
        return 0
    most = max(cached.values(), default=0)
    idle = most > 0 and sum(running) < len(running)
    return demand.raw_tokens - most if most <= (_COLD_PART * demand.raw_tokens if idle else 0) else 0

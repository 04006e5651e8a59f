"""Prefill and decode on two endpoints: who may do which, and who does the prefill of a request that is worth it.

A request is always sent to an endpoint that decodes. If enough of its prompt is cached neither there nor where it
could have been sent, another endpoint reads the prompt first: the sidecar of the decoding one asks it to, at the
address that the header `PREFILLER_HEADER` names, and fetches the KV cache from it. So the prefill is booked on the
one endpoint and the running request on the other.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from enum import StrEnum

from msgspec import structs

from picker.policy.constraints import LabelIn
from picker.policy.model import CostWeights, DisaggregationSettings
from picker.selection.constraints import Constraints
from picker.selection.selector import Decision, Demand, Selector

# As the sidecars of llm-d read it: `ip:port` of who prefills.
PREFILLER_HEADER = "x-prefiller-host-port"


class Prefilled(StrEnum):
    """Where the prompt of a request of a disaggregated profile is read, and why."""

    APART = "apart"
    SHORT = "short"  # with the rest: too little of it is uncached there
    NO_ENDPOINT = "no_prefill_endpoint"  # with the rest: nobody else may do it


@dataclass(slots=True)
class DisaggregationStats:
    requests: Counter[str] = field(default_factory=Counter)


@dataclass(slots=True)
class Disaggregation:
    """Chooses who prefills."""

    selector: Selector
    stats: DisaggregationStats = field(default_factory=DisaggregationStats)

    def narrowed(self, demand: Demand, constraints: Constraints, rule: DisaggregationSettings) -> Constraints:
        """The constraints under the rule: who decodes, and if the prompt is long enough now, who prefills.

        Endpoints without the label of a role do everything, so they decode too. A pin and a rank name the endpoint
        that the request is sent to; who prefills is free.
        """
        decode_role = LabelIn(rule.role_label, frozenset(rule.decode_roles), or_absent=True)
        decode = replace(constraints, role=decode_role)
        cached = self.selector.best_cached(demand, self.selector.eligible(decode).mask)
        if demand.raw_tokens - cached < rule.min_uncached_tokens:
            return decode
        prefill_role = LabelIn(rule.role_label, frozenset(rule.prefill_roles))
        return replace(decode, prefill=replace(constraints, role=prefill_role, pin=None, rank=None))

    def mask(self, constraints: Constraints) -> int:
        """Who may do the prefill of such requests; 0 where it is not to be done apart, or nobody may."""
        return 0 if constraints.prefill is None else self.selector.eligible(constraints.prefill).mask

    def choose(
        self, demand: Demand, decode: Decision, full: int, weights: CostWeights, least_tokens: int
    ) -> Decision | None:
        """Who prefills for the endpoint that was chosen to decode, among those not `full`; None: it does so itself.

        least_tokens: with fewer uncached tokens there it is not worth the transfer.
        """
        if demand.constraints.prefill is None or decode.chosen.uncached_tokens < least_tokens:
            self.stats.requests[Prefilled.SHORT] += 1
            return None
        mask = self.mask(demand.constraints) & ~full & ~decode.endpoint.bit
        if not mask:
            self.stats.requests[Prefilled.NO_ENDPOINT] += 1
            return None
        self.stats.requests[Prefilled.APART] += 1
        return self.selector.choose(
            structs.replace(demand, constraints=demand.constraints.prefill, session=None), mask, weights
        )

"""What each endpoint was believed to do, and what it did: cached tokens, and times to the first token."""

from __future__ import annotations

from dataclasses import dataclass, field

from picker.pool.endpoint import Endpoint
from picker.pool.pool import Pool, PoolChange


@dataclass(slots=True)
class EndpointAccount:
    """Sums since the endpoint joined. Times are seconds, and only of the `timed` requests, which have both.

    `cached_tokens` is what decisions counted on; `reported_cached_tokens` what the engine said afterwards, where
    its answers are read.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    reported_cached_tokens: int = 0
    timed: int = 0
    predicted_ttft: float = 0.0
    observed_ttft: float = 0.0


@dataclass(slots=True)
class EndpointAccounts:
    """One account an endpoint; it goes when the endpoint leaves the pool."""

    pool: Pool
    _by_slot: dict[int, EndpointAccount] = field(default_factory=dict)

    def of(self, endpoint: Endpoint) -> EndpointAccount:
        """Of an endpoint that has left: one that nobody keeps, so that its slot's next owner is not burdened."""
        if self.pool.by_slot(endpoint.slot) is not endpoint:
            return EndpointAccount()
        return self._by_slot.setdefault(endpoint.slot, EndpointAccount())

    def pool_changed(self, change: PoolChange) -> None:
        for endpoint in change.removed:
            self._by_slot.pop(endpoint.slot, None)

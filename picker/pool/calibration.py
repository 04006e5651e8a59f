"""How fast each endpoint prefills, learned from first-byte times: no calibration job, no constants of one GPU."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from picker.pool.pool import PoolChange


@dataclass(slots=True)
class Calibration:
    """Median prefill rates over a sliding window of observations.

    An observation is (tokens, seconds): the tokens that had to be prefilled before the first byte of a request
    could come (its own uncached ones and those booked ahead of it) and the time from its decision to that byte.
    Small ones say more of latency than of rate and are left out. The median shrugs off stalls and lucky hits.
    """

    window: int = 64
    min_samples: int = 8
    min_tokens: int = 256
    # Tokens a second by slot, of those endpoints that are known, and their median. Read only.
    rates: dict[int, float] = field(default_factory=dict)
    typical: float | None = None
    _samples: dict[int, deque[float]] = field(default_factory=dict)

    def observe(self, slot: int, tokens: int, seconds: float) -> None:
        if tokens < self.min_tokens or seconds <= 0:
            return
        samples = self._samples.setdefault(slot, deque(maxlen=self.window))
        samples.append(tokens / seconds)
        if len(samples) >= self.min_samples:
            self.rates[slot] = median(samples)
            self.typical = median(self.rates.values())

    def rate(self, slot: int) -> float | None:
        """Prefill tokens a second: this endpoint's, else the pool's typical one, else None."""
        return self.rates.get(slot, self.typical)

    def relative_speed(self, slot: int) -> float:
        """This endpoint's rate over the pool's typical one; 1.0 until both are known."""
        rate = self.rates.get(slot)
        return rate / self.typical if rate and self.typical else 1.0

    def pool_changed(self, change: PoolChange) -> None:
        for endpoint in change.removed:
            self._samples.pop(endpoint.slot, None)
            self.rates.pop(endpoint.slot, None)
        if change.removed:
            self.typical = median(self.rates.values()) if self.rates else None

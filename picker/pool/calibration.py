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
    _samples: dict[int, deque[float]] = field(default_factory=dict)
    _rates: dict[int, float] = field(default_factory=dict)
    _typical: float | None = None

    def observe(self, slot: int, tokens: int, seconds: float) -> None:
        if tokens < self.min_tokens or seconds <= 0:
            return
        samples = self._samples.setdefault(slot, deque(maxlen=self.window))
        samples.append(tokens / seconds)
        if len(samples) >= self.min_samples:
            self._rates[slot] = median(samples)
            self._typical = median(self._rates.values())

    def rate(self, slot: int) -> float | None:
        """Prefill tokens a second: this endpoint's, else the pool's typical one, else None."""
        return self._rates.get(slot, self._typical)

    def relative_speed(self, slot: int) -> float:
        """This endpoint's rate over the pool's typical one; 1.0 until both are known."""
        rate = self._rates.get(slot)
        return rate / self._typical if rate and self._typical else 1.0

    def relative_speeds(self) -> dict[int, float]:
        """Those of all endpoints that are known to differ from 1.0, by slot."""
        typical = self._typical
        return {slot: rate / typical for slot, rate in self._rates.items()} if typical else {}

    def pool_changed(self, change: PoolChange) -> None:
        for endpoint in change.removed:
            self._samples.pop(endpoint.slot, None)
            self._rates.pop(endpoint.slot, None)
        if change.removed:
            self._typical = median(self._rates.values()) if self._rates else None

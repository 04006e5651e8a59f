"""How fast each endpoint is, learned from what is seen: no calibration job, no constants of one GPU.

How fast it prefills is learned from first-byte times; how fast it decodes, from what its engine reports.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from picker.pool.endpoint import EngineReport
from picker.pool.pool import PoolChange


@dataclass(slots=True)
class InterTokenTimes:
    """Seconds between two tokens of an answer, of each endpoint whose engine reports them.

    A sample is the mean over the tokens between two reports, `min_tokens` of them or more: where there were fewer, the
    next report is waited for. The median of the samples is that of decoding by itself, as most of them see no prefill.
    """

    window: int = 64
    min_samples: int = 8
    min_tokens: int = 32
    # By slot, of those endpoints that are known. Read only.
    known: dict[int, float] = field(default_factory=dict)
    _samples: dict[int, deque[float]] = field(default_factory=dict)
    # Where the sample that is under way began: seconds and tokens since the engine's start.
    _since: dict[int, tuple[float, float]] = field(default_factory=dict)

    def observe(self, slot: int, report: EngineReport) -> None:
        if report.inter_token_seconds is None or report.inter_tokens is None:
            return
        now = (report.inter_token_seconds, report.inter_tokens)
        before = self._since.setdefault(slot, now)
        seconds, tokens = now[0] - before[0], now[1] - before[1]
        if tokens < 0 or seconds < 0:
            # The engine has started anew.
            self._since[slot] = now
        elif tokens >= self.min_tokens:
            self._since[slot] = now
            self._learn(slot, seconds / tokens)

    def forget(self, slot: int) -> None:
        self.known.pop(slot, None)
        self._samples.pop(slot, None)
        self._since.pop(slot, None)

    def _learn(self, slot: int, sample: float) -> None:
        samples = self._samples.setdefault(slot, deque(maxlen=self.window))
        samples.append(sample)
        if len(samples) >= self.min_samples:
            self.known[slot] = median(samples)


@dataclass(slots=True)
class Calibration:
    """Medians over sliding windows of observations; the median shrugs off stalls and lucky hits.

    An observation is (tokens, seconds): the tokens that had to be prefilled before the first byte of a request
    could come (its own uncached ones and those booked ahead of it) and the time from its decision to that byte.
    Small ones say more of latency than of rate and are left out.

    `slowness` compares like with like: an endpoint's seconds a token against those of the others at work of about
    the same size (within a factor of two). Rates alone would not do: a fixed part in every answer makes who happens to
    be sent the small prompts look slow, and who is taken for slow is sent no others. Less than `tolerance` from
    the typical is noise.
    """

    window: int = 64
    min_samples: int = 8
    min_tokens: int = 256
    tolerance: float = 0.25
    # Tokens a second by slot, of those endpoints that are known, and their median. Read only.
    rates: dict[int, float] = field(default_factory=dict)
    typical: float | None = None
    # By slot: how many times as long as a typical endpoint it takes; who is not in it is typical. Read only.
    slowness: dict[int, float] = field(default_factory=dict)
    inter_token: InterTokenTimes = field(default_factory=InterTokenTimes)
    _samples: dict[int, deque[float]] = field(default_factory=dict)
    _paces: dict[int, _Paces] = field(default_factory=dict)

    def observe(self, slot: int, tokens: int, seconds: float) -> None:
        if tokens < self.min_tokens or seconds <= 0:
            return
        samples = self._samples.setdefault(slot, deque(maxlen=self.window))
        samples.append(tokens / seconds)
        if len(samples) >= self.min_samples:
            self.rates[slot] = median(samples)
            self.typical = median(self.rates.values())
        size = tokens.bit_length()
        if size not in self._paces:
            self._paces[size] = _Paces(2 * self.min_samples, self.min_samples)
        self._paces[size].observe(slot, seconds / tokens)
        self._compare(slot)

    def rate(self, slot: int) -> float | None:
        """Prefill tokens a second: this endpoint's, else the pool's typical one, else None."""
        return self.rates.get(slot, self.typical)

    def pool_changed(self, change: PoolChange) -> None:
        for endpoint in change.removed:
            self._samples.pop(endpoint.slot, None)
            self.rates.pop(endpoint.slot, None)
            self.slowness.pop(endpoint.slot, None)
            for paces in self._paces.values():
                paces.forget(endpoint.slot)
            self.inter_token.forget(endpoint.slot)
        if change.removed:
            self.typical = median(self.rates.values()) if self.rates else None

    def _compare(self, slot: int) -> None:
        """Take the middle of what the sizes say, those in which the endpoint is known."""
        ratios = [ratio for paces in self._paces.values() if (ratio := paces.ratio(slot)) is not None]
        ratio = median(ratios) if ratios else 1.0
        if 1 / (1 + self.tolerance) <= ratio <= 1 + self.tolerance:
            self.slowness.pop(slot, None)
        else:
            self.slowness[slot] = ratio


@dataclass(slots=True)
class _Paces:
    """Seconds a token at work of one size: the latest samples of each slot, their medians, and the median of those."""

    window: int
    min_samples: int
    samples: dict[int, deque[float]] = field(default_factory=dict)
    known: dict[int, float] = field(default_factory=dict)
    typical: float = 0.0

    def observe(self, slot: int, pace: float) -> None:
        samples = self.samples.setdefault(slot, deque(maxlen=self.window))
        samples.append(pace)
        if len(samples) >= self.min_samples:
            self.known[slot] = median(samples)
            self.typical = median(self.known.values())

    def ratio(self, slot: int) -> float | None:
        pace = self.known.get(slot)
        return None if pace is None else pace / self.typical

    def forget(self, slot: int) -> None:
        self.samples.pop(slot, None)
        if self.known.pop(slot, None) is not None and self.known:
            self.typical = median(self.known.values())

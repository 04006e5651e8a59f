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
class Medians:
    """The median of each slot's latest samples, `window` of them at most, and the median of those medians. The median
    shrugs off stalls and lucky hits. A slot with fewer than `min_samples` is not known yet.
    """

    window: int
    min_samples: int
    samples: dict[int, deque[float]] = field(default_factory=dict)
    # Read only.
    known: dict[int, float] = field(default_factory=dict)
    typical: float | None = None

    def observe(self, slot: int, sample: float) -> None:
        samples = self.samples.setdefault(slot, deque(maxlen=self.window))
        samples.append(sample)
        if len(samples) >= self.min_samples:
            self.known[slot] = median(samples)
            self.typical = median(self.known.values())

    def forget(self, slot: int) -> None:
        self.samples.pop(slot, None)
        if self.known.pop(slot, None) is not None:
            self.typical = median(self.known.values()) if self.known else None


@dataclass(slots=True)
class InterTokenTimes:
    """Seconds between two tokens of an answer, of each endpoint whose engine reports them.

    A sample is the mean over the tokens between two reports, `min_tokens` of them or more: where there were fewer, the
    next report is waited for. The median of the samples is that of decoding by itself, as most of them see no prefill.
    """

    window: int = 64
    min_samples: int = 8
    min_tokens: int = 32
    _times: Medians = field(init=False)
    # Where the sample that is under way began: seconds and tokens since the engine's start.
    _since: dict[int, tuple[float, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._times = Medians(self.window, self.min_samples)

    @property
    def known(self) -> dict[int, float]:
        """By slot, of those endpoints that are known. Read only."""
        return self._times.known

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
            self._times.observe(slot, seconds / tokens)

    def forget(self, slot: int) -> None:
        self._times.forget(slot)
        self._since.pop(slot, None)


@dataclass(slots=True)
class Calibration:
    """What requests tell of their endpoints.

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
    # By slot: how many times as long as a typical endpoint it takes; who is not in it is typical. Read only.
    slowness: dict[int, float] = field(default_factory=dict)
    inter_token: InterTokenTimes = field(default_factory=InterTokenTimes)
    # Tokens a second.
    rates: Medians = field(init=False)
    # Seconds a token, by the size of the work.
    _paces: dict[int, Medians] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rates = Medians(self.window, self.min_samples)

    def observe(self, slot: int, tokens: int, seconds: float) -> None:
        if tokens < self.min_tokens or seconds <= 0:
            return
        self.rates.observe(slot, tokens / seconds)
        size = tokens.bit_length()
        if size not in self._paces:
            self._paces[size] = Medians(2 * self.min_samples, self.min_samples)
        self._paces[size].observe(slot, seconds / tokens)
        self._compare(slot)

    def rate(self, slot: int) -> float | None:
        """Prefill tokens a second: this endpoint's, else the pool's typical one, else None."""
        return self.rates.known.get(slot, self.rates.typical)

    def pool_changed(self, change: PoolChange) -> None:
        for endpoint in change.removed:
            self.slowness.pop(endpoint.slot, None)
            for medians in (self.rates, *self._paces.values()):
                medians.forget(endpoint.slot)
            self.inter_token.forget(endpoint.slot)

    def _compare(self, slot: int) -> None:
        """Take the middle of what the sizes say, those in which the endpoint is known."""
        ratios = [
            paces.known[slot] / paces.typical
            for paces in self._paces.values()
            if slot in paces.known and paces.typical
        ]
        ratio = median(ratios) if ratios else 1.0
        if 1 / (1 + self.tolerance) <= ratio <= 1 + self.tolerance:
            self.slowness.pop(slot, None)
        else:
            self.slowness[slot] = ratio

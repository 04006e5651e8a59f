"""Who got how much of the work over time, against what the weights entitled them to.

Sans-IO: the driver takes a sample every so often. Counters in, shares out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise

from picker.telemetry.sources import ClassStats


@dataclass(frozen=True, slots=True)
class Sample:
    """One instant. By class label: cost dispatched since the start, requests waiting, and the quantum."""

    at: float
    cost: Mapping[str, int]
    waiting: Mapping[str, int]
    quantum: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Share:
    """One class over one interval, both parts 0..1 of the cost dispatched in it.

    entitlement: each interval's work is split by quantum among the classes that had work in it (that waited
    at either end or were served); this is the sum of the class's parts.
    """

    share: float
    entitlement: float


class ShareHistory:
    """The last `samples` samples."""

    def __init__(self, samples: int = 301) -> None:
        self._samples: deque[Sample] = deque(maxlen=samples)

    def sample(self, classes: Iterable[ClassStats], now: float) -> None:
        stats = list(classes)
        self._samples.append(
            Sample(
                now,
                {entry.label: entry.dispatched_cost for entry in stats},
                {entry.label: entry.waiting_requests for entry in stats},
                {entry.label: entry.quantum for entry in stats},
            )
        )

    def over(self, seconds: float, now: float) -> dict[str, Share]:
        """Shares of the work in the last `seconds`; empty when none was done."""
        samples = [sample for sample in self._samples if sample.at >= now - seconds]
        return _shares(samples)

    def series(self, points: int, step: int) -> list[tuple[float, dict[str, Share]]]:
        """Up to `points` windows of `step` samples each, oldest first, by the time of their end."""
        samples = list(self._samples)
        ends = range(len(samples) - 1, step - 1, -step)
        windows = [samples[end - step : end + 1] for end in list(ends)[:points]]
        return [(window[-1].at, _shares(window)) for window in reversed(windows)]


def _shares(samples: list[Sample]) -> dict[str, Share]:
    served: dict[str, int] = {}
    entitled: dict[str, float] = {}
    for before, after in pairwise(samples):
        work = {label: max(0, cost - before.cost.get(label, 0)) for label, cost in after.cost.items()}
        total = sum(work.values())
        active = {
            label: quantum
            for label, quantum in after.quantum.items()
            if work[label] or after.waiting[label] or before.waiting.get(label)
        }
        quanta = sum(active.values())
        for label in after.cost:
            served[label] = served.get(label, 0) + work[label]
            part = total * active[label] / quanta if label in active else 0.0
            entitled[label] = entitled.get(label, 0.0) + part
    done = sum(served.values())
    return {label: Share(served[label] / done, entitled[label] / done) for label in served} if done else {}

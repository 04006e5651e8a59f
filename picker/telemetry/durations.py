"""Histograms that cost next to nothing to write to: each request makes ten observations."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from picker.telemetry.catalogue import HistogramMetric


class Durations:
    """How many durations there were up to each bound, and their sum. Seconds."""

    __slots__ = ("_bounds", "_counts", "_sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        # One more, for what is longer than every bound.
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(self._bounds, seconds)] += 1
        self._sum += seconds

    def add_to(self, family: HistogramMetricFamily, labels: tuple[str, ...]) -> None:
        names = [*map(floatToGoString, self._bounds), "+Inf"]
        buckets = zip(names, accumulate(self._counts), strict=True)
        family.add_metric(labels, list(buckets), self._sum)


class DurationsByLabel(Collector):
    """The histograms of one metric, by the values of its labels; a value that is new begins one."""

    def __init__(self, entry: HistogramMetric) -> None:
        self._entry = entry
        self._found: dict[tuple[str, ...], Durations] = {}

    def of(self, *labels: str) -> Durations:
        found = self._found.get(labels)
        if found is None:
            found = self._found[labels] = Durations(self._entry.buckets)
        return found

    def collect(self) -> Iterable[HistogramMetricFamily]:
        metric = self._entry.metric
        family = HistogramMetricFamily(metric.name, metric.help, labels=metric.labels)
        for labels, durations in self._found.items():
            durations.add_to(family, labels)
        yield family

"""Prometheus exposition: gauges and counters read from the rooms at scrape time, histograms kept here."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

from picker.telemetry import catalogue
from picker.telemetry.catalogue import Kind, Metric
from picker.telemetry.durations import DurationsByLabel
from picker.telemetry.shares import ShareHistory
from picker.telemetry.sources import Sources

OTHER = "other"
WINDOWS = {"1m": 60.0, "5m": 300.0}

Family = CounterMetricFamily | GaugeMetricFamily


class BoundedLabel:
    """The values of one label, of which only the first `limit` are told apart."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._seen: set[str] = set()

    def __call__(self, value: str) -> str:
        if value in self._seen:
            return value
        if len(self._seen) >= self._limit:
            return OTHER
        self._seen.add(value)
        return value


class Metrics:
    """One registry. `expose` gives its text; `queue_wait`, `decision` and the stages take observations.

    clock: seconds, the same that the share history is sampled by. max_classes: policy classes told apart in
    histograms, where a class keeps its series for as long as the process lives.
    """

    def __init__(
        self,
        sources: Sources,
        shares: ShareHistory,
        *,
        clock: Callable[[], float],
        version: str,
        max_classes: int = 200,
    ) -> None:
        self._registry = CollectorRegistry()
        for collector in (ProcessCollector, PlatformCollector, GCCollector):
            collector(registry=self._registry)
        build = Info("picker_build", "The version that runs.", registry=self._registry)
        build.info({"version": version, "python": platform.python_version()})
        self._registry.register(_RoomsCollector(sources, shares, clock))
        self._class_label = BoundedLabel(max_classes)
        self._waits = DurationsByLabel(catalogue.QUEUE_WAIT)
        self._stages = DurationsByLabel(catalogue.STAGE)
        decisions = DurationsByLabel(catalogue.DECISION)
        for histograms in (self._waits, self._stages, decisions):
            self._registry.register(histograms)
        self.decision: Callable[[float], None] = decisions.of().observe

    def queue_wait(self, policy_class: str, seconds: float) -> None:
        self._waits.of(self._class_label(policy_class)).observe(seconds)

    def stage(self, name: str) -> Callable[[float], None]:
        """What a room calls with the seconds that a request spent in the stage; one of `catalogue.STAGES`."""
        if name not in catalogue.STAGES:
            raise ValueError(f"{name!r} is not a stage")
        return self._stages.of(name).observe

    def expose(self, accept: str = "") -> tuple[bytes, str]:
        """The text and its content type: OpenMetrics for a reader that asks for it."""
        encode, content_type = choose_encoder(accept)
        return encode(self._registry), content_type


class _RoomsCollector(Collector):
    def __init__(self, sources: Sources, shares: ShareHistory, clock: Callable[[], float]) -> None:
        self._sources = sources
        self._shares = shares
        self._clock = clock

    def describe(self) -> Iterable[Family]:
        # Asked at registration, to find names taken twice; the rooms need not be there yet.
        entries = (catalogue.CLASS_METRICS, catalogue.ENDPOINT_METRICS, catalogue.ROOM_METRICS)
        return [_family(entry.metric) for group in entries for entry in group]

    def collect(self) -> Iterator[Family]:
        yield from self._classes()
        yield from self._endpoints()
        yield from self._rooms()

    def _classes(self) -> Iterator[Family]:
        classes = list(self._sources.classes())
        for entry in catalogue.CLASS_METRICS:
            yield _family(entry.metric, _known(((each.label,), entry.read(each)) for each in classes))
        dropped = (
            ((each.label, reason), count)
            for each in classes
            for reason, count in sorted(each.dropped.items())
        )
        yield _family(catalogue.DROPPED, dropped)
        blocked = (
            ((each.label, reason), spent)
            for each in classes
            for reason, spent in sorted(each.blocked.items())
        )
        yield _family(catalogue.BLOCKED, blocked)
        share, entitlement = _family(catalogue.SHARE), _family(catalogue.ENTITLEMENT)
        for window, seconds in WINDOWS.items():
            for label, value in self._shares.over(seconds, self._clock()).items():
                share.add_metric((label, window), value.share)
                entitlement.add_metric((label, window), value.entitlement)
        yield share
        yield entitlement

    def _endpoints(self) -> Iterator[Family]:
        # Two endpoints with the same labels would be a malformed exposition: the first one stands.
        endpoints = {
            (each.name, each.address, str(each.rank)): each
            for each in reversed(list(self._sources.endpoints()))
        }
        for entry in catalogue.ENDPOINT_METRICS:
            samples = ((labels, entry.read(each)) for labels, each in endpoints.items())
            yield _family(entry.metric, _known(samples))
        yield _family(catalogue.POOL_SYNCED, [((), self._sources.synced())])
        yield _family(catalogue.POOL_ENDPOINTS, [((), len(endpoints))])

    def _rooms(self) -> Iterator[Family]:
        # Each room once: to look at some of them takes a sample.
        rooms = {room: stats() if callable(stats) else stats for room, stats in self._sources.stats.items()}
        for entry in catalogue.ROOM_METRICS:
            stats = rooms.get(entry.room)
            yield _family(entry.metric, _samples(stats, entry.field) if stats is not None else ())


def _known(
    samples: Iterable[tuple[tuple[str, ...], float | None]],
) -> Iterator[tuple[tuple[str, ...], float]]:
    """What is not known is no sample, not zero."""
    return ((labels, value) for labels, value in samples if value is not None)


def _samples(stats: Any, field: str) -> Iterator[tuple[tuple[str, ...], float]]:
    value = getattr(stats, field)
    if isinstance(value, dict):
        yield from (((str(key),), count) for key, count in sorted(value.items()))
    elif value is not None:
        yield (), value


def _family(metric: Metric, samples: Iterable[tuple[tuple[str, ...], float]] = ()) -> Family:
    kind = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.help, labels=metric.labels)
    for labels, value in samples:
        family.add_metric(labels, float(value))
    return family

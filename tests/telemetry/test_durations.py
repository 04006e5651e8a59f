"""Histograms: each observation in its bucket, buckets cumulative, labels apart."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.exposition import generate_latest

from picker.telemetry.catalogue import STAGE
from picker.telemetry.durations import DurationsByLabel


@given(st.lists(st.floats(0, 2) | st.sampled_from(STAGE.buckets), max_size=30))
def test_they_say_what_the_clients_own_histograms_say(observed: list[float]) -> None:
    ours, theirs = CollectorRegistry(), CollectorRegistry()
    metric = STAGE.metric
    durations = DurationsByLabel(STAGE)
    ours.register(durations)
    reference = Histogram(metric.name, metric.help, metric.labels, buckets=STAGE.buckets, registry=theirs)
    for number, seconds in enumerate(observed):
        stage = ("parse", "hash")[number % 2]
        durations.of(stage).observe(seconds)
        reference.labels(stage).observe(seconds)
    expected = [line for line in generate_latest(theirs).decode().splitlines() if "_created" not in line]
    assert generate_latest(ours).decode().splitlines() == expected

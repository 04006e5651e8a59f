"""Picker's own core in virtual time: the same queue, index and selection as in the server."""

from __future__ import annotations

from collections import Counter

import pytest

from picker.policy import Policy, load_policy
from picker.simulation.core_picker import CorePicker
from picker.simulation.engine_model import EngineShape, StepCost
from picker.simulation.replay import Pod, Replay
from picker.simulation.workloads import Arrival, SharedPrefix

TWO_CLASSES = """
default_policy_family: standard
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
  - {name: premium, policy_family: premium, cache_bucket: any, quantum: 4096, prefill_busy_threshold: 1024,
     max_queue_wait: 1000}
  - {name: standard, policy_family: standard, cache_bucket: any, quantum: 1024, prefill_busy_threshold: 1024,
     max_queue_wait: 1000}
"""


def pods(number: int) -> list[Pod]:
    shape = EngineShape(block_size=16, num_blocks=4097, max_num_seqs=64, max_num_batched_tokens=2048)
    return [Pod(index, shape, StepCost(base=0.005, prefill_token=1e-4)) for index in range(number)]


def test_shares_of_uncached_tokens_follow_the_quanta_while_both_classes_wait() -> None:
    cluster = pods(2)
    arrivals = [
        Arrival(0.0, 512, 4, policy_class=name) for _ in range(300) for name in ("premium", "standard")
    ]
    run = Replay(cluster, CorePicker(load_policy(TWO_CLASSES), cluster)).run(arrivals)
    assert all(trip.finished is not None for trip in run.trips)
    first = sorted(run.trips, key=lambda trip: trip.dispatched or 0.0)[:300]
    shares = Counter(trip.arrival.policy_class for trip in first)
    assert shares["premium"] == pytest.approx(240, abs=8)


def test_what_waits_too_long_is_refused() -> None:
    cluster = pods(1)
    policy = load_policy(TWO_CLASSES.replace("1000}", "0.5}"))
    arrivals = [Arrival(0.0, 2048, 4, policy_class="standard") for _ in range(20)]
    run = Replay(cluster, CorePicker(policy, cluster)).run(arrivals)
    refused = [trip for trip in run.trips if trip.refused is not None]
    assert {trip.refused for trip in refused} == {"deadline"}
    assert 0 < len(refused) < 20
    assert all((trip.queue_wait or 0.0) <= 0.5 for trip in run.trips)


def test_the_index_holds_what_the_pods_have_cached() -> None:
    cluster = pods(3)
    picker = CorePicker(Policy.default(), cluster)
    generator = SharedPrefix(
        groups=12,
        prompts_per_group=4,
        system_tokens=1600,
        question_tokens=400,
        output_tokens=20,
        block_size=16,
    )
    run = Replay(cluster, picker).run(generator.stage(20.0, 20.0).arrivals)
    assert sum(trip.cached_tokens for trip in run.trips) > 0.5 * 400 * 2000
    for pod in cluster:
        assert picker.index.blocks_of(pod.index) == pod.model.cache.resident


def test_bookings_are_gone_when_everything_has_ended() -> None:
    cluster = pods(2)
    picker = CorePicker(load_policy(TWO_CLASSES), cluster)
    Replay(cluster, picker).run([Arrival(0.1 * index, 700, 9) for index in range(50)])
    assert len(picker.queue) == 0
    assert all(picker.ledger.load(pod.index).running == 0 for pod in cluster)
    assert all(picker.ledger.load(pod.index).prefill_tokens == 0 for pod in cluster)


def test_how_fast_the_pods_decode_is_learned_from_their_reports() -> None:
    cluster = pods(2)
    picker = CorePicker(Policy.default(), cluster)
    Replay(cluster, picker).run([Arrival(0.1 * index, 100, 50) for index in range(400)])
    known = picker.calibration.inter_token.known
    assert set(known) == {0, 1}
    assert all(0.005 <= seconds < 0.01 for seconds in known.values()), (
        "an iteration without prefill takes 5 ms"
    )

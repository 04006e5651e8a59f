"""The simulator's event loop with plain pickers, and the policies that it compares with."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from picker.simulation.engine_model import EngineShape, StepCost
from picker.simulation.reference_policies import CHOOSERS, Immediate, LongestPrefix, reference_picker
from picker.simulation.replay import Dispatch, Pod, Replay
from picker.simulation.workloads import Arrival, SharedPrefix

TICK = StepCost(base=1.0)


def pods(number: int, blocks: int = 100, cost: StepCost = TICK, seqs: int = 8) -> list[Pod]:
    return [Pod(index, EngineShape(4, blocks, seqs, 64), cost) for index in range(number)]


def arrival(at: float, prompt: int = 8, output: int = 1, family: int = 0) -> Arrival:
    return Arrival(at, prompt, output, [100 * family + block for block in range(prompt // 4)])


class Mirror:
    """Keeps what a consumer of KV events would know."""

    def __init__(self, number: int) -> None:
        self.held: list[set[int]] = [set() for _ in range(number)]

    def stored(self, pod: int, keys: Sequence[int], parent: int | None) -> None:
        assert parent is None or parent in self.held[pod]
        self.held[pod].update(keys)

    def removed(self, pod: int, keys: Sequence[int]) -> None:
        self.held[pod] -= set(keys)


class OneAtATime:
    """Holds everything until the one pod is empty; refuses what has waited longer than its patience."""

    feed = None

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._queue: list[tuple[float, Arrival]] = []
        self._busy = False

    def arrive(self, now: float, arrival: Arrival) -> Iterable[Dispatch]:
        self._queue.append((now + self._patience, arrival))
        return self.poll(now)

    def prefilled(self, now: float, arrival: Arrival, pod: int) -> None:
        pass

    def finished(self, now: float, arrival: Arrival, pod: int) -> None:
        self._busy = False

    def poll(self, now: float) -> Iterable[Dispatch]:
        late = [arrival for deadline, arrival in self._queue if deadline <= now]
        self._queue = [item for item in self._queue if item[0] > now]
        dispatches = [Dispatch(arrival, refused="deadline") for arrival in late]
        if self._queue and not self._busy:
            self._busy = True
            dispatches.append(Dispatch(self._queue.pop(0)[1], 0))
        return dispatches

    def next_wakeup(self) -> float:
        return min((deadline for deadline, _ in self._queue), default=inf)


def test_a_queueing_picker_holds_releases_and_refuses_on_time() -> None:
    run = Replay(pods(1), OneAtATime(patience=6.0)).run([arrival(0.0, output=5) for _ in range(3)])
    first, second, third = run.trips
    assert (first.ttft, first.finished, first.queue_wait) == (1.0, 5.0, 0.0)
    assert (second.queue_wait, second.ttft, second.finished) == (5.0, 6.0, 10.0)
    assert third.refused == "deadline"
    assert third.dispatched is None
    assert run.seconds == 10.0


def test_runs_follow_one_another_on_warm_caches() -> None:
    cluster = pods(1, cost=StepCost(base=1.0, prefill_token=1.0))
    replay = Replay(cluster, Immediate(LongestPrefix(cluster, Random(0))))
    cold = replay.run([arrival(0.0, prompt=9)])
    warm = replay.run([arrival(0.0, prompt=9)], pause=30.0)
    assert (cold.trips[0].ttft, cold.trips[0].cached_tokens) == (10.0, 0)
    assert (warm.trips[0].ttft, warm.trips[0].cached_tokens) == (2.0, 8)
    assert warm.started == cold.ended + 30.0


def test_delivery_takes_its_time() -> None:
    cluster = pods(1)
    replay = Replay(cluster, Immediate(LongestPrefix(cluster, Random(0))), delivery=0.25)
    trip = replay.run([arrival(1.0)]).trips[0]
    assert (trip.queue_wait, trip.ttft) == (0.0, 1.25)


def test_the_feed_knows_exactly_what_each_pod_has_cached() -> None:
    cluster = pods(3, blocks=14)
    mirror = Mirror(3)
    picker = reference_picker("random", cluster)
    picker.feed = mirror  # type: ignore[misc]
    source = Random(5)
    work = [
        arrival(
            index * 0.7,
            prompt=source.randint(4, 30),
            output=source.randint(1, 9),
            family=source.randint(0, 4),
        )
        for index in range(200)
    ]
    Replay(cluster, picker).run(work)
    for pod in cluster:
        assert len(mirror.held[pod.index]) == pod.model.cache.resident
        assert all(pod.model.cache.match([key], 1) for key in mirror.held[pod.index])


@pytest.mark.parametrize("name", CHOOSERS)
def test_every_policy_serves_everything_and_repeats_itself(name: str) -> None:
    generator = SharedPrefix(
        groups=6, prompts_per_group=2, system_tokens=16, question_tokens=8, output_tokens=40, block_size=4
    )
    work = generator.stage(rate=3.0, seconds=40.0).arrivals
    results = []
    for _ in range(2):
        cluster = pods(4, blocks=1000, seqs=64)
        run = Replay(cluster, reference_picker(name, cluster, seed=1)).run(work)
        assert len(run.trips) == 120
        assert all(trip.finished is not None for trip in run.trips)
        results.append([(trip.pod, trip.finished) for trip in run.trips])
    assert results[0] == results[1]


def test_an_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="round-robin, random"):
        reference_picker("rond-robin", pods(1))


def test_affinity_hits_more_than_round_robin_and_balances_better_than_longest_prefix() -> None:
    generator = SharedPrefix(
        groups=8, prompts_per_group=4, system_tokens=64, question_tokens=8, output_tokens=4
    )
    work = SharedPrefix.stage(generator, rate=4.0, seconds=60.0).arrivals
    shape = EngineShape(64, 8, 16, 64)
    cached: dict[str, int] = {}
    for name in ("round-robin", "llmd-blend-precise"):
        cluster = [Pod(index, shape, StepCost(base=0.01)) for index in range(4)]
        run = Replay(cluster, reference_picker(name, cluster)).run(work)
        cached[name] = sum(trip.cached_tokens for trip in run.trips)
    assert cached["llmd-blend-precise"] > cached["round-robin"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.floats(0, 30), st.integers(1, 40), st.integers(1, 20), st.integers(0, 3)),
        min_size=1,
        max_size=25,
    ),
    st.sampled_from(list(CHOOSERS)),
)
def test_no_trip_is_lost_or_out_of_order(history: list[tuple[float, int, int, int]], name: str) -> None:
    work = sorted(
        (arrival(at, prompt, output, family) for at, prompt, output, family in history),
        key=lambda item: item.at,
    )
    cluster = pods(3, blocks=20)
    run = Replay(cluster, reference_picker(name, cluster)).run(work)
    assert [trip.arrival for trip in run.trips] == work
    for trip in run.trips:
        assert trip.dispatched is not None
        assert trip.first_token is not None
        assert trip.finished is not None
        assert trip.arrived <= trip.dispatched < trip.first_token <= trip.finished
    assert all(pod.model.cache.usage == 0.0 for pod in cluster)

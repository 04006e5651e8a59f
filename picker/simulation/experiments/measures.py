"""What a run is worth: figures of all requests, of each class and of each pod."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from picker.simulation.engine_model import EngineShape, StepCost
from picker.simulation.replay import Pod, Run, Trip
from picker.simulation.traffic import percentile

# A run is looked at in this many windows, none shorter than so many seconds.
_WINDOWS = 60
_SHORTEST_WINDOW = 10.0
# The fractions at which a distribution is drawn.
CURVE = (*(step / 100 for step in range(100)), 0.995, 0.999)


@dataclass(frozen=True, slots=True)
class Times:
    """A distribution of seconds; all zero where there are none."""

    mean: float
    p50: float
    p90: float
    p99: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Times:
        ordered = sorted(values)
        mean = sum(ordered) / len(ordered) if ordered else 0.0
        return cls(mean, *(percentile(ordered, part) or 0.0 for part in (0.5, 0.9, 0.99)))


@dataclass(frozen=True, slots=True)
class ClassMeasures:
    """One class. `wait` is in the picker's own queue.

    share: its part (0..1) of all uncached tokens computed. shortfall: how much less than it was owed it got of
    the work, where it always had a request waiting: the mean over those windows, 0..1.
    """

    requests: int
    refused: int
    ttft: Times
    wait: Times
    share: float
    shortfall: float


@dataclass(frozen=True, slots=True)
class PodMeasures:
    """One pod. `busy` is the part of the run in which it computed, `hit_share` that of its prompt tokens cached."""

    requests: int
    prefill_tokens: int
    hit_share: float
    busy: float
    preemptions: int


@dataclass(frozen=True, slots=True)
class Measures:
    """One run. Times are seconds, rates tokens a second over the whole run with its drain, shares 0..1.

    imbalance: the most prefill tokens of a pod over their mean. unfairness: the largest shortfall of a class.
    ttft_curve: seconds at each fraction of `CURVE`. shares: (seconds from the start, part of the computed
    uncached tokens by class), one entry a window.
    """

    seconds: float
    requests: int
    refused: int
    ttft: Times
    wait: Times
    inter_token: float
    hit_share: float
    prompt_rate: float
    output_rate: float
    imbalance: float
    unfairness: float
    classes: Mapping[str, ClassMeasures]
    pods: tuple[PodMeasures, ...]
    ttft_curve: tuple[float, ...]
    shares: tuple[tuple[float, Mapping[str, float]], ...]


def measure(run: Run, pods: Sequence[Pod], owed: Mapping[str, int] | None = None) -> Measures:
    """`owed` weighs the classes that requests name; a class that is not in it is owed nothing."""
    served = [trip for trip in run.trips if trip.first_token is not None]
    prompts = sum(trip.arrival.prompt_tokens for trip in served)
    ttfts = [trip.ttft for trip in served if trip.ttft is not None]
    gaps = [gap for trip in served if (gap := trip.inter_token_latency) is not None]
    per_pod = _pods(run, pods)
    mean_prefill = sum(pod.prefill_tokens for pod in per_pod) / len(per_pod)
    windows = _Windows(run, pods[0].model.shape, pods[0].model.cost)
    classes = _classes(run, windows, owed or {})
    return Measures(
        seconds=run.seconds,
        requests=len(run.trips),
        refused=sum(trip.refused is not None for trip in run.trips),
        ttft=Times.of(ttfts),
        wait=Times.of([trip.queue_wait for trip in run.trips if trip.queue_wait is not None]),
        inter_token=sum(gaps) / len(gaps) if gaps else 0.0,
        hit_share=sum(trip.cached_tokens for trip in served) / prompts if prompts else 0.0,
        prompt_rate=prompts / run.seconds if run.seconds else 0.0,
        output_rate=sum(trip.arrival.output_tokens for trip in served) / run.seconds if run.seconds else 0.0,
        imbalance=max(pod.prefill_tokens for pod in per_pod) / mean_prefill if mean_prefill else 1.0,
        unfairness=max((each.shortfall for each in classes.values()), default=0.0),
        classes=classes,
        pods=per_pod,
        ttft_curve=_curve(ttfts),
        shares=windows.shares(),
    )


def class_of(trip: Trip) -> str:
    return trip.arrival.policy_class or "default"


def _curve(values: Sequence[float]) -> tuple[float, ...]:
    ordered = sorted(values)
    return tuple(percentile(ordered, part) or 0.0 for part in CURVE)


def _pods(run: Run, pods: Sequence[Pod]) -> tuple[PodMeasures, ...]:
    sent: list[list[Trip]] = [[] for _ in pods]
    for trip in run.trips:
        if trip.pod is not None:
            sent[trip.pod].append(trip)
    found = []
    for pod, trips in zip(pods, sent, strict=True):
        prompts = sum(trip.arrival.prompt_tokens for trip in trips)
        found.append(
            PodMeasures(
                requests=len(trips),
                prefill_tokens=sum(trip.arrival.prompt_tokens - trip.cached_tokens for trip in trips),
                hit_share=sum(trip.cached_tokens for trip in trips) / prompts if prompts else 0.0,
                busy=min(1.0, pod.model.stats.busy_seconds / run.seconds) if run.seconds else 0.0,
                preemptions=pod.model.stats.preemptions,
            )
        )
    return tuple(found)


def _classes(run: Run, windows: _Windows, owed: Mapping[str, int]) -> dict[str, ClassMeasures]:
    trips: defaultdict[str, list[Trip]] = defaultdict(list)
    for trip in run.trips:
        trips[class_of(trip)].append(trip)
    computed = {name: sum(map(_uncached, each)) for name, each in trips.items()}
    everything = sum(computed.values())
    shortfalls = windows.shortfalls(owed)
    return {
        name: ClassMeasures(
            requests=len(each),
            refused=sum(trip.refused is not None for trip in each),
            ttft=Times.of([trip.ttft for trip in each if trip.ttft is not None]),
            wait=Times.of([trip.queue_wait for trip in each if trip.queue_wait is not None]),
            share=computed[name] / everything if everything else 0.0,
            shortfall=shortfalls.get(name, 0.0),
        )
        for name, each in sorted(trips.items())
    }


def _uncached(trip: Trip) -> int:
    return trip.arrival.prompt_tokens - trip.cached_tokens if trip.first_token is not None else 0


class _Windows:
    """A run in windows of equal length: which class got how much of the computing, and which always waited.

    A request counts as waiting for as long as its first token takes beyond its own prefill, wherever it waits: in a
    picker's queue or in an engine's. Its work counts in the window in which its prefill ends.
    """

    def __init__(self, run: Run, shape: EngineShape, cost: StepCost) -> None:
        self._start = run.started
        self._length = max(_SHORTEST_WINDOW, run.seconds / _WINDOWS)
        self._work: defaultdict[int, dict[str, int]] = defaultdict(dict)
        # By class: when a request began to wait (+1) and when it no longer did (-1).
        self._changes: defaultdict[str, list[tuple[float, int]]] = defaultdict(list)
        for trip in run.trips:
            if trip.first_token is None:
                continue
            name = class_of(trip)
            work = self._work[int((trip.first_token - run.started) / self._length)]
            work[name] = work.get(name, 0) + _uncached(trip)
            starts = trip.first_token - _prefill_seconds(trip, shape, cost)
            if starts > trip.arrived:
                self._changes[name] += [(trip.arrived, 1), (starts, -1)]

    def shares(self) -> tuple[tuple[float, Mapping[str, float]], ...]:
        found = []
        for window, work in sorted(self._work.items()):
            total = sum(work.values())
            parts = {name: tokens / total for name, tokens in work.items()} if total else {}
            found.append(((window + 1) * self._length, parts))
        return tuple(found)

    def shortfalls(self, owed: Mapping[str, int]) -> dict[str, float]:
        """By class: by how much less than owed it was served, the mean over the windows in which it always waited."""
        always = {name: self._always_waiting(name) for name in owed}
        found = {}
        for name, weight in owed.items():
            missing = []
            for window in always[name]:
                work = self._work.get(window, {})
                active = sum(owed[each] for each in owed if work.get(each) or window in always[each])
                total = sum(work.values())
                if total:
                    missing.append(max(0.0, weight / active - work.get(name, 0) / total))
            found[name] = sum(missing) / len(missing) if missing else 0.0
        return found

    def _always_waiting(self, name: str) -> set[int]:
        """The windows in which at every moment a request of the class waited."""
        windows: set[int] = set()
        waiting, since = 0, 0.0
        for at, change in sorted(self._changes[name]):
            if waiting == 0:
                since = at
            waiting += change
            if waiting == 0:
                first = -(-(since - self._start) // self._length)
                windows.update(range(int(first), int((at - self._start) // self._length)))
        return windows


def _prefill_seconds(trip: Trip, shape: EngineShape, cost: StepCost) -> float:
    """How long an idle pod would compute on a prompt."""
    tokens = _uncached(trip)
    steps = -(-tokens // shape.max_num_batched_tokens)
    attention = tokens * (trip.cached_tokens + tokens / 2)
    return cost.base * steps + cost.prefill_token * tokens + cost.prefill_attention * attention

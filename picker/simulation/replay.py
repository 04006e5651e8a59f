"""The event loop of the simulator: arrivals, a picker, and pods that are engine models, in virtual time."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Protocol

from picker.simulation.block_cache import BlockTable
from picker.simulation.engine_model import EngineModel, EngineShape, Job, Step, StepCost
from picker.simulation.workloads import Arrival


@dataclass(frozen=True, slots=True)
class Dispatch:
    """An arrival goes to a pod, or to none: then `refused` says why."""

    arrival: Arrival
    pod: int = -1
    refused: str | None = None


class BlockFeed(Protocol):
    """What hears of the pods' caches, as KV events tell it: after the step, one copy of each key at most."""

    def stored(self, pod: int, keys: Sequence[int], parent: int | None) -> None: ...

    def removed(self, pod: int, keys: Sequence[int]) -> None: ...


class Picker(Protocol):
    """Decides where arrivals go, and when. Every call says what time it is, in seconds.

    `poll` comes after each step of a pod that ended something, and no later than `next_wakeup`.
    """

    @property
    def feed(self) -> BlockFeed | None: ...

    def arrive(self, now: float, arrival: Arrival) -> Iterable[Dispatch]: ...

    def prefilled(self, now: float, arrival: Arrival, pod: int) -> None: ...

    def finished(self, now: float, arrival: Arrival, pod: int) -> None: ...

    def poll(self, now: float) -> Iterable[Dispatch]: ...

    def next_wakeup(self) -> float: ...


@dataclass(slots=True, eq=False)
class Trip:
    """What became of one arrival. Times are the simulation's; None: it did not come to that."""

    arrival: Arrival
    arrived: float
    pod: int | None = None
    dispatched: float | None = None
    first_token: float | None = None
    finished: float | None = None
    cached_tokens: int = 0
    refused: str | None = None

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrived

    @property
    def queue_wait(self) -> float | None:
        """Seconds in the picker's own queue."""
        return None if self.dispatched is None else self.dispatched - self.arrived

    @property
    def inter_token_latency(self) -> float | None:
        """Mean seconds between output tokens."""
        tokens = self.arrival.output_tokens
        if self.finished is None or self.first_token is None or tokens < 2:
            return None
        return (self.finished - self.first_token) / (tokens - 1)


@dataclass(slots=True)
class Run:
    """The trips of one run in order of arrival, and its first and last moment (all answers included)."""

    trips: list[Trip] = field(default_factory=list)
    started: float = 0.0
    ended: float = 0.0

    @property
    def seconds(self) -> float:
        return self.ended - self.started


class Pod:
    """One engine in the simulation, with the blocks that it has told of held back until its step is over."""

    __slots__ = ("_copies", "_events", "feed", "index", "model", "step", "version")

    def __init__(self, index: int, shape: EngineShape, cost: StepCost) -> None:
        self.index = index
        self.model = EngineModel(shape, cost, self)
        self.feed: BlockFeed | None = None
        self.step: Step | None = None
        self.version = 0
        self._copies: dict[int, int] = {}
        self._events: list[tuple[Sequence[int], int | None] | int] = []

    def stored(self, table: BlockTable, first: int, last: int) -> None:
        if self.feed is not None:
            parent = table.keys[first - 1] if first else None
            self._events.append((table.keys[first:last], parent))

    def removed(self, key: int) -> None:
        if self.feed is not None:
            self._events.append(key)

    def cleared(self) -> None:
        raise NotImplementedError("the simulator never resets a cache")

    def publish(self) -> None:
        """Tell the feed what has happened since the last time, in order."""
        feed = self.feed
        if feed is None or not self._events:
            return
        copies = self._copies
        for event in self._events:
            if isinstance(event, int):
                copies[event] -= 1
                if not copies[event]:
                    del copies[event]
                    feed.removed(self.index, (event,))
            else:
                keys, parent = event
                for key in keys:
                    copies[key] = copies.get(key, 0) + 1
                feed.stored(self.index, keys, parent)
        self._events.clear()


class Replay:
    """A cluster under a picker. Runs may follow one another: caches stay warm and the clock goes on.

    `delivery` is the seconds between a dispatch and the engine's own queue: proxy, HTTP and tokenization.
    """

    def __init__(self, pods: Sequence[Pod], picker: Picker, *, delivery: float = 0.0) -> None:
        self.pods = pods
        self.now = 0.0
        self._picker = picker
        self._delivery = delivery
        self._underway: deque[tuple[float, Trip]] = deque()
        self._trips: dict[Arrival, Trip] = {}
        self._jobs: dict[Job, Trip] = {}
        # (time, order, pod, version): when a pod's step ends, unless the pod's version has moved on.
        self._ends: list[tuple[float, int, int, int]] = []
        self._order = itertools.count()
        for pod in pods:
            pod.feed = picker.feed

    def run(self, arrivals: Iterable[Arrival], *, pause: float = 0.0) -> Run:
        """Play arrivals, whose times count from `pause` seconds after now, and go on until all have ended."""
        start = self.now + pause
        run = Run(started=start)
        coming = iter(arrivals)
        following = next(coming, None)
        while True:
            arrives = inf if following is None else start + following.at
            ends = self._ends[0][0] if self._ends else inf
            delivers = self._underway[0][0] if self._underway else inf
            wakes = self._picker.next_wakeup()
            soonest = min(arrives, delivers, ends, wakes)
            if soonest == inf:
                break
            self.now = now = max(self.now, soonest)
            if soonest == arrives and following is not None:
                self._arrive(run, following, now)
                following = next(coming, None)
            elif soonest == delivers:
                self._submit(self._underway.popleft()[1], now)
            elif soonest == ends:
                self._end_step(now)
            else:
                self._apply(self._picker.poll(now), now)
        if self._jobs or self._trips:
            raise RuntimeError(
                f"{len(self._jobs)} requests never ended, {len(self._trips)} never left the queue"
            )
        run.ended = self.now = max((trip.finished or trip.arrived for trip in run.trips), default=start)
        return run

    def _arrive(self, run: Run, arrival: Arrival, now: float) -> None:
        trip = Trip(arrival, now)
        run.trips.append(trip)
        self._trips[arrival] = trip
        self._apply(self._picker.arrive(now, arrival), now)

    def _apply(self, dispatches: Iterable[Dispatch], now: float) -> None:
        for dispatch in dispatches:
            trip = self._trips.pop(dispatch.arrival)
            if dispatch.refused is not None:
                trip.refused = dispatch.refused
                continue
            trip.pod, trip.dispatched = dispatch.pod, now
            if self._delivery:
                self._underway.append((now + self._delivery, trip))
            else:
                self._submit(trip, now)

    def _submit(self, trip: Trip, now: float) -> None:
        assert trip.pod is not None
        pod, arrival = self.pods[trip.pod], trip.arrival
        job = Job(BlockTable(list(arrival.blocks)), arrival.prompt_tokens, arrival.output_tokens)
        self._jobs[job] = trip
        pod.model.submit(job)
        if pod.step is None:
            self._begin_step(pod, now)
        elif len(pod.model.waiting) == 1 and pod.step.cut(now):
            # Nobody was waiting, so this one may be admitted with the next iteration.
            self._expect_end(pod)

    def _begin_step(self, pod: Pod, now: float) -> None:
        pod.step = pod.model.begin(now)
        if pod.step is not None:
            self._expect_end(pod)

    def _expect_end(self, pod: Pod) -> None:
        assert pod.step is not None
        pod.version += 1
        heapq.heappush(self._ends, (pod.step.ends, next(self._order), pod.index, pod.version))

    def _end_step(self, now: float) -> None:
        _, _, index, version = heapq.heappop(self._ends)
        pod = self.pods[index]
        if version != pod.version or pod.step is None:
            return
        outcome = pod.model.end(pod.step)
        pod.step = None
        pod.publish()
        for job in outcome.prefilled:
            self._prefilled(job, index, now)
        for job in outcome.finished:
            trip = self._jobs.pop(job)
            trip.finished = now
            self._picker.finished(now, trip.arrival, index)
        if outcome.prefilled or outcome.finished:
            self._apply(self._picker.poll(now), now)
        if pod.step is None:
            self._begin_step(pod, now)

    def _prefilled(self, job: Job, index: int, now: float) -> None:
        trip = self._jobs[job]
        if trip.first_token is None:
            trip.first_token = now
            trip.cached_tokens = job.cached_tokens or 0
            self._picker.prefilled(now, trip.arrival, index)

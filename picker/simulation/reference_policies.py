"""Plain routing policies to compare with: each sends an arrival to a pod the moment it comes.

The peers' ones follow what their code or documentation says; they see what their originals see (their own
bookings, a scrape that is up to 50 ms old, the caches by events), and none of it is tuned here.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from math import inf
from random import Random
from typing import Protocol

from picker.simulation.replay import BlockFeed, Dispatch, Picker, Pod
from picker.simulation.workloads import Arrival

_SCRAPE_SECONDS = 0.05


class Chooser(Protocol):
    """A policy without a queue."""

    def choose(self, now: float, arrival: Arrival) -> int: ...

    def prefilled(self, arrival: Arrival, pod: int) -> None: ...

    def finished(self, arrival: Arrival, pod: int) -> None: ...


class Immediate:
    """Makes a picker of a chooser."""

    feed: BlockFeed | None = None

    def __init__(self, chooser: Chooser) -> None:
        self._chooser = chooser

    def arrive(self, now: float, arrival: Arrival) -> Iterable[Dispatch]:
        return (Dispatch(arrival, self._chooser.choose(now, arrival)),)

    def prefilled(self, now: float, arrival: Arrival, pod: int) -> None:
        self._chooser.prefilled(arrival, pod)

    def finished(self, now: float, arrival: Arrival, pod: int) -> None:
        self._chooser.finished(arrival, pod)

    def poll(self, now: float) -> Iterable[Dispatch]:
        return ()

    def next_wakeup(self) -> float:
        return inf


class _Base:
    def __init__(self, pods: Sequence[Pod], source: Random) -> None:
        self.pods = pods
        self.source = source

    def prefilled(self, arrival: Arrival, pod: int) -> None:
        pass

    def finished(self, arrival: Arrival, pod: int) -> None:
        pass

    def lowest(self, values: Sequence[float]) -> int:
        """The pod with the lowest value, ties at random."""
        low = min(values)
        return self.source.choice([pod for pod, value in enumerate(values) if value == low])

    def matched(self, arrival: Arrival) -> list[int]:
        """Reusable blocks of the prompt on each pod, as KV events would have told by now."""
        return [pod.model.cache.reusable(arrival.blocks, arrival.prompt_tokens) for pod in self.pods]


class RoundRobin(_Base):
    def __init__(self, pods: Sequence[Pod], source: Random) -> None:
        super().__init__(pods, source)
        self._next = 0

    def choose(self, now: float, arrival: Arrival) -> int:
        self._next = (self._next + 1) % len(self.pods)
        return self._next


class RandomPod(_Base):
    def choose(self, now: float, arrival: Arrival) -> int:
        return self.source.randrange(len(self.pods))


class LeastRunning(_Base):
    """The fewest requests sent and not finished."""

    def __init__(self, pods: Sequence[Pod], source: Random) -> None:
        super().__init__(pods, source)
        self._open = [0] * len(pods)

    def choose(self, now: float, arrival: Arrival) -> int:
        pod = self.lowest(self._open)
        self._open[pod] += 1
        return pod

    def finished(self, arrival: Arrival, pod: int) -> None:
        self._open[pod] -= 1


class LongestPrefix(_Base):
    """The most cached tokens, whatever the load."""

    def choose(self, now: float, arrival: Arrival) -> int:
        return self.lowest([-blocks for blocks in self.matched(arrival)])


class _RoutedPrefixes:
    """Which prefixes were sent to a pod lately: llm-d's approximate prefix index, an LRU a pod."""

    def __init__(self, pods: int, capacity: int) -> None:
        self._held: list[OrderedDict[int, None]] = [OrderedDict() for _ in range(pods)]
        self._capacity = capacity

    def matched(self, blocks: Sequence[int]) -> list[int]:
        return [self._match(held, blocks) for held in self._held]

    def sent(self, pod: int, blocks: Sequence[int]) -> None:
        held = self._held[pod]
        for block in reversed(blocks):
            held[block] = None
            held.move_to_end(block)
        while len(held) > self._capacity:
            held.popitem(last=False)

    def _match(self, held: OrderedDict[int, None], blocks: Sequence[int]) -> int:
        matched = 0
        for block in blocks:
            if block not in held:
                break
            matched += 1
        return matched


class LlmdBlend(_Base):
    """llm-d's weighted blend 3:2:2:2 of prefix, queue, KV use and no-hit LRU; the highest score wins."""

    weights = (3.0, 2.0, 2.0, 2.0)

    def __init__(self, pods: Sequence[Pod], source: Random, *, precise: bool = False) -> None:
        super().__init__(pods, source)
        capacity = pods[0].model.shape.num_blocks
        self._routed = None if precise else _RoutedPrefixes(len(pods), capacity)
        self._scraped_at = -inf
        self._queues: list[int] = []
        self._usage: list[float] = []
        # Pods by when they last got a prompt that no pod had cached, the longest ago first.
        self._cold: OrderedDict[int, None] = OrderedDict.fromkeys(range(len(pods)))

    def choose(self, now: float, arrival: Arrival) -> int:
        self._scrape(now)
        matched = self.matched(arrival) if self._routed is None else self._routed.matched(arrival.blocks)
        prefix, queue, usage, cold = self.weights
        blocks = max(1, len(arrival.blocks))
        low, high = min(self._queues), max(self._queues)
        no_hit = self._no_hit(matched)
        scores = [
            prefix * matched[pod] / blocks
            + queue * ((high - self._queues[pod]) / (high - low) if high > low else 1.0)
            + usage * (1.0 - self._usage[pod])
            + cold * no_hit[pod]
            for pod in range(len(self.pods))
        ]
        pod = self.lowest([-score for score in scores])
        if not any(matched):
            self._cold.move_to_end(pod)
        if self._routed is not None:
            self._routed.sent(pod, arrival.blocks)
        return pod

    def _scrape(self, now: float) -> None:
        if now - self._scraped_at >= _SCRAPE_SECONDS:
            self._scraped_at = now
            self._queues = [len(pod.model.waiting) for pod in self.pods]
            self._usage = [pod.model.cache.usage for pod in self.pods]

    def _no_hit(self, matched: Sequence[int]) -> list[float]:
        """Neutral for a prompt that some pod has; else from 1 for the pod that has rested longest to 0."""
        if any(matched) or len(self.pods) == 1:
            return [0.5] * len(self.pods)
        scores = [0.0] * len(self.pods)
        for rank, pod in enumerate(self._cold):
            scores[pod] = 1.0 - rank / (len(self.pods) - 1)
        return scores


class LlmdAffinity(_Base):
    """llm-d's newer default: stay where 80 % is cached unless that pod's prefill backlog is too long, then
    the fewest tokens in flight (this request's uncached ones on the pod included).
    """

    stickiness = 0.8
    break_tokens = 286_720

    def __init__(self, pods: Sequence[Pod], source: Random) -> None:
        super().__init__(pods, source)
        self._tokens = [0] * len(pods)
        self._booked: dict[Arrival, int] = {}

    def choose(self, now: float, arrival: Arrival) -> int:
        size = self.pods[0].model.shape.block_size
        cached = [blocks * size for blocks in self.matched(arrival)]
        sticky = [
            pod for pod, tokens in enumerate(cached) if tokens >= self.stickiness * arrival.prompt_tokens
        ]
        everybody = range(len(self.pods))
        if sticky:
            gap = min(self._tokens[pod] for pod in sticky) - min(self._tokens)
            candidates: Sequence[int] = sticky if gap <= self.break_tokens else everybody
        else:
            candidates = everybody
        costs = [self._tokens[pod] + arrival.prompt_tokens - cached[pod] for pod in candidates]
        pod = candidates[self.lowest(costs)]
        self._booked[arrival] = arrival.prompt_tokens - cached[pod]
        self._tokens[pod] += self._booked[arrival]
        return pod

    def prefilled(self, arrival: Arrival, pod: int) -> None:
        self._tokens[pod] -= self._booked.pop(arrival)


class DynamoCost(_Base):
    """Dynamo's default cost: uncached prefill blocks in flight, this prompt's included, plus decode blocks."""

    def __init__(self, pods: Sequence[Pod], source: Random) -> None:
        super().__init__(pods, source)
        self._prefill = [0] * len(pods)
        self._decode = [0] * len(pods)
        self._booked: dict[Arrival, int] = {}

    def choose(self, now: float, arrival: Arrival) -> int:
        size = self.pods[0].model.shape.block_size
        matched = self.matched(arrival)
        own = -(-arrival.prompt_tokens // size)
        pod = self.lowest(
            [
                max(0.0, (self._prefill[pod] + arrival.prompt_tokens) / size - matched[pod])
                + self._decode[pod]
                + own
                for pod in range(len(self.pods))
            ]
        )
        self._booked[arrival] = max(0, arrival.prompt_tokens - matched[pod] * size)
        self._prefill[pod] += self._booked[arrival]
        self._decode[pod] += own
        return pod

    def prefilled(self, arrival: Arrival, pod: int) -> None:
        self._prefill[pod] -= self._booked.pop(arrival)

    def finished(self, arrival: Arrival, pod: int) -> None:
        self._decode[pod] -= -(-arrival.prompt_tokens // self.pods[0].model.shape.block_size)


def _precise_blend(pods: Sequence[Pod], source: Random) -> Chooser:
    return LlmdBlend(pods, source, precise=True)


CHOOSERS: dict[str, Callable[[Sequence[Pod], Random], Chooser]] = {
    "round-robin": RoundRobin,
    "random": RandomPod,
    "least-running": LeastRunning,
    "longest-prefix": LongestPrefix,
    "llmd-blend": LlmdBlend,
    "llmd-blend-precise": _precise_blend,
    "llmd-affinity": LlmdAffinity,
    "dynamo-cost": DynamoCost,
}


def reference_picker(name: str, pods: Sequence[Pod], seed: int = 0) -> Picker:
    """The policy of this name. Raises ValueError that lists the names."""
    if name not in CHOOSERS:
        raise ValueError(f"no policy {name!r}; there are {', '.join(CHOOSERS)}")
    return Immediate(CHOOSERS[name](pods, Random(f"{seed}/{name}")))

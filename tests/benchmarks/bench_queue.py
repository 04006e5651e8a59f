"""Costs of deciding: one arbitration, joining, leaving, and queue and selection together.

    python -m tests.benchmarks.bench_queue

Every figure is what the fastest tenth of the samples stayed below, in processor time, on this machine and at this
moment; what counts is that time does not grow with costs and quanta, and how it grows with classes and lanes. The first
line says how fast the machine was meanwhile: 10 to 15 ms is a quiet server.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from random import Random

from picker.kvcache.index import KvIndex
from picker.kvcache.keys import root_key
from picker.policy.model import CostWeights, Policy, PolicyClass, Profile, QueuePolicy
from picker.pool.endpoint import EndpointSpec
from picker.pool.ledger import Ledger
from picker.pool.pool import Pool
from picker.queueing.admission import AdmissionQueue, QueueLimits
from picker.queueing.work import Outcome, Released, Work
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import Prefix, PromptKeys
from picker.selection.selector import Decision, Demand, Eligibility, Selector
from picker.selection.weighing import Candidate, Members, weigh_prefill

BLOCK = 16
NOBODY_REFUSED = Eligibility(0, {})
NOTHING_WEIGHED = weigh_prefill(0, Members([], [], []), {}, {}, CostWeights())
ROOT = root_key(BLOCK, None)


class NothingCached:
    def find_matches(self, keys: Sequence[int], mask: int) -> Mapping[int, Prefix]:
        return {}


class FirstFree(Selector):
    """Takes the first endpoint, so that an arbitration is measured without the choice."""

    def choose(self, demand: Demand, mask: int, weights: CostWeights, **options: object) -> Decision:
        endpoint = self.pool.in_mask(mask & -mask)[0]
        chosen = Candidate(endpoint, 0, demand.raw_tokens, 0, 0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
        return Decision(chosen, NOTHING_WEIGHED, NOBODY_REFUSED, held_tokens=0)


class Bench:
    """A pool that is busy, so that whoever is submitted waits, and a queue."""

    def __init__(
        self,
        classes: Sequence[PolicyClass],
        endpoints: int,
        *,
        max_lanes: int = 20_000,
        index: KvIndex | None = None,
        selector: type[Selector] = Selector,
    ) -> None:
        self.pool = Pool()
        self.ledger = Ledger()
        self.pool.subscribe(self.ledger.pool_changed)
        specs = [EndpointSpec(f"e{n}", f"e{n}", f"10.0.{n // 256}.{n % 256}", 8000) for n in range(endpoints)]
        self.pool.replace(specs)
        self.selector = selector(self.pool, self.ledger, index or NothingCached(), random=Random(1))
        self.queue = AdmissionQueue(
            Policy(root=Profile("", tuple(classes))), self.selector, QueueLimits(max_lanes=max_lanes)
        )
        self.classes = list(classes)
        self.now = 0.0
        self.number = 0
        self.running: list[Released] = []
        for _ in range(endpoints):
            self.take(self.queue.submit(self.work(0, 1), self.now))

    def work(
        self,
        number: int,
        cost: int,
        constraints: Constraints = Constraints(),
        prompt: PromptKeys | None = None,
    ) -> Work:
        self.number += 1
        self.now += 1e-4
        return Work(
            id=str(self.number),
            arrival=self.now,
            demand=Demand(cost, prompt or PromptKeys.unknown(), constraints),
            policy_class=self.classes[number % len(self.classes)],
        )

    def take(self, outcomes: Sequence[Outcome]) -> int:
        released = [each for each in outcomes if isinstance(each, Released)]
        self.running += released
        return len(released)

    def serve_one(self) -> float:
        """Free one place; the seconds until the next request has it."""
        self.ledger.release(self.running.pop(0).booking)
        self.now += 1e-4
        start = time.process_time()
        outcomes = self.queue.poll(self.now)
        seconds = time.process_time() - start
        assert self.take(outcomes) == 1
        return seconds


def policy_class(number: int, quantum: int, order: str = "fcfs") -> PolicyClass:
    return PolicyClass(
        name=f"c{number}", quantum=quantum, max_running_per_worker=1, queue_policy=QueuePolicy(order)
    )


def fastest(measure: Callable[[], float], samples: int = 500) -> float:
    """What a tenth of the samples stayed below: other work on the machine only ever adds."""
    gc.collect()
    gc.disable()
    try:
        return sorted(measure() for _ in range(samples))[samples // 10]
    finally:
        gc.enable()


def arbitration(
    classes: int, cost: int, quantum: int, lanes: int = 1, order: str = "fcfs", waiting: int = 1000
) -> float:
    """Seconds of one poll that dispatches one request, on one endpoint, with about so many waiting."""
    bench = Bench([policy_class(number, quantum, order) for number in range(classes)], 1, selector=FirstFree)
    kinds = [Constraints(allow=(frozenset({"e0", str(kind)}),)) for kind in range(lanes)]
    for number in range(max(waiting, 3 * classes, lanes)):
        bench.queue.submit(bench.work(number, cost, kinds[number % lanes]), bench.now)

    numbers = count()

    def measure() -> float:
        seconds = bench.serve_one()
        number = next(numbers)
        bench.queue.submit(bench.work(number, cost, kinds[number % lanes]), bench.now)
        return seconds

    return fastest(measure)


def join_and_leave(classes: int, order: str, waiting: int = 1000) -> tuple[float, float]:
    """Seconds to join a queue that cannot move, and to leave it again from its middle."""
    bench = Bench([policy_class(number, 1000, order) for number in range(classes)], 4)
    for number in range(waiting):
        bench.queue.submit(bench.work(number, 100 + number), bench.now)
    numbers = count()

    def join() -> float:
        work = bench.work(next(numbers), 500)
        start = time.process_time()
        bench.queue.submit(work, bench.now)
        seconds = time.process_time() - start
        works.append(work)
        return seconds

    def leave() -> float:
        work = works.pop(len(works) // 2)
        start = time.process_time()
        bench.queue.cancel(work)
        return time.process_time() - start

    works: list[Work] = []
    return fastest(join), fastest(leave)


def decision(endpoints: int, waiting: int, blocks: int) -> float:
    """Seconds of queue and selection for one request: joining, arbitration, cache lookup, choice, booking."""
    index = KvIndex()
    keys = [list(range(1000 * (n + 1), 1000 * (n + 1) + blocks)) for n in range(50)]
    for slot in range(endpoints):
        for number in range(slot % 7, 50, 7):
            index.add(slot, keys[number], ROOT)
    bench = Bench([policy_class(number, 1000) for number in range(4)], endpoints, index=index)

    def prompted(number: int) -> Work:
        chain = keys[number % 50]
        prompt = PromptKeys([blocks * BLOCK + 5], lambda block_size: (chain,))
        return bench.work(number, blocks * BLOCK + 5, prompt=prompt)

    for number in range(waiting):
        bench.queue.submit(prompted(number), bench.now)

    numbers = count()

    def measure() -> float:
        work = prompted(next(numbers))
        start = time.process_time()
        cached = bench.selector.best_cached(work.demand, (1 << endpoints) - 1)
        work = Work(work.id, work.arrival, work.demand, work.policy_class, cached_tokens=cached)
        bench.queue.submit(work, bench.now)
        return time.process_time() - start + bench.serve_one()

    return fastest(measure)


def choice(endpoints: int, blocks: int) -> float:
    """Seconds of one choice among all endpoints."""
    index = KvIndex()
    chain = list(range(1, blocks + 1))
    for slot in range(0, endpoints, 3):
        index.add(slot, chain, ROOT)
    bench = Bench([policy_class(0, 1000)], endpoints, index=index)
    prompt = PromptKeys([blocks * BLOCK + 5] if blocks else [], lambda block_size: (chain,))
    demand = Demand(blocks * BLOCK + 5, prompt)

    weights = CostWeights()

    def measure() -> float:
        start = time.process_time()
        bench.selector.choose(demand, (1 << endpoints) - 1, weights)
        return time.process_time() - start

    return fastest(measure)


def row(what: str, seconds: float, target: float | None = None) -> None:
    goal = f"   target {target:5.0f}" if target else ""
    print(f"  {what:<58}{seconds * 1e6:9.1f} us{goal}")


def plain_loop() -> float:
    """Seconds of a million turns of an empty loop."""
    start = time.process_time()
    for _ in range(1_000_000):
        pass
    return time.process_time() - start


def main() -> None:
    print(f"An empty loop turns a million times in {fastest(plain_loop, samples=10) * 1e3:.1f} ms")
    print("One arbitration (a poll that finds who goes next, charges and books), 1,000 waiting")
    for classes, target in ((1, None), (16, 20), (256, 60)):
        row(f"{classes} classes, cost 500, quantum 1000", arbitration(classes, 500, 1000), target)
    print("Costs and quanta, 16 classes")
    for cost, quantum in ((1, 1), (1, 10**9), (10**9, 1), (10**9, 10**9)):
        row(f"cost {cost:.0e}, quantum {quantum:.0e}", arbitration(16, cost, quantum))
    print("Lanes, 1 class")
    for lanes in (1, 100, 10_000):
        row(f"{lanes} lanes on one endpoint", arbitration(1, 500, 1000, lanes))
    print("Orders, 16 classes")
    for policy in QueuePolicy:
        row(policy, arbitration(16, 500, 1000, order=policy))
    print("Joining and leaving, nothing can go, 1,000 waiting")
    for classes in (1, 16, 256):
        for order in ("fcfs", "cache_affinity") if classes == 16 else ("fcfs",):
            joining, leaving = join_and_leave(classes, order)
            row(f"join, {classes} classes, {order}", joining, 10)
            row(f"leave, {classes} classes, {order}", leaving, 10)
    print("Selection")
    for endpoints, blocks in ((8, 0), (64, 0), (64, 128)):
        row(f"choice among {endpoints} endpoints, {blocks} blocks of prompt", choice(endpoints, blocks))
    for endpoints in (8, 64):
        row(
            f"queue and selection, {endpoints} endpoints, 1,000 waiting, 128 blocks",
            decision(endpoints, 1000, 128),
            150,
        )


if __name__ == "__main__":
    main()

"""Costs of deciding: one arbitration, joining, leaving, and queue and selection together.

    python -m tests.benchmarks.bench_queue

Every figure is what the fastest tenth of the samples stayed below, and the least of several rounds
over everything: others on the machine only ever add, and for seconds at a time. What counts is that time does not grow
with costs and quanta, and how it grows with classes and lanes. The first line says how fast the machine is at its best:
10 to 15 ms is a quiet server.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from random import Random

from picker.kvcache.index import KvIndex
from picker.kvcache.keys import root_key
from picker.policy.model import CostWeights, Policy, PolicyClass, Profile, QueuePolicy
from picker.pool.endpoint import EndpointSpec
from picker.pool.ledger import Columns, Ledger
from picker.pool.pool import Pool
from picker.queueing.admission import AdmissionQueue, QueueLimits
from picker.queueing.work import Outcome, Released, Work
from picker.selection.constraints import Constraints
from picker.selection.prompt_keys import Prefix, PromptKeys
from picker.selection.selector import Decision, Demand, Eligibility, Selector
from picker.selection.weighing import Candidate, Members, weigh_prefill

BLOCK = 16
NOBODY_REFUSED = Eligibility(0, {})
NOTHING_WEIGHED = weigh_prefill(0, Members([], [], [], []), Columns(), {}, {}, CostWeights())
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
        start = time.perf_counter()
        outcomes = self.queue.poll(self.now)
        seconds = time.perf_counter() - start
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
        start = time.perf_counter()
        bench.queue.submit(work, bench.now)
        seconds = time.perf_counter() - start
        works.append(work)
        return seconds

    def leave() -> float:
        work = works.pop(len(works) // 2)
        start = time.perf_counter()
        bench.queue.cancel(work)
        return time.perf_counter() - start

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
        start = time.perf_counter()
        cached = bench.selector.best_cached(work.demand, (1 << endpoints) - 1)
        work = Work(work.id, work.arrival, work.demand, work.policy_class, cached_tokens=cached)
        bench.queue.submit(work, bench.now)
        return time.perf_counter() - start + bench.serve_one()

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
        start = time.perf_counter()
        bench.selector.choose(demand, (1 << endpoints) - 1, weights)
        return time.perf_counter() - start

    return fastest(measure)


def plain_loop() -> float:
    """Seconds of a million turns of an empty loop."""
    start = time.perf_counter()
    for _ in range(1_000_000):
        pass
    return time.perf_counter() - start


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report, or several that are measured together. Targets are in microseconds."""

    section: str
    what: tuple[str, ...]
    measure: Callable[[], Sequence[float]]
    target: float | None = None


def one(section: str, what: str, measure: Callable[[], float], target: float | None = None) -> Row:
    return Row(section, (what,), lambda: (measure(),), target)


def rows() -> Iterator[Row]:
    section = "One arbitration (a poll that finds who goes next, charges and books), 1,000 waiting"
    for classes, target in ((1, None), (16, 20), (256, 60)):
        what = f"{classes} classes, cost 500, quantum 1000"
        yield one(section, what, partial(arbitration, classes, 500, 1000), target)
    for cost, quantum in ((1, 1), (1, 10**9), (10**9, 1), (10**9, 10**9)):
        what = f"cost {cost:.0e}, quantum {quantum:.0e}"
        yield one("Costs and quanta, 16 classes", what, partial(arbitration, 16, cost, quantum))
    for lanes in (1, 100, 10_000):
        what = f"{lanes} lanes on one endpoint"
        yield one("Lanes, 1 class", what, partial(arbitration, 1, 500, 1000, lanes))
    for policy in QueuePolicy:
        yield one("Orders, 16 classes", policy, partial(arbitration, 16, 500, 1000, order=policy))
    section = "Joining and leaving, nothing can go, 1,000 waiting"
    for classes in (1, 16, 256):
        for order in ("fcfs", "cache_affinity") if classes == 16 else ("fcfs",):
            what = f"{classes} classes, {order}"
            both = partial(join_and_leave, classes, order)
            yield Row(section, (f"join, {what}", f"leave, {what}"), both, 10)
    for endpoints, blocks in ((8, 0), (64, 0), (64, 128)):
        what = f"choice among {endpoints} endpoints, {blocks} blocks of prompt"
        yield one("Selection", what, partial(choice, endpoints, blocks))
    for endpoints in (8, 64):
        what = f"queue and selection, {endpoints} endpoints, 1,000 waiting, 128 blocks"
        yield one("Selection", what, partial(decision, endpoints, 1000, 128), 150)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=8, help="times that everything is measured")
    rounds = parser.parse_args().rounds
    table = list(rows())
    loops: list[float] = []
    found: list[list[Sequence[float]]] = []
    for _ in range(rounds):
        loops.append(fastest(plain_loop, samples=10))
        found.append([measured.measure() for measured in table])
    print(f"An empty loop turns a million times in {min(loops) * 1e3:.1f} ms")
    section = ""
    for measured, seconds in zip(table, zip(*found, strict=True), strict=True):
        if measured.section != section:
            section = measured.section
            print(section)
        goal = f"   target {measured.target:5.0f}" if measured.target else ""
        for what, samples in zip(measured.what, zip(*seconds, strict=True), strict=True):
            print(f"  {what:<58}{min(samples) * 1e6:9.1f} us{goal}")


if __name__ == "__main__":
    main()

"""How costs grow: each step's time against what there is of pods, waiting requests, classes, lanes and blocks.

    python -m tests.benchmarks.bench_scale

The exponent is the slope of the least-squares line through the logarithms: 0 for a cost that does not grow, 1 for one
in proportion. Anything above what is allowed for it makes the command fail. Times are processor times of one call, what
a tenth of the samples stayed below.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import log
from random import Random
from statistics import linear_regression

from picker.kvcache.engine_blocks import EngineBlocks
from picker.kvcache.events import BlockStored
from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys, root_key
from tests.benchmarks.bench_queue import arbitration, choice, decision, fastest, join_and_leave

SIZE = 16


@dataclass(frozen=True, slots=True)
class Law:
    """`seconds` of one call for each of the sizes; `allowed` is the largest exponent that is no fault."""

    name: str
    sizes: Sequence[int]
    seconds: Callable[[int], float]
    allowed: float

    def check(self) -> bool:
        times = [self.seconds(size) for size in self.sizes]
        slope = linear_regression([log(size) for size in self.sizes], [log(each) for each in times]).slope
        row = "  ".join(
            f"{size:,}: {seconds * 1e6:.1f}" for size, seconds in zip(self.sizes, times, strict=True)
        )
        verdict = "" if slope <= self.allowed else "   TOO STEEP"
        print(
            f"{self.name:<48} exponent {slope:5.2f} (allowed {self.allowed:.1f}){verdict}\n    us  {row}",
            flush=True,
        )
        return slope <= self.allowed


def joining(waiting: int) -> float:
    return join_and_leave(4, "fcfs", waiting)[0]


def leaving(waiting: int) -> float:
    return join_and_leave(4, "fcfs", waiting)[1]


def looking_up(pods: int) -> float:
    """A prompt of 256 blocks, all of which every pod holds."""
    index = KvIndex()
    keys = block_keys(range(256 * SIZE), SIZE)
    for slot in range(pods):
        index.add(slot, keys, root_key(SIZE, None))
    everybody = (1 << pods) - 1

    def measure() -> float:
        start = time.process_time()
        index.find_matches(keys, everybody)
        return time.process_time() - start

    return fastest(measure, 200)


def storing(blocks: int) -> float:
    """One event of eight blocks, with so many in the index."""
    source = Random(1)
    index = KvIndex(max_blocks=2 * blocks)
    engine = EngineBlocks(0, index)

    def event() -> BlockStored:
        hashes = [source.getrandbits(63) for _ in range(8)]
        return BlockStored(hashes, None, [source.randrange(50_000) for _ in range(8 * SIZE)], SIZE)

    for _ in range(blocks // 8):
        engine.apply([event()])

    def measure() -> float:
        another = event()
        start = time.process_time()
        engine.apply([another])
        return time.process_time() - start

    return fastest(measure, 300)


WAITING = (10, 1000, 100_000)
PODS = (8, 32, 128, 512, 1024)
LAWS = [
    Law("choice against pods", PODS, lambda pods: choice(pods, 128), 1.1),
    Law("queue and choice against pods", PODS, lambda pods: decision(pods, 1000, 128), 1.1),
    Law("look-up of 256 blocks against pods", PODS, looking_up, 1.1),
    Law("arbitration against waiting requests", WAITING, lambda n: arbitration(1, 500, 1000, waiting=n), 0.2),
    Law("joining against waiting requests", WAITING, joining, 0.2),
    Law("leaving against waiting requests", WAITING, leaving, 0.2),
    Law("arbitration against classes", (1, 4, 16, 64, 256), lambda n: arbitration(n, 500, 1000), 1.1),
    Law("arbitration against lanes", (1, 100, 10_000), lambda n: arbitration(1, 500, 1000, lanes=n), 0.2),
    Law("arbitration against cost", (1, 10**3, 10**6, 10**9), lambda n: arbitration(16, n, 1000), 0.1),
    Law("a stored event of 8 blocks against the index", (1_000, 30_000, 1_000_000), storing, 0.2),
]


def main() -> int:
    broken = [law.name for law in LAWS if not law.check()]
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())

"""Runs of a simulation, one after another or in several processes at once."""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, replace
from multiprocessing.sharedctypes import Synchronized
from typing import Any

from picker.policy import Policy, load_policy
from picker.simulation.engines import QWEN3_32B_2XH100, EngineProfile
from picker.simulation.experiments.contenders import contender, weights_of
from picker.simulation.experiments.measures import Measures, measure
from picker.simulation.experiments.recipe import Recipe
from picker.simulation.replay import Pod, Replay
from picker.simulation.workloads import Arrival

# Arrivals between two steps of a progress bar.
_STEP = 200


@dataclass(frozen=True, slots=True)
class Cluster:
    """Equal pods. `blocks` of the workload's size are what each can cache; None: what the engine's memory holds."""

    pods: int = 8
    blocks: int | None = None
    profile: EngineProfile = QWEN3_32B_2XH100

    def make(self, block_size: int) -> list[Pod]:
        if self.blocks is None:
            return self.profile.pods(self.pods, block_size)
        shape = replace(self.profile.shape, block_size=block_size, num_blocks=self.blocks + 1)
        return replace(self.profile, shape=shape).pods(self.pods)


@dataclass(frozen=True, slots=True)
class Case:
    """One run to make. `policy` is the text of a policy file; empty: the default."""

    contender: str
    recipe: Recipe
    cluster: Cluster
    seed: int = 0
    policy: str = ""


@dataclass(frozen=True, slots=True)
class Result:
    """What came of a case. `cpu`: seconds that the run took to compute."""

    case: Case
    measures: Measures
    cpu: float


def run(case: Case, tick: Callable[[int], None] = lambda arrivals: None) -> Result:
    """Simulate one case; `tick` hears of arrivals as they come. Raises ValueError for what cannot be run."""
    policy = load_policy(case.policy) if case.policy else Policy.default()
    workload = case.recipe.make(case.seed)
    pods = case.cluster.make(workload.block_size)
    started = time.process_time()
    picker = contender(case.contender, pods, policy, case.seed)
    replay = Replay(pods, picker, delivery=case.cluster.profile.delivery)
    done = replay.run(_counted(workload.arrivals, tick))
    cpu = time.process_time() - started
    return Result(case, measure(done, pods, weights_of(policy)), cpu)


def run_all(
    cases: Sequence[Case], *, jobs: int = 1, tick: Callable[[int], None] = lambda arrivals: None
) -> list[Result]:
    """Simulate all cases, in up to `jobs` processes; the results are in the order of the cases."""
    if jobs <= 1 or len(cases) == 1:
        return [run(case, tick) for case in cases]
    # A fresh interpreter for each: what the parent has running does not concern them.
    context = multiprocessing.get_context("spawn")
    counter = context.Value("Q", 0)
    with ProcessPoolExecutor(min(jobs, len(cases)), context, _take_counter, (counter,)) as pool:
        futures = [pool.submit(_run_counted, case) for case in cases]
        try:
            _follow(futures, counter, tick)
        except BaseException:
            pool.shutdown(cancel_futures=True)
            raise
        return [future.result() for future in futures]


def _follow(futures: list[Future[Result]], counter: Synchronized[int], tick: Callable[[int], None]) -> None:
    """Tell of progress until all have ended or one has failed."""
    told = 0
    open_: set[Future[Result]] = set(futures)
    while open_:
        done, open_ = wait(open_, timeout=0.2)
        for future in done:
            future.result()
        seen = counter.value
        tick(seen - told)
        told = seen


_counter: Synchronized[int] | None = None


def _take_counter(counter: Synchronized[int]) -> None:
    """In a worker: the counter that the parent looks at, and a quiet end at Ctrl-C."""
    global _counter
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    _counter = counter


def _run_counted(case: Case) -> Result:
    return run(case, _count)


def _count(arrivals: int) -> None:
    assert _counter is not None
    with _counter.get_lock():
        _counter.value += arrivals


def _counted(arrivals: Sequence[Arrival], tick: Callable[[int], None]) -> Iterator[Arrival]:
    for number, arrival in enumerate(arrivals, 1):
        yield arrival
        if number % _STEP == 0:
            tick(_STEP)
    tick(len(arrivals) % _STEP)


def grouped(results: Iterable[Result], key: Callable[[Case], Any]) -> dict[Any, list[Result]]:
    """The results of like cases (their seeds) together, in order."""
    groups: dict[Any, list[Result]] = {}
    for result in results:
        groups.setdefault(key(result.case), []).append(result)
    return groups

"""Fairness between clients on a real trace: one engine, 27 clients of a public chat arena, orders side by side.

    python -m tests.benchmarks.bench_fairness [TRACE.csv]

The trace is that of the VTC paper (Sheng et al., Fairness in Serving Large Language Models, OSDI 2024). It is looked
for in PICKER_SHARED/traces, else in ../shared/traces beside the checkout.

Service is input tokens + 2 x output tokens, spread evenly from a request's first token to its last. At each of 100
instants the unfairness is the sum over clients of min(what the best served client got more, what this client
had asked for and did not get), in a window of 60 s around the instant: the paper's definition. The engine is a model
of the paper's (Llama 7B on an A10G with a pool of 10,000 tokens), with step times set so that FCFS serves about as
much a second as it did there. The figures that were published of this trace are printed beside ours. How they were
averaged is not known, and they are of the engine's own admission, where ours stands before the engine: compare ratios.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from picker.policy.model import Policy, PolicyClass, Profile, QueuePolicy
from picker.queueing.work import Work
from picker.simulation.core_picker import CorePicker
from picker.simulation.engine_model import EngineShape, StepCost
from picker.simulation.replay import Pod, Replay, Trip
from picker.simulation.workloads import Arrival, read_vtc

TRACE = "vtc_lmsys_arena_27clients.csv"
WINDOW = 60.0
INSTANTS = 100
OUTPUT_PRICE = 2.0
# More than the pool holds at once would wait in the engine, where no client is told from another.
RUNNING = 24

SHAPE = EngineShape(block_size=16, num_blocks=10_000 // 16 + 1, max_num_seqs=256, max_num_batched_tokens=4096)
COST = StepCost(base=0.0205, prefill_token=0.0003, decode_sequence=0.0004, decode_context=1.0e-6)

# Unfairness, and service a second.
PUBLISHED = {"FCFS": (40_848, 1316), "VTC": (11_594, 1322)}


class EstimatingPicker(CorePicker):
    """Charges the mean output so far, and settles when the true one is known."""

    def __init__(self, policy: Policy, pods: Sequence[Pod]) -> None:
        super().__init__(policy, pods)
        self._works: dict[Arrival, Work] = {}
        self._outputs: list[int] = [256]

    def _work(self, now: float, arrival: Arrival) -> Work:
        work = super()._work(now, replace(arrival, output_tokens=round(mean(self._outputs[-200:]))))
        self._works[arrival] = work
        return work

    def finished(self, now: float, arrival: Arrival, pod: int) -> None:
        super().finished(now, arrival, pod)
        self._outputs.append(arrival.output_tokens)
        self.queue.settle(self._works.pop(arrival), arrival.output_tokens)


def policy_of(order: QueuePolicy, *, fair: bool = False, output: bool = False) -> Policy:
    only = PolicyClass(
        name="only",
        quantum=128,
        queue_policy=order,
        fair_tenants=fair,
        output_charge=OUTPUT_PRICE if output else None,
        max_running_per_worker=RUNNING,
    )
    return Policy(root=Profile("", (only,)))


def service_of(arrival: Arrival) -> float:
    return arrival.prompt_tokens + OUTPUT_PRICE * arrival.output_tokens


def served(trips: Iterable[Trip], start: float, end: float) -> float:
    """Service in an interval."""
    total = 0.0
    for trip in trips:
        if trip.first_token is None or trip.finished is None or trip.finished - trip.first_token < 1e-5:
            continue
        overlap = max(0.0, min(end, trip.finished) - max(start, trip.first_token))
        total += service_of(trip.arrival) * overlap / (trip.finished - trip.first_token)
    return total


def unfairness(trips: Sequence[Trip]) -> list[float]:
    """In tokens a window, at each instant."""
    clients: dict[str, list[Trip]] = {}
    for trip in trips:
        clients.setdefault(trip.arrival.tenant, []).append(trip)
    last = max(trip.arrived for trip in trips)
    found = []
    for number in range(INSTANTS):
        start = last * number / INSTANTS - WINDOW / 2
        end = start + WINDOW
        got = {client: served(own, start, end) for client, own in clients.items()}
        asked = {
            client: sum(service_of(trip.arrival) for trip in own if start <= trip.arrived <= end)
            for client, own in clients.items()
        }
        best = max(got.values())
        found.append(sum(min(best - got[client], abs(asked[client] - got[client])) for client in clients))
    return found


def play(policy: Policy, arrivals: Sequence[Arrival], picker: type[CorePicker]) -> list[Trip]:
    pods = [Pod(0, SHAPE, COST)]
    return Replay(pods, picker(policy, pods)).run(arrivals).trips


def trace_path() -> Path:
    shared = os.environ.get("PICKER_SHARED") or Path(__file__).parents[3] / "shared"
    return Path(shared) / "traces" / TRACE


def main(path: Path) -> None:
    if not path.exists():
        sys.exit(f"no trace at {path}: nothing is measured")
    arrivals = read_vtc(path).arrivals
    last = arrivals[-1].at
    print(f"{'order':<44}{'mean':>9}{'max':>9}{'service/s':>11}{'TTFT of the lightest half, s':>31}")
    runs = {
        "FCFS": (policy_of(QueuePolicy.FCFS), CorePicker),
        "WSPT": (policy_of(QueuePolicy.WSPT), CorePicker),
        "equal tenants, input only": (policy_of(QueuePolicy.FCFS, fair=True), CorePicker),
        "equal tenants, output estimated and settled": (
            policy_of(QueuePolicy.FCFS, fair=True, output=True),
            EstimatingPicker,
        ),
        "equal tenants, output known": (policy_of(QueuePolicy.FCFS, fair=True, output=True), CorePicker),
        "equal tenants, output known, WSPT inside": (
            policy_of(QueuePolicy.WSPT, fair=True, output=True),
            CorePicker,
        ),
    }
    asked: dict[str, float] = {}
    for arrival in arrivals:
        asked[arrival.tenant] = asked.get(arrival.tenant, 0.0) + service_of(arrival)
    light = set(sorted(asked, key=lambda client: asked[client])[: len(asked) // 2])
    for name, (policy, picker) in runs.items():
        trips = play(policy, arrivals, picker)
        found = unfairness(trips)
        ttft = mean(trip.ttft for trip in trips if trip.ttft is not None and trip.arrival.tenant in light)
        rate = served(trips, 0.0, last) / last
        print(f"{name:<44}{mean(found):>9,.0f}{max(found):>9,.0f}{rate:>11,.0f}{ttft:>31.1f}")
    for name, (gap, rate) in PUBLISHED.items():
        print(f"{'published: ' + name:<44}{gap:>9,}{'':>9}{rate:>11,}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("trace", nargs="?", type=Path, default=trace_path())
    main(parser.parse_args().trace)

"""llm-d's published rate ladder, run on the model: is the simulator to be believed?

`python -m picker.simulation.ladder` prints the table that the simulation's README shows.
The published figures are those of llm-d's precise-prefix-cache guide of 2026-06 (workload, averages over the
stages, rate 20) and of its later reports (peaks, knees); how they measure is told in its benchmark profiles: a
stage's throughput is its output tokens over its wall time, with the time to drain included.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from picker.policy import Policy
from picker.simulation.core_picker import CorePicker
from picker.simulation.engines import QWEN3_32B_2XH100, EngineProfile
from picker.simulation.reference_policies import reference_picker
from picker.simulation.replay import Picker, Pod, Replay, Run
from picker.simulation.traffic import percentile
from picker.simulation.workloads import SharedPrefix

PODS = 8
PAUSE = 30.0
WARM_UP = (15.0, 50.0)
# Requests a second, and for how many seconds.
STAGES = (
    *((3.0, 20.0), (10.0, 20.0), (15.0, 20.0), (20.0, 38.0), (22.0, 34.0), (25.0, 30.0), (30.0, 25.0)),
    *((35.0, 21.0), (40.0, 38.0), (43.0, 36.0), (46.0, 33.0), (49.0, 30.0), (52.0, 29.0), (55.0, 27.0)),
    *((57.0, 26.0), (60.0, 25.0)),
)


@dataclass(frozen=True, slots=True)
class StageResult:
    """One stage. Output tokens a second with the drain; seconds; the cached part of all prompt tokens."""

    rate: float
    output_rate: float
    ttft_mean: float
    ttft_p90: float
    inter_token: float
    hit_share: float


@dataclass(frozen=True, slots=True)
class Published:
    """What llm-d reports of an arm; None: not reported."""

    average: float
    at_rate_20: float
    ttft_mean: float
    ttft_p90: float


PUBLISHED = {
    "round-robin": Published(5722, 6205, 58.1, 107.4),
    "llmd-blend": Published(13_163, 11_224, 0.156, 0.206),
}


def picker_named(name: str, pods: Sequence[Pod]) -> Picker:
    """A reference policy, or `picker` for Picker's own core with its default policy."""
    return CorePicker(Policy.default(), pods) if name == "picker" else reference_picker(name, pods)


def climb(
    make: Callable[[Sequence[Pod]], Picker],
    stages: Sequence[tuple[float, float]] = STAGES,
    profile: EngineProfile = QWEN3_32B_2XH100,
) -> list[StageResult]:
    """Warm up, then run the stages one after another, each to its last answer."""
    pods = profile.pods(PODS)
    replay = Replay(pods, make(pods), delivery=profile.delivery)
    generator = SharedPrefix(block_size=profile.shape.block_size)
    results, sent = [], 0
    for rate, seconds in (WARM_UP, *stages):
        work = generator.stage(rate, seconds, first=sent)
        sent += len(work.arrivals)
        results.append(_measure(rate, replay.run(work.arrivals, pause=PAUSE)))
    return results[1:]


def _measure(rate: float, run: Run) -> StageResult:
    ttfts = [trip.ttft for trip in run.trips if trip.ttft is not None]
    gaps = [gap for trip in run.trips if (gap := trip.inter_token_latency) is not None]
    return StageResult(
        rate,
        sum(trip.arrival.output_tokens for trip in run.trips if trip.finished is not None) / run.seconds,
        sum(ttfts) / len(ttfts),
        percentile(ttfts, 0.9) or 0.0,
        sum(gaps) / len(gaps),
        sum(trip.cached_tokens for trip in run.trips) / sum(trip.arrival.prompt_tokens for trip in run.trips),
    )


def main(names: Sequence[str]) -> None:
    """Print a table of each arm's stages and what was published of it."""
    for name in names:
        print(f"\n### {name}\n")
        print("| requests/s | output tokens/s | TTFT mean s | p90 s | between tokens ms | cached |")
        print("|---|---|---|---|---|---|")

        def make(pods: Sequence[Pod], name: str = name) -> Picker:
            return picker_named(name, pods)

        results = climb(make)
        for stage in results:
            print(
                f"| {stage.rate:g} | {stage.output_rate:.0f} | {stage.ttft_mean:.2f} | {stage.ttft_p90:.2f} "
                f"| {1000 * stage.inter_token:.0f} | {stage.hit_share:.1%} |"
            )
        average = sum(stage.output_rate for stage in results) / len(results)
        print(f"\naverage {average:.0f} output tokens/s", end="")
        if name in PUBLISHED:
            print(f", published {PUBLISHED[name].average:.0f} ({average / PUBLISHED[name].average - 1:+.1%})")
        else:
            print()


if __name__ == "__main__":
    main(sys.argv[1:] or ["round-robin", "llmd-blend", "picker"])

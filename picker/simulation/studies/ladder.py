"""llm-d's published rate ladder, run on the model: is the simulator to be believed?

The published figures are those of llm-d's precise-prefix-cache guide of 2026-06 (workload, averages over the
stages, rate 20) and of its later reports (peaks, knees); how they measure is told in its benchmark profiles: a
stage's throughput is its output tokens over its wall time, with the time to drain included.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

from picker.policy import Policy
from picker.simulation.engines import QWEN3_32B_2XH100, EngineProfile
from picker.simulation.experiments.charts import lines
from picker.simulation.experiments.contenders import CORE, contender
from picker.simulation.experiments.tables import Table
from picker.simulation.replay import Picker, Pod, Replay, Run
from picker.simulation.studies.findings import Claim, Findings, Tick
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
    """What llm-d reports of an arm: output tokens a second, seconds; `knee` in requests a second."""

    average: float
    at_rate_20: float
    ttft_mean: float
    ttft_p90: float
    knee: float


PUBLISHED = {
    "round-robin": Published(5722, 6205, 58.1, 107.4, 18.0),
    "llmd-blend": Published(13_163, 11_224, 0.156, 0.206, 38.0),
}
ARMS = ("round-robin", "llmd-blend", CORE)

# The knee is passed where requests wait for more than this many seconds on average.
_KNEE_SECONDS = 1.0


def arrivals(stages: Sequence[tuple[float, float]] = STAGES) -> int:
    """Requests of one arm, warm-up included."""
    return sum(round(rate * seconds) for rate, seconds in (WARM_UP, *stages))


def climb(
    make: Callable[[Sequence[Pod]], Picker],
    stages: Sequence[tuple[float, float]] = STAGES,
    profile: EngineProfile = QWEN3_32B_2XH100,
    tick: Tick = lambda arrivals: None,
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
        tick(len(work.arrivals))
    return results[1:]


def climb_of(
    name: str, stages: Sequence[tuple[float, float]] = STAGES, tick: Tick = lambda n: None
) -> list[StageResult]:
    """The same of a contender by name, Picker's own core with its default policy."""
    return climb(lambda pods: contender(name, pods, Policy.default()), stages, tick=tick)


def study(tick: Tick) -> Findings:
    results = {name: climb_of(name, tick=tick) for name in ARMS}
    claims = [claim for name in PUBLISHED for claim in claims_of(name, results[name])]
    claims.append(_knees_apart(results))
    series = {name: [(stage.rate, stage.output_rate) for stage in stages] for name, stages in results.items()}
    waits = {name: [(stage.rate, stage.ttft_mean) for stage in stages] for name, stages in results.items()}
    return Findings(
        title="The model against llm-d's published ladder",
        facts=[
            "8 pods of 2 H100 with Qwen3-32B and 307,328 tokens of KV each; 150 groups of 5 prompts, 6,000 + 1,200"
            " tokens in, 1,000 out; throughput over the wall time of a stage with its drain.",
            "Five constants of the engine were fitted to this ladder (`engines.py` says which), so it is no independent"
            " proof. Not fitted: the knee of either policy and the ratio between them.",
        ],
        claims=claims,
        tables=[_comparison(results), *(_stages(name, stages) for name, stages in results.items())],
        notes=_NOTES,
        charts=[
            ("Output tokens a second", lines(series, "requests a second", "tokens/s")),
            ("Mean TTFT", lines(waits, "requests a second", "seconds")),
        ],
        data={"stages": {name: [asdict(stage) for stage in stages] for name, stages in results.items()}},
    )


def claims_of(name: str, results: Sequence[StageResult]) -> list[Claim]:
    """What validates an arm: its throughput within 15 %, its TTFT below the knee within a factor of two, its knee."""
    published = PUBLISHED[name]
    at_20 = next(stage.output_rate for stage in results if stage.rate == 20.0)
    claims = [
        _near(
            f"{name}, output tokens/s, mean of the stages, within 15 %", average(results), published.average
        ),
        _near(f"{name}, output tokens/s at 20 requests/s, within 15 %", at_20, published.at_rate_20),
    ]
    below = [stage for stage in results if stage.rate <= published.knee]
    calm = all(stage.ttft_mean < _KNEE_SECONDS for stage in below)
    claims.append(
        Claim(
            f"{name}, no queue below the published knee of {published.knee:g} requests/s",
            f"mean TTFT up to {max(stage.ttft_mean for stage in below):.2f} s",
            calm,
        )
    )
    above = next((stage for stage in results if stage.rate > published.knee), None)
    if above is not None:
        claims.append(
            Claim(
                f"{name}, a queue at the first stage above it",
                f"mean TTFT {above.ttft_mean:.2f} s at {above.rate:g} requests/s",
                above.ttft_mean >= _KNEE_SECONDS,
            )
        )
    if published.ttft_mean < _KNEE_SECONDS:
        ratios = [stage.ttft_mean / published.ttft_mean for stage in below]
        claims.append(
            Claim(
                f"{name}, mean TTFT below the knee within a factor of 2 of {published.ttft_mean:g} s",
                f"{min(ratios):.2f} to {max(ratios):.2f} times",
                min(ratios) > 0.5 and max(ratios) < 2.0,
            )
        )
    return claims


def average(results: Sequence[StageResult]) -> float:
    """Mean output tokens a second of the stages."""
    return sum(stage.output_rate for stage in results) / len(results)


_NOTES = [
    "99.6 % of the blend's prompt tokens are cached here, 96 to 97 % there.",
    "The blend's published mean TTFT (0.16 s over all stages up to 60 requests/s) and its knee of 38 come from two"
    " reports that do not agree: here waits appear at 40 requests/s, where KV memory is full, and fade later.",
    "p90 TTFT of round robin at the highest rates is 135 to 163 s here; its average over the ladder was published as"
    " 107 s.",
    "Time between tokens at 60 requests/s is 57 ms here, 44 to 47 ms there.",
    "llm-d's newer affinity policy, published as equal to the blend, comes out a tenth lower here: its groups end up"
    " unevenly on the pods.",
    "Conclusions that rest on a difference of a few per cent are not safe.",
]


def _near(text: str, found: float, published: float) -> Claim:
    off = found / published - 1
    return Claim(text, f"{found:,.0f} against {published:,.0f} ({off:+.1%})", abs(off) <= 0.15)


def _knees_apart(results: dict[str, list[StageResult]]) -> Claim:
    knees = {name: knee(stages) for name, stages in results.items()}
    return Claim(
        "the knee of round robin comes long before that of the blend (published: 18 and 38 requests/s)",
        f"last stages without a queue: {knees['round-robin']:g} and {knees['llmd-blend']:g}",
        knees["llmd-blend"] >= 1.5 * knees["round-robin"],
    )


def knee(results: Sequence[StageResult]) -> float:
    """The highest rate up to which every stage has a mean TTFT under a second."""
    reached = 0.0
    for stage in results:
        if stage.ttft_mean >= _KNEE_SECONDS:
            break
        reached = stage.rate
    return reached


def _comparison(results: dict[str, list[StageResult]]) -> Table:
    columns = [
        "arm",
        "output tokens/s",
        "published",
        "at 20/s",
        "published",
        "mean TTFT s",
        "published",
        "knee",
        "published",
    ]
    table = Table("Averages over the stages", columns)
    for name, stages in results.items():
        published = PUBLISHED.get(name)
        wait = sum(stage.ttft_mean for stage in stages) / len(stages)
        at_20 = next(stage.output_rate for stage in stages if stage.rate == 20.0)
        pairs = [
            (f"{average(stages):,.0f}", f"{published.average:,.0f}" if published else "-"),
            (f"{at_20:,.0f}", f"{published.at_rate_20:,.0f}" if published else "-"),
            (f"{wait:.2f}", f"{published.ttft_mean:g}" if published else "-"),
            (f"{knee(stages):g}", f"{published.knee:g}" if published else "-"),
        ]
        table.rows.append([name, *(cell for pair in pairs for cell in pair)])
    return table


def _stages(name: str, results: Sequence[StageResult]) -> Table:
    table = Table(
        f"Stages under {name}",
        ["requests/s", "output tokens/s", "TTFT mean s", "p90 s", "between tokens ms", "cached"],
    )
    for stage in results:
        table.rows.append(
            [
                f"{stage.rate:g}",
                f"{stage.output_rate:,.0f}",
                f"{stage.ttft_mean:.2f}",
                f"{stage.ttft_p90:.2f}",
                f"{1000 * stage.inter_token:.0f}",
                f"{stage.hit_share:.1%}",
            ]
        )
    return table


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

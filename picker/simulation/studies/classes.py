"""Three classes, 8:4:1, one of which asks ten times as often: what the weights are worth, and what they cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from picker.simulation.experiments.contenders import CORE, WITHOUT_FAIRNESS
from picker.simulation.experiments.recipe import Recipe
from picker.simulation.experiments.report import class_charts
from picker.simulation.experiments.runs import Case, Cluster, Result, run_all
from picker.simulation.experiments.summary import CLASS_FIGURES, FIGURES, class_table, policy_table
from picker.simulation.studies.findings import Claim, Findings, Tick

VICTIMS = ("premium", "standard")
FLOOD = ("batch", 10)

# The flooding class waits for a pod that is nearly idle, the others for one with two chunks booked.
POLICY = """\
default_policy_family: batch
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
  - {name: premium, policy_family: premium, cache_bucket: any, quantum: 8192, prefill_busy_threshold: 16384}
  - {name: standard, policy_family: standard, cache_bucket: any, quantum: 4096, prefill_busy_threshold: 16384}
  - {name: batch, policy_family: batch, cache_bucket: any, quantum: 1024, prefill_busy_threshold: 4096}
"""
ALONE, FAIR, FCFS = "victims alone", "flood, by weight", "flood, in order of arrival"
_CLUSTER = Cluster(8, 4000)


def cases(trace: Path, rates: Path, seeds: int, seconds: float) -> dict[str, list[Case]]:
    """The runs of each arm."""
    calm = Recipe(str(trace), tenants=rates, classes=(*VICTIMS, FLOOD[0]), seconds=seconds)
    arms = {
        ALONE: (CORE, replace(calm, only=VICTIMS)),
        FAIR: (CORE, replace(calm, flood=FLOOD)),
        FCFS: (WITHOUT_FAIRNESS, replace(calm, flood=FLOOD)),
    }
    return {
        arm: [Case(name, recipe, _CLUSTER, seed, POLICY) for seed in range(seeds)]
        for arm, (name, recipe) in arms.items()
    }


def study(trace: Path, rates: Path, seeds: int, jobs: int, tick: Tick, seconds: float) -> Findings:
    wanted = cases(trace, rates, seeds, seconds)
    results = iter(run_all([case for each in wanted.values() for case in each], jobs=jobs, tick=tick))
    groups = {arm: [next(results) for _ in each] for arm, each in wanted.items()}
    return Findings(
        title="Three classes 8:4:1, one flooding at ten times its rate",
        facts=[
            f"The first {seconds:,.0f} s of Mooncake's conversation trace, 8 pods with 4,000 blocks of 512 tokens. The"
            " trace has no tenants: each prefix tree was given to one of ServeGen's clients, drawn by their rates, and"
            " the clients were shared out to three classes with about the same number of tokens. This workload was put"
            " together for this study; nobody recorded it.",
            "The flood: every request of `batch` has nine copies within a minute of it, each set of copies with"
            " prefixes of its own, so that in all the pods are asked for about 1.5 times what they can do.",
            f"{seeds} seeds; ± is half of a 95 % confidence interval. `{FCFS}` is the same Picker with one queue.",
        ],
        claims=claims(groups),
        tables=[policy_table(groups), class_table(groups)],
        notes=[
            "`share` counts the whole run, in which all of the flood is served in the end: nothing is refused here."
            " `short of its due` counts only windows in which a class always had a request waiting.",
            "The victims' p99 is that of their longest prompts, which take ten seconds on an idle pod. Their mean"
            " grows by much more than their p99: what is under way on a pod is not interrupted.",
            "Each seed draws other tenants for the prefixes, so that the intervals are wide; the p99 of about a"
            " thousand requests is the tenth longest. The bounds hold of the means over the seeds, and not by much.",
            "Throughput is prompt and output tokens over the whole run with its drain.",
        ],
        charts=class_charts(groups),
        data={
            arm: {key: figure.estimate(each).mean for key, figure in FIGURES.items()}
            for arm, each in groups.items()
        },
    )


def claims(groups: dict[str, list[Result]]) -> list[Claim]:
    found = []
    for name in VICTIMS:
        alone, flooded = (CLASS_FIGURES["ttft_p99"].estimate(groups[arm], name).mean for arm in (ALONE, FAIR))
        found.append(
            Claim(
                f"p99 TTFT of {name} within 1.25 times its value alone",
                f"{flooded:.2f} s against {alone:.2f} s, {flooded / alone:.2f} times",
                flooded <= 1.25 * alone,
            )
        )
    fair, fcfs = _throughput(groups[FAIR]), _throughput(groups[FCFS])
    found.append(
        Claim(
            "throughput within 2 % of that in order of arrival",
            f"{fair:,.0f} against {fcfs:,.0f} tokens/s ({fair / fcfs - 1:+.1%})",
            fair >= 0.98 * fcfs,
        )
    )
    hits = [FIGURES["hit_share"].estimate(groups[arm]).mean for arm in (FAIR, FCFS)]
    found.append(
        Claim(
            "hit rate at least 95 % of that of the same Picker without fairness",
            f"{hits[0]:.1%} against {hits[1]:.1%}, {hits[0] / hits[1]:.0%} of it",
            hits[0] >= 0.95 * hits[1],
        )
    )
    return found


def _throughput(results: Sequence[Result]) -> float:
    return sum(each.measures.prompt_rate + each.measures.output_rate for each in results) / len(results)

"""The HTML report of `picker simulate`."""

from __future__ import annotations

from collections.abc import Sequence

from picker.simulation.experiments.charts import bars, lines
from picker.simulation.experiments.confidence import Estimate
from picker.simulation.experiments.measures import CURVE
from picker.simulation.experiments.page import chart, charts, items, page, paragraph
from picker.simulation.experiments.summary import (
    CLASS_FIGURES,
    FIGURES,
    Groups,
    class_names,
    class_table,
    having,
    policy_table,
)

# A time of nothing has no place on a logarithmic axis.
_SHORTEST = 0.001


def report(title: str, facts: Sequence[str], groups: Groups) -> str:
    """`facts` say what was simulated."""
    sections = [
        ("What was simulated", [items(facts)]),
        ("Results", [policy_table(groups).html(), paragraph(_READING)]),
        ("Time to the first token and the caches", [charts(_time_charts(groups))]),
        ("Pods", [charts(_pod_charts(groups))]),
    ]
    if len(class_names(groups)) > 1:
        sections.append(
            ("Classes", [class_table(groups).html(), charts([chart(*each) for each in class_charts(groups)])])
        )
    return page(title, sections)


_READING = (
    "TTFT: seconds from arrival to the first token, all waiting included. Cached: the part of all prompt tokens that "
    "the chosen pod had. Busiest pod: its prefill tokens over their mean. Unfairness: of the class that fares worst, "
    "how much less than its weight's part of the work it got while it always had a request waiting. ± is half of a "
    "95 % confidence interval over the seeds."
)


def _time_charts(groups: Groups) -> list[str]:
    curves = {
        name: [
            (max(_SHORTEST, time), part) for time, part in zip(_mean_curve(groups, name), CURVE, strict=True)
        ]
        for name in groups
    }
    return [
        chart(
            "Requests with their first token by then",
            lines(curves, "seconds, logarithmic", "part", log_x=True),
        ),
        chart("TTFT", bars(_by_figure(groups, ("ttft_mean", "ttft_p90", "ttft_p99")), "seconds")),
        chart("Wait in the picker's queue", bars(_by_figure(groups, ("wait_p99",)), "seconds")),
        chart("Prompt tokens cached", bars(_by_figure(groups, ("hit_share",)), "part")),
    ]


def _pod_charts(groups: Groups) -> list[str]:
    """Of the first seed: a mean over seeds would hide what is uneven."""
    first = {name: results[0].measures.pods for name, results in groups.items()}
    numbers = range(max(len(pods) for pods in first.values()))
    work = {
        str(number): {name: Estimate(pods[number].prefill_tokens / 1e6) for name, pods in first.items()}
        for number in numbers
    }
    busy = {
        str(number): {name: Estimate(pods[number].busy) for name, pods in first.items()} for number in numbers
    }
    hits = {
        str(number): {name: Estimate(pods[number].hit_share) for name, pods in first.items()}
        for number in numbers
    }
    return [
        chart("Prefill tokens by pod, first seed", bars(work, "millions")),
        chart("Time spent computing by pod, first seed", bars(busy, "part")),
        chart("Prompt tokens cached by pod, first seed", bars(hits, "part")),
    ]


def class_charts(groups: Groups) -> list[tuple[str, str]]:
    """(heading, drawing) of waits, shares and shortfalls by class, and of each policy's shares over time."""
    names = class_names(groups)
    found = []
    for key in ("ttft_p99", "wait_p99", "share", "shortfall"):
        figure = CLASS_FIGURES[key]
        by_class = {
            name: {policy: figure.estimate(results, name) for policy, results in having(groups, name).items()}
            for name in names
        }
        found.append((_TITLES[key], bars(by_class, "seconds" if key.endswith("p99") else "part")))
    for policy, results in groups.items():
        shares = results[0].measures.shares
        series = {name: [(at, parts.get(name, 0.0)) for at, parts in shares] for name in names}
        found.append((f"Shares of the work under {policy}, first seed", lines(series, "seconds", "part")))
    return found


_TITLES = {
    "ttft_p99": "TTFT p99 by class",
    "wait_p99": "Wait in the picker's queue, p99 by class",
    "share": "Share of the uncached tokens",
    "shortfall": "Short of its due while it always waited",
}


def _by_figure(groups: Groups, keys: Sequence[str]) -> dict[str, dict[str, Estimate]]:
    return {
        FIGURES[key].heading: {name: FIGURES[key].estimate(results) for name, results in groups.items()}
        for key in keys
    }


def _mean_curve(groups: Groups, name: str) -> list[float]:
    curves = [result.measures.ttft_curve for result in groups[name]]
    return [sum(points) / len(points) for points in zip(*curves, strict=True)]

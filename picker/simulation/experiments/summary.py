"""The runs of several seeds together: for each policy its figures with confidence intervals, as tables and data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from picker.simulation.experiments.confidence import Estimate
from picker.simulation.experiments.measures import ClassMeasures, Measures
from picker.simulation.experiments.runs import Result
from picker.simulation.experiments.tables import Table


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of a run: its heading, where it is found, and how it is written."""

    heading: str
    of: Callable[[Measures], float]
    form: str

    def estimate(self, results: Sequence[Result]) -> Estimate:
        return Estimate.of([self.of(result.measures) for result in results])


@dataclass(frozen=True, slots=True)
class ClassFigure:
    """The same of one class, over the runs that had it."""

    heading: str
    of: Callable[[ClassMeasures], float]
    form: str

    def estimate(self, results: Sequence[Result], name: str) -> Estimate:
        found = [result.measures.classes[name] for result in results if name in result.measures.classes]
        return Estimate.of([self.of(each) for each in found])


FIGURES = {
    "ttft_mean": Figure("TTFT mean s", lambda found: found.ttft.mean, ".2f"),
    "ttft_p50": Figure("p50", lambda found: found.ttft.p50, ".2f"),
    "ttft_p90": Figure("p90", lambda found: found.ttft.p90, ".2f"),
    "ttft_p99": Figure("p99", lambda found: found.ttft.p99, ".2f"),
    "wait_p99": Figure("queue p99 s", lambda found: found.wait.p99, ".2f"),
    "inter_token": Figure("between tokens s", lambda found: found.inter_token, ".3f"),
    "hit_share": Figure("cached", lambda found: found.hit_share, ".1%"),
    "output_rate": Figure("output tokens/s", lambda found: found.output_rate, ",.0f"),
    "imbalance": Figure("busiest pod", lambda found: found.imbalance, ".2f"),
    "unfairness": Figure("unfairness", lambda found: found.unfairness, ".1%"),
    "refused": Figure("refused", lambda found: float(found.refused), ",.0f"),
}
CLASS_FIGURES = {
    "requests": ClassFigure("requests", lambda found: float(found.requests), ",.0f"),
    "refused": ClassFigure("refused", lambda found: float(found.refused), ",.0f"),
    "ttft_mean": ClassFigure("TTFT mean s", lambda found: found.ttft.mean, ".2f"),
    "ttft_p99": ClassFigure("p99", lambda found: found.ttft.p99, ".2f"),
    "wait_mean": ClassFigure("queue mean s", lambda found: found.wait.mean, ".2f"),
    "wait_p99": ClassFigure("queue p99 s", lambda found: found.wait.p99, ".2f"),
    "share": ClassFigure("share", lambda found: found.share, ".1%"),
    "shortfall": ClassFigure("short of its due", lambda found: found.shortfall, ".1%"),
}
# Where the lowest value is the best.
_LOW_IS_BEST = ("ttft_mean", "ttft_p50", "ttft_p90", "ttft_p99")

Groups = Mapping[str, Sequence[Result]]


def policy_table(groups: Groups) -> Table:
    """A row for each policy; figures that are nothing everywhere are left out."""
    estimates = {
        key: [figure.estimate(results) for results in groups.values()] for key, figure in FIGURES.items()
    }
    shown = [
        key for key, values in estimates.items() if key.startswith("ttft") or any(v.mean for v in values)
    ]
    table = Table("Policies", ["policy", *(FIGURES[key].heading for key in shown), "computed in s"])
    for row, (name, results) in enumerate(groups.items()):
        cells = [estimates[key][row].text(FIGURES[key].form) for key in shown]
        table.rows.append([name, *cells, f"{sum(result.cpu for result in results) / len(results):.1f}"])
    for column, key in enumerate(shown, 1):
        if key in _LOW_IS_BEST:
            table.mark_lowest(column, [round(value.mean, 2) for value in estimates[key]])
    return table


def class_names(groups: Groups) -> list[str]:
    """Those of any run of any policy."""
    return sorted(
        {name for results in groups.values() for result in results for name in result.measures.classes}
    )


def having(groups: Groups, name: str) -> Groups:
    """The policies that were sent requests of this class."""
    return {policy: results for policy, results in groups.items() if name in class_names({policy: results})}


def class_table(groups: Groups) -> Table:
    """A row for each class under each policy."""
    table = Table("Classes", ["class", "policy", *(figure.heading for figure in CLASS_FIGURES.values())])
    for name in class_names(groups):
        for policy, results in having(groups, name).items():
            cells = [figure.estimate(results, name).text(figure.form) for figure in CLASS_FIGURES.values()]
            table.rows.append([name, policy, *cells])
    return table


def as_data(groups: Groups) -> dict[str, Any]:
    """For JSON: of each policy its figures with 95 % intervals, and each run in full."""
    return {
        name: {
            "figures": {key: asdict(figure.estimate(results)) for key, figure in FIGURES.items()},
            "classes": {
                each: {key: asdict(figure.estimate(results, each)) for key, figure in CLASS_FIGURES.items()}
                for each in class_names({name: results})
            },
            "runs": [
                {"seed": result.case.seed, "cpu": result.cpu, **asdict(result.measures)} for result in results
            ],
        }
        for name, results in groups.items()
    }

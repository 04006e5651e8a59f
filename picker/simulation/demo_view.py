"""What `picker demo` measures while it runs, and how it shows it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from picker.simulation.mock_engine import MockEngine
from picker.simulation.traffic import Record, percentile

_BAR_WIDTH = 14
_COLOURS = ("cyan", "magenta", "green", "yellow")


@dataclass(slots=True)
class ClassFigures:
    """One class. Shares are fractions; `share` counts only while every class had requests waiting."""

    name: str
    weight_share: float = 0.0
    share: float | None = None
    waiting: int = 0
    longest_queue: int = 0
    oldest_wait: float = 0.0
    answered: int = 0
    refused: int = 0
    contended_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    prompt_tokens: int = 0
    cached_tokens: int = 0


@dataclass(slots=True)
class Monitor:
    """Gathers from Picker's /status (by `take_status`), from each answer (by `take_record`) and the engines."""

    engines: Sequence[MockEngine]
    classes: dict[str, ClassFigures]
    answered_by: dict[str, int] = field(default_factory=dict)
    statuses: dict[str, int] = field(default_factory=dict)
    _last_cost: dict[str, int] = field(default_factory=dict)
    _contended: bool = False

    def take_record(self, record: Record) -> None:
        status = str(record.status or record.error)
        self.statuses[status] = self.statuses.get(status, 0) + 1
        figures = self.classes[record.traffic_class]
        if not record.ok:
            figures.refused += 1
            return
        figures.answered += 1
        figures.prompt_tokens += record.prompt_tokens
        figures.cached_tokens += record.cached_tokens
        if record.ttft is not None:
            figures.ttfts.append(record.ttft)
        if record.endpoint is not None:
            self.answered_by[record.endpoint] = self.answered_by.get(record.endpoint, 0) + 1

    def take_status(self, status: Mapping[str, Any]) -> None:
        seen = {view["name"]: view for view in status["queues"]["classes"] if view["name"] in self.classes}
        contended = len(seen) == len(self.classes) and all(view["waiting_requests"] for view in seen.values())
        for name, view in seen.items():
            figures = self.classes[name]
            figures.weight_share = view["weight_share"]
            figures.waiting = view["waiting_requests"]
            figures.longest_queue = max(figures.longest_queue, figures.waiting)
            figures.oldest_wait = view["oldest_wait"]
            if contended and self._contended:
                figures.contended_tokens += view["dispatched_cost"] - self._last_cost[name]
            self._last_cost[name] = view["dispatched_cost"]
        self._contended = contended
        total = sum(figures.contended_tokens for figures in self.classes.values())
        for figures in self.classes.values():
            figures.share = figures.contended_tokens / total if total else None

    @property
    def answered(self) -> int:
        return sum(figures.answered for figures in self.classes.values())

    @property
    def hit_share(self) -> float:
        """Cached part of all prompt tokens, as the engines reported it in their answers."""
        prompt = sum(figures.prompt_tokens for figures in self.classes.values())
        return sum(figures.cached_tokens for figures in self.classes.values()) / prompt if prompt else 0.0

    def as_json(self, seconds: float) -> dict[str, Any]:
        return {
            "seconds": round(seconds, 3),
            "answered": self.answered,
            "statuses": self.statuses,
            "cache_hit_share": round(self.hit_share, 4),
            "classes": {name: _class_json(figures) for name, figures in self.classes.items()},
            "pods": {
                str(engine.settings.name): {
                    "answered": self.answered_by.get(str(engine.settings.name), 0),
                    "cache_hit_share": round(_engine_hit_share(engine), 4),
                }
                for engine in self.engines
            },
        }

    def render(self, title: Text, done: float) -> RenderableType:
        """The live view. `done` is the finished part of the run, 0..1."""
        bar = ProgressBar(total=1.0, completed=min(1.0, done), width=78)
        return Group(title, self.class_table(), self.pod_table(), bar)

    def class_table(self) -> Table:
        table = Table(
            box=SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
            title="Classes: share of uncached tokens while all of them wait",
            caption="p50 and p99 of the time to the first token",
        )
        table.add_column("class", no_wrap=True)
        for name in ("owed", "got"):
            table.add_column(name, justify="right", no_wrap=True)
        table.add_column("", width=_BAR_WIDTH)
        for name in ("waiting", "done", "p50", "p99", "cached"):
            table.add_column(name, justify="right", no_wrap=True)
        for number, figures in enumerate(self.classes.values()):
            colour = _COLOURS[number % len(_COLOURS)]
            table.add_row(
                Text(figures.name, style=colour),
                f"{figures.weight_share:.0%}",
                "-" if figures.share is None else f"{figures.share:.0%}",
                _bar(figures.share or 0.0, figures.weight_share, colour),
                str(figures.waiting),
                str(figures.answered),
                _seconds(percentile(figures.ttfts, 0.5)),
                _seconds(percentile(figures.ttfts, 0.99)),
                _part(figures.cached_tokens, figures.prompt_tokens),
            )
        return table

    def pod_table(self) -> Table:
        table = Table(box=SIMPLE_HEAD, pad_edge=False, title="Pods")
        table.add_column("pod")
        for name in ("running", "waiting", "KV held", "blocks", "answered", "cached"):
            table.add_column(name, justify="right")
        for engine in self.engines:
            model = engine.model
            table.add_row(
                engine.settings.name,
                str(len(model.running)),
                str(len(model.waiting)),
                f"{model.cache.usage:.0%}",
                str(model.cache.resident),
                str(self.answered_by.get(str(engine.settings.name), 0)),
                f"{_engine_hit_share(engine):.0%}",
            )
        return table


def _class_json(figures: ClassFigures) -> dict[str, Any]:
    p50, p99 = percentile(figures.ttfts, 0.5), percentile(figures.ttfts, 0.99)
    return {
        "weight_share": round(figures.weight_share, 4),
        "share": None if figures.share is None else round(figures.share, 4),
        "answered": figures.answered,
        "refused": figures.refused,
        "longest_queue": figures.longest_queue,
        "ttft_p50": None if p50 is None else round(p50, 4),
        "ttft_p99": None if p99 is None else round(p99, 4),
        "cache_hit_share": round(figures.cached_tokens / figures.prompt_tokens, 4)
        if figures.prompt_tokens
        else 0.0,
    }


def _engine_hit_share(engine: MockEngine) -> float:
    stats = engine.model.stats
    return stats.prefix_hits / stats.prefix_queries if stats.prefix_queries else 0.0


def _bar(share: float, weight: float, colour: str, width: int = _BAR_WIDTH) -> Text:
    """The share as a bar, with a mark where the weight is."""
    filled, mark = round(share * width), min(width - 1, round(weight * width))
    cells = ["█" if cell < filled else "·" for cell in range(width)]
    cells[mark] = "┃"
    return Text("".join(cells), style=colour)


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _part(part: int, whole: int) -> str:
    return f"{part / whole:.0%}" if whole else "-"

"""How exact the shares are: the gap between classes that deficit round robin leaves, against its bound."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from picker.queueing.drr import Flow


class Gap(NamedTuple):
    """By how many rounds one class is ahead of another, and the most that it may be (see `drr`)."""

    rounds: float = 0.0
    bound: float = 2.0


class _Mark(NamedTuple):
    """A flow's account at the start of a window. It must not have changed hands by the end: same period, quantum
    and disturbances."""

    account: tuple[int, int, int]
    charged: int


@dataclass(slots=True)
class FairnessMeter:
    """Compares what the classes that wait were charged, each in its own quanta, over windows of `window` samples.

    A class counts in a window while its backlog lasts and nothing comes between it and its exact share: it is
    passed over while blocked, or an old charge is corrected. A sample is O(classes); take one at every scrape.

    `latest` is the widest gap at the last sample, `worst` the one that came closest to its bound (or broke it)
    since the start.
    """

    window: int = 20
    latest: Gap = field(default_factory=Gap)
    worst: Gap = field(default_factory=Gap)
    _marks: dict[Flow[Any], _Mark] = field(default_factory=dict)
    _samples: int = 0

    def sample(self, flows: Iterable[Flow[Any]]) -> Gap:
        """Look at the flows now. The gap is 0 where fewer than two classes can be compared."""
        waiting = [flow for flow in flows if flow.period]
        found = self._widest([flow for flow in waiting if self._counts(flow)])
        self.latest = found or Gap()
        if self.latest.rounds / self.latest.bound > self.worst.rounds / self.worst.bound:
            self.worst = self.latest
        self._samples += 1
        if found is None or self._samples >= self.window:
            self._marks = {flow: _Mark(_account(flow), flow.charged) for flow in waiting}
            self._samples = 0
        return self.latest

    def _counts(self, flow: Flow[Any]) -> bool:
        mark = self._marks.get(flow)
        return mark is not None and mark.account == _account(flow)

    def _widest(self, flows: list[Flow[Any]]) -> Gap | None:
        """The gap of the pair that is nearest to its bound: the most served against the least served."""
        if len(flows) < 2:
            return None
        rounds = {flow: (flow.charged - self._marks[flow].charged) / flow.quantum for flow in flows}
        slack = {flow: flow.largest / flow.quantum for flow in flows}
        ahead = max(flows, key=lambda flow: rounds[flow] - slack[flow])
        behind = min(
            (flow for flow in flows if flow is not ahead), key=lambda flow: rounds[flow] + slack[flow]
        )
        return Gap(abs(rounds[ahead] - rounds[behind]), 2 + slack[ahead] + slack[behind])


def _account(flow: Flow[Any]) -> tuple[int, int, int]:
    return flow.period, flow.quantum, flow.disturbed

"""Everything that watches the service while it runs, behind one object."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

from msgspec import Struct
from msgspec.structs import replace

from picker.telemetry.catalogue import STAGES
from picker.telemetry.decisions import (
    MAX_CANDIDATES,
    Candidate,
    DecisionLog,
    DecisionRecord,
    Rejection,
)
from picker.telemetry.live_recording import LiveRecording
from picker.telemetry.logs import DecisionLines
from picker.telemetry.metrics import Metrics
from picker.telemetry.shares import ShareHistory
from picker.telemetry.sources import Sources

if TYPE_CHECKING:
    from picker.pool.endpoint import Endpoint
    from picker.queueing.work import Dropped, Released, Work
    from picker.selection.constraints import Constraints, Ineligible
    from picker.selection.weighing import Candidate as Weighed

DISPATCHED = "dispatched"

_SAMPLE_EVERY = 1.0
_LAG_EVERY = 0.1


@dataclass(slots=True)
class RequestStats:
    """Tokens of dispatched requests, as predicted and as engines reported them."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    reported_cached_tokens: int = 0
    prediction_error_tokens: int = 0


@dataclass(slots=True)
class LoopStats:
    """lag: the longest delay of the event loop in the last quarter of a minute, in seconds."""

    recent: deque[float] = field(default_factory=lambda: deque(maxlen=round(15 / _LAG_EVERY)))

    @property
    def lag(self) -> float:
        return max(self.recent, default=0.0)

    @property
    def tasks(self) -> int:
        """Tasks alive on the running loop; 0 where none runs."""
        try:
            return len(asyncio.all_tasks())
        except RuntimeError:
            return 0


class Telemetry:
    """Metrics, decisions, shares and decision lines.

    Who composes the service fills `sources`, hands `stages` to the pipeline, calls `released` or `dropped` with
    each outcome of the queue, and keeps `run` running. `clock` is the queue's.
    """

    def __init__(
        self,
        *,
        clock: Callable[[], float],
        version: str,
        decisions: int = 1000,
        lines_per_second: float = 1.0,
    ) -> None:
        self.sources = Sources()
        self.shares = ShareHistory()
        self.metrics = Metrics(self.sources, self.shares, clock=clock, version=version)
        self.decisions = DecisionLog(decisions)
        self.requests = RequestStats()
        self.recording = LiveRecording(clock)
        self.stages: Mapping[str, Callable[[float], None]] = {
            name: self.metrics.stage(name) for name in STAGES
        }
        self._lines = DecisionLines(lines_per_second, clock)
        self._clock = clock
        self._loop = LoopStats()
        self.sources.stats |= {"requests": self.requests, "loop": self._loop}

    def released(self, released: Released) -> None:
        work, decision = released.work, released.decision
        self.metrics.queue_wait(work.policy_class.label, released.waited)
        self.requests.prompt_tokens += work.demand.raw_tokens
        self.requests.cached_tokens += decision.held_tokens
        record = _record(
            work,
            DISPATCHED,
            released.waited,
            deficit=released.deficit_after,
            deficit_before=released.deficit_before,
            prefill=released.prefill.decision.endpoint.spec.authority if released.prefill else "",
            chosen=decision.endpoint.spec.authority,
        )
        weighed, refused = decision.first(MAX_CANDIDATES), decision.eligibility.refused
        self._keep(record, Weighing(work.demand.constraints, weighed, refused), explain=work.explain)

    def dropped(self, dropped: Dropped) -> None:
        work = dropped.work
        record = _record(work, str(dropped.reason), max(0.0, self._clock() - work.arrival))
        self._keep(record, Weighing(work.demand.constraints, (), {}), explain=work.explain)

    def reported(self, predicted: int, cached: int) -> None:
        """An engine has told in its response how many of a prompt's tokens it had cached."""
        self.requests.reported_cached_tokens += cached
        self.requests.prediction_error_tokens += abs(predicted - cached)

    async def run(self) -> None:
        """Take the samples that nobody asks for, until cancelled."""
        loop = asyncio.get_running_loop()
        due = 0.0
        while True:
            if (now := self._clock()) >= due:
                self.shares.sample(self.sources.classes(), now)
                due = now + _SAMPLE_EVERY
            asleep = loop.time()
            await asyncio.sleep(_LAG_EVERY)
            self._loop.recent.append(max(0.0, loop.time() - asleep - _LAG_EVERY))

    def _keep(self, record: DecisionRecord, detail: Weighing, *, explain: bool) -> None:
        self.decisions.add(record, detail)
        if explain:
            self._lines.explain(detail.filled_in(record))
        else:
            self._lines.write(record)


def _record(
    work: Work,
    outcome: str,
    waited: float,
    *,
    deficit: int = 0,
    deficit_before: int = 0,
    prefill: str = "",
    chosen: str = "",
) -> DecisionRecord:
    return DecisionRecord(
        id=work.id,
        at=time.time(),
        policy_class=work.policy_class.label,
        outcome=outcome,
        model=work.model,
        prompt_tokens=work.demand.raw_tokens,
        cached_tokens=work.cached_tokens,
        uncached_tokens=work.uncached_tokens,
        cost=work.cost,
        estimated=not work.demand.prompt.lengths,
        wait=waited,
        deficit=deficit,
        deficit_before=deficit_before,
        prefill=prefill,
        chosen=chosen,
    )


class Weighing(Struct, gc=False):
    """What a decision was made from, but for its prompt. Many are kept, so that the collector must not walk them: no
    part of it refers to what it is part of.
    """

    constraints: Constraints
    weighed: Sequence[Weighed]
    refused: Mapping[Endpoint, Ineligible]

    def filled_in(self, record: DecisionRecord) -> DecisionRecord:
        rejected = (
            Rejection(endpoint.spec.authority, endpoint.spec.name, str(reason))
            for endpoint, reason in islice(self.refused.items(), MAX_CANDIDATES)
        )
        return replace(
            record,
            lane=str(self.constraints),
            candidates=tuple(_candidate(each) for each in self.weighed),
            rejected=tuple(rejected),
        )


def _candidate(weighed: Weighed) -> Candidate:
    spec = weighed.endpoint.spec
    terms: dict[str, float] = {
        "uncached_tokens": weighed.uncached_tokens,
        "booked_prefill_tokens": weighed.booked_prefill_tokens,
        "running_requests": weighed.running,
    }
    if weighed.interference:
        terms["decode_interference"] = weighed.interference
    if weighed.crowding:
        terms["crowding"] = weighed.crowding
    if weighed.cold_turn:
        terms["cold_turn"] = weighed.cold_turn
    if weighed.over_share:
        terms["over_share"] = weighed.over_share
    if weighed.off_session:
        terms["off_session"] = weighed.off_session
    return Candidate(spec.authority, spec.name, weighed.cost, weighed.cached_tokens, terms)

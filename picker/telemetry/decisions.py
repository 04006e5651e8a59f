"""The last decisions, each with what it takes to say why: a bounded log, and a stream of what comes in."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

# A decision keeps this many of its candidates and of its refusals, the best first.
MAX_CANDIDATES = 8


class Candidate(msgspec.Struct, frozen=True, gc=False):
    """One endpoint that was weighed. `total` is its cost in weighted tokens; `terms` are what went into it."""

    endpoint: str
    name: str
    total: float
    cached_tokens: int
    terms: Mapping[str, float]


class Rejection(msgspec.Struct, frozen=True, gc=False):
    """One endpoint that could not take the request."""

    endpoint: str
    name: str
    reason: str


class DecisionRecord(msgspec.Struct, frozen=True, gc=False):
    """What became of one request. Tokens are tokens, `at` is Unix seconds, `wait` seconds.

    `outcome` is "dispatched" or the reason of the refusal; `deficit` is the class's after the charge, and
    `deficit_before` before it. `lane` tells what was asked of the endpoint, for those who asked the same wait together.
    `prefill` is the endpoint that reads the prompt, if it is another. `model` is only for people: clients choose it.
    """

    id: str
    at: float
    policy_class: str
    outcome: str
    model: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    uncached_tokens: int = 0
    cost: int = 0
    estimated: bool = False
    wait: float = 0.0
    deficit: int = 0
    deficit_before: int = 0
    lane: str = ""
    chosen: str = ""
    prefill: str = ""
    candidates: tuple[Candidate, ...] = ()
    rejected: tuple[Rejection, ...] = ()


class Detail(Protocol):
    """What takes longest to write of a record and is seldom read."""

    def filled_in(self, record: DecisionRecord) -> DecisionRecord: ...


@dataclass(slots=True)
class DecisionLog:
    """The last `size` decisions by id, and those who watch them come in. A record gets its detail when it is read."""

    size: int = 1000
    _records: OrderedDict[str, tuple[DecisionRecord, Detail | None]] = field(default_factory=OrderedDict)
    _watchers: set[Watcher] = field(default_factory=set)

    def add(self, record: DecisionRecord, detail: Detail | None = None) -> None:
        if self.size:
            self._records[record.id] = (record, detail)
            if len(self._records) > self.size:
                self._records.popitem(last=False)
        for watcher in self._watchers:
            watcher.offer(_whole(record, detail))

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[DecisionRecord]:
        """Newest first."""
        return self.of_class("")

    def of_class(self, policy_class: str) -> Iterator[DecisionRecord]:
        """Those of a class, or of any class (""), newest first."""
        for record, detail in reversed(self._records.values()):
            if not policy_class or record.policy_class == policy_class:
                yield _whole(record, detail)

    def get(self, id: str) -> DecisionRecord | None:
        kept = self._records.get(id)
        return None if kept is None else _whole(*kept)

    def watch(self, backlog: int = 256) -> Watcher:
        """Decisions from now on; close it when done. A reader that falls `backlog` behind misses some."""
        watcher = Watcher(self._watchers, backlog)
        self._watchers.add(watcher)
        return watcher


def _whole(record: DecisionRecord, detail: Detail | None) -> DecisionRecord:
    return record if detail is None else detail.filled_in(record)


@dataclass(slots=True, eq=False)
class Watcher:
    """One reader: iterates over (decision, number of decisions missed before it)."""

    watchers: set[Watcher]
    backlog: int
    _waiting: asyncio.Queue[tuple[DecisionRecord, int]] = field(default_factory=asyncio.Queue)
    _missed: int = 0

    def offer(self, record: DecisionRecord) -> None:
        if self._waiting.qsize() >= self.backlog:
            self._missed += 1
            return
        self._waiting.put_nowait((record, self._missed))
        self._missed = 0

    async def __aiter__(self) -> AsyncIterator[tuple[DecisionRecord, int]]:
        while True:
            yield await self._waiting.get()

    def close(self) -> None:
        self.watchers.discard(self)

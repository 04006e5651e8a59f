"""Engines that nobody gave an event address for are asked for it, until their events come."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol
from urllib.parse import urlsplit

import aiohttp

from picker.kvcache.discovery import DiscoveryError, EventAddresses, discover_sources

log = logging.getLogger(__name__)


class Answer(StrEnum):
    """What asking an engine gave."""

    FOUND = "found"
    # It answers, and publishes no events.
    NONE = "none"
    # It is not there, or has no such route.
    FAILED = "failed"


@dataclass(slots=True)
class AskingStats:
    """`answers` since the start; `targets`: processes that are being asked, now."""

    targets: int = 0
    answers: dict[Answer, int] = field(default_factory=lambda: dict.fromkeys(Answer, 0))


@dataclass(frozen=True, slots=True)
class AskingSettings:
    """Times in seconds. The pause between questions doubles from `interval` to `longest`; an engine whose events
    come is looked at every `interval` and not asked.
    """

    interval: float = 2.0
    longest: float = 30.0
    timeout: float = 2.0
    concurrency: int = 16


class Spec(Protocol):
    """What asking needs to know of an endpoint; the pool's EndpointSpec has it."""

    @property
    def uid(self) -> str: ...
    @property
    def rank(self) -> int: ...
    @property
    def authority(self) -> str: ...
    @property
    def engine(self) -> str: ...
    @property
    def metrics_url(self) -> str | None: ...
    @property
    def kv_events(self) -> str | None: ...
    @property
    def ask_kv_events(self) -> bool: ...


@dataclass(slots=True)
class _Target:
    """One process, and the ranks in it: uid -> rank."""

    ranks: dict[str, int]
    task: asyncio.Task[None] | None = None


class SourceAsking:
    """One task for each process that is to be asked. All methods belong to the event loop's thread.

    `on_answer(uid, addresses)` is called with each answer, None where the engine publishes nothing for that
    rank. An engine that does not answer has said nothing: what it said before holds. `is_connected(uid)` tells
    whether an endpoint's events come; one whose events do not come is asked again, since a restart may have
    changed the ports.
    """

    def __init__(
        self,
        on_answer: Callable[[str, EventAddresses | None], None],
        is_connected: Callable[[str], bool],
        settings: AskingSettings = AskingSettings(),
    ) -> None:
        self.stats = AskingStats()
        self._on_answer = on_answer
        self._is_connected = is_connected
        self._settings = settings
        self._targets: dict[str, _Target] = {}
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._session: aiohttp.ClientSession | None = None

    def update(self, specs: Iterable[Spec]) -> None:
        """Ask for exactly these endpoints, as far as they have to be asked for."""
        wanted: dict[str, dict[str, int]] = {}
        for spec in specs:
            if _is_to_be_asked(spec):
                wanted.setdefault(_base_url(spec), {})[spec.uid] = spec.rank
        for url in self._targets.keys() - wanted.keys():
            self._stop(self._targets.pop(url))
        for url, ranks in wanted.items():
            target = self._targets.get(url)
            if target is not None and target.ranks.keys().isdisjoint(ranks):
                # Others under the old address: they do not inherit an answer on its way, nor the pause.
                self._stop(target)
                target = None
            if target is None:
                target = self._targets[url] = _Target(ranks)
                target.task = asyncio.get_running_loop().create_task(self._follow(url, target))
            target.ranks = ranks
        self.stats.targets = len(self._targets)

    async def close(self) -> None:
        """Ask nobody any more."""
        tasks = [target.task for target in self._targets.values() if target.task is not None]
        self.update(())
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _stop(self, target: _Target) -> None:
        target.ranks = {}
        if target.task is not None:
            target.task.cancel()

    async def _follow(self, url: str, target: _Target) -> None:
        settings = self._settings
        questions = 0  # since its events last came
        while True:
            if all(map(self._is_connected, target.ranks)):
                questions = 0
            else:
                async with self._slots:
                    await self._ask(url, target)
                questions = min(questions + 1, 16)
            pause = settings.interval * 2 ** max(0, questions - 1)
            await asyncio.sleep(min(pause, settings.longest) * random.uniform(0.8, 1.0))

    async def _ask(self, url: str, target: _Target) -> None:
        try:
            sources = await discover_sources(self._open_session(), url, timeout=self._settings.timeout)
        except DiscoveryError as error:
            self.stats.answers[Answer.FAILED] += 1
            log.debug("%s", error)
            return
        self.stats.answers[Answer.FOUND if sources else Answer.NONE] += 1
        for uid, rank in list(target.ranks.items()):
            self._on_answer(uid, _of_rank(sources, rank))

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, force_close=True),
                cookie_jar=aiohttp.DummyCookieJar(),
            )
        return self._session


def _is_to_be_asked(spec: Spec) -> bool:
    """Only vLLM can be asked."""
    return spec.kv_events is None and spec.ask_kv_events and spec.engine == "vllm"


def _base_url(spec: Spec) -> str:
    """The engine's API server, which is also where its metrics are."""
    if spec.metrics_url is None:
        return f"http://{spec.authority}"
    parts = urlsplit(spec.metrics_url)
    return f"{parts.scheme}://{parts.netloc}"


def _of_rank(sources: Mapping[int, EventAddresses], rank: int) -> EventAddresses | None:
    """A process with one source speaks of itself, whatever it takes its rank to be."""
    if len(sources) == 1:
        return next(iter(sources.values()))
    return sources.get(rank)

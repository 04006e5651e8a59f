"""Scrapes the engines' metrics and hands on what they say. Routing works without it, only less informed."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from math import inf

import aiohttp

from picker.pool.endpoint import EndpointSpec, EngineReport
from picker.pool.metrics_text import parse_engine_report


class ScrapeFailure(StrEnum):
    """Why a scrape gave nothing."""

    CONNECT = "connect"
    TIMEOUT = "timeout"
    STATUS = "status"
    TOO_LARGE = "too_large"
    # An answer that breaks off or is no HTTP.
    PROTOCOL = "protocol"
    # A page without a single figure of a known engine.
    UNRECOGNISED = "unrecognised"


@dataclass(slots=True)
class ScraperStats:
    """`scrapes` (good ones) and `failures` since the start; `targets` and `stale` now."""

    scrapes: int = 0
    failures: dict[ScrapeFailure, int] = field(default_factory=lambda: dict.fromkeys(ScrapeFailure, 0))
    targets: int = 0
    # Scraped endpoints whose last report is older than `stale_after`, or that never gave one for that long.
    stale: int = 0


@dataclass(frozen=True, slots=True)
class ScraperSettings:
    """Times in seconds. A page that fails is asked again after twice the `interval`, doubling to `max_backoff`.

    Scrapes start on multiples of `tick`, a few pods at each: spread over the interval, and yet with far fewer
    wake-ups than one a pod, which halves the cost.
    """

    interval: float = 1.0
    tick: float = 0.1
    timeout: float = 1.0
    max_backoff: float = 10.0
    stale_after: float = 5.0
    max_bytes: int = 4 * 1024 * 1024
    concurrency: int = 64


class _Failed(Exception):
    def __init__(self, reason: ScrapeFailure) -> None:
        self.reason = reason


@dataclass(slots=True)
class _Target:
    """One metrics page and the endpoints that it speaks of: more than one where ranks share a process."""

    url: str
    endpoints: dict[str, EndpointSpec]
    # When the page was last read well; at first, when it became a target.
    fresh_at: float
    task: asyncio.Task[None] | None = None


class Scraper:
    """Keeps one task for each metrics page of the pool. All methods belong to the event loop's thread.

    `on_report(uid, report)` is called with each reading; `report.at` is the time, by `clock`, when the request
    for it was sent. After `update` no report of an endpoint that left is handed on.
    """

    def __init__(
        self,
        on_report: Callable[[str, EngineReport], object],
        settings: ScraperSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings or ScraperSettings()
        self._on_report = on_report
        self._clock = clock
        self._stats = ScraperStats()
        self._targets: dict[str, _Target] = {}
        self._slots = asyncio.Semaphore(self.settings.concurrency)
        self._session: aiohttp.ClientSession | None = None

    @property
    def stats(self) -> ScraperStats:
        self._stats.targets = len(self._targets)
        self._stats.stale = len(self.stale())
        return self._stats

    def stale(self) -> set[str]:
        """The uids of scraped endpoints that have not been heard for `stale_after`, or let nobody connect."""
        limit = self._clock() - self.settings.stale_after
        return {
            uid for target in self._targets.values() if target.fresh_at < limit for uid in target.endpoints
        }

    def update(self, specs: Iterable[EndpointSpec]) -> None:
        """Scrape the pages of exactly these endpoints: new ones start, ones that left stop at once."""
        pages: dict[str, dict[str, EndpointSpec]] = {}
        for spec in specs:
            if spec.metrics_url is not None:
                pages.setdefault(spec.metrics_url, {})[spec.uid] = spec
        for url in self._targets.keys() - pages.keys():
            self._stop(self._targets.pop(url))
        for url, endpoints in pages.items():
            target = self._targets.get(url)
            if target is not None and target.endpoints.keys().isdisjoint(endpoints):
                # Others under the old address: they inherit neither its freshness nor an answer on its way.
                self._stop(target)
                target = None
            if target is None:
                target = self._targets[url] = _Target(url, endpoints, self._clock())
                target.task = asyncio.get_running_loop().create_task(self._follow(target))
            target.endpoints = endpoints

    async def close(self) -> None:
        """Stop every scrape and close the connections."""
        tasks = [target.task for target in self._targets.values() if target.task is not None]
        self.update(())
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    def _stop(self, target: _Target) -> None:
        target.endpoints = {}
        if target.task is not None:
            target.task.cancel()

    async def _follow(self, target: _Target) -> None:
        settings, loop = self.settings, asyncio.get_running_loop()
        longest = max(settings.max_backoff, settings.interval)
        failures = 0
        await self._sleep(random.uniform(0, settings.interval))
        while True:
            due = loop.time() + settings.interval
            try:
                async with self._slots:
                    started = self._clock()
                    text = await self._fetch(target.url)
                self._deliver(target, text, started)
                failures = 0
                await self._sleep(due - loop.time())
            except _Failed as failed:
                self._stats.failures[failed.reason] += 1
                if failed.reason is ScrapeFailure.CONNECT:
                    # Nobody is there. Its requests come back at once, so that it seems to be the least busy of all.
                    target.fresh_at = -inf
                failures = min(failures + 1, 16)
                await self._sleep(min(settings.interval * 2**failures, longest) * random.uniform(0.8, 1.0))

    async def _sleep(self, delay: float) -> None:
        """Sleep for `delay`, or until the tick nearest to its end."""
        now, tick = asyncio.get_running_loop().time(), self.settings.tick
        await asyncio.sleep(max(0.0, round((now + delay) / tick) * tick - now))

    def _deliver(self, target: _Target, text: str, started: float) -> None:
        shared = len(target.endpoints) > 1
        recognised = False
        for uid, spec in list(target.endpoints.items()):
            report = parse_engine_report(text, spec.engine, spec.rank if shared else None, started)
            if report.running is not None or report.waiting is not None or report.kv_usage is not None:
                recognised = True
                target.fresh_at = started
                self._on_report(uid, report)
        if not recognised:
            raise _Failed(ScrapeFailure.UNRECOGNISED)
        self._stats.scrapes += 1

    async def _fetch(self, url: str) -> str:
        try:
            async with (
                asyncio.timeout(self.settings.timeout),
                self._open_session().get(url, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise _Failed(ScrapeFailure.STATUS)
                return (await self._body(response)).decode("utf-8", "replace")
        except TimeoutError:
            raise _Failed(ScrapeFailure.TIMEOUT) from None
        except (aiohttp.ClientConnectorError, ConnectionRefusedError):
            raise _Failed(ScrapeFailure.CONNECT) from None
        except (aiohttp.ClientError, OSError, ValueError):
            raise _Failed(ScrapeFailure.PROTOCOL) from None

    async def _body(self, response: aiohttp.ClientResponse) -> bytes:
        body = bytearray()
        async for chunk in response.content.iter_any():
            body += chunk
            if len(body) > self.settings.max_bytes:
                raise _Failed(ScrapeFailure.TOO_LARGE)
        return bytes(body)

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # Uncompressed: unpacking 50 KB costs more than reading it from a neighbour.
                headers={"Accept": "text/plain", "Accept-Encoding": "identity"},
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=30),
                cookie_jar=aiohttp.DummyCookieJar(),
                timeout=aiohttp.ClientTimeout(total=None),
                auto_decompress=False,
            )
        return self._session

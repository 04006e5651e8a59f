"""Follows one kind of object: a list, then a watch from its version, for ever and through every fault.

What each fault leads to:

    410 on the connection or in the stream   a fresh list
    401                                      credentials read anew, the watch resumed where it was
    429                                      waits as long as the server says
    5xx, connection refused, cut             the watch resumed; after three in a row without progress, a list
    nothing heard for `silence` seconds      a fresh list: the connection may be half open
    403 or 404 on an optional kind           taken as an empty list, asked again now and then
    an event of an unknown type, no event    ignored

Between tries it waits twice as long each time, until an event or a bookmark has come or a watch has held for a
while. The last good state stays with the sink throughout.
"""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Protocol

import msgspec

from picker.pool.kube.api import KubeApi, Query
from picker.pool.kube.errors import ApiError, SilentError
from picker.pool.kube.pod_table import KubeObject

_log = logging.getLogger(__name__)


class Change(StrEnum):
    """What a watch event says of its object."""

    ADDED = "ADDED"
    MODIFIED = "MODIFIED"
    DELETED = "DELETED"


class Sink(Protocol):
    """Takes the objects in."""

    def replace(self, objects: list[KubeObject]) -> None:
        """The complete list, as of now."""

    def apply(self, change: Change, item: KubeObject) -> None:
        """One event after it."""


class WatchFault(StrEnum):
    """Why a list or a watch ended before its time."""

    EXPIRED = "expired"
    UNAUTHORIZED = "unauthorized"
    THROTTLED = "throttled"
    REFUSED = "refused"
    SERVER = "server"
    TRANSPORT = "transport"
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class WatchSettings:
    """Times in seconds.

    A watch is asked to end after half to three quarters of `silence`, so that a sound one is never silent for
    that long: bookmarks alone can be two minutes apart. One that held for `settled` counts as progress.
    """

    silence: float = 60.0
    settled: float = 5.0
    list_timeout: float = 30.0
    first_backoff: float = 0.2
    max_backoff: float = 30.0
    absent_retry: float = 60.0
    page_size: int = 250


@dataclass(slots=True)
class WatchStats:
    """Counters since the start; several loops may share them."""

    lists: int = 0
    watches: int = 0
    events: int = 0
    bookmarks: int = 0
    ignored: int = 0
    faults: dict[WatchFault, int] = field(default_factory=lambda: dict.fromkeys(WatchFault, 0))


class WatchLoop:
    """One kind of object, at `path`. `run` goes on until it is cancelled and raises nothing of the server's.

    `synced` is True once a list has been complete, or an optional kind has turned out to be absent.
    `heard_at` is when, by `clock`, the server last showed that the state is current.
    """

    def __init__(
        self,
        api: KubeApi,
        path: str,
        sink: Sink,
        *,
        selector: Query = (),
        optional: bool = False,
        settings: WatchSettings | None = None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
        stats: WatchStats | None = None,
    ) -> None:
        self.stats = stats or WatchStats()
        self.synced = False
        self.heard_at: float | None = None
        self._api = api
        self._path = path
        self._sink = sink
        self._selector = tuple(selector)
        self._optional = optional
        self._settings = settings or WatchSettings()
        self._clock = clock
        self._sleep = sleep
        # Where to resume; None: with a list.
        self._version: str | None = None
        self._failures = 0

    async def run(self) -> None:
        while True:
            try:
                if self._version is None:
                    await self._list()
                await self._watch()
                # A server that ends each watch at once must not be asked in a tight loop.
                self._failures += 1
                delay = self._backoff() if self._failures > 1 else 0.0
            except ApiError as error:
                delay = await self._recover(error)
            await self._sleep(delay)

    async def _list(self) -> None:
        objects: list[KubeObject] = []
        page: Query = (*self._selector, ("limit", str(self._settings.page_size)))
        following = ""
        while True:
            query = (*page, ("continue", following)) if following else page
            answer = await self._api.request("GET", self._path, query, timeout=self._settings.list_timeout)
            metadata, items = answer.get("metadata"), answer.get("items") or []
            if not isinstance(metadata, dict) or not isinstance(items, list):
                raise ApiError(None, "the answer is no list")
            objects.extend(item for item in items if isinstance(item, dict))
            following = metadata.get("continue") or ""
            if not following:
                break
        self._version = str(metadata.get("resourceVersion", ""))
        self.stats.lists += 1
        self._take_all(objects)

    def _take_all(self, objects: list[KubeObject]) -> None:
        self.synced = True
        self.heard_at = self._clock()
        self._sink.replace(objects)

    async def _watch(self) -> None:
        settings = self._settings
        query = (
            *self._selector,
            ("watch", "true"),
            ("allowWatchBookmarks", "true"),
            ("resourceVersion", self._version or ""),
            ("timeoutSeconds", str(max(1, round(settings.silence * random.uniform(0.5, 0.75))))),
        )
        self.stats.watches += 1
        began = self._clock()
        try:
            async with aclosing(self._api.lines(self._path, query, settings.silence)) as lines:
                async for line in lines:
                    self._take(line)
            # The server has ended it in good order, so there was nothing more to say.
            self.heard_at = self._clock()
        finally:
            if self._clock() - began >= settings.settled:
                self._failures = 0

    def _take(self, line: bytes) -> None:
        event = _decode(line)
        if event is None:
            self.stats.ignored += bool(line.strip())
            return
        kind, item = event.get("type"), event.get("object")
        if not isinstance(item, dict):
            item = {}
        if kind == "ERROR" or (kind is None and event.get("kind") == "Status"):
            raise _status_error(item or event)
        metadata = item.get("metadata")
        version = metadata.get("resourceVersion") if isinstance(metadata, dict) else None
        if not isinstance(kind, str) or kind not in _EVENT_TYPES or not isinstance(version, str):
            self.stats.ignored += 1
            return
        self._version = version
        self._progress()
        if kind == "BOOKMARK":
            self.stats.bookmarks += 1
        else:
            self.stats.events += 1
            self._sink.apply(Change(kind), item)

    def _progress(self) -> None:
        if self._failures > 1:
            _log.info("%s: current again", self._path)
        self._failures = 0
        self.heard_at = self._clock()

    async def _recover(self, error: ApiError) -> float:
        """Set up the next try, and say how many seconds to wait before it."""
        if self._optional and error.status in (403, 404):
            if not self.synced:
                _log.info("%s: not served or not allowed, taken as empty", self._path)
            self._version = None
            self._take_all([])
            return self._settings.absent_retry * random.uniform(0.9, 1.1)
        fault = _fault(error)
        self.stats.faults[fault] += 1
        self._failures += 1
        if self._failures in (1, 10) or self._failures % 100 == 0:
            _log.warning("%s: %s (failure %d in a row)", self._path, error, self._failures)
        if fault is WatchFault.UNAUTHORIZED:
            await self._api.refresh()
        elif fault in (WatchFault.EXPIRED, WatchFault.SILENT, WatchFault.REFUSED) or self._failures % 3 == 0:
            self._version = None
        return max(self._backoff(), min(error.retry_after or 0.0, 60.0))

    def _backoff(self) -> float:
        doubled = self._settings.first_backoff * 2 ** min(self._failures - 1, 16)
        return float(min(doubled, self._settings.max_backoff) * random.uniform(0.5, 1.0))


_EVENT_TYPES = frozenset({*Change, "BOOKMARK"})


def _decode(line: bytes) -> dict[str, Any] | None:
    try:
        value = msgspec.json.decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    return value if isinstance(value, dict) else None


def _status_error(status: KubeObject) -> ApiError:
    code = status.get("code")
    message = status.get("message") or status.get("reason") or "error in the watch"
    details = status.get("details")
    wait = details.get("retryAfterSeconds") if isinstance(details, dict) else None
    return ApiError(
        code if isinstance(code, int) else 500,
        str(message),
        float(wait) if isinstance(wait, int) else None,
    )


def _fault(error: ApiError) -> WatchFault:
    if isinstance(error, SilentError):
        return WatchFault.SILENT
    match error.status:
        case None:
            return WatchFault.TRANSPORT
        case 410:
            return WatchFault.EXPIRED
        case 401:
            return WatchFault.UNAUTHORIZED
        case 429:
            return WatchFault.THROTTLED
        case status if status >= 500:
            return WatchFault.SERVER
        case _:
            return WatchFault.REFUSED

"""The dashboard's live data: made once a tick for all who watch, and not at all when nobody does."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import msgspec

from picker.admin.views import View


class TooManyWatchers(Exception):
    """The feed has as many watchers as it takes."""


class Feed:
    """Server-sent events. A watcher that is slow gets the newest state and misses the ones between."""

    def __init__(self, state: Callable[[], View], *, interval: float = 1.0, max_watchers: int = 32) -> None:
        self._state = state
        self._interval = interval
        self._max_watchers = max_watchers
        self._watchers = 0
        self._next: asyncio.Future[bytes] | None = None
        self._ticker: asyncio.Task[None] | None = None
        self._closed = False

    async def watch(self) -> AsyncIterator[bytes]:
        """Each tick's event, until `close`. Raises TooManyWatchers."""
        if self._watchers >= self._max_watchers:
            raise TooManyWatchers
        self._watchers += 1
        if self._ticker is None:
            self._next = asyncio.get_running_loop().create_future()
            self._ticker = asyncio.create_task(self._tick())
        try:
            while not self._closed and self._next is not None:
                yield await asyncio.shield(self._next)
        except asyncio.CancelledError:
            if not self._closed:
                raise
        finally:
            self._watchers -= 1

    def close(self) -> None:
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        if self._next is not None:
            self._next.cancel()

    async def _tick(self) -> None:
        while self._watchers:
            await asyncio.sleep(self._interval)
            assert self._next is not None
            done, self._next = self._next, asyncio.get_running_loop().create_future()
            done.set_result(event("state", self._state()))
        self._ticker = self._next = None


def event(name: str, data: object) -> bytes:
    """One server-sent event."""
    return b"event: " + name.encode() + b"\ndata: " + msgspec.json.encode(data) + b"\n\n"

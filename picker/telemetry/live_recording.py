"""A recording for whoever listens at the admin port (`picker record`): each listener's own, from its coming on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from picker.telemetry.recording import Entry, Form

if TYPE_CHECKING:
    from picker.queueing.work import Work

# What is sent where nothing happens, so that a listener who has left is noticed. Readers leave empty lines out.
HEARTBEAT = "\n"


class TooManyListeners(Exception):
    """There are as many listeners as are allowed."""


class LiveRecording:
    """Requests that are over, told to up to `max_listeners`. Without a listener, nothing is done.

    heartbeat: seconds without a request after which a sign of life is given.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        *,
        max_listeners: int = 4,
        backlog: int = 4096,
        heartbeat: float = 5.0,
    ) -> None:
        self._clock = clock
        self._max_listeners = max_listeners
        self._backlog = backlog
        self._heartbeat = heartbeat
        self._listeners: set[Listener] = set()

    @property
    def wanted(self) -> bool:
        return bool(self._listeners)

    def take(self, work: Work, outcome: str, output_tokens: int | None, block_size: int) -> None:
        """A request has ended or was refused; see `Form.entry`."""
        for listener in self._listeners:
            listener.take(work, outcome, output_tokens, block_size)

    def listen(self) -> Listener:
        """Listen from now on; `leave` when done. Raises TooManyListeners."""
        if len(self._listeners) >= self._max_listeners:
            raise TooManyListeners
        listener = Listener(self._listeners, Form(self._clock), self._backlog, self._heartbeat)
        self._listeners.add(listener)
        return listener

    def close(self) -> None:
        """Let every listener come to its end."""
        for listener in list(self._listeners):
            listener.leave()


class Listener:
    """Iterates over texts of whole lines. Where it falls `backlog` requests behind it misses some, and the next line
    says how many by `lost`.
    """

    def __init__(self, others: set[Listener], form: Form, backlog: int, heartbeat: float) -> None:
        self._others = others
        self._form = form
        self._backlog = backlog
        self._heartbeat = heartbeat
        # None: there is no more.
        self._waiting: asyncio.Queue[Entry | None] = asyncio.Queue()
        self._lost = 0

    def take(self, work: Work, outcome: str, output_tokens: int | None, block_size: int) -> None:
        if self._waiting.qsize() >= self._backlog:
            self._lost += 1
            return
        record, keys = self._form.entry(work, outcome, output_tokens, block_size)
        if self._lost:
            record["lost"], self._lost = self._lost, 0
        self._waiting.put_nowait((record, keys))

    def leave(self) -> None:
        self._others.discard(self)
        self._waiting.put_nowait(None)

    def _text(self, entries: list[Entry]) -> str:
        return "".join(map(self._form.line, entries))

    async def __aiter__(self) -> AsyncIterator[str]:
        """As soon as something has come, all that has; a heartbeat where nothing does."""
        while True:
            try:
                entries = [await asyncio.wait_for(self._waiting.get(), self._heartbeat)]
            except TimeoutError:
                yield HEARTBEAT
                continue
            while not self._waiting.empty():
                entries.append(self._waiting.get_nowait())
            kept = [entry for entry in entries if entry is not None]
            if kept:
                # To hash a long prompt's keys takes a millisecond.
                yield await asyncio.to_thread(self._text, kept)
            if len(kept) < len(entries):
                return

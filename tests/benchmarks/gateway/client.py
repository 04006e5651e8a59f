"""A client that is no part of what it measures: raw connections, prepared requests, latencies from the instant at which
a request was due, so that a server that stalls pays for everybody who had to wait (no coordinated omission).
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from random import Random

from tests.benchmarks.gateway.wire import Message

# Seconds after the last arrival before an open-loop run gives up on what is still unanswered.
PATIENCE = 30.0


@dataclass(slots=True)
class Load:
    """What came of a run: seconds of each request from when it was due, and how many did not get 200."""

    seconds: float
    latencies: list[float] = field(default_factory=list)
    refused: int = 0
    unanswered: int = 0

    @property
    def per_second(self) -> float:
        return len(self.latencies) / self.seconds

    def quantile(self, share: float) -> float:
        ordered = sorted(self.latencies)
        return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else float("nan")


class Connection(asyncio.Protocol):
    def __init__(self, on_answer: Callable[[Connection, Message], None]) -> None:
        self._on_answer = on_answer
        self._message = Message()
        self.closed = False
        self.due = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True

    def ask(self, request: bytes, due: float) -> None:
        self.due = due
        self._transport.write(request)

    def data_received(self, data: bytes) -> None:
        if self._message.feed(data):
            message, self._message = self._message, Message()
            self._on_answer(self, message)

    def close(self) -> None:
        self._transport.close()


async def closed_loop(port: int, requests: Callable[[], bytes], clients: int, seconds: float) -> Load:
    """So many clients, each asking again as soon as it is answered: the throughput at saturation."""
    load = Load(seconds)
    end = time.perf_counter() + seconds
    done = asyncio.Event()
    running = clients

    def answered(connection: Connection, message: Message) -> None:
        nonlocal running
        now = time.perf_counter()
        _count(load, message, now - connection.due)
        if now < end:
            connection.ask(requests(), now)
        else:
            running -= 1
            connection.close()
            if not running:
                done.set()

    with _undisturbed():
        connections = [await _connect(port, answered) for _ in range(clients)]
        start = time.perf_counter()
        for connection in connections:
            connection.ask(requests(), start)
        await asyncio.wait_for(done.wait(), seconds + PATIENCE)
    load.seconds = time.perf_counter() - start
    return load


async def open_loop(port: int, requests: Callable[[], bytes], rate: float, seconds: float) -> Load:
    """Requests at random instants, `rate` of them a second, whoever is still waiting."""
    load = Load(seconds)
    idle: list[Connection] = []

    def answered(connection: Connection, message: Message) -> None:
        _count(load, message, time.perf_counter() - connection.due)
        idle.append(connection)

    async def send(due: float) -> None:
        while idle and idle[-1].closed:
            idle.pop()
        connection = idle.pop() if idle else await _connect(port, answered)
        connection.ask(requests(), due)

    arrivals = _poisson(rate, seconds)
    with _undisturbed():
        start = time.perf_counter()
        for arrival in arrivals:
            wait = start + arrival - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            await send(start + arrival)
        limit = time.perf_counter() + PATIENCE
        while len(load.latencies) + load.refused < len(arrivals) and time.perf_counter() < limit:
            await asyncio.sleep(0.01)
    load.unanswered = len(arrivals) - len(load.latencies) - load.refused
    for connection in idle:
        connection.close()
    return load


def _count(load: Load, message: Message, seconds: float) -> None:
    if message.status == 200:
        load.latencies.append(seconds)
    else:
        load.refused += 1


async def _connect(port: int, answered: Callable[[Connection, Message], None]) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(lambda: Connection(answered), "127.0.0.1", port)
    return connection


def _poisson(rate: float, seconds: float) -> Sequence[float]:
    dice = Random(7)
    arrivals, now = [], dice.expovariate(rate)
    while now < seconds:
        arrivals.append(now)
        now += dice.expovariate(rate)
    return arrivals


@contextmanager
def _undisturbed() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()

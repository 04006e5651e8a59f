"""Request handlers that do as a test says."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from picker.extproc.handler import Arrival, Headers, Refused, Routed


@dataclass(slots=True)
class RecordedExchange:
    """Remembers what it was told."""

    wants_response_body: bool = False
    status: int | None = None
    headers: Headers = ()
    served: str | None = None
    chunks: list[bytes] = field(default_factory=list)
    finishes: list[bool] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def response_headers(self, status: int, headers: Headers, served: str | None) -> None:
        self.status, self.headers, self.served = status, headers, served

    def response_chunk(self, data: bytes) -> None:
        self.chunks.append(data)

    def finished(self, delivered: bool) -> None:
        self.finishes.append(delivered)
        self.over.set()


Decide = Callable[["StubHandler", Arrival], Awaitable[Routed | Refused]]


@dataclass(slots=True)
class StubHandler:
    """Routes everything to `endpoint`, or does what `decide` does.

    `waiting` counts the requests inside `route`; `cancelled` those whose `route` was cancelled from outside.
    """

    endpoint: str = "127.0.0.1:1"
    decide: Decide | None = None
    wants_response_body: bool = False
    arrivals: list[Arrival] = field(default_factory=list)
    exchanges: list[RecordedExchange] = field(default_factory=list)
    arrived: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: int = 0
    cancelled: int = 0

    async def route(self, arrival: Arrival) -> Routed | Refused:
        self.arrivals.append(arrival)
        self.arrived.set()
        self.waiting += 1
        try:
            return await (self.decide(self, arrival) if self.decide is not None else self.forward(arrival))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.waiting -= 1

    async def forward(self, arrival: Arrival) -> Routed:
        return self.routed()

    def routed(self, **changes: object) -> Routed:
        exchange = RecordedExchange(wants_response_body=self.wants_response_body)
        self.exchanges.append(exchange)
        return Routed(**{"endpoint": self.endpoint, "exchange": exchange} | changes)  # type: ignore[arg-type]

    @property
    def open_exchanges(self) -> int:
        return sum(1 for exchange in self.exchanges if not exchange.finishes)


def refuse_bodiless_posts(handler: StubHandler, arrival: Arrival) -> Awaitable[Routed | Refused]:
    """What the pipeline does with an inference POST that has nothing in it."""

    async def decide() -> Routed | Refused:
        if arrival.method == "POST" and not arrival.body:
            return Refused(400, "bad_request", "the request has no body")
        return handler.routed()

    return decide()


def held_until(event: asyncio.Event) -> Decide:
    """Holds each request until `event` is set."""

    async def decide(handler: StubHandler, arrival: Arrival) -> Routed | Refused:
        await event.wait()
        return handler.routed()

    return decide


def raising(error: BaseException) -> Decide:
    async def decide(handler: StubHandler, arrival: Arrival) -> Routed | Refused:
        raise error

    return decide

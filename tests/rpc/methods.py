"""Methods that do as a test says, and clients of every kind."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field

import grpc
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import DataReceived, Event

from picker.rpc import ByteBudget, Call, Receiver, RpcServer

METHOD = "/test.Service/Method"
HEADERS = [
    (":method", "POST"),
    (":scheme", "http"),
    (":path", METHOD),
    (":authority", "test"),
    ("te", "trailers"),
    ("content-type", "application/grpc"),
]


@dataclass(eq=False)
class Recorded(Receiver):
    """A receiver that remembers what it was told, and does `each` with each message."""

    call: Call
    each: Callable[[Recorded, bytes], None] = lambda recorded, message: None
    messages: list[bytes] = field(default_factory=list)
    ends: int = 0
    asked: int = 0
    closes: int = 0
    over: asyncio.Event = field(default_factory=asyncio.Event)

    def received(self, message: bytes) -> None:
        self.messages.append(message)
        self.each(self, message)

    def half_closed(self) -> None:
        self.ends += 1
        self.call.end()

    def sendable(self) -> None:
        self.asked += 1

    def closed(self) -> None:
        self.closes += 1
        self.over.set()


@dataclass
class Service:
    """One method; `calls` are those that it was opened for."""

    each: Callable[[Recorded, bytes], None] = lambda recorded, message: recorded.call.send(message)
    calls: list[Recorded] = field(default_factory=list)
    opened: asyncio.Event = field(default_factory=asyncio.Event)

    def open(self, call: Call) -> Recorded:
        self.calls.append(Recorded(call, self.each))
        self.opened.set()
        return self.calls[-1]

    @property
    def open_calls(self) -> int:
        return sum(not recorded.closes for recorded in self.calls)


@asynccontextmanager
async def serving(
    service: Service,
    *,
    max_message_bytes: int = 8 << 20,
    budget: ByteBudget | None = None,
    connection_seconds: float | None = None,
) -> AsyncIterator[tuple[RpcServer, int]]:
    server = RpcServer(
        max_message_bytes=max_message_bytes,
        budget=budget or ByteBudget(1 << 30),
        connection_seconds=connection_seconds,
    )
    server.add(METHOD, service.open)
    port = await server.listen("127.0.0.1", 0)
    try:
        yield server, port
    finally:
        await server.stop()


@asynccontextmanager
async def client(
    port: int, **options: int
) -> AsyncIterator[grpc.aio.StreamStreamMultiCallable[bytes, bytes]]:
    """The method, by gRPC's own client."""
    chosen = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    chosen += [(f"grpc.{name}", value) for name, value in options.items()]
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=chosen) as channel:
        yield channel.stream_stream(METHOD)


class Raw:
    """A client that sends what it likes, when it likes."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.h2 = H2Connection(H2Configuration(header_encoding="utf-8"))
        self.events: list[Event] = []
        self.reader = reader
        self.writer = writer

    def open(self, headers: list[tuple[str, str]] | None = None, *, end: bool = False) -> int:
        stream = self.h2.get_next_available_stream_id()
        self.h2.send_headers(stream, headers or HEADERS, end_stream=end)
        return stream

    def flush(self) -> None:
        self.writer.write(self.h2.data_to_send())

    async def until(self, holds: Callable[[list[Event]], bool]) -> None:
        """Read until the events make it true."""
        self.flush()
        async with asyncio.timeout(60):
            while not holds(self.events):
                if not (data := await self.reader.read(65_536)):
                    raise AssertionError(f"the connection ended after {self.events}")
                self.events += self.h2.receive_data(data)
                self.flush()

    async def closed(self) -> None:
        """Read until the server hangs up."""
        with suppress(ConnectionResetError):
            async with asyncio.timeout(60):
                while await self.reader.read(65_536):
                    pass

    def received(self, stream: int) -> bytes:
        return b"".join(
            event.data
            for event in self.events
            if isinstance(event, DataReceived) and event.stream_id == stream
        )


@asynccontextmanager
async def raw(port: int, *, holds: int | None = None) -> AsyncIterator[Raw]:
    """`holds`: about so many bytes that it did not read are taken in for it, and no more."""
    end = socket.socket()
    if holds is not None:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, holds)
    end.setblocking(False)
    await asyncio.get_running_loop().sock_connect(end, ("127.0.0.1", port))
    reader, writer = await asyncio.open_connection(sock=end, limit=holds or 65_536)
    connection = Raw(reader, writer)
    connection.h2.initiate_connection()
    try:
        yield connection
    finally:
        writer.close()


def has(kind: type[Event], count: int = 1, **values: object) -> Callable[[list[Event]], bool]:
    def holds(events: list[Event]) -> bool:
        matching = [
            event
            for event in events
            if isinstance(event, kind)
            and all(getattr(event, name) == value for name, value in values.items())
        ]
        return len(matching) >= count

    return holds

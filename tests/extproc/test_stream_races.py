"""What must hold between two steps of the event loop; the gRPC stream is a stand-in, so that each step is ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker.extproc.conversation import CONGESTED_BYTES
from picker.extproc.handler import Arrival, Routed
from picker.extproc.server import EOF, SERVICE_NAME, ExtProcServer
from tests.support import messages
from tests.support.handlers import StubHandler, held_until


class Stream:
    """Stands in for the gRPC server and for the context of one stream of it."""

    def __init__(self, server: ExtProcServer) -> None:
        self.incoming: asyncio.Queue[ProcessingRequest | None] = asyncio.Queue()
        self.written: list[ProcessingResponse] = []
        self.may_write = asyncio.Event()
        self.may_write.set()
        self.reads = 0
        self._behaviour: Callable[[object, Any], Awaitable[None]]
        server.add_to(self)  # type: ignore[arg-type]
        self.task = asyncio.ensure_future(self._behaviour(None, self))

    def add_generic_rpc_handlers(self, handlers: tuple[grpc.GenericRpcHandler, ...]) -> None:
        class Details:
            method = f"/{SERVICE_NAME}/Process"

        self._behaviour = handlers[0].service(Details()).stream_stream  # type: ignore[arg-type, union-attr, assignment]

    def send(self, *incoming: ProcessingRequest | None) -> None:
        for message in incoming:
            self.incoming.put_nowait(message)

    async def read(self) -> Any:
        message = await self.incoming.get()
        self.reads += 1
        return EOF if message is None else message.SerializeToString()

    async def write(self, data: bytes) -> None:
        await self.may_write.wait()
        self.written.append(ProcessingResponse.FromString(data))


async def steps(count: int) -> None:
    """Let everything that can run do so, `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_decision_lost_to_a_cancellation_is_released() -> None:
    """C23: made, and booked, but the stream is reset before the decision is even looked at."""
    stream: Stream

    async def decide(handler: StubHandler, arrival: Arrival) -> Routed:
        stream.task.cancel()
        return handler.routed()

    handler = StubHandler(decide=decide)
    server = ExtProcServer(handler)
    stream = Stream(server)
    stream.send(messages.request_headers("GET", end=True))
    await asyncio.wait([stream.task])
    await steps(5)
    assert stream.task.cancelled()
    assert stream.written == []
    assert [exchange.finishes for exchange in handler.exchanges] == [[False]]
    assert server.stats.active_streams == 0


async def test_reading_stops_while_nothing_can_be_written() -> None:
    """Envoy pushes as fast as the model server does; what it does not take back must not pile up."""
    server = ExtProcServer(StubHandler())
    stream = Stream(server)
    stream.send(messages.request_headers("GET", end=True))
    await steps(20)
    stream.may_write.clear()
    chunk = b"x" * 10_000
    stream.send(messages.response_headers(), *[messages.response_body(chunk)] * 500)
    await steps(2000)
    assert stream.reads <= 2 + CONGESTED_BYTES // len(chunk) + 2
    stream.may_write.set()
    stream.send(messages.response_body(b"", end=True), None)
    await stream.task
    echoed = messages.streamed_pieces(stream.written, "response_body")
    assert sum(len(data) for data, _ in echoed) == 500 * len(chunk)
    assert [last for _, last in echoed].count(True) == 1


async def test_a_reset_while_writing_counts_as_delivered() -> None:
    """Envoy may act on an answer and end the stream before our write of it returns."""
    handler = StubHandler()
    server = ExtProcServer(handler)
    stream = Stream(server)
    stream.may_write.clear()
    stream.send(messages.request_headers("GET", end=True))
    await steps(20)
    stream.task.cancel()
    await asyncio.wait([stream.task])
    assert [exchange.finishes for exchange in handler.exchanges] == [[True]]


NO_RESPONSE = (messages.FULL_DUPLEX[0], messages.BodyMode.NONE)


async def test_what_is_decided_at_once_needs_no_other_task() -> None:
    """Where responses pass by, all that is left to read is the end, and whatever else comes is answered."""
    handler = StubHandler()
    server = ExtProcServer(handler)
    before = asyncio.all_tasks()
    stream = Stream(server)
    stream.send(messages.request_headers("GET", end=True, modes=NO_RESPONSE))
    await steps(20)
    assert asyncio.all_tasks() - before == {stream.task}
    assert len(stream.written) == 1
    stream.send(messages.response_headers())
    await steps(20)
    assert stream.written[1].HasField("response_headers")
    assert handler.exchanges[0].status == 200
    stream.send(None)
    await stream.task
    assert handler.exchanges[0].finishes == [True]


async def test_an_end_is_noticed_while_a_decision_is_waited_for() -> None:
    handler = StubHandler(decide=held_until(asyncio.Event()))
    server = ExtProcServer(handler)
    stream = Stream(server)
    stream.send(messages.request_headers("GET", end=True, modes=NO_RESPONSE))
    await steps(20)
    assert handler.waiting == 1
    stream.send(None)
    await stream.task
    assert (handler.waiting, handler.cancelled, stream.task.cancelling()) == (0, 1, 0)
    assert (server.stats.given_up, server.stats.internal_errors, server.stats.active_streams) == (1, 0, 0)


async def test_a_decision_that_comes_in_spite_of_the_end_is_released() -> None:
    async def stubborn(handler: StubHandler, arrival: Arrival) -> Routed:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return handler.routed()

    handler = StubHandler(decide=stubborn)
    stream = Stream(ExtProcServer(handler))
    stream.send(messages.request_headers("GET", end=True))
    await steps(20)
    stream.send(None)
    await stream.task
    assert stream.written == []
    assert (handler.exchanges[0].finishes, stream.task.cancelling()) == ([False], 0)


async def test_a_decision_that_is_waited_for_is_written_and_followed() -> None:
    release = asyncio.Event()
    handler = StubHandler(decide=held_until(release))
    stream = Stream(ExtProcServer(handler))
    stream.send(messages.request_headers("GET", end=True, modes=NO_RESPONSE))
    await steps(20)
    assert stream.written == []
    release.set()
    await steps(20)
    assert len(stream.written) == 1
    stream.send(None)
    await stream.task
    assert handler.exchanges[0].finishes == [True]

"""What must hold between two steps of the event loop; the call is a stand-in, so that each step is ours."""

from __future__ import annotations

import asyncio
from contextlib import suppress

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker.extproc.conversation import CONGESTED_BYTES
from picker.extproc.handler import Arrival, Routed
from picker.extproc.server import ExtProcServer
from picker.rpc import Method, Receiver, Status
from tests.support import messages
from tests.support.handlers import StubHandler, held_until


class Stream:
    """Stands in for the gRPC server, and for one call of it."""

    def __init__(self, server: ExtProcServer) -> None:
        self.written: list[ProcessingResponse] = []
        self.backed_up = False
        self.held = False
        self.over = False
        self.status: Status | None = None
        self.receiver: Receiver
        server.add_to(self)  # type: ignore[arg-type]

    def add(self, path: str, method: Method, *, client_names: frozenset[str]) -> None:
        self.receiver = method(self)  # type: ignore[arg-type]

    # What the server does with it

    def want_to_send(self) -> None:
        if not self.over:
            asyncio.get_running_loop().call_soon(self._ask)

    def send(self, message: bytes) -> None:
        self.written.append(ProcessingResponse.FromString(message))

    def end(self, status: Status = Status.OK, why: str = "") -> None:
        if not self.over:
            self.status = status
            self.close()

    def hold(self) -> None:
        self.held = True

    def go_on(self) -> None:
        self.held = False

    def _ask(self) -> None:
        if not (self.over or self.backed_up):
            self.receiver.sendable()

    # What the gateway does with it

    def receive(self, *incoming: ProcessingRequest) -> None:
        for message in incoming:
            self.receiver.received(message.SerializeToString())

    def close(self) -> None:
        """The end of the call, for instance because the gateway resets it."""
        self.over = True
        self.receiver.closed()

    def take(self) -> None:
        """The gateway takes what was sent, and more."""
        self.backed_up = False
        self._ask()


async def steps(count: int) -> None:
    """Let everything that can run do so, `count` times."""
    for _ in range(count):
        await asyncio.sleep(0)


NO_RESPONSE = (messages.FULL_DUPLEX[0], messages.BodyMode.NONE)
REQUEST = messages.request_headers("GET", end=True)


async def test_a_decision_lost_to_a_reset_is_released() -> None:
    """C23: made, and booked, but the stream is reset before the decision is even looked at."""
    stream: Stream

    async def decide(handler: StubHandler, arrival: Arrival) -> Routed:
        stream.close()
        return handler.routed()

    handler = StubHandler(decide=decide)
    server = ExtProcServer(handler)
    stream = Stream(server)
    stream.receive(REQUEST)
    await steps(5)
    assert stream.written == []
    assert [exchange.finishes for exchange in handler.exchanges] == [[False]]
    assert (server.stats.active_streams, server.stats.given_up) == (0, 1)


async def test_no_more_is_asked_for_while_nothing_can_be_sent() -> None:
    """Envoy pushes as fast as the model server does; what it does not take back must not pile up."""
    stream = Stream(ExtProcServer(StubHandler()))
    stream.receive(REQUEST)
    await steps(5)
    stream.backed_up = True
    chunk = b"x" * 10_000
    stream.receive(messages.response_headers())
    for _ in range(CONGESTED_BYTES // len(chunk)):
        stream.receive(messages.response_body(chunk))
    stream.receiver.sendable()
    assert not stream.held
    stream.receive(messages.response_body(chunk))
    stream.receiver.sendable()
    assert stream.held
    stream.take()
    assert not stream.held
    stream.receive(messages.response_body(b"", end=True))
    stream.receiver.half_closed()
    await steps(5)
    echoed = messages.streamed_pieces(stream.written, "response_body")
    assert sum(len(data) for data, _ in echoed) == (CONGESTED_BYTES // len(chunk) + 1) * len(chunk)
    assert [last for _, last in echoed].count(True) == 1
    assert stream.status is Status.OK


async def test_chunks_that_come_together_leave_together() -> None:
    stream = Stream(ExtProcServer(StubHandler()))
    stream.receive(REQUEST)
    await steps(5)
    stream.receive(messages.response_headers(), *[messages.response_body(b"token")] * 100)
    await steps(5)
    assert messages.streamed_pieces(stream.written, "response_body") == [(b"token" * 100, False)]


async def test_a_reset_behind_the_answer_counts_as_delivered() -> None:
    """Envoy may act on an answer and end the stream before we hear anything more of it."""
    handler = StubHandler()
    stream = Stream(ExtProcServer(handler))
    stream.receive(REQUEST)
    await steps(5)
    stream.close()
    assert [exchange.finishes for exchange in handler.exchanges] == [[True]]


async def test_a_reset_before_the_answer_could_be_sent_does_not() -> None:
    handler = StubHandler()
    stream = Stream(ExtProcServer(handler))
    stream.backed_up = True
    stream.receive(REQUEST)
    await steps(5)
    stream.close()
    assert [exchange.finishes for exchange in handler.exchanges] == [[False]]


async def test_where_responses_pass_by_nothing_is_left_running() -> None:
    """All that is left to come is the end, and whatever else comes is answered."""
    handler = StubHandler()
    stream = Stream(ExtProcServer(handler))
    before = asyncio.all_tasks()
    stream.receive(messages.request_headers("GET", end=True, modes=NO_RESPONSE))
    await steps(5)
    assert asyncio.all_tasks() == before
    assert len(stream.written) == 1
    stream.receive(messages.response_headers())
    await steps(5)
    assert stream.written[1].HasField("response_headers")
    assert handler.exchanges[0].status == 200
    stream.receiver.half_closed()
    await steps(5)
    assert (handler.exchanges[0].finishes, stream.status) == ([True], Status.OK)


async def test_an_end_is_noticed_while_a_decision_is_waited_for() -> None:
    handler = StubHandler(decide=held_until(asyncio.Event()))
    server = ExtProcServer(handler)
    stream = Stream(server)
    stream.receive(messages.request_headers("GET", end=True, modes=NO_RESPONSE))
    await steps(5)
    assert handler.waiting == 1
    stream.receiver.half_closed()
    await steps(5)
    assert (handler.waiting, handler.cancelled, stream.status) == (0, 1, Status.OK)
    assert (server.stats.given_up, server.stats.internal_errors, server.stats.active_streams) == (1, 0, 0)


async def test_a_decision_that_comes_in_spite_of_the_end_is_released() -> None:
    async def stubborn(handler: StubHandler, arrival: Arrival) -> Routed:
        with suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        return handler.routed()

    for reset in (False, True):
        handler = StubHandler(decide=stubborn)
        stream = Stream(ExtProcServer(handler))
        stream.receive(REQUEST)
        await steps(5)
        stream.close() if reset else stream.receiver.half_closed()
        await steps(5)
        assert stream.written == []
        assert handler.exchanges[0].finishes == [False]


async def test_a_decision_that_is_waited_for_is_sent_and_followed() -> None:
    release = asyncio.Event()
    handler = StubHandler(decide=held_until(release))
    stream = Stream(ExtProcServer(handler))
    stream.receive(messages.request_headers("GET", end=True, modes=NO_RESPONSE))
    await steps(5)
    assert stream.written == []
    release.set()
    await steps(5)
    assert len(stream.written) == 1
    stream.receiver.half_closed()
    await steps(5)
    assert handler.exchanges[0].finishes == [True]


async def test_deciding_cancelled_from_inside_is_an_error_and_from_outside_is_none() -> None:
    async def broken(handler: StubHandler, arrival: Arrival) -> Routed:
        raise asyncio.CancelledError

    server = ExtProcServer(StubHandler(decide=broken))
    stream = Stream(server)
    stream.receive(REQUEST)
    await steps(5)
    assert stream.written[0].immediate_response.status.code == 500
    assert (stream.status, server.stats.internal_errors) == (Status.OK, 1)

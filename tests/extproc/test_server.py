"""The ext_proc server over real gRPC, spoken to as a gateway would."""

from __future__ import annotations

import asyncio
import json
import logging
import time

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from picker.extproc.conversation import BodyMode, ConversationLimits
from picker.extproc.handler import Arrival, Refused, Routed
from picker.extproc.server import SERVICE_NAME, ExtProcServer
from picker.rpc import ByteBudget
from tests.support import messages
from tests.support.handlers import StubHandler, held_until, raising, refuse_bodiless_posts
from tests.support.messages import kind, set_header_values, streamed_pieces
from tests.support.servers import GatewayStream, eventually, gateway_client, listening


def is_end_of_request(reply: ProcessingResponse) -> bool:
    return (
        kind(reply) == "request_body"
        and reply.request_body.response.body_mutation.streamed_response.end_of_stream
    )


def reason(reply: ProcessingResponse | None) -> str:
    assert reply is not None
    assert kind(reply) == "immediate_response", reply
    assert json.loads(reply.immediate_response.body)["error"]["message"]
    assert set_header_values(reply)["content-type"] == ["application/json"]
    return set_header_values(reply)["x-picker-dropped-reason"][0]


async def test_a_request_and_its_streamed_response() -> None:
    handler = StubHandler("10.0.0.1:8000", wants_response_body=True)
    async with gateway_client(ExtProcServer(handler)) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers(), messages.request_body(b"{}", end=True))
        replies = await stream.receive_until(is_end_of_request)
        assert [kind(reply) for reply in replies] == ["request_headers", "request_body"]
        chunks = [b"data: %d\n\n" % n for n in range(200)]
        await stream.send(messages.response_headers(200), *map(messages.response_body, chunks))
        await stream.send(messages.response_body(b"", end=True))
        await stream.finish()
        echoed = streamed_pieces(stream.received, "response_body")
        assert b"".join(data for data, _ in echoed) == b"".join(chunks)
        assert [last for _, last in echoed].count(True) == 1
        (exchange,) = handler.exchanges
        await exchange.over.wait()
        assert (exchange.status, exchange.finishes) == (200, [True])
        assert b"".join(exchange.chunks) == b"".join(chunks)
        await eventually(lambda: gateway.server.stats.active_streams == 0)
        assert gateway.server.stats.internal_errors == 0


@pytest.mark.slow
async def test_streams_that_the_loop_does_not_come_to_are_late_and_not_lost() -> None:
    """gRPC's own limit is half a minute; a machine without time for us can take longer."""
    server = ExtProcServer(StubHandler("10.0.0.1:8000"))
    request = messages.request_headers("GET", "/v1/models", end=True).SerializeToString()

    def ask(port: int) -> list[bytes]:
        time.sleep(0.5)
        with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
            process = channel.stream_stream(f"/{SERVICE_NAME}/Process")
            calls = [process(iter([request])) for _ in range(5)]
            return [next(call) for call in calls]

    async with listening(server) as port:
        answers = asyncio.create_task(asyncio.to_thread(ask, port))
        await asyncio.sleep(0.1)
        time.sleep(32)  # noqa: ASYNC251 - the event loop stands still
        replies = [ProcessingResponse.FromString(answer) for answer in await answers]
        assert [kind(reply) for reply in replies] == ["request_headers"] * 5


async def test_a_post_without_content_is_a_bad_request() -> None:
    """C04 b and c: an empty body, and headers that end the request."""
    async with gateway_client(ExtProcServer(StubHandler(decide=refuse_bodiless_posts))) as gateway:
        for incoming in (
            [messages.request_headers(), messages.request_body(b"", end=True)],
            [messages.request_headers(end=True)],
        ):
            stream = gateway.open()
            await stream.send(*incoming)
            reply = await stream.receive()
            assert reason(reply) == "bad_request"
            assert reply is not None
            assert reply.immediate_response.status.code == 400
            assert await stream.receive() is None


async def test_a_message_over_grpcs_own_default_limit_is_taken() -> None:
    """C06 a: 5 MiB in one BUFFERED message; the limit must be set on the server's constructor."""
    handler = StubHandler()
    async with gateway_client(ExtProcServer(handler)) as gateway:
        stream = gateway.open()
        body = b"x" * (5 << 20)
        await stream.send(messages.request_headers(modes=(BodyMode.BUFFERED, BodyMode.NONE)))
        await stream.receive()
        await stream.send(messages.request_body(body, end=True))
        reply = await stream.receive()
        assert reply is not None
        assert kind(reply) == "request_body"
        assert handler.arrivals[0].body == body


async def test_an_endless_body_is_cut_off_and_forgotten() -> None:
    """C06 b: 413 as soon as the bound is passed, though no end-of-stream ever comes."""
    server = ExtProcServer(StubHandler(), limits=ConversationLimits(max_body_bytes=1_000_000))
    async with gateway_client(server) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers())
        for _ in range(21):
            await stream.send(messages.request_body(b"x" * 50_000))
        reply = await stream.receive()
        assert reason(reply) == "body_too_large"
        assert reply is not None
        assert reply.immediate_response.status.code == 413
        assert await stream.receive() is None
        assert server.budget.stats.held_bytes == 0
        assert server.stats.refused == {"body_too_large": 1}


async def test_all_streams_share_one_body_budget() -> None:
    release = asyncio.Event()
    handler = StubHandler(decide=held_until(release))
    server = ExtProcServer(handler, budget=ByteBudget(max_bytes=1000))
    async with gateway_client(server) as gateway:
        holding = gateway.open()
        await holding.send(messages.request_headers(), messages.request_body(b"x" * 800, end=True))
        await handler.arrived.wait()
        refused = gateway.open()
        await refused.send(messages.request_headers(), messages.request_body(b"x" * 300))
        assert reason(await refused.receive()) == "body_memory"
        release.set()
        await holding.receive_until(is_end_of_request)
        assert server.budget.stats.held_bytes == 0


async def test_a_body_for_which_there_is_no_room_is_refused_before_it_has_come() -> None:
    release = asyncio.Event()
    handler = StubHandler(decide=held_until(release))
    server = ExtProcServer(handler, budget=ByteBudget(max_bytes=100_000))
    buffered = messages.request_headers(modes=(BodyMode.BUFFERED, BodyMode.NONE))
    async with gateway_client(server) as gateway:
        refused = gateway.open()
        await refused.send(buffered)
        assert await refused.receive() is not None
        await refused.send(messages.request_body(bytes(300_000), end=True))
        assert reason(await refused.receive()) == "body_memory"
        assert await refused.receive() is None
        assert server.stats.refused == {"body_memory": 1}
        good = gateway.open()
        await good.send(messages.request_headers(), messages.request_body(bytes(90_000), end=True))
        await handler.arrived.wait()
        release.set()
        await good.receive_until(is_end_of_request)
        assert server.budget.stats.held_bytes == 0


async def test_one_stream_too_many_is_refused() -> None:
    handler = StubHandler(decide=held_until(asyncio.Event()))
    server = ExtProcServer(handler, max_streams=1)
    async with gateway_client(server) as gateway:
        holding = gateway.open()
        await holding.send(messages.request_headers("GET", end=True))
        await handler.arrived.wait()
        refused = gateway.open()
        await refused.send(messages.request_headers("GET", end=True))
        assert reason(await refused.receive()) == "too_many_streams"


async def test_streams_that_say_nothing_are_bounded_too() -> None:
    """They cannot be answered yet, so there is room for as many again, and no more."""
    server = ExtProcServer(StubHandler(), max_streams=2)
    async with gateway_client(server) as gateway:
        silent = [gateway.open() for _ in range(4)]
        await eventually(lambda: server.stats.active_streams == 4)
        one_more = gateway.open()
        assert await one_more.call.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        silent[0].reset()
        await eventually(lambda: server.stats.active_streams == 3)


@pytest.mark.parametrize(
    "error", [ValueError("poisoned"), RuntimeError("policy"), asyncio.CancelledError("inside")]
)
async def test_an_error_inside_is_an_error_to_the_client(
    error: BaseException, caplog: pytest.LogCaptureFixture
) -> None:
    """C12: never a silent close, never a wait for the client's own timeout; the next request is fine."""
    handler = StubHandler(decide=raising(error))
    async with gateway_client(ExtProcServer(handler)) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers(), messages.request_body(b"{}", end=True))
        reply = await asyncio.wait_for(stream.receive(), 60)
        assert reason(reply) == "internal_error"
        assert reply is not None
        assert reply.immediate_response.status.code == 500
        assert "poisoned" not in reply.immediate_response.body.decode()
        assert await stream.receive() is None
        assert any(record.exc_info for record in caplog.records)
        handler.decide = None
        following = gateway.open()
        await following.send(messages.request_headers("GET", end=True))
        reply = await following.receive()
        assert reply is not None
        assert kind(reply) == "request_headers"
        await following.finish()
        await eventually(lambda: gateway.server.stats.active_streams == 0)
        assert gateway.server.stats.internal_errors == 1
        assert handler.open_exchanges == 0


async def test_a_decision_that_cannot_be_said_is_an_error_and_released() -> None:
    async def nonsense(handler: StubHandler, arrival: Arrival) -> Routed:
        return handler.routed(endpoint=7)

    handler = StubHandler(decide=nonsense)
    async with gateway_client(ExtProcServer(handler)) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers("GET", end=True))
        assert reason(await stream.receive()) == "internal_error"
        await handler.exchanges[0].over.wait()
        assert handler.exchanges[0].finishes == [False]


async def test_an_exchange_that_raises_disturbs_nothing(caplog: pytest.LogCaptureFixture) -> None:
    handler = StubHandler()

    async def raising_exchange(handler: StubHandler, arrival: Arrival) -> Routed:
        routed = handler.routed()
        handler.exchanges[0].over = None  # type: ignore[assignment]
        return routed

    handler.decide = raising_exchange
    async with gateway_client(ExtProcServer(handler)) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers("GET", end=True))
        await stream.receive()
        await stream.send(messages.response_headers(200, end=True))
        reply = await stream.receive()
        assert reply is not None
        assert kind(reply) == "response_headers"
        await stream.finish()
        await eventually(lambda: gateway.server.stats.active_streams == 0)
        assert gateway.server.stats.internal_errors == 1


async def leave_by_reset(stream: GatewayStream) -> None:
    stream.reset()


async def leave_by_half_close(stream: GatewayStream) -> None:
    await stream.call.done_writing()


LEAVINGS = [leave_by_reset, leave_by_half_close]


@pytest.mark.parametrize("leave", LEAVINGS)
@pytest.mark.parametrize("stage", ["headers", "body", "deciding", "forwarded", "response"])
async def test_the_gateway_may_leave_at_any_point(
    leave: object, stage: str, caplog: pytest.LogCaptureFixture
) -> None:
    """C11, C21: cleanup runs once, whatever ends the stream, and none of it is an error."""
    never = asyncio.Event()
    handler = StubHandler(decide=held_until(never) if stage == "deciding" else None)
    server = ExtProcServer(handler)
    async with gateway_client(server) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers())
        if stage != "headers":
            await stream.send(messages.request_body(b"x" * 1000, end=stage != "body"))
        match stage:
            case "headers" | "body":
                await eventually(lambda: server.stats.received_messages == (1 if stage == "headers" else 2))
            case "deciding":
                await handler.arrived.wait()
            case "forwarded" | "response":
                await stream.receive_until(is_end_of_request)
        if stage == "response":
            await stream.send(messages.response_headers(), messages.response_body(b"abc"))
            await stream.receive_until(lambda reply: kind(reply) == "response_body")
        await leave(stream)  # type: ignore[operator]
        await eventually(lambda: server.stats.active_streams == 0)
        await eventually(lambda: handler.waiting == 0)
        assert server.budget.stats.held_bytes == 0
        assert server.stats.internal_errors == server.stats.protocol_errors == 0
        assert [exchange.finishes for exchange in handler.exchanges] == (
            [[True]] if stage in ("forwarded", "response") else []
        )
        assert handler.cancelled == (1 if stage == "deciding" else 0)
        assert server.stats.given_up == (0 if stage in ("forwarded", "response") else 1)
    assert not [record for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize("leave", LEAVINGS)
async def test_a_decision_that_comes_too_late_is_released(leave: object) -> None:
    """The handler may have booked by the time that its cancellation reaches it."""
    release = asyncio.Event()

    async def stubborn(handler: StubHandler, arrival: Arrival) -> Routed:
        while not release.is_set():
            try:
                await release.wait()
            except asyncio.CancelledError:
                release.set()
        return handler.routed()

    handler = StubHandler(decide=stubborn)
    async with gateway_client(ExtProcServer(handler)) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers("GET", end=True))
        await handler.arrived.wait()
        await leave(stream)  # type: ignore[operator]
        await eventually(lambda: gateway.server.stats.active_streams == 0)
        await eventually(lambda: [exchange.finishes for exchange in handler.exchanges] == [[False]])


async def test_a_local_reply_of_the_gateway_cancels_the_question() -> None:
    handler = StubHandler(decide=held_until(asyncio.Event()))
    async with gateway_client(ExtProcServer(handler)) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers("GET", end=True))
        await handler.arrived.wait()
        await stream.send(messages.response_headers(504), messages.response_body(b"timeout", end=True))
        replies = await stream.receive_until(lambda reply: kind(reply) == "response_body")
        assert [kind(reply) for reply in replies] == ["response_headers", "response_body"]
        assert handler.waiting == 0
        assert handler.cancelled == 1
        await stream.finish()
        assert gateway.server.stats.given_up == 1


async def test_disorder_before_the_decision_is_an_error_response() -> None:
    handler = StubHandler(decide=held_until(asyncio.Event()))
    async with gateway_client(ExtProcServer(handler)) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers("GET", end=True))
        await handler.arrived.wait()
        await stream.send(messages.request_headers("GET", end=True))
        assert reason(await stream.receive()) == "internal_error"
        await eventually(lambda: handler.waiting == 0)
        assert gateway.server.stats.protocol_errors == 1


async def test_disorder_after_the_decision_is_a_grpc_error() -> None:
    async with gateway_client(ExtProcServer(StubHandler())) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers(), messages.request_body(b"{}", end=True))
        await stream.receive_until(is_end_of_request)
        await stream.send(messages.request_body(b"more"))
        with pytest.raises(grpc.aio.AioRpcError, match="request body while FORWARDED"):
            await stream.receive_all()


async def test_what_is_no_message_at_all_is_answered() -> None:
    async with gateway_client(ExtProcServer(StubHandler())) as gateway:
        call = gateway.channel.stream_stream(f"/{SERVICE_NAME}/Process")()
        await call.write(b"\xff\xff\xff")
        reply = ProcessingResponse.FromString(await call.read())
        assert reason(reply) == "internal_error"


async def test_a_wait_is_announced_while_it_lasts() -> None:
    """C13 b: in BUFFERED mode Envoy's message timer runs; it is asked to wait, before the decision."""
    handler = StubHandler(decide=held_until(asyncio.Event()))
    server = ExtProcServer(handler, limits=ConversationLimits(buffered_hold=30.0))
    async with gateway_client(server) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers(modes=(BodyMode.BUFFERED, BodyMode.NONE)))
        await stream.receive()
        await stream.send(messages.request_body(b"{}", end=True))
        reply = await stream.receive()
        assert reply is not None
        assert reply.override_message_timeout.seconds == 30


async def test_a_slow_gateway_bounds_what_is_kept_for_it() -> None:
    """Reading stops while too much of a response waits to be written, and nothing is lost."""
    server = ExtProcServer(StubHandler())
    async with gateway_client(server) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers("GET", end=True))
        await stream.receive()
        await stream.send(messages.response_headers())
        chunk = b"x" * 60_000
        sending = asyncio.create_task(
            stream.send(*[messages.response_body(chunk)] * 400, messages.response_body(b"", end=True))
        )
        await stream.receive_until(lambda reply: kind(reply) == "response_headers")
        replies = await stream.receive_until(
            lambda reply: reply.response_body.response.body_mutation.streamed_response.end_of_stream
        )
        await sending
        assert sum(len(data) for data, _ in streamed_pieces(replies, "response_body")) == 400 * 60_000


async def test_chunks_that_wait_leave_together() -> None:
    """What a gateway does not take at once goes back in fewer messages, and not a byte less."""
    server = ExtProcServer(StubHandler())
    async with gateway_client(server) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers("GET", end=True), messages.response_headers())
        chunks = [b"data: %0100d\n\n" % n for n in range(2000)]
        sending = asyncio.create_task(stream.send(*map(messages.response_body, chunks)))
        await eventually(lambda: server.stats.received_messages == len(chunks) + 2)
        await sending
        await stream.send(messages.response_body(b"", end=True))
        replies = await stream.receive_until(
            lambda reply: reply.response_body.response.body_mutation.streamed_response.end_of_stream
        )
        echoed = streamed_pieces(replies, "response_body")
        assert b"".join(data for data, _ in echoed) == b"".join(chunks)
        assert len(echoed) < len(chunks) / 2


async def test_many_streams_at_once_leave_nothing_behind() -> None:
    handler = StubHandler()
    async with gateway_client(ExtProcServer(handler)) as gateway:

        async def one(number: int) -> None:
            stream = gateway.open()
            await stream.send(messages.request_headers(), messages.request_body(b"%d" % number, end=True))
            if number % 5 == 0:
                stream.reset()
                return
            replies = await stream.receive_until(is_end_of_request)
            assert streamed_pieces(replies, "request_body") == [(b"%d" % number, True)]
            await stream.finish()

        await asyncio.gather(*map(one, range(200)))
        await eventually(lambda: gateway.server.stats.active_streams == 0)
        assert handler.open_exchanges == 0
        assert all(len(exchange.finishes) == 1 for exchange in handler.exchanges)
        assert gateway.server.budget.stats.held_bytes == 0


async def test_a_refusal_by_the_handler_is_counted_by_its_reason() -> None:
    async def full(handler: StubHandler, arrival: Arrival) -> Refused:
        return Refused(429, "queue_full", "full", retry_after=0.2)

    async with gateway_client(ExtProcServer(StubHandler(decide=full))) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers("GET", end=True))
        reply = await stream.receive()
        assert reason(reply) == "queue_full"
        assert reply is not None
        assert set_header_values(reply)["retry-after"] == ["1"]
        assert await stream.receive() is None
        assert gateway.server.stats.refused == {"queue_full": 1}

"""The gRPC server, spoken to by gRPC's own client, and by one that does as it likes."""

from __future__ import annotations

import asyncio
import logging
import random

import grpc
import pytest
from h2.connection import H2Connection
from h2.errors import ErrorCodes
from h2.events import (
    PingAckReceived,
    ResponseReceived,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from h2.settings import SettingCodes
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from picker.rpc import ByteBudget, RpcServer, Status
from picker.rpc import connection as connection_module
from picker.rpc.call import CALL_WINDOW
from picker.rpc.framing import SPARE_BYTES, framed
from tests.rpc.methods import HEADERS, METHOD, Recorded, Service, client, has, raw, serving
from tests.support.servers import eventually

PONG = b"\0\0\x08\x06\1\0\0\0\0retired?"

# By gRPC's own client


async def test_messages_go_both_ways_in_order_and_the_end_is_clean() -> None:
    service = Service()
    async with serving(service) as (_, port), client(port) as method:
        call = method()
        sent = [random.Random(n).randbytes(size) for n, size in enumerate((0, 1, 16_384, 70_000, 3 << 20))]
        for message in sent:
            await call.write(message)
        assert [await call.read() for _ in sent] == sent
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]
        assert await call.code() is grpc.StatusCode.OK
        [recorded] = service.calls
        assert (recorded.messages, recorded.ends, recorded.closes) == (sent, 1, 1)


async def test_calls_at_once_do_not_mix() -> None:
    service = Service()
    async with serving(service) as (_, port), client(port) as method:

        async def echo(number: int) -> None:
            call = method()
            for size in (1, 30_000, 5):
                message = bytes([number]) * size
                await call.write(message)
                assert await call.read() == message
            await call.done_writing()
            assert await call.code() is grpc.StatusCode.OK

        await asyncio.gather(*(echo(number) for number in range(100)))
    assert service.open_calls == 0


async def answered(
    method: grpc.aio.StreamStreamMultiCallable[bytes, bytes],
) -> grpc.aio.StreamStreamCall[bytes, bytes]:
    """A call that the server has taken, and has sent one message back on."""
    call = method()
    await call.write(b"x")
    await call.read()
    return call


async def code_and_details(call: grpc.aio.StreamStreamCall[bytes, bytes]) -> tuple[grpc.StatusCode, str]:
    return await call.code(), await call.details()


async def test_who_asks_for_what_is_not_served_is_told() -> None:
    async with (
        serving(Service()) as (_, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        call = channel.stream_stream("/test.Service/Nothing")()
        assert await code_and_details(call) == (grpc.StatusCode.UNIMPLEMENTED, "no such method")


async def test_a_status_and_its_words_come_as_they_are() -> None:
    def refuse(recorded: Recorded, message: bytes) -> None:
        recorded.call.send(b"first")
        recorded.call.end(Status.RESOURCE_EXHAUSTED, "100 % für alle: größer\n")
        recorded.call.send(b"lost")
        recorded.call.end(Status.INTERNAL, "lost too")

    service = Service(refuse)
    async with serving(service) as (_, port), client(port) as method:
        call = method()
        await call.write(b"x")
        assert await call.read() == b"first"
        expected = (grpc.StatusCode.RESOURCE_EXHAUSTED, "100 % für alle: größer\n")
        assert await code_and_details(call) == expected
        assert service.calls[0].closes == 1


async def test_messages_that_cannot_be_taken_end_their_call_only() -> None:
    service = Service()
    async with serving(service, max_message_bytes=1000) as (_, port), client(port) as method:
        good = method()
        await good.write(b"x" * 1000)
        long = method()
        await long.write(b"x" * 1001)
        assert await long.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        packed = method(compression=grpc.Compression.Gzip)
        await packed.write(b"x" * 900)
        assert await packed.code() is grpc.StatusCode.UNIMPLEMENTED
        assert await good.read() == b"x" * 1000
        assert [recorded.closes for recorded in service.calls] == [0, 1, 1]


async def test_messages_that_do_not_come_whole_are_bounded_together() -> None:
    budget, size = ByteBudget(200_000), 150_000
    async with serving(Service(), budget=budget) as (_, port), raw(port) as slow, raw(port) as late:
        part = framed(bytes(2 * size))[: SPARE_BYTES + size]
        for client in (slow, late):
            await client.until(has(connection_module.RemoteSettingsChanged))
            stream = client.open()
            for start in range(0, len(part), 16_000):
                client.h2.send_data(stream, part[start : start + 16_000])
            client.flush()
            if client is slow:
                await eventually(lambda: budget.stats.held_bytes == size)
        await late.until(has(ResponseReceived))
        (answer,) = (event.headers for event in late.events if isinstance(event, ResponseReceived))
        assert dict(answer)["grpc-status"] == str(Status.RESOURCE_EXHAUSTED.value)
        slow.writer.close()
        await eventually(lambda: budget.stats.held_bytes == 0)


async def test_a_method_that_raises_ends_its_call_only(caplog: pytest.LogCaptureFixture) -> None:
    def fail(recorded: Recorded, message: bytes) -> None:
        if message == b"bad":
            raise ValueError("secret")
        recorded.call.send(message)

    service = Service(fail)
    async with serving(service) as (_, port), client(port) as method:
        good, bad = method(), method()
        await good.write(b"one")
        await bad.write(b"bad")
        assert await code_and_details(bad) == (grpc.StatusCode.INTERNAL, "internal error")
        await good.write(b"two")
        assert [await good.read(), await good.read()] == [b"one", b"two"]
        assert "secret" in caplog.text
        assert sorted(recorded.closes for recorded in service.calls) == [0, 1]


async def test_a_call_that_is_cancelled_is_closed_once() -> None:
    service = Service()
    async with serving(service) as (_, port), client(port) as method:
        call = await answered(method)
        call.cancel()
        await service.calls[0].over.wait()
        service.calls[0].call.send(b"late")
        service.calls[0].call.want_to_send()
        service.calls[0].call.end()
    assert (service.calls[0].closes, service.calls[0].ends) == (1, 0)


async def test_a_client_that_vanishes_closes_its_calls() -> None:
    service = Service()
    async with serving(service) as (_, port):
        async with raw(port) as gone:
            for _ in range(3):
                gone.open()
            gone.flush()
            await eventually(lambda: len(service.calls) == 3)
        await eventually(lambda: service.open_calls == 0)


# What has no room


async def test_what_the_client_does_not_take_is_held_back_and_comes_whole() -> None:
    pieces = [bytes([n]) * 50_000 for n in range(40)]

    def pour(recorded: Recorded, message: bytes) -> None:
        for piece in pieces:
            recorded.call.send(piece)
        recorded.call.end()

    service = Service(pour)
    # Without probing, the client takes in 64 KiB that nobody reads, and no more.
    async with serving(service) as (_, port), client(port, **{"http2.bdp_probe": 0}) as method:
        call = method()
        await call.write(b"go")
        await service.opened.wait()
        await eventually(lambda: bool(service.calls[0].messages))
        assert service.calls[0].call.backed_up
        assert service.calls[0].closes == 0
        assert [await call.read() for _ in pieces] == pieces
        assert await call.code() is grpc.StatusCode.OK
        assert service.calls[0].closes == 1


async def test_room_is_told_of() -> None:
    def pour(recorded: Recorded, message: bytes) -> None:
        recorded.call.send(b"x" * 500_000)

    service = Service(pour)
    async with serving(service) as (_, port), client(port, **{"http2.bdp_probe": 0}) as method:
        call = method()
        await call.write(b"go")
        await eventually(lambda: bool(service.calls) and bool(service.calls[0].messages))
        assert service.calls[0].asked == 0
        await call.read()
        await eventually(lambda: service.calls[0].asked > 0)
        assert not service.calls[0].call.backed_up


async def test_a_call_on_hold_is_sent_a_window_and_no_more() -> None:
    service = Service(lambda recorded, message: recorded.call.hold())
    async with serving(service) as (_, port), client(port) as method:
        call = method()
        message = b"x" * (CALL_WINDOW // 8)
        written = 0
        writing = asyncio.ensure_future(call.write(message))
        while (await asyncio.wait([writing], timeout=0.3))[0]:
            written += 1
            writing = asyncio.ensure_future(call.write(message))
        [recorded] = service.calls
        assert 1 <= len(recorded.messages) <= 8
        recorded.each = lambda recorded, message: None
        recorded.call.go_on()
        await writing
        await eventually(lambda: len(recorded.messages) == written + 1)


async def test_a_client_that_reads_nothing_is_not_read_from() -> None:
    """Each ping makes an answer, which would pile up."""
    async with serving(Service()) as (_, port), raw(port) as flood:
        await flood.until(has(connection_module.RemoteSettingsChanged))
        for _ in range(10_000):
            flood.h2.ping(b"12345678")
        pings = flood.h2.data_to_send()

        async def pour() -> None:
            for _ in range(200):
                flood.writer.write(pings)
                await asyncio.wait_for(flood.writer.drain(), 0.5)

        with pytest.raises(TimeoutError):
            await pour()


async def test_a_call_that_its_method_ends_as_the_client_does_leaves_nothing() -> None:
    """By the time that we see the message, h2 has taken the end of the stream too: there is nothing to reset."""

    def end(recorded: Recorded, message: bytes) -> None:
        if message == b"bad":
            raise ValueError("bad")
        recorded.call.end(Status.NOT_FOUND, "no")

    service = Service(end)
    async with serving(service) as (server, port), raw(port) as hasty:
        kept = hasty.open()
        await hasty.until(lambda events: service.opened.is_set())
        for message in (b"good", b"bad"):
            stream = hasty.open()
            hasty.h2.send_data(stream, framed(message))
            hasty.h2.end_stream(stream)
            await hasty.until(has(StreamEnded, stream_id=stream))
        plain = [(name, value) for name, value in HEADERS if name != "content-type"]
        stream = hasty.open(plain)
        hasty.h2.send_data(stream, b"{}", end_stream=True)
        await hasty.until(has(StreamEnded, stream_id=stream))
        assert [recorded.closes for recorded in service.calls] == [0, 1, 1]
        hasty.h2.send_data(kept, framed(b"good"))
        await hasty.until(has(StreamEnded, stream_id=kept))
        assert (service.open_calls, server.connections) == (0, 1)


async def test_calls_that_nobody_serves_are_not_kept() -> None:
    async with (
        serving(Service(), connection_seconds=0.5) as (server, port),
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        for _ in range(5):
            call = channel.unary_unary("/test.Service/Nothing")(b"x")
            assert await call.code() is grpc.StatusCode.UNIMPLEMENTED
        # A connection with a call would stay.
        await eventually(lambda: server.connections == 0)


async def test_too_many_headers_end_their_call_only() -> None:
    service = Service()
    async with serving(service) as (_, port), client(port, max_metadata_size=1 << 20) as method:
        good = method()
        await good.write(b"one")
        assert await good.read() == b"one"
        greedy = method(metadata=[("huge", "h" * 200_000)])
        assert await greedy.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        await good.write(b"two")
        assert await good.read() == b"two"
        assert len(service.calls) == 1


# The end of connections


async def test_the_last_answer_of_a_connection_comes_whole() -> None:
    """Who hung up first would have the rest of it thrown away, as soon as the client says one thing more."""
    size = 200_000

    def answer(recorded: Recorded, message: bytes) -> None:
        recorded.call.send(b"x" * size)
        recorded.call.end()

    service = Service(answer)
    async with serving(service, connection_seconds=0.05) as (_, port), raw(port, holds=8192) as slow:
        slow.h2.update_settings({SettingCodes.INITIAL_WINDOW_SIZE: 1 << 20})
        slow.h2.increment_flow_control_window(1 << 20)
        await slow.until(has(connection_module.RemoteSettingsChanged))
        stream = slow.open()
        slow.flush()
        # Read past h2, which says nothing more on a connection that is to end.
        await slow.reader.readuntil(b"retired?")
        slow.h2.send_data(stream, framed(b"go"))
        slow.writer.write(PONG + slow.h2.data_to_send())
        await service.opened.wait()
        await service.calls[0].over.wait()
        await asyncio.sleep(0.05)
        slow.h2.ping(b"12345678")
        slow.flush()
        await asyncio.sleep(0.05)
        got = b""
        while len(got) < size:
            got += await slow.reader.read(65_536)


async def test_a_call_that_comes_with_the_answer_to_the_retirement_is_served() -> None:
    service = Service()
    async with serving(service, connection_seconds=0.05) as (_, port), raw(port) as late:
        await late.until(has(connection_module.RemoteSettingsChanged))
        # Read past h2, which says nothing more on a connection that is to end.
        await late.reader.readuntil(b"retired?")
        stream = late.open()
        late.h2.send_data(stream, framed(b"hi"))
        late.writer.write(PONG + late.h2.data_to_send())
        await eventually(lambda: bool(service.calls) and service.calls[0].messages == [b"hi"])
        for _ in range(10):
            await asyncio.sleep(0)
        assert service.calls[0].closes == 0


async def test_an_old_connection_is_left_by_its_client_and_ends_after_its_last_call() -> None:
    service = Service()
    async with serving(service, connection_seconds=0.2) as (server, port), client(port) as method:
        old = await answered(method)
        new = method()
        while server.connections < 2:
            await new.write(b"new")
            await new.read()
            if server.connections < 2:
                await new.done_writing()
                new = method()
                await asyncio.sleep(0.02)
        await old.write(b"still here")
        assert await old.read() == b"still here"
        await old.done_writing()
        assert await old.code() is grpc.StatusCode.OK
        await eventually(lambda: server.connections == 1)
        await new.write(b"too")
        assert await new.read() == b"too"


async def test_stopping_waits_for_who_ends_in_time() -> None:
    service = Service()
    async with serving(service) as (server, port), client(port) as method:
        call = await answered(method)
        stopping = asyncio.create_task(server.stop(grace=60))
        await asyncio.sleep(0)
        await call.write(b"y")
        assert await call.read() == b"y"
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK
        await stopping
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", port)


async def test_stopping_ends_who_does_not() -> None:
    service = Service()
    async with serving(service) as (server, port), client(port) as method:
        call = await answered(method)
        await server.stop()
        assert (service.calls[0].closes, server.connections) == (1, 0)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE


async def test_a_client_that_says_goodbye_is_hung_up_on() -> None:
    service = Service()
    async with serving(service) as (_, port), raw(port) as leaving:
        leaving.open()
        await leaving.until(lambda events: service.opened.is_set())
        leaving.h2.close_connection()
        leaving.flush()
        await leaving.closed()
        assert service.calls[0].closes == 1


async def test_who_is_silent_is_hung_up_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection_module, "_GREETING_SECONDS", 0.05)
    async with serving(Service()) as (server, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await eventually(lambda: server.connections == 1)
        await eventually(lambda: server.connections == 0)
        writer.close()


# What is no gRPC


async def test_what_is_no_grpc_is_answered_in_http() -> None:
    service = Service()
    async with serving(service) as (_, port), raw(port) as browser:
        headers = [(":method", "GET"), (":scheme", "http"), (":path", METHOD), (":authority", "test")]
        browser.open(headers, end=True)
        stream = browser.open(headers)
        await browser.until(has(ResponseReceived, 2))
        await browser.until(has(StreamEnded, 2))
        await browser.until(has(StreamReset, stream_id=stream))
        answers = [event for event in browser.events if isinstance(event, ResponseReceived)]
        assert [dict(event.headers)[":status"] for event in answers] == ["415", "415"]
        assert service.calls == []


@pytest.mark.parametrize("greeting", [b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", b"\x16\x03\x01\x02", b"\0" * 100])
async def test_what_is_no_http2_is_hung_up_on(greeting: bytes) -> None:
    async with serving(Service()) as (server, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(greeting)
        async with asyncio.timeout(60):
            while await reader.read(1000):
                pass
        writer.close()
        await eventually(lambda: server.connections == 0)


async def test_a_request_and_its_reset_in_one_piece() -> None:
    """By the time that we see the request, h2 has closed its stream: nothing may be sent there."""
    service = Service()
    async with serving(service) as (_, port), raw(port) as hasty:
        kept = hasty.open()
        await hasty.until(lambda events: service.opened.is_set())
        gone = hasty.open()
        for stream in (kept, gone):
            hasty.h2.send_data(stream, framed(b"x"))
            hasty.h2.reset_stream(stream, ErrorCodes.CANCEL)
        last = hasty.open()
        hasty.h2.send_data(last, framed(b"last"), end_stream=True)
        await hasty.until(has(TrailersReceived, stream_id=last))
        assert hasty.received(last) == framed(b"last")
        assert [recorded.messages for recorded in service.calls] == [[], [b"last"]]
        assert service.open_calls == 0


async def test_late_frames_of_a_call_that_was_ended_hurt_nobody() -> None:
    service = Service(lambda recorded, message: recorded.call.end(Status.NOT_FOUND, "no"))
    async with serving(service) as (_, port), raw(port) as late:
        stream = late.open()
        for _ in range(3):
            late.h2.send_data(stream, framed(b"x"))
        late.flush()
        late.h2.send_data(stream, framed(b"y"))
        await late.until(has(StreamReset, stream_id=stream, error_code=ErrorCodes.NO_ERROR))
        late.h2.ping(b"12345678")
        await late.until(has(PingAckReceived))
        assert [recorded.messages for recorded in service.calls] == [[b"x"]]


async def test_many_open_calls_do_not_make_the_next_one_dear(monkeypatch: pytest.MonkeyPatch) -> None:
    """h2 walks over all open streams for each new one, which we have it do a few times only."""
    walked = 0
    walk = H2Connection.open_inbound_streams.fget
    assert walk is not None

    def counted(self: H2Connection) -> int:
        nonlocal walked
        walked += len(self.streams)
        return walk(self)

    service = Service()
    async with serving(service) as (_, port), raw(port) as many:
        monkeypatch.setattr(H2Connection, "open_inbound_streams", property(counted))
        for number in range(2000):
            if number % 4 == 0:
                many.h2.end_stream(many.open())  # those do not stay
            many.open()
        await many.until(lambda events: len(service.calls) == 2500)
        await many.until(has(StreamEnded, 500))
        assert service.open_calls == 2000
        assert 0 < walked < 4 * 2500


class _Alarm(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


frames = st.builds(
    lambda kind, flags, stream, body: (
        len(body).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + body
    ),
    st.integers(0, 10),
    st.sampled_from([0, 1, 4, 5, 8, 0x20, 0x2D]),
    st.sampled_from([0, 1, 2, 3, 5, 2**31 - 1]),
    st.one_of(
        st.binary(max_size=20),
        st.sampled_from(
            [framed(b"x"), b"\0\0\0\0", b"\x7f\xff\xff\xff", b"\x82\x86\x84", bytes(8), b"\xff\xff"]
        ),
    ),
)


@given(pieces=st.lists(st.one_of(frames, st.binary(max_size=30)), max_size=12), opened=st.booleans())
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_frames_of_any_kind_leave_nothing_behind(pieces: list[bytes], opened: bool) -> None:
    asyncio.run(_survives(pieces, opened))


async def _survives(pieces: list[bytes], opened: bool) -> None:
    alarm, loop_alarms = _Alarm(), []
    logging.getLogger().addHandler(alarm)
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: loop_alarms.append(context))
    service = Service()
    try:
        async with serving(service) as (server, port), raw(port) as good, raw(port) as hostile:
            await good.until(has(connection_module.RemoteSettingsChanged))
            if opened:
                hostile.open()
            hostile.flush()
            for piece in pieces:
                hostile.writer.write(piece)
            stream = good.open()
            good.h2.send_data(stream, framed(b"still here"), end_stream=True)
            await good.until(has(TrailersReceived, stream_id=stream))
            assert good.received(stream) == framed(b"still here")
            hostile.writer.close()
            await hostile.closed()
            await eventually(lambda: server.connections == 1)
            assert (service.open_calls, server.budget.stats.held_bytes) == (0, 0)
        assert (alarm.lines, loop_alarms) == ([], [])
    finally:
        logging.getLogger().removeHandler(alarm)


async def test_nobody_hears_a_server_that_is_stopped() -> None:
    server = RpcServer(max_message_bytes=100, budget=ByteBudget(100))
    port = await server.listen("127.0.0.1", 0)
    with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        await RpcServer(max_message_bytes=100, budget=ByteBudget(100)).listen("127.0.0.1", port)
    await server.stop()

"""One HTTP/2 connection of a gRPC client: h2's state machine between the loop's socket and the calls."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from h2.errors import ErrorCodes
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    Event,
    PingAckReceived,
    RemoteSettingsChanged,
    RequestReceived,
    StreamEnded,
    StreamReset,
    WindowUpdated,
)
from h2.exceptions import ProtocolError
from hyperframe.frame import GoAwayFrame

from picker.rpc.call import CALL_WINDOW, Call, Headers, Status
from picker.rpc.http2 import HEADER_BYTES, server_side

if TYPE_CHECKING:
    from picker.rpc.server import RpcServer

log = logging.getLogger(__name__)

# Bytes that all calls of a connection may send together before they hear that more is wanted.
_CONNECTION_WINDOW = 16 * 1024 * 1024
# A client that does not say within so many seconds that it speaks HTTP/2 is hung up on.
_GREETING_SECONDS = 20.0
# So long may a client take to hang up that was asked to open no more calls, and has none.
_LAST_SECONDS = 5.0
_ANY_STREAM = 2**31 - 1
_RETIRED = b"retired?"


class Connection(asyncio.BufferedProtocol):
    """Whatever comes in one read is handled together, and whatever that makes to send leaves in one write."""

    def __init__(self, server: RpcServer) -> None:
        self.peer_names: frozenset[str] = frozenset()
        self._server = server
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport
        self._h2 = server_side(CALL_WINDOW)
        self._calls: dict[int, Call] = {}
        # As sets that keep their order.
        self._due: dict[Call, None] = {}
        self._held_back: dict[Call, None] = {}
        self._reset: set[int] = set()
        self._taken = 0  # bytes of the connection's window, not given back yet
        self._paused = False
        self._gathering = False  # a write comes anyway
        self._write_comes: asyncio.Handle | None = None
        self._retired = False
        self._last_moment: asyncio.TimerHandle | None = None
        self._timers: list[asyncio.TimerHandle] = []

    # The transport's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if not self._server.take(self):
            transport.abort()
            return
        self.peer_names = _names(transport.get_extra_info("peercert") or {})
        self._timers = [self._loop.call_later(_GREETING_SECONDS, self._hang_up_on_silence)]
        if (seconds := self._server.connection_seconds) is not None:
            self._timers.append(self._loop.call_later(seconds * random.uniform(0.9, 1.1), self.retire))
        self._h2.initiate_connection()
        self._h2.increment_flow_control_window(_CONNECTION_WINDOW - 65_535)
        self._write()

    def get_buffer(self, sizehint: int) -> memoryview:
        # What is read is handled before anybody reads again, so that all connections can share it.
        return self._server.buffer

    def buffer_updated(self, nbytes: int) -> None:
        try:
            events = self._h2.receive_data(self._server.buffer[:nbytes])
        except ProtocolError as error:
            log.warning("a client broke the HTTP/2 protocol: %s", error)
            self._close()
            return
        self._gathering = True
        if self._look_ahead(events):
            for event in events:
                if (take := _TAKE.get(type(event))) is not None:
                    take(self, event)
            self._give_back()
        self._send_all()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (*self._timers, self._last_moment):
            if timer is not None:
                timer.cancel()
        self._close_calls()
        self._server.lost(self)

    def pause_writing(self) -> None:
        # Nor is anything read, as that makes more to write.
        self._paused = True
        self._transport.pause_reading()

    def resume_writing(self) -> None:
        self._paused = False
        self._transport.resume_reading()
        self._go_on()

    # The calls' side

    def see_to(self, call: Call) -> None:
        """It has something to send: soon, with all others who have."""
        self._due[call] = None
        self._send_soon()

    def hold_back(self, call: Call) -> None:
        """Until there is room again."""
        self._held_back[call] = None

    def send_headers(self, stream: int, headers: Headers, *, end: bool = False) -> None:
        self._h2.send_headers(stream, headers, end_stream=end)
        self._send_soon()

    def send_data(self, stream: int, data: bytes | bytearray) -> int:
        """Send as much of it as there is room for: so many bytes."""
        if self._paused:
            return 0
        h2 = self._h2
        room = min(len(data), h2.local_flow_control_window(stream))
        sent = 0
        while sent < room:
            end = min(room, sent + h2.max_outbound_frame_size)
            h2.send_data(stream, bytes(data[sent:end]))
            sent = end
        self._send_soon()
        return sent

    def reset(self, stream: int) -> None:
        """The client is to send no more on it, if it has not ended it; what was sent to it is still good."""
        state = self._h2.streams.get(stream)
        if state is not None and not state.closed:
            self._h2.reset_stream(stream, ErrorCodes.NO_ERROR)

    def widen(self, stream: int, size: int) -> None:
        self._h2.increment_flow_control_window(size, stream)
        self._send_soon()

    def forget(self, stream: int) -> Call | None:
        call = self._calls.pop(stream, None)
        if call is not None:
            self._held_back.pop(call, None)
            self._due.pop(call, None)
            self._hang_up_if_done()
        return call

    # The server's side

    def retire(self) -> None:
        """Ask the client to open no more calls here, and hang up after the last one.

        h2 takes a connection that said so for closed (its issue 1181), hence this frame past it. When the client has
        answered the ping that follows, it has heard, and what it opened before has come.
        """
        if not self._transport.is_closing():
            self._write()
            self._transport.write(GoAwayFrame(0, last_stream_id=_ANY_STREAM).serialize())
            self._h2.ping(_RETIRED)
            self._write()

    def abort(self) -> None:
        """End everything at once, whether the client takes note or not."""
        self._close()
        self._transport.abort()

    # What comes

    def _look_ahead(self, events: Sequence[Event]) -> bool:
        """Note what h2 has taken in already: on what was reset or closed, nothing can be sent any more."""
        self._reset.clear()
        for event in events:
            kind = type(event)
            if kind is StreamReset:
                self._take_reset(event)
            elif kind is ConnectionTerminated:
                self._close()
                return False
        return True

    def _take_reset(self, event: Any) -> None:
        self._reset.add(event.stream_id)
        if (call := self.forget(event.stream_id)) is not None:
            self._tell(call, call.close)

    def _open(self, event: RequestReceived) -> None:
        stream, headers = event.stream_id, dict(event.headers)
        if stream in self._reset:
            return
        if not headers.get(b"content-type", b"").startswith(b"application/grpc"):
            self.send_headers(stream, ((b":status", b"415"),), end=True)
            self.reset(stream)
            return
        self._calls[stream] = call = Call(self, stream, self._server.max_message_bytes, self._server.budget)
        if sum([len(name) + len(value) + 32 for name, value in event.headers]) > HEADER_BYTES:
            call.end(Status.RESOURCE_EXHAUSTED, f"more than {HEADER_BYTES} bytes of headers")
        else:
            self._tell(call, self._server.open, headers.get(b":path", b""), call)

    def _take_data(self, event: DataReceived) -> None:
        self._taken += event.flow_controlled_length
        if (call := self._calls.get(event.stream_id)) is not None:
            self._tell(call, call.take, event)

    def _take_end(self, event: StreamEnded) -> None:
        if (call := self._calls.get(event.stream_id)) is not None:
            self._tell(call, call.take_end, event)

    def _take_window(self, event: WindowUpdated) -> None:
        if not event.stream_id:
            self._go_on()
        elif (call := self._calls.get(event.stream_id)) in self._held_back:
            del self._held_back[call]
            call.has_room()

    def _take_settings(self, event: RemoteSettingsChanged) -> None:
        self._timers[0].cancel()
        self._go_on()

    def _take_pong(self, event: PingAckReceived) -> None:
        if event.ping_data == _RETIRED:
            self._retired = True
            self._hang_up_if_done()

    def _give_back(self) -> None:
        if self._taken >= _CONNECTION_WINDOW // 4 and not self._transport.is_closing():
            self._h2.increment_flow_control_window(self._taken)
            self._taken = 0

    # What goes

    def _go_on(self) -> None:
        """There may be room again for those who were held back."""
        held_back, self._held_back = self._held_back, {}
        for call in held_back:
            call.has_room()

    def _send_soon(self) -> None:
        if not self._gathering and self._write_comes is None:
            self._write_comes = self._loop.call_soon(self._send_all)

    def _send_all(self) -> None:
        """See to all who have something to send, and write it."""
        self._gathering = True
        try:
            while self._due:
                due, self._due = self._due, {}
                for call in due:
                    self._tell(call, call.go)
        finally:
            self._gathering = False
        if self._write_comes is not None:
            self._write_comes.cancel()
            self._write_comes = None
        self._write()

    def _write(self) -> None:
        data = self._h2.data_to_send()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _tell(self, call: Call, what: Callable[..., object], *values: object) -> None:
        try:
            what(*values)
        except Exception:
            log.exception("a call failed")
            call.end(Status.INTERNAL, "internal error")

    # Its end

    def _hang_up_if_done(self) -> None:
        """Leave it to the client, at first: what it still sends would meet a closed socket, and to that systems answer
        by throwing away what the client has not read yet.
        """
        if self._retired and not self._calls and self._last_moment is None:
            self._last_moment = self._loop.call_later(_LAST_SECONDS, self._close_if_done)

    def _close_if_done(self) -> None:
        self._last_moment = None
        if not self._calls:
            self._close()

    def _hang_up_on_silence(self) -> None:
        log.warning("hanging up on a client that does not speak HTTP/2")
        self._transport.abort()

    def _close(self) -> None:
        """Hang up. What is open is over; what was written still goes out."""
        self._close_calls()
        if not self._transport.is_closing():
            self._h2.close_connection()
            self._write()
            self._transport.close()

    def _close_calls(self) -> None:
        calls, self._calls = self._calls, {}
        self._held_back.clear()
        self._due.clear()
        for call in calls.values():
            self._tell(call, call.close)


_TAKE: dict[type[Event], Callable[[Connection, Any], None]] = {
    RequestReceived: Connection._open,
    DataReceived: Connection._take_data,
    StreamEnded: Connection._take_end,
    WindowUpdated: Connection._take_window,
    RemoteSettingsChanged: Connection._take_settings,
    PingAckReceived: Connection._take_pong,
}


def _names(certificate: Mapping[str, Any]) -> frozenset[str]:
    """Its subject alternative names, or its common name."""
    alternative = [str(value) for _, value in certificate.get("subjectAltName", ())]
    common = [
        value for part in certificate.get("subject", ()) for name, value in part if name == "commonName"
    ]
    return frozenset(alternative or common)

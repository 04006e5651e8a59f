"""One gRPC call, as its method sees it."""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import TYPE_CHECKING
from urllib.parse import quote

from h2.events import DataReceived, StreamEnded

from picker.rpc.budget import ByteBudget
from picker.rpc.framing import BadFraming, CompressedMessage, MessageReader, NoRoom, framed

if TYPE_CHECKING:
    from picker.rpc.connection import Connection

# Bytes of a call that a client may send before it hears that more is wanted: a long prompt goes without a pause.
CALL_WINDOW = 256 * 1024

Headers = tuple[tuple[bytes, bytes], ...]
# Bytes that are not gathered further before they are written.
_ENOUGH_BYTES = 64 * 1024
_HEADERS: Headers = ((b":status", b"200"), (b"content-type", b"application/grpc"))


class Status(IntEnum):
    """The codes of gRPC that are used here."""

    OK = 0
    NOT_FOUND = 5
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class Receiver:
    """What a method does about its call: by itself, nothing. Nothing here may block; what is raised ends the call with
    INTERNAL.
    """

    def received(self, message: bytes) -> None:
        """A message of the client's."""

    def half_closed(self) -> None:
        """The client sends nothing more. It still listens."""

    def crowded_out(self) -> bool:
        """There is no room for the message that is coming, and nothing more will come. True: the call will be ended
        as is fit; otherwise it is, with RESOURCE_EXHAUSTED.
        """
        return False

    def sendable(self) -> None:
        """After `Call.want_to_send`, once what came along has been received too; and whenever there is room again."""

    def closed(self) -> None:
        """The call is over, in whatever way. Called exactly once, and nothing after it."""


Method = Callable[["Call"], Receiver]

# Stands where a call has no method, or none any more.
_NOBODY = Receiver()


class Call:
    """Sends what it is given in order. After the end, by whichever side, all of this does nothing."""

    __slots__ = (
        "_answering",
        "_client_ended",
        "_connection",
        "_ending",
        "_held",
        "_pending",
        "_reader",
        "_stream",
        "_taken",
        "_wants",
        "backed_up",
        "over",
        "receiver",
    )

    def __init__(
        self, connection: Connection, stream: int, max_message_bytes: int, budget: ByteBudget
    ) -> None:
        self.receiver: Receiver = _NOBODY
        self.over = False
        self.backed_up = False  # the client or the network does not take what was sent already
        self._connection = connection
        self._stream = stream
        self._reader = MessageReader(max_message_bytes, budget)
        self._taken = 0  # bytes of the window, not given back yet
        self._held = False
        self._client_ended = False
        self._answering = False
        self._pending = bytearray()  # what was not written yet
        self._wants = False
        self._ending: Headers | None = None

    # For the method

    @property
    def peer_names(self) -> frozenset[str]:
        """The names in the client's verified certificate; none without one."""
        return self._connection.peer_names

    def want_to_send(self) -> None:
        """Have `Receiver.sendable` called soon: together with what others have to send, at the cost of one."""
        if not self.over:
            self._wants = True
            self._connection.see_to(self)

    def send(self, message: bytes) -> None:
        """Messages that are sent in one go leave together."""
        if self.over or self._ending is not None:
            return
        if not self._answering:
            self._answering = True
            self._connection.send_headers(self._stream, _HEADERS)
        self._pending += framed(message)
        if len(self._pending) < _ENOUGH_BYTES:
            self._connection.see_to(self)
        else:
            self._push()

    def end(self, status: Status = Status.OK, why: str = "") -> None:
        """End the call behind what was sent."""
        if self.over or self._ending is not None:
            return
        trailers: Headers = ((b"grpc-status", b"%d" % status),)
        if why:
            trailers += ((b"grpc-message", quote(why, safe=" !#$&'()*+,-./:;<=>?@[]^_`{|}~").encode()),)
        self._ending = trailers if self._answering else _HEADERS + trailers
        if not self._pending:
            self._finish()

    def hold(self) -> None:
        """Take no more than a window (`CALL_WINDOW`) until `go_on`."""
        self._held = True

    def go_on(self) -> None:
        if self._held:
            self._held = False
            self._give_back()

    # For the connection

    def take(self, event: DataReceived) -> None:
        self._client_ended = event.stream_ended is not None
        self._taken += event.flow_controlled_length
        if self._ending is not None:
            return
        try:
            messages = self._reader.read(event.data)
        except BadFraming as error:
            if isinstance(error, NoRoom) and self.receiver.crowded_out():
                return
            compressed = isinstance(error, CompressedMessage)
            self.end(Status.UNIMPLEMENTED if compressed else Status.RESOURCE_EXHAUSTED, str(error))
            return
        for message in messages:
            if self._ending is not None or self.over:
                return
            self.receiver.received(message)
        self._give_back()

    def take_end(self, _: StreamEnded) -> None:
        self._client_ended = True
        self.receiver.half_closed()

    def has_room(self) -> None:
        """The client or the network has taken something."""
        self.backed_up = False
        self.want_to_send()

    def go(self) -> None:
        """Write what waits, and if that is all of it, what else there is."""
        if self._pending:
            self._push()
        if self._wants and not self.backed_up:
            self._wants = False
            self.receiver.sendable()
            if self._pending:
                self._push()

    def close(self) -> None:
        if not self.over:
            self.over = True
            self._pending.clear()
            self._reader.close()
            receiver, self.receiver = self.receiver, _NOBODY
            receiver.closed()

    def _push(self) -> None:
        pending = self._pending
        del pending[: self._connection.send_data(self._stream, pending)]
        if pending:
            self.backed_up = True
            self._connection.hold_back(self)
        elif self._ending is not None:
            self._finish()

    def _finish(self) -> None:
        assert self._ending is not None
        try:
            self._connection.send_headers(self._stream, self._ending, end=True)
            # As the gRPC protocol wants it: the client is not to send what nobody will read.
            self._connection.reset(self._stream)
        finally:
            self._connection.forget(self._stream)
            self.close()

    def _give_back(self) -> None:
        if self._taken >= CALL_WINDOW // 2 and not (self._held or self._client_ended or self.over):
            self._connection.widen(self._stream, self._taken)
            self._taken = 0

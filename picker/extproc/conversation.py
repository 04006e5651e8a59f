"""One ext_proc stream as a state machine: the gateway's messages in, events and replies out. No I/O.

    conversation = Conversation(limits, budget)
    event = conversation.receive(message, now)      # for each message, in order
    if isinstance(event, Ask):                      # the request is complete: decide, then
        conversation.forward(routed)                #   ... or conversation.refuse(refused)
    while (reply := conversation.next_reply()) is not None:
        send(reply)
    conversation.close()                            # when the stream ends, however it ends

A request is held whole until the decision. The replies then leave in the only order that Envoy takes:
headers with the destination, the body in pieces with one end-of-stream, trailers. Where the gateway streams
the response through, every chunk goes back unparsed; chunks that wait together leave in one message. A stream
that was forwarded is the gateway's to end: closing early loses response bytes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import Any

from envoy.config.core.v3.base_pb2 import Metadata
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    HttpBody,
    HttpHeaders,
    ProcessingRequest,
    ProcessingResponse,
)
from msgspec import Struct

from picker.extproc import messages
from picker.extproc.body import GatheredBody
from picker.extproc.handler import Arrival, Headers, Refused, Routed
from picker.extproc.outbox import Outbox
from picker.rpc import ByteBudget

# More of a response than this waiting to be written back means that the gateway is not taking it.
CONGESTED_BYTES = 256 * 1024


class BodyMode(IntEnum):
    """How the gateway sends bodies (`ProcessingMode.BodySendMode`)."""

    NONE = 0
    STREAMED = 1
    BUFFERED = 2
    BUFFERED_PARTIAL = 3
    FULL_DUPLEX_STREAMED = 4
    GRPC = 5


@dataclass(frozen=True, slots=True)
class ConversationLimits:
    """Per-stream settings.

    `assumed_body_mode` is taken where the gateway does not say its modes (no `protocol_config`).
    `buffered_hold` (seconds): in BUFFERED mode, ask Envoy once to wait this long instead of its
    `message_timeout`; it obeys up to its `max_message_timeout`. None does not ask.
    `refuses` False (shadow mode): a request that would be refused is passed on untouched.
    """

    max_body_bytes: int = 16 * 1024 * 1024
    max_header_bytes: int = 256 * 1024
    assumed_body_mode: BodyMode = BodyMode.FULL_DUPLEX_STREAMED
    buffered_hold: float | None = None
    refuses: bool = True


class ProtocolError(Exception):
    """The gateway sent what the protocol does not allow at this point."""


class Phase(Enum):
    """Where the request is. The response passes through beside it and can overtake it (`GIVEN_UP`)."""

    EXPECTING_HEADERS = auto()
    EXPECTING_BODY = auto()  # the headers are in; the body is being gathered
    DECIDING = auto()  # the request is whole and has been asked about
    FORWARDED = auto()  # answered with a destination
    REFUSED = auto()  # answered with an error; whatever still comes is ignored
    LET_GO = auto()  # passed on as it is, without a decision; what still comes of it goes straight back
    GIVEN_UP = auto()  # the gateway answered the client by itself, before the decision
    CLOSED = auto()


NO_ROOM = Refused(
    503, "body_memory", "Too many request bodies are being held; try again later.", retry_after=1.0
)

# What is held of a request in these is on its way back to the gateway.
_RETURNING = (Phase.FORWARDED, Phase.LET_GO)


class Ask(Struct, frozen=True):
    """The request is complete: call `forward` or `refuse`."""

    arrival: Arrival


class RefusedEarly(Struct, frozen=True):
    """The request was refused before it was complete, or would have been; the replies wait to be sent."""

    refused: Refused


class GaveUp(Struct, frozen=True):
    """The gateway sends the client a response of its own: drop the decision."""


class StreamEnded(Struct, frozen=True):
    """The gateway sends nothing more on this stream."""


class ResponseHeaders(Struct, frozen=True):
    status: int
    headers: Headers
    served: str | None


class ResponseChunk(Struct, frozen=True):
    """A piece of the response body: the first one always, the others where the exchange wants them."""

    data: bytes


Event = Ask | RefusedEarly | GaveUp | StreamEnded | ResponseHeaders | ResponseChunk

_UNDECIDED = frozenset({Phase.EXPECTING_HEADERS, Phase.EXPECTING_BODY, Phase.DECIDING})
_REQUEST_MODES = frozenset({BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED})
_MODES = {mode.value: mode for mode in BodyMode}  # looking up is faster than calling the enum
_RESPONSE_MODES = frozenset(BodyMode) - {BodyMode.GRPC}


class Conversation:
    """One stream. Not to be used further after `close` or a `ProtocolError` with `undecided` False."""

    def __init__(self, limits: ConversationLimits, budget: ByteBudget) -> None:
        self.phase = Phase.EXPECTING_HEADERS
        self._limits = limits
        self._budget = budget
        self._outbox = Outbox()
        self._request_mode = limits.assumed_body_mode
        self._response_mode = limits.assumed_body_mode
        self._opened = False
        self._headers_answered = False
        # The request, as far as it has come.
        self._method = self._path = self._authority = ""
        self._headers: list[tuple[str, str]] = []
        self._received_at = 0.0
        self._metadata_context: Metadata | None = None
        self._metadata: dict[str, Any] = {}
        self._body = GatheredBody()
        self._has_body = False
        self._has_trailers = False
        self._held_bytes = 0
        self._wants_response_body = False
        self._response_headers: tuple[tuple[str, str], ...] = ()
        self._response_begun = False

    # Driving it

    @property
    def undecided(self) -> bool:
        """True while the request is unanswered: `refuse` can still take the place of everything else."""
        return self.phase in _UNDECIDED

    @property
    def congested(self) -> bool:
        """True while so much of what streams through waits to be sent that reading on would only pile it up."""
        waiting = self._outbox.response_bytes_waiting
        if self.phase is Phase.LET_GO:
            waiting += self._outbox.request_bytes_waiting
        return waiting > CONGESTED_BYTES

    def receive(self, message: ProcessingRequest, now: float) -> Event | None:
        """Take the gateway's next message. Raises `ProtocolError`."""
        if self.phase is Phase.REFUSED:
            return None
        if not self._opened:
            self._open(message)
        match message.WhichOneof("request"):
            case "response_body":
                return self._receive_response_body(message.response_body)
            case "request_headers":
                return self._receive_request_headers(message, now)
            case "request_body":
                return self._receive_request_body(message)
            case "request_trailers":
                return self._receive_request_trailers(message)
            case "response_headers":
                return self._receive_response_headers(message)
            case "response_trailers":
                self._outbox.put(messages.RESPONSE_TRAILERS_UNCHANGED)
            case _:
                raise ProtocolError("a message of no known kind")
        return None

    def receive_end(self) -> StreamEnded:
        """The gateway closed its side, by half-close or reset, at any time: which is normal.

        Who leaves before the decision wants none. After it, what waits to be sent is still good: a gateway may
        close its side right behind the last message.
        """
        if self.undecided:
            self.close()
        return StreamEnded()

    def forward(self, routed: Routed) -> None:
        """Answer the request asked about: pass it on to `routed.endpoint`."""
        self._expect_deciding()
        outbox = self._outbox
        if self._headers_answered:
            outbox.put(
                messages.destination_on_body(
                    routed.endpoint, routed.set_headers, routed.remove_headers, routed.body
                )
            )
        else:
            outbox.put(
                messages.destination_on_headers(routed.endpoint, routed.set_headers, routed.remove_headers)
            )
            if self._has_body:
                body = self._body.whole() if routed.body is None else routed.body
                outbox.put_request_body(body, ends=not self._has_trailers)
        if self._has_trailers:
            outbox.put(messages.REQUEST_TRAILERS_UNCHANGED)
        self._body = GatheredBody()
        self._wants_response_body = routed.exchange.wants_response_body
        self._response_headers = routed.response_headers
        self.phase = Phase.FORWARDED

    def refuse(self, refused: Refused) -> None:
        """Answer the client with an error, or in shadow mode let the request go; possible while `undecided`."""
        if not self.undecided:
            raise ProtocolError(f"cannot refuse a request that is {self.phase.name}")
        if not self._limits.refuses:
            self._let_go()
            return
        self._outbox.put(messages.immediate(refused))
        self._drop_request()
        self.phase = Phase.REFUSED

    def next_reply(self) -> ProcessingResponse | None:
        """Take the next message to send, in order; None when nothing waits."""
        reply = self._outbox.take()
        if self._held_bytes and self.phase in _RETURNING and not self._outbox.request_body_waits:
            self._drop_request()
        return reply

    def close(self) -> None:
        """The stream is over. Frees what is held; harmless when repeated."""
        self._outbox.clear()
        self._drop_request()
        self.phase = Phase.CLOSED

    # The request

    def _open(self, message: ProcessingRequest) -> None:
        self._opened = True
        if message.HasField("protocol_config"):
            config = message.protocol_config
            self._request_mode = _body_mode(config.request_body_mode)
            self._response_mode = _body_mode(config.response_body_mode)

    def _receive_request_headers(self, message: ProcessingRequest, now: float) -> Event | None:
        if self.phase is Phase.LET_GO:
            self._outbox.put(messages.REQUEST_HEADERS_UNCHANGED)
            return None
        if self.phase is not Phase.EXPECTING_HEADERS:
            raise ProtocolError(f"request headers while {self.phase.name}")
        self._received_at = now
        self.phase = Phase.EXPECTING_BODY
        if message.request_headers.ByteSize() > self._limits.max_header_bytes:
            return self._refuse_early(self._headers_too_large())
        self._read_request_headers(message.request_headers)
        self._note_metadata(message)
        if message.request_headers.end_of_stream:
            return self._ask()
        self._has_body = True
        if refused := self._unreadable():
            return self._refuse_early(refused)
        if self._request_mode is BodyMode.BUFFERED:
            # Envoy sends the body only after this, and keeps the headers: the destination goes with the body.
            self._outbox.put(messages.REQUEST_HEADERS_UNCHANGED)
            self._headers_answered = True
        return None

    def _receive_request_body(self, message: ProcessingRequest) -> Event | None:
        body = message.request_body
        if self.phase is Phase.LET_GO:
            self._return_body(body)
            return None
        if self.phase is not Phase.EXPECTING_BODY:
            self._ignore_late_body(body)
            return None
        if refused := self._gather(body.body):
            early = self._refuse_early(refused)
            if not self._limits.refuses:
                self._return_body(body)
            return early
        if self._request_mode is BodyMode.BUFFERED:
            # One message is the whole body, even without an end-of-stream: then trailers follow the answer.
            if self._limits.buffered_hold is not None:
                self._outbox.put(messages.hold(self._limits.buffered_hold))
        elif not body.end_of_stream:
            return None
        self._note_metadata(message)
        return self._ask()

    def _ignore_late_body(self, body: HttpBody) -> None:
        """A second end-of-stream says nothing new. Bytes after the end would be lost, if they matter."""
        if self.phase is Phase.GIVEN_UP:
            return
        if body.body or self.phase is Phase.EXPECTING_HEADERS:
            raise ProtocolError(f"request body while {self.phase.name}")

    def _receive_request_trailers(self, message: ProcessingRequest) -> Event | None:
        match self.phase:
            case Phase.EXPECTING_BODY:
                self._has_trailers = True
                if self._headers_answered:
                    return self._refuse_early(_unsupported("trailers without a body in BUFFERED mode"))
                self._note_metadata(message)
                return self._ask()
            case Phase.DECIDING:
                self._has_trailers = True
            case Phase.FORWARDED | Phase.LET_GO:
                self._outbox.put(messages.REQUEST_TRAILERS_UNCHANGED)
            case Phase.EXPECTING_HEADERS:
                raise ProtocolError("request trailers before any headers")
        return None

    def _read_request_headers(self, headers: HttpHeaders) -> None:
        pseudo, self._headers = messages.split_headers(headers)
        self._method = pseudo.get(":method", "")
        self._path = pseudo.get(":path", "")
        self._authority = pseudo.get(":authority", "")

    def _note_metadata(self, message: ProcessingRequest) -> None:
        """Envoy repeats its metadata on each message; later filters may have added to it."""
        if not message.HasField("metadata_context"):
            return
        context = message.metadata_context
        if context != self._metadata_context:
            self._metadata.update(messages.plain_metadata(context.filter_metadata))
            self._metadata_context = context

    def _unreadable(self) -> Refused | None:
        """Why the body that is about to come cannot be read, if so."""
        if self._request_mode not in _REQUEST_MODES:
            return _unsupported(f"request_body_mode {self._request_mode.name}")
        if self._response_mode not in _RESPONSE_MODES:
            return _unsupported(f"response_body_mode {self._response_mode.name}")
        declared = ""
        for name, value in self._headers:
            if name == "content-length":
                declared = value
        if declared.isascii() and declared.isdigit() and int(declared[:20]) > self._limits.max_body_bytes:
            return self._too_large()
        return None

    def _gather(self, data: bytes) -> Refused | None:
        if self._held_bytes + len(data) > self._limits.max_body_bytes:
            return self._too_large()
        if not self._budget.take(len(data)):
            return NO_ROOM
        self._held_bytes += len(data)
        self._body.add(data)
        return None

    def _headers_too_large(self) -> Refused:
        limit = self._limits.max_header_bytes
        return Refused(431, "headers_too_large", f"The request's headers are larger than {limit} bytes.")

    def _too_large(self) -> Refused:
        limit = self._limits.max_body_bytes
        return Refused(413, "body_too_large", f"The request body is larger than {limit} bytes.")

    def _refuse_early(self, refused: Refused) -> RefusedEarly:
        self.refuse(refused)
        return RefusedEarly(refused)

    def _let_go(self) -> None:
        """Pass on what has come of the request, and from now on whatever else comes."""
        complete = self.phase is Phase.DECIDING
        if self.phase is not Phase.EXPECTING_HEADERS and not self._headers_answered:
            self._outbox.put(messages.REQUEST_HEADERS_UNCHANGED)
        if self._has_body and (complete or self._held_bytes):
            if self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
                self._outbox.put_request_body(self._body.whole(), ends=complete and not self._has_trailers)
            else:
                self._outbox.put(messages.REQUEST_BODY_UNCHANGED)
                self._drop_request()
        if self._has_trailers:
            self._outbox.put(messages.REQUEST_TRAILERS_UNCHANGED)
        self.phase = Phase.LET_GO

    def _return_body(self, body: HttpBody) -> None:
        if self._request_mode is BodyMode.FULL_DUPLEX_STREAMED:
            self._outbox.put_request_body(body.body, ends=body.end_of_stream)
        else:
            self._outbox.put(messages.REQUEST_BODY_UNCHANGED)

    def _ask(self) -> Ask:
        self.phase = Phase.DECIDING
        return Ask(
            Arrival(
                method=self._method,
                path=self._path,
                authority=self._authority,
                headers=self._headers,
                body=self._body.whole(),
                has_body=self._has_body,
                metadata=self._metadata,
                received_at=self._received_at,
                observes_response=self._response_mode is not BodyMode.NONE,
            )
        )

    def _expect_deciding(self) -> None:
        if self.phase is not Phase.DECIDING:
            raise ProtocolError(f"cannot forward a request that is {self.phase.name}")

    def _drop_request(self) -> None:
        self._body = GatheredBody()
        self._budget.give_back(self._held_bytes)
        self._held_bytes = 0

    # The response

    def _receive_response_headers(self, message: ProcessingRequest) -> Event | None:
        self._outbox.put(messages.response_headers(self._response_headers))
        if self.undecided:
            # A local reply of the gateway (a timer, a filter before us) goes through the response phases too.
            self._drop_request()
            self.phase = Phase.GIVEN_UP
            return GaveUp()
        if self.phase is not Phase.FORWARDED:
            return None
        status, headers = _read_response_headers(message.response_headers)
        return ResponseHeaders(status, headers, _served(message))

    def _receive_response_body(self, body: HttpBody) -> Event | None:
        if self._response_mode is BodyMode.FULL_DUPLEX_STREAMED:
            self._outbox.put_response_chunk(body.body, body.end_of_stream)
        else:
            self._outbox.put(messages.RESPONSE_BODY_UNCHANGED)
        begun, self._response_begun = self._response_begun, self._response_begun or bool(body.body)
        return ResponseChunk(body.body) if self._wants_response_body or not begun else None


def _body_mode(number: int) -> BodyMode:
    mode = _MODES.get(number)
    if mode is None:
        raise ProtocolError(f"body mode {number} is unknown")
    return mode


def _unsupported(what: str) -> Refused:
    return Refused(
        500,
        "unsupported_mode",
        f"The gateway's ext_proc configuration is not supported: {what}. "
        "Use request_body_mode FULL_DUPLEX_STREAMED or BUFFERED.",
    )


def _read_response_headers(message: HttpHeaders) -> tuple[int, Headers]:
    pseudo, headers = messages.split_headers(message)
    status = pseudo.get(":status", "")
    return int(status) if status.isascii() and status.isdigit() else 0, headers


def _served(message: ProcessingRequest) -> str | None:
    namespaces = message.metadata_context.filter_metadata
    if messages.LB_NAMESPACE not in namespaces:
        return None
    served = namespaces[messages.LB_NAMESPACE].fields
    return served[messages.SERVED_KEY].string_value or None if messages.SERVED_KEY in served else None

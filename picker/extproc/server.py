"""The ext_proc gRPC server: a thin shell around `Conversation`.

A stream is the method of one call: messages come in, events go to the handler and to the exchange, replies go out when
there is room for them. Only deciding has a task, because only that may wait. Whatever ends a stream, `_Stream.closed`
runs once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.message import DecodeError

from picker.extproc.conversation import (
    NO_ROOM,
    Ask,
    Conversation,
    ConversationLimits,
    Event,
    GaveUp,
    Phase,
    ProtocolError,
    RefusedEarly,
    ResponseChunk,
    ResponseHeaders,
)
from picker.extproc.handler import Arrival, Exchange, Refused, RequestHandler, Routed
from picker.rpc import ByteBudget, Call, Receiver, RpcServer, Status

log = logging.getLogger(__name__)

T = TypeVar("T")

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"

# Room in a gRPC message beside the body: headers, metadata, attributes.
_MESSAGE_OVERHEAD_BYTES = 1024 * 1024

_INTERNAL_ERROR = Refused(500, "internal_error", "The endpoint picker failed on this request.")
_TOO_MANY_STREAMS = Refused(
    503, "too_many_streams", "The endpoint picker has too many requests at once.", 1.0
)


@dataclass(slots=True)
class ExtProcStats:
    """Counters over all streams. `refused` is keyed by reason, a closed set."""

    streams: int = 0
    active_streams: int = 0
    routed: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    given_up: int = 0  # the client or the gateway left before it had an answer
    protocol_errors: int = 0
    internal_errors: int = 0
    received_messages: int = 0
    sent_messages: int = 0


class ExtProcServer:
    """Serves `envoy.service.ext_proc.v3.ExternalProcessor` for one `RequestHandler`.

    `clock` gives seconds; `Arrival.received_at` is on it. `max_streams` bounds the requests held and followed at
    once; one more is refused with 503. `client_names`, if given, are the names of which a client's certificate
    must carry one (mutual TLS).
    """

    def __init__(
        self,
        handler: RequestHandler,
        *,
        limits: ConversationLimits | None = None,
        budget: ByteBudget | None = None,
        max_streams: int = 20_000,
        client_names: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = ExtProcStats()
        self.handler = handler
        self.limits = limits or ConversationLimits()
        self.budget = budget or ByteBudget(max_bytes=1024**3)
        self.max_streams = max_streams
        self.client_names = client_names
        self.clock = clock

    @property
    def max_message_bytes(self) -> int:
        """What the server that this is added to must take at least: a BUFFERED body comes in one message."""
        return self.limits.max_body_bytes + _MESSAGE_OVERHEAD_BYTES

    def add_to(self, server: RpcServer) -> None:
        server.add(
            f"/{SERVICE_NAME}/Process", lambda call: _Stream(self, call), client_names=self.client_names
        )


class _Stream(Receiver):
    """One ext_proc stream, from its first message to its end."""

    def __init__(self, server: ExtProcServer, call: Call) -> None:
        self._server = server
        self._stats = server.stats
        self._call = call
        self._conversation = Conversation(server.limits, server.budget)
        self._one_too_many = server.stats.active_streams >= server.max_streams
        self._deciding: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._answered = False
        self._delivered = False
        self._ending = False  # after what waits to be sent
        self._stats.streams += 1
        self._stats.active_streams += 1
        if server.limits.refuses and self._stats.active_streams > 2 * server.max_streams:
            # Nothing has been said on it yet to which there could be a better answer.
            call.end(Status.RESOURCE_EXHAUSTED, "too many streams")

    # What comes

    def crowded_out(self) -> bool:
        refuses = self._conversation.undecided and self._server.limits.refuses
        if refuses:
            self._refuse(NO_ROOM)
            self._call.want_to_send()
        return refuses

    def received(self, message: bytes) -> None:
        self._stats.received_messages += 1
        if self._ending:
            return
        self._guard(self._take, message)
        self._call.want_to_send()

    def half_closed(self) -> None:
        self._conversation.receive_end()
        self._abandon_decision()
        self._ending = True
        self._call.want_to_send()

    def closed(self) -> None:
        """Release everything that the stream holds."""
        self._stats.active_streams -= 1
        self._stats.given_up += not self._answered
        self._abandon_decision()
        self._conversation.close()
        if self._exchange is not None:
            self._finish(self._exchange)

    def _take(self, data: bytes) -> None:
        if self._one_too_many:
            self._one_too_many = False
            self._refuse(_TOO_MANY_STREAMS)
            if self._ending:
                return
        try:
            message = ProcessingRequest.FromString(data)
        except DecodeError as error:
            raise ProtocolError("not a ProcessingRequest") from error
        event = self._conversation.receive(message, self._server.clock())
        if event is not None:
            self._follow(event)

    def _follow(self, event: Event) -> None:
        match event:
            case Ask(arrival):
                self._deciding = asyncio.create_task(self._decide(arrival))
            case RefusedEarly(refused):
                self._note_refusal(refused)
            case GaveUp():
                self._abandon_decision()
            case ResponseHeaders() | ResponseChunk() if self._exchange is not None:
                self._tell(self._exchange, event)

    def _tell(self, exchange: Exchange, event: ResponseHeaders | ResponseChunk) -> None:
        """Tell the exchange what became of its request."""
        try:
            match event:
                case ResponseHeaders(status, headers, served):
                    exchange.response_headers(status, headers, served)
                case ResponseChunk(data):
                    exchange.response_chunk(data)
        except Exception:
            self._stats.internal_errors += 1
            log.exception("following a response failed")

    # Deciding

    async def _decide(self, arrival: Arrival) -> None:
        decision: Routed | Refused
        try:
            decision = await self._server.handler.route(arrival)
        except asyncio.CancelledError:
            if _is_cancelled():
                raise
            decision = self._failed("deciding was cancelled from inside")
        except Exception:
            decision = self._failed("deciding failed")
        self._guard(self._take_decision, decision)
        self._call.want_to_send()

    def _take_decision(self, decision: Routed | Refused) -> None:
        if isinstance(decision, Routed):
            if self._call.over:
                # Made, and booked, but nobody is there any more.
                self._finish(decision.exchange)
                return
            self._exchange = decision.exchange
        if not self._conversation.undecided:
            return
        if isinstance(decision, Refused):
            self._refuse(decision)
        else:
            self._conversation.forward(decision)
            self._answered = True
            self._stats.routed += 1

    def _abandon_decision(self) -> None:
        if self._deciding is not None:
            self._deciding.cancel()

    def _refuse(self, refused: Refused) -> None:
        self._conversation.refuse(refused)
        self._note_refusal(refused)

    def _note_refusal(self, refused: Refused) -> None:
        self._answered = True
        self._ending = self._conversation.phase is Phase.REFUSED
        self._stats.refused[refused.reason] += 1

    def _failed(self, what: str) -> Refused:
        self._stats.internal_errors += 1
        log.exception(what)
        return _INTERNAL_ERROR

    # What goes

    def sendable(self) -> None:
        """Send what waits, as far as there is room: where the gateway does not take it, nothing more is asked of it."""
        call, conversation = self._call, self._conversation
        while not call.backed_up:
            reply = conversation.next_reply()
            if reply is None:
                if self._ending:
                    call.end()
                break
            self._delivered = conversation.phase is Phase.FORWARDED
            self._stats.sent_messages += 1
            call.send(reply.SerializeToString())
        if conversation.congested:
            call.hold()
        else:
            call.go_on()

    # When it goes wrong

    def _guard(self, step: Callable[[T], None], value: T) -> None:
        try:
            step(value)
        except ProtocolError as error:
            self._stats.protocol_errors += 1
            log.warning("the gateway broke the ext_proc protocol: %s", error)
            self._end_broken(str(error))
        except Exception:
            self._stats.internal_errors += 1
            log.exception("an ext_proc stream failed")
            self._end_broken("internal error")

    def _end_broken(self, why: str) -> None:
        """End a stream that cannot go on: with an error to the client if that is still possible.

        A clean end would not do: Envoy would go on without a body and without a destination. In shadow mode the
        gateway's own failure mode decides.
        """
        if self._conversation.undecided and self._server.limits.refuses:
            self._refuse(_INTERNAL_ERROR)
        else:
            self._call.end(Status.INTERNAL, why)

    def _finish(self, exchange: Exchange) -> None:
        try:
            exchange.finished(self._delivered)
        except Exception:
            self._stats.internal_errors += 1
            log.exception("releasing a request failed")


def _is_cancelled() -> bool:
    """Whether somebody cancelled this task, as against something that it waited for."""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0

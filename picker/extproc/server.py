"""The ext_proc gRPC server: a thin loop around `Conversation`.

A stream has one coroutine while it can: most requests are decided at once, and where responses pass by, all that is
left then is the end. A second one reads beside it where that is not so: while a decision has to be waited for, so that
an end of the stream is noticed at any time, and while responses pass through, so that more of their chunks can gather
and leave together while the socket is waited for. Whatever ends a stream, `_Stream._close` runs once.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest
from google.protobuf.message import DecodeError

from picker.extproc.body import BodyBudget
from picker.extproc.conversation import (
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
    StreamEnded,
)
from picker.extproc.handler import Arrival, Exchange, Refused, RequestHandler, Routed
from picker.extproc.tls import refuse_strangers

log = logging.getLogger(__name__)

SERVICE_NAME = "envoy.service.ext_proc.v3.ExternalProcessor"

# gRPC takes one new stream in a turn of the event loop, and by itself cancels those that have waited for that for half
# a minute: an error without words for their clients. On a starved machine they wait as long as the gateway lets them.
_ACCEPT_SECONDS = 3600

# Room in a gRPC message beside the body: headers, metadata, attributes.
_MESSAGE_OVERHEAD_BYTES = 1024 * 1024

_INTERNAL_ERROR = Refused(500, "internal_error", "The endpoint picker failed on this request.")
_TOO_MANY_STREAMS = Refused(
    503, "too_many_streams", "The endpoint picker has too many requests at once.", 1.0
)

Context = grpc.aio.ServicerContext[bytes, bytes]
EOF = grpc.aio.EOF  # type: ignore[attr-defined]  # missing from the stubs


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
        budget: BodyBudget | None = None,
        max_streams: int = 20_000,
        client_names: frozenset[str] = frozenset(),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.stats = ExtProcStats()
        self.handler = handler
        self.limits = limits or ConversationLimits()
        self.budget = budget or BodyBudget(max_bytes=1024**3)
        self.max_streams = max_streams
        self.client_names = client_names
        self.clock = clock

    def options(self) -> list[tuple[str, Any]]:
        """Channel arguments for the `grpc.aio.server` that this is added to; they work nowhere else."""
        # A BUFFERED body comes in one message, and goes back in one when it was changed.
        max_message = self.limits.max_body_bytes + _MESSAGE_OVERHEAD_BYTES
        return [
            ("grpc.max_receive_message_length", max_message),
            ("grpc.max_send_message_length", max_message),
            ("grpc.server_max_unrequested_time_in_server", _ACCEPT_SECONDS),
        ]

    def add_to(self, server: grpc.aio.Server) -> None:
        # Bytes in and out: messages are parsed here, where a bad one can still be answered.
        method = grpc.stream_stream_rpc_method_handler(self._process)
        service = grpc.method_handlers_generic_handler(SERVICE_NAME, {"Process": method})
        server.add_generic_rpc_handlers((service,))

    async def _process(self, _: object, context: Context) -> None:
        await refuse_strangers(self.client_names, context)
        await _Stream(self, context).run()


class _Stream:
    """One ext_proc stream, from its first message to its end."""

    def __init__(self, server: ExtProcServer, context: Context) -> None:
        self._stats = server.stats
        self._handler = server.handler
        self._clock = server.clock
        self._refuses = server.limits.refuses
        self._overloaded = server.stats.active_streams >= server.max_streams
        self._context = context
        self._conversation = Conversation(server.limits, server.budget)
        # The task that waits for a decision, while it does, and whether nobody wants that any more.
        self._deciding: asyncio.Task[Any] | None = None
        self._abandoned = False
        self._reader: asyncio.Task[None] | None = None
        self._exchange: Exchange | None = None
        self._answered = False
        self._delivered = False
        self._something_to_write = asyncio.Event()
        self._written = asyncio.Event()

    async def run(self) -> None:
        self._stats.streams += 1
        self._stats.active_streams += 1
        try:
            await self._serve()
        except ProtocolError as error:
            self._stats.protocol_errors += 1
            log.warning("the gateway broke the ext_proc protocol: %s", error)
            await self._end_broken(str(error))
        except grpc.aio.BaseError:
            log.debug("the stream broke off", exc_info=True)
        except Exception:
            self._stats.internal_errors += 1
            log.exception("an ext_proc stream failed")
            await self._end_broken("internal error")
        finally:
            self._close()

    async def _serve(self) -> None:
        if self._overloaded:
            await self._refuse(_TOO_MANY_STREAMS)
            arrival = None
        else:
            arrival = await self._read_request()
        if arrival is None and self._conversation.phase is not Phase.LET_GO:
            return
        await self._write_waiting()
        if arrival is not None:
            decision = await self._decide(arrival)
            if isinstance(decision, Refused):
                await self._refuse(decision)
                if self._conversation.phase is Phase.REFUSED:
                    return
            elif isinstance(decision, Routed):
                self._conversation.forward(decision)
                self._answered = True
                self._stats.routed += 1
        if self._reader is None and arrival is not None and not arrival.observes_response:
            await self._write_and_read_until_end()
        else:
            await self._write_until_end(self._read_beside())

    # Reading

    async def _read(self) -> Event | None:
        """Take one message into the conversation, and say what it means."""
        data = await self._context.read()
        if data is EOF:
            return self._conversation.receive_end()
        self._stats.received_messages += 1
        try:
            message = ProcessingRequest.FromString(data)
        except DecodeError as error:
            raise ProtocolError("not a ProcessingRequest") from error
        return self._conversation.receive(message, self._clock())

    async def _read_request(self) -> Arrival | None:
        """Read until the request is complete; None when the stream ended or was answered before that."""
        while True:
            match await self._read():
                case Ask(arrival):
                    return arrival
                case RefusedEarly(refused):
                    self._answered = True
                    self._stats.refused[refused.reason] += 1
                    await self._write_waiting()
                    return None
                case StreamEnded():
                    return None
            await self._write_waiting()

    def _read_beside(self) -> asyncio.Task[None]:
        """Read on in a task of its own, from now on."""
        if self._reader is None:
            self._reader = asyncio.create_task(self._read_rest())
        return self._reader

    async def _read_rest(self) -> None:
        """Read on to the end of the stream, while the request is decided and its response passes through."""
        try:
            while not isinstance(event := await self._read(), StreamEnded):
                if event is not None:
                    self._follow(event)
                self._something_to_write.set()
                while self._conversation.congested:
                    self._written.clear()
                    await self._written.wait()
        finally:
            self._abandon_decision()
            self._something_to_write.set()

    def _follow(self, event: Event) -> None:
        """Tell the exchange what became of its request."""
        if isinstance(event, GaveUp):
            self._abandon_decision()
        if self._exchange is None:
            return
        try:
            match event:
                case ResponseHeaders(status, headers, served):
                    self._exchange.response_headers(status, headers, served)
                case ResponseChunk(data):
                    self._exchange.response_chunk(data)
        except Exception:
            self._stats.internal_errors += 1
            log.exception("following a response failed")

    # Deciding

    async def _decide(self, arrival: Arrival) -> Routed | Refused | None:
        """The handler's decision; None when nobody waits for it any more."""
        if (task := asyncio.current_task()) is None:
            raise RuntimeError("a stream is served by a task")
        decision: Routed | Refused
        self._deciding = task
        reading = asyncio.get_running_loop().call_soon(self._read_beside)
        try:
            decision = await self._handler.route(arrival)
        except asyncio.CancelledError:
            if task.cancelling() > self._abandoned:
                raise
            if self._abandoned:
                return None
            decision = self._failed("deciding was cancelled from inside")
        except Exception:
            decision = self._failed("deciding failed")
        finally:
            self._deciding = None
            reading.cancel()
            if self._abandoned:
                task.uncancel()
        if isinstance(decision, Routed):
            self._exchange = decision.exchange
        if task.cancelling():
            # The stream was reset, and deciding went on all the same.
            raise asyncio.CancelledError
        return decision if self._conversation.undecided and not self._abandoned else None

    def _failed(self, what: str) -> Refused:
        self._stats.internal_errors += 1
        log.exception(what)
        return _INTERNAL_ERROR

    def _abandon_decision(self) -> None:
        """Stop deciding, as `asyncio.timeout` stops what takes too long."""
        if self._deciding is not None and not self._abandoned:
            self._abandoned = True
            self._deciding.cancel()

    # Writing

    async def _write_and_read_until_end(self) -> None:
        await self._write_waiting()
        while not isinstance(event := await self._read(), StreamEnded):
            if event is not None:
                self._follow(event)
            await self._write_waiting()

    async def _write_until_end(self, reader: asyncio.Task[None]) -> None:
        while True:
            await self._write_waiting()
            if reader.done():
                return reader.result()
            self._something_to_write.clear()
            await self._something_to_write.wait()

    async def _write_waiting(self) -> None:
        while (reply := self._conversation.next_reply()) is not None:
            # Envoy may act on a message and end the stream before `write` returns.
            self._delivered = self._conversation.phase is Phase.FORWARDED
            self._stats.sent_messages += 1
            await self._context.write(reply.SerializeToString())
            self._written.set()

    async def _refuse(self, refused: Refused) -> None:
        self._conversation.refuse(refused)
        self._answered = True
        self._stats.refused[refused.reason] += 1
        await self._write_waiting()

    async def _end_broken(self, why: str) -> None:
        """End a stream that cannot go on: with an error to the client if that is still possible.

        A clean end would not do: Envoy would go on without a body and without a destination. In shadow mode the
        gateway's own failure mode decides.
        """
        if self._conversation.undecided and self._refuses:
            await self._refuse(_INTERNAL_ERROR)
        else:
            await self._context.abort(grpc.StatusCode.INTERNAL, why)

    # Ending

    def _close(self) -> None:
        """Release everything that the stream holds. Runs once, on each way out."""
        self._stats.active_streams -= 1
        self._stats.given_up += not self._answered
        self._conversation.close()
        if self._reader is not None:
            self._reader.cancel()
            self._reader.add_done_callback(_retrieve)
        if self._exchange is not None:
            self._finish(self._exchange)

    def _finish(self, exchange: Exchange) -> None:
        try:
            exchange.finished(self._delivered)
        except Exception:
            self._stats.internal_errors += 1
            log.exception("releasing a request failed")


def _retrieve(task: asyncio.Task[Any]) -> None:
    """Look at a task's exception, so that asyncio does not report it as forgotten."""
    if not task.cancelled():
        task.exception()

"""One end of the connection between core and face, on asyncio."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Generic

from picker.faces.protocol import Framing, ProtocolError, Received, Sent

log = logging.getLogger(__name__)


class Channel(asyncio.Protocol, Generic[Sent, Received]):
    """Sends and takes messages. All that is sent in one turn of the loop leaves together.

    `take` hears of each message; it must not raise. `lost` is called once, when the connection is over for whatever
    reason. What waits to be sent is bounded by the requests that there can be.
    """

    def __init__(
        self, framing: Framing[Sent, Received], take: Callable[[Received], None], lost: Callable[[], None]
    ) -> None:
        self._framing = framing
        self._take = take
        self._lost = lost
        self._outbox: list[Sent] = []
        self._transport: asyncio.Transport | None = None

    async def connect(self, end: socket.socket) -> None:
        await asyncio.get_running_loop().create_unix_connection(lambda: self, sock=end)

    def send(self, message: Sent) -> None:
        """Harmless when the connection is over."""
        if not self._outbox and self._transport is not None:
            asyncio.get_running_loop().call_soon(self._flush)
        self._outbox.append(message)

    def close(self) -> None:
        """Send what waits, and end the connection."""
        self._flush()
        if self._transport is not None:
            self._transport.close()

    def _flush(self) -> None:
        outbox, self._outbox = self._outbox, []
        if outbox and self._transport is not None:
            self._transport.write(self._framing.encode(outbox))

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._flush()

    def data_received(self, data: bytes) -> None:
        try:
            for message in self._framing.feed(data):
                self._take(message)
        except ProtocolError:
            log.exception("the connection between core and face is given up")
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = None
        self._lost()

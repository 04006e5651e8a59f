"""A gRPC server: methods by their paths, listening sockets, and the connections that came in by them."""

from __future__ import annotations

import asyncio
import socket
import ssl
from contextlib import suppress

from picker.rpc.budget import ByteBudget
from picker.rpc.call import Call, Method, Status
from picker.rpc.connection import Connection

_READ_BYTES = 256 * 1024
_BACKLOG = 1024
# A client's system that does not answer for so long is gone; one that takes nothing for so long, as good as gone.
_SILENT_SECONDS = 60


class RpcServer:
    """Lives on the event loop that `listen` runs on.

    `max_message_bytes`: a longer message ends its call. `budget`: for what messages hold that have not come
    whole. `connection_seconds`: for how long clients may open calls on one connection before they have to make another,
    give or take a tenth; None for ever.
    """

    def __init__(
        self, *, max_message_bytes: int, budget: ByteBudget, connection_seconds: float | None = None
    ) -> None:
        self.max_message_bytes = max_message_bytes
        self.budget = budget
        self.connection_seconds = connection_seconds
        self.buffer = memoryview(bytearray(_READ_BYTES))
        self._methods: dict[bytes, tuple[Method, frozenset[str]]] = {}
        self._listeners: list[asyncio.Server] = []
        self._connections: set[Connection] = set()
        self._stopping = False
        self._empty = asyncio.Event()

    @property
    def connections(self) -> int:
        return len(self._connections)

    def add(self, path: str, method: Method, *, client_names: frozenset[str] = frozenset()) -> None:
        """Serve `/package.Service/Method`. With `client_names`, only for who shows a certificate with one of them."""
        self._methods[path.encode()] = (method, client_names)

    async def listen(
        self, host: str, port: int, *, tls: ssl.SSLContext | None = None, shared: bool = False
    ) -> int:
        """Take calls at an address, 0 for a free port; gives the port. Raises OSError.

        `shared`: other processes of ours listen on the same port.
        """
        try:
            listener = socket.create_server(
                (host, port),
                family=socket.AF_INET6 if ":" in host else socket.AF_INET,
                reuse_port=shared,
                dualstack_ipv6=host == "::",
            )
        except OSError as error:
            raise OSError(f"cannot listen on {address_of(host, port)}: {error.strerror}") from error
        _notice_the_dead(listener)
        loop = asyncio.get_running_loop()
        self._listeners.append(
            await loop.create_server(lambda: Connection(self), sock=listener, ssl=tls, backlog=_BACKLOG)
        )
        return int(listener.getsockname()[1])

    async def stop(self, grace: float = 0.0) -> None:
        """Take no more calls, give those that are open so many seconds, and end what is left."""
        self._stopping = True
        for listener in self._listeners:
            listener.close()
        for connection in self._connections:
            connection.retire()
        with suppress(TimeoutError):
            async with asyncio.timeout(grace):
                await self._until_empty()
        for connection in tuple(self._connections):
            connection.abort()
        await self._until_empty()

    async def _until_empty(self) -> None:
        if self._connections:
            await self._empty.wait()

    # For the connections

    def take(self, connection: Connection) -> bool:
        """Know of it; False when it comes too late."""
        if not self._stopping:
            self._connections.add(connection)
        return not self._stopping

    def lost(self, connection: Connection) -> None:
        self._connections.discard(connection)
        if self._stopping and not self._connections:
            self._empty.set()

    def open(self, path: bytes, call: Call) -> None:
        """Find the method that the call is for, or end it."""
        if path not in self._methods:
            call.end(Status.UNIMPLEMENTED, "no such method")
            return
        method, names = self._methods[path]
        if names and not names & call.peer_names:
            call.end(Status.PERMISSION_DENIED, "the client certificate has no allowed name")
        else:
            call.receiver = method(call)
            if call.over:
                call.receiver.closed()


def _notice_the_dead(listener: socket.socket) -> None:
    """End connections whose client is gone without a word, or takes nothing. What they accept inherits this (Linux)."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (
        ("TCP_KEEPIDLE", _SILENT_SECONDS),
        ("TCP_KEEPINTVL", _SILENT_SECONDS // 6),
        ("TCP_KEEPCNT", 3),
        ("TCP_USER_TIMEOUT", _SILENT_SECONDS * 1000),
    ):
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def address_of(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

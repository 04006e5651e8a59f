"""The ext_proc server on a real socket, and a client that speaks to it as a gateway would."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import grpc
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

from picker.extproc.server import ExtProcServer
from picker.rpc import ByteBudget, RpcServer


class Service(Protocol):
    def add_to(self, server: RpcServer) -> None: ...


@asynccontextmanager
async def listening(
    *services: Service,
    max_message_bytes: int = 1 << 20,
    budget: ByteBudget | None = None,
    tls: ssl.SSLContext | None = None,
) -> AsyncIterator[int]:
    """Serve on a free port of the loopback interface; gives the port."""
    server = RpcServer(max_message_bytes=max_message_bytes, budget=budget or ByteBudget(1 << 30))
    for service in services:
        service.add_to(server)
    port = await server.listen("127.0.0.1", 0, tls=tls)
    try:
        yield port
    finally:
        await server.stop()


@dataclass(slots=True)
class GatewayStream:
    """One ext_proc stream from the gateway's side."""

    call: Any
    received: list[ProcessingResponse] = field(default_factory=list)

    async def send(self, *messages: ProcessingRequest) -> None:
        for message in messages:
            await self.call.write(message)

    async def receive(self) -> ProcessingResponse | None:
        """The next reply; None at the end of the stream."""
        reply = await asyncio.wait_for(self.call.read(), 60)
        if reply is grpc.aio.EOF:
            return None
        self.received.append(reply)
        return reply

    async def receive_until(self, is_last: Callable[[ProcessingResponse], bool]) -> list[ProcessingResponse]:
        replies: list[ProcessingResponse] = []
        while not replies or not is_last(replies[-1]):
            reply = await self.receive()
            assert reply is not None, f"the stream ended after {replies}"
            replies.append(reply)
        return replies

    async def receive_all(self) -> list[ProcessingResponse]:
        """The replies up to the end of the stream."""
        replies = []
        while (reply := await self.receive()) is not None:
            replies.append(reply)
        return replies

    async def finish(self) -> None:
        """Half-close and wait for the server's end."""
        await self.call.done_writing()
        await self.receive_all()

    def reset(self) -> None:
        self.call.cancel()


@dataclass(slots=True)
class GatewayClient:
    server: ExtProcServer
    port: int
    channel: grpc.aio.Channel

    def open(self) -> GatewayStream:
        return GatewayStream(ExternalProcessorStub(self.channel).Process())


@asynccontextmanager
async def gateway_client(server: ExtProcServer) -> AsyncIterator[GatewayClient]:
    # Without probing, the client takes in 64 KiB a stream that nobody reads, and no more.
    options = [
        ("grpc.max_receive_message_length", -1),
        ("grpc.max_send_message_length", -1),
        ("grpc.http2.bdp_probe", 0),
    ]
    async with (
        listening(server, max_message_bytes=server.max_message_bytes, budget=server.budget) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=options) as channel,
    ):
        yield GatewayClient(server, port, channel)


async def eventually(holds: Callable[[], bool], seconds: float = 60.0) -> None:
    """Wait for something that other tasks or processes bring about; fails when it does not come."""
    async with asyncio.timeout(seconds):
        while not holds():  # there is no event to wait for in another process
            await asyncio.sleep(0.005)

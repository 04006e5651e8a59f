"""Clients that check every byte, over each way that HTTP has of sending one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum

import h2.events
import httpx
from h2.connection import H2Connection

from tests.support.gateway import Gateway

CHUNK_BYTES = 17_000


class Framing(StrEnum):
    """How the client's request body is framed."""

    CONTENT_LENGTH = "http1-content-length"
    CHUNKED = "http1-chunked"
    HTTP2 = "http2"


async def in_chunks(body: bytes) -> AsyncIterator[bytes]:
    for start in range(0, len(body), CHUNK_BYTES):
        yield body[start : start + CHUNK_BYTES]


async def post(
    gateway: Gateway,
    framing: Framing,
    body: bytes,
    path: str = "/v1/completions",
    headers: list[tuple[str, str]] | None = None,
) -> httpx.Response:
    async with gateway.client(http2=framing is Framing.HTTP2) as client:
        content = in_chunks(body) if framing is Framing.CHUNKED else body
        return await client.post(path, content=content, headers=headers)


async def raw_http1(gateway: Gateway, request: bytes) -> bytes:
    """Send bytes as they are, and read to the end: for requests that no tidy client would send."""
    reader, writer = await asyncio.open_connection("127.0.0.1", gateway.envoy.port)
    try:
        writer.write(request)
        await writer.drain()
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


@dataclass(slots=True)
class EarlyAnswer:
    """What an HTTP/2 upload that never ends was answered with."""

    status: int = 0
    body: bytes = b""
    over: bool = False


async def upload_without_end(port: int, size: int) -> EarlyAnswer:
    """POST `size` bytes over HTTP/2, without ever ending the request, and take the answer that comes anyway.

    httpx would not do: when a stream is reset while it sends, it raises and the answer is lost.
    """
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = H2Connection()
    connection.initiate_connection()
    headers = [(":method", "POST"), (":path", "/v1/completions"), (":authority", "a"), (":scheme", "http")]
    connection.send_headers(1, headers)
    answer = EarlyAnswer()
    try:
        while not answer.over:
            room = min(size, connection.local_flow_control_window(1), connection.max_outbound_frame_size)
            if room and not answer.status:
                connection.send_data(1, b"x" * room)
                size -= room
            writer.write(connection.data_to_send())
            await writer.drain()
            if not room or answer.status:
                _take(connection.receive_data(await asyncio.wait_for(reader.read(65_536), 60)), answer)
    finally:
        writer.close()
    return answer


def _take(events: list[h2.events.Event], answer: EarlyAnswer) -> None:
    for event in events:
        match event:
            case h2.events.ResponseReceived():
                answer.status = int(dict(event.headers)[b":status"])
            case h2.events.DataReceived():
                answer.body += event.data
            case h2.events.StreamEnded() | h2.events.StreamReset():
                answer.over = True

"""Clients that check every byte, over each way that HTTP has of sending one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from enum import StrEnum

import httpx

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
        return await asyncio.wait_for(reader.read(), 20)
    finally:
        writer.close()

"""A model server's stand-in that records exactly what reached it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

Respond = Callable[[web.Request, bytes], Awaitable[web.StreamResponse]]


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    method: str
    path: str
    headers: list[tuple[str, str]]
    body: bytes

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.body).hexdigest()

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name]


@dataclass(slots=True)
class Upstream:
    """Answers 200 with the sha256 of what came; `/sse/<n>` with n numbered events and `[DONE]`."""

    address: str = ""
    respond: Respond | None = None
    requests: list[RecordedRequest] = field(default_factory=list)
    aborted: int = 0

    async def handle(self, request: web.Request) -> web.StreamResponse:
        try:
            body = await request.read()
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        headers = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in request.raw_headers]
        recorded = RecordedRequest(request.method, request.path_qs, headers, body)
        self.requests.append(recorded)
        if self.respond is not None:
            return await self.respond(request, body)
        if request.path.startswith("/sse/"):
            return await self.stream_events(request, int(request.path.rsplit("/", 1)[1]))
        return web.json_response({"sha256": recorded.sha256, "bytes": len(body)})

    async def stream_events(
        self, request: web.Request, count: int, *, pause: float = 0.0
    ) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        try:
            for number in range(count):
                await response.write(sse_event(number))
                await asyncio.sleep(pause)
            await response.write(b"data: [DONE]\n\n")
            await response.write_eof()
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        return response


def sse_event(number: int) -> bytes:
    return b'data: {"n": %d, "text": "token number %d"}\n\n' % (number, number)


def sse_stream(count: int) -> bytes:
    """All that a client of `/sse/<count>` must receive, byte for byte."""
    return b"".join(map(sse_event, range(count))) + b"data: [DONE]\n\n"


@asynccontextmanager
async def upstream(respond: Respond | None = None) -> AsyncIterator[Upstream]:
    server = Upstream(respond=respond)
    app = web.Application(client_max_size=64 * 1024 * 1024)
    app.router.add_route("*", "/{path:.*}", server.handle)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    server.address = f"{host}:{port}"
    try:
        yield server
    finally:
        await runner.cleanup()

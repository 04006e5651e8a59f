"""A model server's stand-in that can be made to fail, and whose answers a client can check to the byte."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import socket
from dataclasses import dataclass, field

from aiohttp import web

IDLE_METRICS = 'vllm:num_requests_running{engine="0",model_name="tiny"} 0\n'


@dataclass(slots=True)
class CheckedEngine:
    """Answers every POST with the sha256 of the body that came, numbered events, and `[DONE]`.

    How many events and how fast is the request's to say (`"events"` and `"pause"` in its body). The engine's
    own attributes make it misbehave; its address stays the same through `die` and `start`.
    """

    address: str = ""
    metrics: str | None = None  # None: the truth
    stalls_at: int | None = None  # no event from this one on, until the attribute is None again
    silent: bool = False  # takes requests and answers nothing
    running: int = 0
    served: int = 0
    arrivals: list[list[tuple[str, str]]] = field(default_factory=list)  # the headers of each request
    _open: list[web.Request] = field(default_factory=list)
    _runner: web.AppRunner | None = None

    @property
    def is_down(self) -> bool:
        return self._runner is None

    async def start(self) -> None:
        app = web.Application(client_max_size=64 * 1024 * 1024)
        app.add_routes(
            [
                web.get("/metrics", self._metrics),
                # As an engine answers that is too old to be asked.
                web.get("/kv_event_sources", self._unknown),
                web.route("*", "/{path:.*}", self._answer),
            ]
        )
        self._runner = web.AppRunner(
            app,
            access_log=None,
            shutdown_timeout=0.1,
            handler_cancellation=True,
            auto_decompress=False,  # what came is what counts
        )
        await self._runner.setup()
        host, _, port = (self.address or "127.0.0.1:0").partition(":")
        listener = socket.create_server((host, int(port)), backlog=1024)
        await web.SockSite(self._runner, listener).start()
        self.address = f"{host}:{listener.getsockname()[1]}"

    async def die(self) -> None:
        """As a crashed process: the port is closed, open connections are reset in the middle of whatever."""
        for request in list(self._open):
            if request.transport is not None:
                request.transport.abort()
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None

    async def _metrics(self, _: web.Request) -> web.Response:
        truth = IDLE_METRICS.replace("} 0", f"}} {self.running}")
        return web.Response(text=truth if self.metrics is None else self.metrics)

    async def _unknown(self, _: web.Request) -> web.Response:
        return web.Response(status=404)

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self._open.append(request)
        self.running += 1
        try:
            return await self._stream(request)
        except ConnectionError:
            # The gateway has left, or this engine has just died; nothing more may come.
            if request.transport is not None:
                request.transport.abort()
            return web.Response()
        finally:
            self.running -= 1
            self._open.remove(request)

    async def _stream(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.served += 1
        self.arrivals.append(
            [(name.decode().lower(), value.decode("latin-1")) for name, value in request.raw_headers]
        )
        wanted = json.loads(body) if body[:1] == b"{" else {}
        while self.silent:
            await asyncio.sleep(0.02)
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(first_event(body))
        for number in range(wanted.get("events", 0)):
            while self.stalls_at is not None and number >= self.stalls_at:
                await asyncio.sleep(0.02)
            await response.write(numbered_event(number))
            await asyncio.sleep(wanted.get("pause", 0.0))
        await response.write(LAST_EVENT)
        with contextlib.suppress(ConnectionError):
            await response.write_eof()
        return response


LAST_EVENT = b"data: [DONE]\n\n"


def first_event(body: bytes) -> bytes:
    return b'data: {"sha256": "%s"}\n\n' % hashlib.sha256(body).hexdigest().encode()


def numbered_event(number: int) -> bytes:
    return b'data: {"n": %d, "text": "token number %d"}\n\n' % (number, number)


def whole_answer(body: bytes, events: int) -> bytes:
    """All that the client of such a request must get."""
    return first_event(body) + b"".join(map(numbered_event, range(events))) + LAST_EVENT

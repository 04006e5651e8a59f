"""The admin HTTP server: /metrics, /healthz, /readyz, /status, /decisions, /events, /recording and the dashboard."""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib.resources import files
from typing import Any

import msgspec
from aiohttp import web

from picker import __version__
from picker.admin.access import TOKEN_HEADER, Access
from picker.admin.feed import Feed, TooManyWatchers, event
from picker.admin.views import Views
from picker.telemetry import Telemetry
from picker.telemetry.live_recording import TooManyListeners

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

MAX_DECISIONS = 1000
# What the dashboard gets with each tick.
_FEED_DECISIONS = 40


class AdminServer:
    """Serves until `stop`.

    ready: why the service cannot take requests now, None when it can.
    """

    def __init__(
        self,
        telemetry: Telemetry,
        views: Views,
        access: Access,
        *,
        ready: Callable[[], str | None],
        public_metrics: bool = True,
    ) -> None:
        self._telemetry = telemetry
        self._views = views
        self._access = access
        self._ready = ready
        self._feed = Feed(self._state)
        self._page = _Page()
        self._public = {"/", "/healthz", "/readyz"} | ({"/metrics"} if public_metrics else set())
        app = web.Application(middlewares=[self._guard], client_max_size=64 * 1024)
        app.add_routes(
            [
                web.get("/", self._dashboard),
                web.get("/metrics", self._metrics),
                web.get("/healthz", self._health),
                web.get("/readyz", self._readiness),
                web.get("/status", self._status),
                web.get("/decisions", self._decisions),
                web.get("/decisions/{id}", self._decision),
                web.get("/events", self._events),
                web.get("/recording", self._recording),
            ]
        )
        self._runner = web.AppRunner(app, access_log=None, handle_signals=False, shutdown_timeout=2.0)

    async def start(self, host: str, port: int) -> int:
        """Listen; 0 takes a free port. Returns the port."""
        await self._runner.setup()
        site = web.TCPSite(self._runner, host, port)
        await site.start()
        return int(self._runner.addresses[0][1])

    async def stop(self) -> None:
        self._feed.close()
        self._telemetry.recording.close()
        await self._runner.cleanup()

    @web.middleware
    async def _guard(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        if request.path not in self._public:
            token = request.headers.get(TOKEN_HEADER)
            authorization = f"Bearer {token}" if token else request.headers.get("Authorization")
            refusal = await self._access.refusal(authorization, request.headers.get("Host"))
            if refusal is not None:
                return _json({"error": refusal}, status=401, headers={"WWW-Authenticate": "Bearer"})
        try:
            response = await handler(request)
        except web.HTTPException as error:
            return _json({"error": error.reason}, status=error.status)
        if not response.prepared:
            response.headers.update(_SAFE_HEADERS)
        return response

    async def _dashboard(self, request: web.Request) -> web.StreamResponse:
        return web.Response(
            body=self._page.body,
            content_type="text/html",
            charset="utf-8",
            headers={"Content-Security-Policy": self._page.policy},
        )

    async def _metrics(self, request: web.Request) -> web.StreamResponse:
        text, content_type = self._telemetry.metrics.expose(request.headers.get("Accept", ""))
        return web.Response(body=text, headers={"Content-Type": content_type})

    async def _health(self, request: web.Request) -> web.StreamResponse:
        return web.Response(text="ok\n")

    async def _readiness(self, request: web.Request) -> web.StreamResponse:
        reason = self._ready()
        return web.Response(text=f"{reason or 'ok'}\n", status=503 if reason else 200)

    async def _status(self, request: web.Request) -> web.StreamResponse:
        return _json({"version": __version__, "pool": self._views.pool(), "queues": self._views.queues()})

    async def _decisions(self, request: web.Request) -> web.StreamResponse:
        text = request.query.get("limit", "50")
        if not re.fullmatch(r"[0-9]{1,6}", text):
            return _json({"error": "limit must be a number"}, status=400)
        return _json(
            self._views.decisions(min(int(text), MAX_DECISIONS), request.query.get("policy_class", ""))
        )

    async def _decision(self, request: web.Request) -> web.StreamResponse:
        found = self._views.decision(request.match_info["id"])
        if found is None:
            return _json({"error": "no such decision, or it is too long ago"}, status=404)
        return _json(found)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        events = self._feed.watch()
        response = web.StreamResponse(
            headers={"Content-Type": "text/event-stream", "Cache-Control": "no-store", **_SAFE_HEADERS}
        )
        try:
            await response.prepare(request)
            await response.write(event("history", self._views.history()) + event("state", self._state()))
            async for message in events:
                await response.write(message)
        except TooManyWatchers:
            await response.write(event("refused", "too many watchers"))
        except ConnectionResetError:
            pass
        finally:
            await events.aclose()  # type: ignore[attr-defined]
        return response

    async def _recording(self, request: web.Request) -> web.StreamResponse:
        try:
            listener = self._telemetry.recording.listen()
        except TooManyListeners:
            return _json({"error": "as many recordings are under way as are allowed"}, status=429)
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson", **_SAFE_HEADERS})
        try:
            await response.prepare(request)
            async for text in listener:
                await response.write(text.encode())
        except ConnectionResetError:
            pass
        finally:
            listener.leave()
        return response

    def _state(self) -> dict[str, Any]:
        reason = self._ready()
        return {
            "version": __version__,
            "ready": reason is None,
            "reason": reason or "",
            "pool": self._views.pool(),
            "queues": self._views.queues(),
            **self._views.decisions(_FEED_DECISIONS),
        }


_SAFE_HEADERS = {
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
}


class _Page:
    """The dashboard, with a policy that lets run what is in the file and nothing else."""

    def __init__(self) -> None:
        self.body = (files("picker.admin") / "dashboard.html").read_bytes()
        scripts, styles = self._hashes(b"script"), self._hashes(b"style")
        self.policy = (
            f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; "
            "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
        )

    def _hashes(self, tag: bytes) -> str:
        parts = re.findall(b"<%b>(.*?)</%b>" % (tag, tag), self.body, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part).digest()).decode() for part in parts)
        return " ".join(f"'sha256-{digest}'" for digest in digests) or "'none'"


def _json(data: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(data) + b"\n",
        status=status,
        content_type="application/json",
        headers=headers,
    )

"""A real Envoy that asks a real ext_proc server: the harness of the end-to-end tests."""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace

import httpx

from picker.extproc.access_log import AccessLogService
from picker.extproc.handler import RequestHandler
from picker.extproc.server import ExtProcServer
from picker.simulation.envoy import EnvoyProcess
from picker.simulation.envoy_config import EnvoyOptions, ResponseObservation, bootstrap
from tests.support.servers import listening

MODES = (ResponseObservation.ACCESS_LOG, ResponseObservation.STREAM)


@dataclass(frozen=True, slots=True)
class LoggedRequest:
    """One entry of Envoy's access log."""

    request_id: str
    status: int


@dataclass(slots=True)
class Gateway:
    """`server` serves the handler; `logged` is what the access log has told so far."""

    server: ExtProcServer
    envoy: EnvoyProcess
    logged: list[LoggedRequest] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.envoy.port}"

    @property
    def active_streams(self) -> int:
        return self.server.stats.active_streams

    def client(self, *, http2: bool = False, timeout: float = 30.0) -> httpx.AsyncClient:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        return httpx.AsyncClient(
            base_url=self.url, http1=not http2, http2=http2, timeout=timeout, limits=limits, trust_env=False
        )

    async def spurious_messages(self) -> int:
        """How often Envoy found that an answer broke the protocol."""
        stats = await self.envoy.stats()
        return sum(value for name, value in stats.items() if name.endswith("spurious_msgs_received"))


@asynccontextmanager
async def gateway(
    handler: RequestHandler,
    *,
    server: ExtProcServer | None = None,
    tls: ssl.SSLContext | None = None,
    **options: object,
) -> AsyncIterator[Gateway]:
    """Start both; `options` are those of `EnvoyOptions`. `server` only where its own settings matter."""
    ext_proc = server or ExtProcServer(handler)
    logged: list[LoggedRequest] = []
    access_log = AccessLogService(lambda *entry: logged.append(LoggedRequest(*entry)))
    async with AsyncExitStack() as stack:
        port = await stack.enter_async_context(
            listening(ext_proc, access_log, max_message_bytes=ext_proc.max_message_bytes, tls=tls)
        )
        chosen = replace(EnvoyOptions(picker=("127.0.0.1", port)), **options)  # type: ignore[arg-type]
        chosen = replace(chosen, picker_tls=tls is not None)
        envoy = await stack.enter_async_context(EnvoyProcess(bootstrap(chosen).to_json()))
        yield Gateway(ext_proc, envoy, logged)

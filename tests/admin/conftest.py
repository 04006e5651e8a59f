"""An admin server over telemetry that holds whatever a test puts there."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp
import pytest

from picker.admin.access import Access
from picker.admin.introspection import IntrospectionServer
from picker.admin.server import AdminServer
from picker.admin.token_review import TokenReview
from picker.admin.views import Views
from picker.telemetry import ClassStats, DecisionRecord, EndpointStats, Telemetry
from picker.telemetry.decisions import Candidate, Rejection

DECISION = DecisionRecord(
    id="abc-1",
    at=1_700_000_000.5,
    policy_class="premium",
    outcome="dispatched",
    model="llama",
    prompt_tokens=1000,
    cached_tokens=400,
    uncached_tokens=600,
    cost=600,
    wait=0.25,
    deficit=-3,
    chosen="10.0.0.1:8000",
    candidates=(
        Candidate(
            "10.0.0.1:8000",
            "pod-a",
            612.5,
            400,
            {"uncached_tokens": 600, "booked_prefill_tokens": 0, "running_requests": 1},
        ),
    ),
    rejected=(Rejection("10.0.0.2:8000", "pod-b", "taint"),),
)


@dataclass
class Admin:
    """A running server. Change `classes`, `endpoints` and `not_ready`, or add to `telemetry.decisions`."""

    stack: AsyncExitStack
    telemetry: Telemetry
    clock: list[float]
    classes: list[ClassStats] = field(default_factory=list)
    endpoints: list[EndpointStats] = field(default_factory=list)
    not_ready: str | None = None
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def views(self) -> Views:
        return Views(self.telemetry, lambda: self.clock[0])

    async def serve(
        self,
        *,
        host: str = "127.0.0.1",
        token_file: Path | None = None,
        review: TokenReview | None = None,
        public_metrics: bool = True,
    ) -> None:
        """`host` is what the server believes to listen on; it listens on loopback in any case."""
        server = AdminServer(
            self.telemetry,
            self.views(),
            Access(host, token_file, review),
            ready=lambda: self.not_ready,
            public_metrics=public_metrics,
        )
        self.port = await server.start("127.0.0.1", 0)
        self.stack.push_async_callback(server.stop)

    async def serve_grpc(
        self, *, host: str = "127.0.0.1", token_file: Path | None = None, review: TokenReview | None = None
    ) -> str:
        server = IntrospectionServer(self.telemetry, self.views(), Access(host, token_file, review))
        port = await server.start("127.0.0.1", 0)
        self.stack.push_async_callback(server.stop)
        return f"127.0.0.1:{port}"


@pytest.fixture
async def admin() -> AsyncIterator[Admin]:
    clock = [0.0]
    async with AsyncExitStack() as stack:
        admin = Admin(stack, Telemetry(clock=lambda: clock[0], version="1.2.3"), clock)
        admin.telemetry.sources.classes = lambda: admin.classes
        admin.telemetry.sources.endpoints = lambda: admin.endpoints
        admin.telemetry.sources.synced = lambda: True
        yield admin


Get = Callable[..., "aiohttp.client._RequestContextManager"]


@pytest.fixture
async def get(admin: Admin) -> AsyncIterator[Get]:
    """GET a path of the server, with a time limit."""
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield lambda path, **headers: session.get(
            admin.url + path, headers={k.replace("_", "-"): v for k, v in headers.items()}
        )

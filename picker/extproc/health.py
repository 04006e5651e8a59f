"""gRPC health (grpc.health.v1) under the names that gateways and Kubernetes probes ask for."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.extproc.server import SERVICE_NAME

LIVENESS = "liveness"
# As readiness, but it does not ask for the leadership: a replica that can take over at once.
STANDBY = "standby"
_NAMES = (LIVENESS, STANDBY, "", "readiness", SERVICE_NAME)

_Status = health_pb2.HealthCheckResponse
Context = grpc.aio.ServicerContext[Any, Any]


class HealthState:
    """What the health services report. The application sets it; changes reach watchers at once.

    `synced`: the pool has been read once (it may be empty). `leader`: this replica leads, or no election is on.
    `draining`: shutting down. `serving`: somebody listens for the gateway. Liveness depends on none of them: a
    follower or a draining replica is alive.
    """

    def __init__(self, *, synced: bool = False, leader: bool = True, draining: bool = False) -> None:
        self._synced = synced
        self._leader = leader
        self._draining = draining
        self._serving = True
        self._changed = asyncio.Event()

    @property
    def ready(self) -> bool:
        return self._leader and self.fit

    @property
    def fit(self) -> bool:
        """Ready, or would be as soon as it led."""
        return self._synced and self._serving and not self._draining

    def update(
        self,
        *,
        synced: bool | None = None,
        leader: bool | None = None,
        draining: bool | None = None,
        serving: bool | None = None,
    ) -> None:
        self._synced = self._synced if synced is None else synced
        self._leader = self._leader if leader is None else leader
        self._draining = self._draining if draining is None else draining
        self._serving = self._serving if serving is None else serving
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    @property
    def changed(self) -> asyncio.Event:
        """Set at the next update. Take it before looking at the state, so that no update is missed."""
        return self._changed


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]  # the stub is untyped
    """Serves one `HealthState`. Unknown names are NOT_FOUND."""

    def __init__(self, state: HealthState) -> None:
        self._state = state

    def add_to(self, server: grpc.aio.Server) -> None:
        health_pb2_grpc.add_HealthServicer_to_server(self, server)

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> health_pb2.HealthCheckResponse:
        status = self._status(request.service)
        if status is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, "unknown service")
        return _Status(status=status)

    async def List(
        self, request: health_pb2.HealthListRequest, context: Context
    ) -> health_pb2.HealthListResponse:
        statuses = {name: _Status(status=self._status(name)) for name in _NAMES}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(
        self, request: health_pb2.HealthCheckRequest, context: Context
    ) -> AsyncIterator[health_pb2.HealthCheckResponse]:
        last = None
        while True:
            changed = self._state.changed
            status = self._status(request.service)
            if status is None:
                status = _Status.SERVICE_UNKNOWN  # the health protocol wants an answer here, not an error
            if status != last:
                yield _Status(status=status)
                last = status
            await changed.wait()

    def _status(self, name: str) -> int | None:
        if name not in _NAMES:
            return None
        serves = name == LIVENESS or (self._state.fit if name == STANDBY else self._state.ready)
        return int(_Status.SERVING if serves else _Status.NOT_SERVING)

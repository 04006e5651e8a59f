"""gRPC health (grpc.health.v1) under the names that gateways and Kubernetes probes ask for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from google.protobuf.message import DecodeError
from grpc_health.v1 import health_pb2

from picker.extproc.server import SERVICE_NAME
from picker.rpc import Call, Receiver, RpcServer, Status

LIVENESS = "liveness"
# As readiness, but it does not ask for the leadership: a replica that can take over at once.
STANDBY = "standby"
_NAMES = (LIVENESS, STANDBY, "", "readiness", SERVICE_NAME)

_SERVICE = "/grpc.health.v1.Health"
_Status = health_pb2.HealthCheckResponse


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


class HealthService:
    """Serves one `HealthState`. Unknown names are NOT_FOUND."""

    def __init__(self, state: HealthState) -> None:
        self._state = state

    def add_to(self, server: RpcServer) -> None:
        server.add(f"{_SERVICE}/Check", lambda call: _Once(call, self._check))
        server.add(f"{_SERVICE}/List", lambda call: _Once(call, self._list))
        server.add(f"{_SERVICE}/Watch", lambda call: _Watch(call, self._state))

    def _check(self, call: Call, message: bytes) -> None:
        status = _status(self._state, health_pb2.HealthCheckRequest.FromString(message).service)
        if status is None:
            call.end(Status.NOT_FOUND, "unknown service")
        else:
            call.send(_Status(status=status).SerializeToString())

    def _list(self, call: Call, message: bytes) -> None:
        statuses = {name: _Status(status=_status(self._state, name)) for name in _NAMES}
        call.send(health_pb2.HealthListResponse(statuses=statuses).SerializeToString())


class _Once(Receiver):
    """A call of one question and one answer."""

    def __init__(self, call: Call, answer: Callable[[Call, bytes], None]) -> None:
        self._call = call
        self._answer = answer

    def received(self, message: bytes) -> None:
        try:
            self._answer(self._call, message)
        except DecodeError:
            self._call.end(Status.INTERNAL, "not a message of this method")
        self._call.end()

    def half_closed(self) -> None:
        self._call.end(Status.INTERNAL, "no message came")


class _Watch(Receiver):
    """Says each change of a status until the client has heard enough."""

    def __init__(self, call: Call, state: HealthState) -> None:
        self._call = call
        self._state = state
        self._watching: asyncio.Task[None] | None = None

    def received(self, message: bytes) -> None:
        try:
            name = health_pb2.HealthCheckRequest.FromString(message).service
        except DecodeError:
            self._call.end(Status.INTERNAL, "not a HealthCheckRequest")
            return
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch(name))

    async def _watch(self, name: str) -> None:
        last = None
        while True:
            changed = self._state.changed
            status = _status(self._state, name)
            if status is None:
                status = _Status.SERVICE_UNKNOWN  # the health protocol wants an answer here, not an error
            if status != last:
                self._call.send(_Status(status=status).SerializeToString())
                last = status
            await changed.wait()

    def closed(self) -> None:
        if self._watching is not None:
            self._watching.cancel()


def _status(state: HealthState, name: str) -> int | None:
    if name not in _NAMES:
        return None
    serves = name == LIVENESS or (state.fit if name == STANDBY else state.ready)
    return int(_Status.SERVING if serves else _Status.NOT_SERVING)

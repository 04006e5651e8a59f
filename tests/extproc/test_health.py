"""gRPC health: who is alive, and who is ready (C53)."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from picker.extproc.health import HealthService, HealthState
from picker.extproc.server import SERVICE_NAME, ExtProcServer
from tests.support.handlers import StubHandler
from tests.support.servers import listening

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
READINESS_NAMES = ["", "readiness", SERVICE_NAME]


@asynccontextmanager
async def probe(state: HealthState) -> AsyncIterator[health_pb2_grpc.HealthStub]:
    """A health client of a server that also serves ext_proc, as on the main port."""
    server = ExtProcServer(StubHandler())
    async with (
        listening(server, HealthService(state)) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield health_pb2_grpc.HealthStub(channel)


async def status(stub: health_pb2_grpc.HealthStub, name: str) -> int:
    return int((await stub.Check(health_pb2.HealthCheckRequest(service=name))).status)


@pytest.mark.parametrize(
    ("state", "ready"),
    [
        (HealthState(), False),  # before the first list of the pool
        (HealthState(synced=True), True),  # an empty pool counts as synced
        (HealthState(synced=True, leader=False), False),
        (HealthState(synced=True, draining=True), False),
    ],
)
async def test_readiness_follows_the_state_and_liveness_does_not(state: HealthState, ready: bool) -> None:
    async with probe(state) as stub:
        assert await status(stub, "liveness") == SERVING
        for name in READINESS_NAMES:
            assert await status(stub, name) == (SERVING if ready else NOT_SERVING)


@pytest.mark.parametrize(
    ("state", "fit"),
    [
        (HealthState(leader=False), False),
        (HealthState(synced=True, leader=False), True),
        (HealthState(synced=True), True),
        (HealthState(synced=True, leader=False, draining=True), False),
    ],
)
async def test_a_follower_stands_by(state: HealthState, fit: bool) -> None:
    """A Deployment counts pods that can take over; which of them is asked is for the Service to say."""
    async with probe(state) as stub:
        assert await status(stub, "standby") == (SERVING if fit else NOT_SERVING)


async def test_an_unknown_name_is_not_found() -> None:
    async with probe(HealthState(synced=True)) as stub:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await status(stub, "nonsense")
        assert error.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_watcher_hears_of_each_change_once() -> None:
    state = HealthState()
    async with probe(state) as stub:
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="readiness"))
        assert (await watch.read()).status == NOT_SERVING
        state.update(synced=True)
        assert (await watch.read()).status == SERVING
        state.update(synced=True)
        state.update(draining=True)
        assert (await watch.read()).status == NOT_SERVING
        watch.cancel()


async def test_watching_an_unknown_name_says_so() -> None:
    async with probe(HealthState()) as stub:
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="nonsense"))
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        watch.cancel()


async def test_all_names_can_be_listed() -> None:
    async with probe(HealthState(synced=True)) as stub:
        listing = await stub.List(health_pb2.HealthListRequest())
        assert {name: answer.status for name, answer in listing.statuses.items()} == dict.fromkeys(
            ["liveness", "standby", *READINESS_NAMES], SERVING
        )

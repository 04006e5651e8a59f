"""The Introspection service, and that it says the same as the JSON."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import grpc
import pytest

from picker.admin.views import decision_view
from picker.api.v1 import introspection_pb2 as pb
from picker.api.v1 import introspection_pb2_grpc as pb_grpc
from picker.telemetry import ClassStats, DecisionRecord, EndpointStats

from .conftest import DECISION, Admin


async def test_pool_and_queues(admin: Admin) -> None:
    admin.classes = [ClassStats("premium", 3, waiting_requests=2, dropped={"deadline": 1})]
    admin.endpoints = [EndpointStats("u1", "pod-a", "10.0.0.1:80", kv_usage=0.5)]
    address = await admin.serve_grpc()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.IntrospectionStub(channel)
        queues = await stub.GetQueues(pb.GetQueuesRequest(), timeout=20)
        pool = await stub.GetPool(pb.GetPoolRequest(), timeout=20)
    (premium,) = queues.classes
    assert (premium.waiting_requests, dict(premium.dropped)) == (2, {"deadline": 1})
    assert not premium.HasField("recent_share")
    assert pool.synced
    assert pool.endpoints[0].kv_usage == 0.5
    assert not pool.endpoints[0].HasField("engine_running")


async def test_decisions(admin: Admin) -> None:
    admin.telemetry.decisions.add(DECISION)
    address = await admin.serve_grpc()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.IntrospectionStub(channel)
        found = await stub.GetDecision(pb.GetDecisionRequest(id="abc-1"), timeout=20)
        assert (found.deficit, found.candidates[0].terms["uncached_tokens"]) == (-3, 600)
        assert (await stub.ListDecisions(pb.ListDecisionsRequest(), timeout=20)).decisions[0] == found
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub.GetDecision(pb.GetDecisionRequest(id="gone"), timeout=20)
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watching_decisions_of_one_class(admin: Admin) -> None:
    address = await admin.serve_grpc()
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.IntrospectionStub(channel)
        call = stub.WatchDecisions(pb.WatchDecisionsRequest(policy_class="premium"), timeout=20)
        await call.wait_for_connection()
        admin.telemetry.decisions.add(DecisionRecord("other", 0.0, "regular", "dispatched"))
        admin.telemetry.decisions.add(DECISION)
        seen = await call.read()
        assert isinstance(seen, pb.Decision)
        assert (seen.id, seen.missed) == ("abc-1", 0)


async def test_who_has_no_token_gets_nothing(admin: Admin, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret")
    address = await admin.serve_grpc(token_file=token_file)
    async with grpc.aio.insecure_channel(address) as channel:
        stub = pb_grpc.IntrospectionStub(channel)
        for metadata in ((), (("authorization", "Bearer wrong"),)):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.GetQueues(pb.GetQueuesRequest(), metadata=metadata, timeout=20)
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.WatchDecisions(pb.WatchDecisionsRequest(), metadata=metadata, timeout=20).read()
            assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        right = (("authorization", "Bearer s3cret"),)
        await stub.GetQueues(pb.GetQueuesRequest(), metadata=right, timeout=20)


async def test_views_have_exactly_the_fields_of_the_messages(admin: Admin) -> None:
    admin.classes = [ClassStats("premium", 3)]
    admin.endpoints = [EndpointStats("u1", "pod-a", "10.0.0.1:80")]
    views, decision = admin.views(), decision_view(DECISION)
    pairs: list[tuple[dict[str, Any], Any]] = [
        (views.pool(), pb.Pool),
        (views.pool()["endpoints"][0], pb.Endpoint),
        (views.queues(), pb.Queues),
        (views.queues()["classes"][0], pb.PolicyClass),
        (decision | {"missed": 0}, pb.Decision),
        (decision["candidates"][0], pb.Candidate),
        (decision["rejected"][0], pb.Rejection),
    ]
    for view, message in pairs:
        assert set(view) == {field.name for field in message.DESCRIPTOR.fields}, message.DESCRIPTOR.name

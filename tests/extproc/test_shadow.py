"""Shadow mode over real gRPC: everything is decided and counted, and nothing is refused, held or sent anywhere."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse
from envoy.service.ext_proc.v3.external_processor_pb2_grpc import ExternalProcessorStub

from picker.app import App
from picker.extproc.conversation import BodyMode, ConversationLimits
from picker.extproc.handler import Refused
from picker.extproc.server import ExtProcServer
from picker.rpc import ByteBudget
from picker.settings import Settings
from picker.simulation.prompts import DEFAULT_TOKENIZER
from tests.support import messages
from tests.support.handlers import StubHandler, raising
from tests.support.messages import kind, set_header_values, streamed_pieces
from tests.support.servers import GatewayStream, gateway_client

LIMITS = ConversationLimits(max_body_bytes=1000, refuses=False)


async def refuse(handler: StubHandler, arrival: object) -> Refused:
    return Refused(429, "queue_full_requests", "too many")


async def exchange(stream: GatewayStream, *request: ProcessingRequest) -> list[ProcessingResponse]:
    """Send a request, play a response of two chunks when it has gone on, and give every reply."""
    await stream.send(*request)
    passed_on = await stream.receive_until(
        lambda reply: reply.request_body.response.body_mutation.streamed_response.end_of_stream
    )
    await stream.send(messages.response_headers(200), messages.response_body(b"one"))
    await stream.send(messages.response_body(b"two", end=True))
    await stream.call.done_writing()
    return passed_on + await stream.receive_all()


def assert_untouched(replies: list[ProcessingResponse], body: bytes) -> None:
    kinds = [kind(reply) for reply in replies]
    assert kinds[0] == "request_headers"
    assert "immediate_response" not in kinds
    assert not any(set_header_values(replies[0]))
    assert not replies[0].HasField("dynamic_metadata")
    pieces = streamed_pieces(replies, "request_body")
    assert b"".join(data for data, _ in pieces) == body
    assert [last for _, last in pieces] == [False] * (len(pieces) - 1) + [True]
    assert b"".join(data for data, _ in streamed_pieces(replies, "response_body")) == b"onetwo"


@pytest.mark.parametrize("decide", [refuse, raising(RuntimeError("a bug"))])
async def test_what_would_be_refused_is_passed_on(decide: Any) -> None:
    server = ExtProcServer(StubHandler(decide=decide), limits=LIMITS)
    async with gateway_client(server) as gateway:
        stream = gateway.open()
        body = messages.request_body(b"ab"), messages.request_body(b"cd", end=True)
        assert_untouched(await exchange(stream, messages.request_headers(), *body), b"abcd")
        assert sum(server.stats.refused.values()) == 1


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"budget": ByteBudget(max_bytes=500)},
        {"max_streams": 0},
    ],
    ids=["body limit", "memory", "streams"],
)
async def test_what_cannot_be_read_streams_through(changes: Any) -> None:
    server = ExtProcServer(StubHandler(), limits=LIMITS, **changes)
    async with gateway_client(server) as gateway:
        chunks = [messages.request_body(b"%d" % number * 100) for number in range(100)]
        whole = b"".join(chunk.request_body.body for chunk in chunks)
        request = (messages.request_headers(), *chunks, messages.request_body(b"", end=True))
        assert_untouched(await exchange(gateway.open(), *request), whole)
        assert sum(server.stats.refused.values()) == 1
    assert server.budget.stats.held_bytes == 0
    assert server.stats.active_streams == 0


async def test_a_buffered_body_that_is_too_large_goes_on() -> None:
    server = ExtProcServer(StubHandler(), limits=LIMITS)
    async with gateway_client(server) as gateway:
        stream = gateway.open()
        await stream.send(messages.request_headers(modes=(BodyMode.BUFFERED, BodyMode.NONE)))
        headers = await stream.receive()
        await stream.send(messages.request_body(b"x" * 2000, end=True))
        body = await stream.receive()
        assert headers is not None
        assert body is not None
        assert [kind(headers), kind(body)] == ["request_headers", "request_body"]
        assert not body.request_body.response.HasField("body_mutation")


POLICY = """
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
  - name: only
    policy_family: all
    cache_bucket: any
    quantum: 100
    max_running_per_worker: 1
"""


@asynccontextmanager
async def shadowing(directory: Path) -> AsyncIterator[tuple[App, Any]]:
    """A whole picker in shadow mode, with a pool of one engine that may run one request; and a client for it."""
    (directory / "policy.yaml").write_text(POLICY)
    pool = {"endpoints": [{"name": "pod", "address": "127.0.0.1:9", "metrics": False}]}
    (directory / "pool.yaml").write_text(json.dumps(pool))
    app = App(
        Settings.model_validate(
            {
                "extproc": {"host": "127.0.0.1", "port": 0, "health_port": 0, "shadow": True},
                "admin": {"port": 0, "grpc_port": 0},
                "pool": {"file": directory / "pool.yaml"},
                "policy": {"file": directory / "policy.yaml"},
                "tokens": {"models": {"*": DEFAULT_TOKENIZER}},
            }
        )
    )
    try:
        addresses = await app.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{addresses.extproc}") as channel:
            async with asyncio.timeout(60):
                while not app.health.ready:
                    await asyncio.sleep(0.01)
            yield app, ExternalProcessorStub(channel)
    finally:
        await app.stop()


async def test_decisions_are_recorded_and_no_request_waits_for_another(tmp_path: Path) -> None:
    async with shadowing(tmp_path) as (app, stub):
        body = json.dumps({"model": "tiny", "prompt": "A walk"}).encode()

        async def ask() -> tuple[GatewayStream, list[ProcessingResponse]]:
            stream = GatewayStream(stub.Process())
            await stream.send(messages.request_headers(headers=[("x-picker-endpoint", "pod")]))
            await stream.send(messages.request_body(body, end=True))
            return stream, await stream.receive_until(lambda reply: kind(reply) == "request_body")

        first, replies = await ask()
        # It runs until its response has passed, so that the next one would have to wait, by default a minute.
        second, more = await asyncio.wait_for(ask(), 30)
        for reply in (replies[0], more[0]):
            assert "x-gateway-destination-endpoint" not in set_header_values(reply)
            assert not reply.request_headers.response.header_mutation.remove_headers
            assert not reply.HasField("dynamic_metadata")
        assert [record.outcome for record in app.telemetry.decisions] == ["deadline", "dispatched"]
        assert next(record for record in app.telemetry.decisions if record.chosen).prompt_tokens > 1
        assert app.faces.extproc.stats.refused == {"deadline": 1}

        for stream in (first, second):
            await stream.send(messages.response_headers(200), messages.response_body(b"", end=True))
            await stream.finish()
        assert len(app.exchanges) == 0


async def test_a_request_that_makes_no_sense_is_the_engines_to_refuse(tmp_path: Path) -> None:
    async with shadowing(tmp_path) as (app, stub):
        stream = GatewayStream(stub.Process())
        request = messages.request_headers(), messages.request_body(b"{", end=True)
        assert_untouched(await exchange(stream, *request), b"{")
        assert app.faces.extproc.stats.refused == {"bad_request": 1}

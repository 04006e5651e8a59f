"""Request bodies through a real Envoy: each arrives as it was sent, whatever its size and framing."""

from __future__ import annotations

import hashlib
import json
import random

import pytest

from picker.extproc.conversation import ConversationLimits
from picker.extproc.handler import Arrival, Routed
from picker.extproc.server import ExtProcServer
from picker.simulation.envoy_config import BodyMode, ResponseObservation
from tests.support.clients import Framing, post, raw_http1, upload_without_end
from tests.support.gateway import MODES, gateway
from tests.support.handlers import StubHandler, refuse_bodiless_posts
from tests.support.servers import eventually
from tests.support.upstream import upstream

FRAMINGS = list(Framing)
SIZES = [0, 1, 300, 30_000, 61_999, 62_000, 62_001, 65_536, 200_000, 1 << 20, 6 << 20]
# What parsing and writing anew would change: numbers, escapes, order, duplicates, white space.
DELICATE = (
    '{ "user" : "a",\n\n "seed": 12345678901234567890, "a": 1.0, "b": 1, "c": 0.1000000000000000055511,'
    ' "d": "\\u00e9 é \\ud83d", "e": "a<b&c", "user": "b", "A": {"z": 1, "y": 2} }\n'
).encode()


@pytest.mark.parametrize("observation", MODES)
@pytest.mark.parametrize("framing", FRAMINGS)
async def test_every_size_arrives_byte_for_byte(framing: Framing, observation: ResponseObservation) -> None:
    """C01, C05, C09: in every framing, and the answers are in an order that Envoy takes."""
    rng = random.Random(1)
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, observation=observation) as gw:
            for body in [*map(rng.randbytes, SIZES), DELICATE]:
                response = await post(gw, framing, body)
                digest = hashlib.sha256(body).hexdigest()
                assert response.status_code == 200, len(body)
                assert response.json() == {"sha256": digest, "bytes": len(body)}
                assert handler.arrivals[-1].body == body
                arrived = pod.requests[-1]
                assert arrived.values("x-gateway-destination-endpoint") == [pod.address]
                assert len(arrived.values("content-length")) + len(arrived.values("transfer-encoding")) <= 1
            assert await gw.spurious_messages() == 0


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_no_body_and_an_empty_body(framing: Framing) -> None:
    """C04: a GET is answered in the header phase; a POST with nothing in it is a bad request, at once."""
    async with upstream() as pod:
        handler = StubHandler(pod.address, decide=refuse_bodiless_posts)
        async with gateway(handler) as gw:
            async with gw.client(http2=framing is Framing.HTTP2) as client:
                assert (await client.get("/v1/models")).status_code == 200
                assert not handler.arrivals[-1].has_body
            response = await post(gw, framing, b"")
            assert response.status_code == 400
            assert response.headers["content-type"] == "application/json"
            assert response.json()["error"]["type"] == "invalid_request_error"
            assert [request.method for request in pod.requests] == ["GET"]


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_buffered_body_beyond_grpcs_default_limit(framing: Framing) -> None:
    """C06 a and C07: 5 MiB come in one message; the body and its length reach the upstream unchanged."""
    body = json.dumps({"prompt": "x" * (5 << 20)}).encode()
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        options = {"request_body_mode": BodyMode.BUFFERED, "buffer_limit": 32 << 20}
        async with gateway(handler, **options) as gw:
            for sent in (body, DELICATE):
                response = await post(gw, framing, sent)
                assert response.status_code == 200
                assert pod.requests[-1].body == sent
                assert len(pod.requests[-1].values("content-length")) <= 1
            async with gw.client() as client:
                assert (await client.get("/v1/models")).status_code == 200
            assert await gw.spurious_messages() == 0


@pytest.mark.parametrize("mode", [BodyMode.FULL_DUPLEX_STREAMED, BodyMode.BUFFERED])
async def test_a_changed_body_has_the_right_framing(mode: BodyMode) -> None:
    """C07: whatever a rewrite does to the length, the upstream can read the request."""
    changed = b'{"model": "the-real-name", "prompt": "hi"}'

    async def rewrite(handler: StubHandler, arrival: Arrival) -> Routed:
        return handler.routed(body=changed)

    async with (
        upstream() as pod,
        gateway(StubHandler(pod.address, decide=rewrite), request_body_mode=mode) as gw,
    ):
        for framing in FRAMINGS:
            response = await post(gw, framing, b'{ "model" : "m",\n\n "prompt" : "hi"  }')
            assert response.status_code == 200
            assert pod.requests[-1].body == changed
            lengths = pod.requests[-1].values("content-length")
            assert lengths in ([], [str(len(changed))])
            assert not (lengths and pod.requests[-1].values("transfer-encoding"))
        assert await gw.spurious_messages() == 0


@pytest.mark.parametrize("framing", [Framing.CONTENT_LENGTH, Framing.CHUNKED])
async def test_a_body_over_the_limit_is_refused(framing: Framing) -> None:
    """C06 b: the client gets its 413, the memory is free, and the next request is served."""
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        server = ExtProcServer(handler, limits=ConversationLimits(max_body_bytes=1 << 20))
        async with gateway(handler, server=server) as gw:
            response = await post(gw, framing, b"x" * (3 << 20))
            assert response.status_code == 413
            assert response.json()["error"]["code"] == "body_too_large"
            assert server.budget.stats.held_bytes == 0
            assert (await post(gw, framing, b"x" * (1 << 20))).status_code == 200
            assert len(pod.requests) == 1


async def test_an_upload_that_never_ends_is_refused() -> None:
    """C06 b over HTTP/2: the answer does not wait for the end of the request."""
    handler = StubHandler()
    server = ExtProcServer(handler, limits=ConversationLimits(max_body_bytes=1 << 20))
    async with gateway(handler, server=server) as gw:
        answer = await upload_without_end(gw.envoy.port, 3 << 20)
        assert answer.status == 413
        assert json.loads(answer.body)["error"]["code"] == "body_too_large"
        await eventually(lambda: gw.active_streams == 0)
        assert server.budget.stats.held_bytes == 0
        assert handler.arrivals == []


async def test_request_trailers_do_not_hold_a_request_up() -> None:
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler) as gw:
            answer = await raw_http1(
                gw,
                b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
                b"transfer-encoding: chunked\r\ntrailer: x-sum\r\n\r\n"
                b"3\r\nabc\r\n0\r\nx-sum: 1\r\n\r\n",
            )
            assert answer.startswith(b"HTTP/1.1 200")
            assert pod.requests[0].body == b"abc"

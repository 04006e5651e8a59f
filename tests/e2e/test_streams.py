"""Responses through a real Envoy: no event is lost, in each way that Picker has of following them."""

from __future__ import annotations

import asyncio

import aiohttp
import httpx
import pytest
from aiohttp import web

from picker.simulation.envoy_config import ResponseObservation
from tests.support.gateway import MODES, Gateway, gateway
from tests.support.handlers import StubHandler
from tests.support.servers import eventually
from tests.support.upstream import sse_event, sse_stream, upstream

CLIENTS = 60
OVER_HTTP2 = 10
EVENTS = 200


async def read_over_http1(session: aiohttp.ClientSession) -> None:
    async with session.post(f"/sse/{EVENTS}", data=b'{"stream": true}') as response:
        assert response.status == 200
        assert "content-length" not in response.headers
        assert await response.read() == sse_stream(EVENTS)


async def read_over_http2(client: httpx.AsyncClient) -> None:
    response = await client.post(f"/sse/{EVENTS}", content=b'{"stream": true}')
    assert response.status_code == 200
    assert "content-length" not in response.headers
    assert response.content == sse_stream(EVENTS)


async def many_clients_at_once(gw: Gateway, handler: StubHandler, rounds: int) -> None:
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(gw.url, connector=connector) as http1,
        gw.client(http2=True) as http2,
    ):
        for _ in range(rounds):
            await asyncio.gather(
                *(read_over_http2(http2) for _ in range(OVER_HTTP2)),
                *(read_over_http1(http1) for _ in range(CLIENTS - OVER_HTTP2)),
            )
    await eventually(lambda: gw.active_streams == 0)
    assert handler.open_exchanges == 0
    assert gw.server.stats.internal_errors == gw.server.stats.protocol_errors == 0
    assert await gw.spurious_messages() == 0


@pytest.mark.parametrize("observation", MODES)
async def test_every_client_gets_every_event(observation: ResponseObservation) -> None:
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, observation=observation) as gw:
            await many_clients_at_once(gw, handler, rounds=1)


@pytest.mark.slow
@pytest.mark.parametrize("observation", MODES)
async def test_every_client_gets_every_event_twenty_times(observation: ResponseObservation) -> None:
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, observation=observation) as gw:
            await many_clients_at_once(gw, handler, rounds=20)


async def test_a_follower_of_the_response_sees_every_byte() -> None:
    async with upstream() as pod:
        handler = StubHandler(pod.address, wants_response_body=True)
        async with gateway(handler, observation=ResponseObservation.STREAM) as gw:
            await many_clients_at_once(gw, handler, rounds=1)
            assert all(b"".join(seen.chunks) == sse_stream(EVENTS) for seen in handler.exchanges)


@pytest.mark.parametrize("http2", [False, True])
@pytest.mark.parametrize("observation", MODES)
async def test_events_flow_while_they_are_made(observation: ResponseObservation, http2: bool) -> None:
    """C08: the first event is there before the last is made, and nothing of the framing leaks across."""
    first_seen = asyncio.Event()

    async def six_events(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        response.enable_chunked_encoding()
        await response.prepare(request)
        for number in range(6):
            await response.write(sse_event(number))
            if number == 0:
                await asyncio.wait_for(first_seen.wait(), 60)
        await response.write(b"data: [DONE]\n\n")
        return response

    async with upstream(six_events) as pod:
        handler = StubHandler(pod.address)
        async with (
            gateway(handler, observation=observation) as gw,
            gw.client(http2=http2) as client,
            client.stream("POST", "/v1/completions", content=b"{}") as response,
        ):
            received = b""
            async for data in response.aiter_raw():
                received += data
                first_seen.set()
            assert received == sse_stream(6)
            assert "content-length" not in response.headers
            assert not (http2 and "transfer-encoding" in response.headers)


@pytest.mark.parametrize("size", [0, 1, 62_001, 3 << 20])
async def test_large_responses_pass_through_whole(size: int) -> None:
    content = bytes(range(251)) * (size // 251 + 1)

    async def large(request: web.Request, body: bytes) -> web.StreamResponse:
        return web.Response(body=content[:size])

    async with upstream(large) as pod:
        handler = StubHandler(pod.address)
        async with (
            gateway(handler, observation=ResponseObservation.STREAM) as gw,
            gw.client() as client,
        ):
            response = await client.post("/v1/embeddings", content=b"{}")
            assert response.content == content[:size]


async def test_the_access_log_tells_each_end() -> None:
    """Where responses do not pass through Picker: one entry a request, joined on the id it came with."""

    async def failing(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/fail":
            return web.Response(status=500)
        return await pod.stream_events(request, 3)

    async with upstream(failing) as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, observation=ResponseObservation.ACCESS_LOG) as gw:
            async with gw.client() as client:
                spoofed = {"x-picker-request-id": "mine"}
                assert (await client.post("/sse", content=b"{}", headers=spoofed)).status_code == 200
                assert (await client.post("/fail", content=b"{}")).status_code == 500
            await eventually(lambda: len(gw.logged) == 2)
            asked = [dict(arrival.headers)["x-picker-request-id"] for arrival in handler.arrivals]
            assert [entry.request_id for entry in gw.logged] == asked
            assert "mine" not in asked
            assert [entry.status for entry in gw.logged] == [200, 500]


@pytest.mark.parametrize("observation", MODES)
async def test_an_upstream_that_breaks_off_is_passed_on_and_followed(
    observation: ResponseObservation,
) -> None:
    """C21: the client sees a broken stream, and Picker its end."""
    first_seen = asyncio.Event()

    async def broken(request: web.Request, body: bytes) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(sse_event(0))
        await asyncio.wait_for(first_seen.wait(), 60)
        assert request.transport is not None
        request.transport.abort()
        return response

    async with upstream(broken) as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, observation=observation) as gw:
            async with gw.client() as client:

                async def read() -> None:
                    async with client.stream("POST", "/v1/completions", content=b"{}") as response:
                        async for _ in response.aiter_raw():
                            first_seen.set()

                with pytest.raises(httpx.HTTPError):
                    await read()
            await eventually(lambda: gw.active_streams == 0 and handler.open_exchanges == 0)
            if observation is ResponseObservation.ACCESS_LOG:
                await eventually(lambda: len(gw.logged) == 1)

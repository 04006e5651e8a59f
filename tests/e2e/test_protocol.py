"""The protocol's hard places through a real Envoy: ends, errors, timers, spoofing. The decision is a stub."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

import httpx
import pytest
from aiohttp import web
from envoy_data_plane.envoy.extensions.filters.network.http_connection_manager.v3 import HttpFilter
from envoy_data_plane.google.protobuf import Any as PackedMessage

from picker.extproc.conversation import ConversationLimits
from picker.extproc.handler import Arrival, Refused, Routed
from picker.extproc.server import ExtProcServer
from picker.extproc.tls import fixed_context, self_signed
from picker.simulation.envoy_config import BodyMode, ResponseObservation
from tests.support.clients import Framing, post, raw_http1
from tests.support.gateway import MODES, Gateway, gateway
from tests.support.handlers import StubHandler, held_until, raising
from tests.support.servers import eventually
from tests.support.upstream import upstream

FRAMINGS = list(Framing)
DESTINATION = "x-gateway-destination-endpoint"


async def settled(gw: Gateway, handler: StubHandler) -> None:
    """Nothing is left of any request."""
    await eventually(lambda: gw.active_streams == 0)
    await eventually(lambda: handler.waiting == 0 and handler.open_exchanges == 0)
    assert gw.server.budget.stats.held_bytes == 0


@pytest.mark.parametrize("observation", MODES)
async def test_the_usual_end_of_a_stream_is_no_error(
    observation: ResponseObservation, caplog: pytest.LogCaptureFixture
) -> None:
    """C11: Envoy ends by half-close or reset, as it happens; neither is an error or skips the cleanup."""
    caplog.set_level(logging.WARNING)
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, observation=observation) as gw:
            async with gw.client() as client:
                for _ in range(50):
                    assert (await client.post("/v1/completions", content=b"{}")).status_code == 200
            for _ in range(50):
                answer = await raw_http1(
                    gw,
                    b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nconnection: close\r\n"
                    b"content-length: 2\r\n\r\n{}",
                )
                assert answer.startswith(b"HTTP/1.1 200")
            await settled(gw, handler)
            stats = gw.server.stats
            assert (stats.routed, stats.given_up, stats.internal_errors, stats.protocol_errors) == (
                100,
                0,
                0,
                0,
            )
            assert all(exchange.finishes == [True] for exchange in handler.exchanges)
    assert [record for record in caplog.records if record.name.startswith("picker")] == []


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("error", [RuntimeError("policy"), asyncio.CancelledError("inside")])
async def test_an_error_inside_reaches_the_client_at_once(framing: Framing, error: BaseException) -> None:
    """C12 b and c."""
    async with upstream() as pod:
        handler = StubHandler(pod.address, decide=raising(error))
        async with gateway(handler) as gw:
            # The case says a second, of a machine that has time for it; where it fails it is never.
            async with asyncio.timeout(20):
                response = await post(gw, framing, b"x" * 200_000)
            assert response.status_code == 500
            assert response.json()["error"]["code"] == "internal_error"
            assert response.headers["x-picker-dropped-reason"] == "internal_error"
            assert pod.requests == []
            handler.decide = None
            assert (await post(gw, framing, b"{}")).status_code == 200
            await settled(gw, handler)


@pytest.mark.parametrize("framing", FRAMINGS)
async def test_a_refusal_arrives_as_it_was_meant(framing: Framing) -> None:
    async def full(handler: StubHandler, arrival: Arrival) -> Refused:
        return Refused(429, "queue_full", "The queue of class 'regular' is full.", retry_after=3.2)

    async with gateway(StubHandler(decide=full)) as gw:
        response = await post(gw, framing, b"{}")
        assert response.status_code == 429
        assert response.headers["content-type"] == "application/json"
        assert response.headers["retry-after"] == "4"
        assert response.json()["error"] == {
            "message": "The queue of class 'regular' is full.",
            "type": "rate_limit_error",
            "param": None,
            "code": "queue_full",
        }


async def released_after(
    seconds: float, handler: StubHandler, send: Callable[[], Awaitable[httpx.Response]]
) -> int:
    """Hold the next request for a time on the wall clock, which is what Envoy's timers run on."""
    release = asyncio.Event()
    handler.decide = held_until(release)
    handler.arrived.clear()
    request = asyncio.ensure_future(send())
    await handler.arrived.wait()
    asyncio.get_running_loop().call_later(seconds, release.set)
    return (await request).status_code


async def test_a_held_request_outlives_the_message_timeout() -> None:
    """C13 a: in full duplex the timer is not armed."""
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, message_timeout=0.3) as gw, gw.client() as client:
            assert await released_after(1.0, handler, lambda: client.get("/")) == 200
            assert await released_after(1.0, handler, lambda: client.post("/", content=b"x" * 100_000)) == 200
            await settled(gw, handler)


async def test_a_buffered_wait_runs_into_the_message_timeout() -> None:
    """C13 b: 504, our question is cancelled, and nothing reaches the upstream."""
    async with upstream() as pod:
        handler = StubHandler(pod.address, decide=held_until(asyncio.Event()))
        options = {"request_body_mode": BodyMode.BUFFERED, "message_timeout": 0.3}
        async with gateway(handler, **options) as gw, gw.client() as client:
            response = await client.post("/v1/completions", content=b"{}")
            assert response.status_code == 504
            await settled(gw, handler)
            assert handler.cancelled == 1
            assert pod.requests == []


async def test_a_buffered_wait_that_was_announced_is_waited_for() -> None:
    """C13 b, the better way: Envoy is asked for more time, once."""
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        server = ExtProcServer(handler, limits=ConversationLimits(buffered_hold=20.0))
        options = {
            "request_body_mode": BodyMode.BUFFERED,
            "message_timeout": 0.3,
            "max_message_timeout": 60.0,
        }
        async with gateway(handler, server=server, **options) as gw, gw.client() as client:
            assert await released_after(1.0, handler, lambda: client.post("/", content=b"{}")) == 200
            assert pod.requests[0].values(DESTINATION) == [pod.address]
            await settled(gw, handler)


@pytest.mark.parametrize("observation", MODES)
async def test_an_idle_timer_of_the_proxy_cancels_the_question(observation: ResponseObservation) -> None:
    """C13 c: Envoy gives up; the item is gone here too, and is never sent to anyone later."""
    release = asyncio.Event()
    async with upstream() as pod:
        handler = StubHandler(pod.address, decide=held_until(release))
        options = {"observation": observation, "stream_idle_timeout": 0.5}
        async with gateway(handler, **options) as gw, gw.client() as client:
            response = await client.post("/v1/completions", content=b"{}")
            assert response.status_code == 504
            await settled(gw, handler)
            assert handler.cancelled == 1
            assert gw.server.stats.given_up == 1
            release.set()
            assert (await client.get("/v1/models")).status_code == 200
            assert [request.path for request in pod.requests] == ["/v1/models"]


async def test_our_own_configuration_outlasts_the_longest_wait() -> None:
    """C13 d: the timers of the standalone configuration follow from the longest wait."""
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, longest_wait=0.5, message_timeout=0.2) as gw, gw.client() as client:
            assert await released_after(0.5, handler, lambda: client.post("/", content=b"{}")) == 200


SPOOFS = [
    [(DESTINATION, "{outside}")],
    [(DESTINATION, "{outside}"), (DESTINATION, "{outside}")],
    [("x-gateway-destination-endpoint-subset", "{outside}")],
]


@pytest.mark.parametrize("framing", FRAMINGS)
@pytest.mark.parametrize("spoof", SPOOFS)
async def test_a_client_cannot_name_its_destination(framing: Framing, spoof: list[tuple[str, str]]) -> None:
    """C14 a to d: on requests that are routed, refused, and without a body."""

    async def refuse_some(handler: StubHandler, arrival: Arrival) -> Routed | Refused:
        if arrival.body == b"refuse":
            return Refused(503, "no_endpoint", "nobody is there")
        return handler.routed()

    async with upstream() as pod, upstream() as outside:
        handler = StubHandler(pod.address, decide=refuse_some)
        headers = [(name, value.format(outside=outside.address)) for name, value in spoof]
        async with gateway(handler) as gw:
            assert (await post(gw, framing, b"{}", headers=headers)).status_code == 200
            assert (await post(gw, framing, b"refuse", headers=headers)).status_code == 503
            async with gw.client(http2=framing is Framing.HTTP2) as client:
                assert (await client.get("/v1/models", headers=headers)).status_code == 200
            assert outside.requests == []
            assert len(pod.requests) == 2
            for request in pod.requests:
                assert request.values(DESTINATION) == [pod.address]
                assert request.values("x-gateway-destination-endpoint-subset") == []


async def test_a_mixed_case_name_is_the_same_name() -> None:
    """C14 e."""
    async with upstream() as pod, upstream() as outside, gateway(StubHandler(pod.address)) as gw:
        answer = await raw_http1(
            gw,
            b"POST / HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: 2\r\n"
            + f"X-Gateway-DESTINATION-Endpoint: {outside.address}\r\n\r\n{{}}".encode(),
        )
        assert answer.startswith(b"HTTP/1.1 200")
        assert outside.requests == []
        assert pod.requests[0].values(DESTINATION) == [pod.address]


async def test_our_value_wins_even_where_the_gateway_strips_nothing() -> None:
    """C14 with a gateway that leaves the client's header in: it is overwritten, not added to."""
    async with upstream() as pod, upstream() as outside:
        handler = StubHandler(pod.address)
        async with gateway(handler, strip_client_headers=False) as gw:
            headers = [(DESTINATION, outside.address), (DESTINATION, outside.address)]
            assert (await post(gw, Framing.HTTP2, b"{}", headers=headers)).status_code == 200
            assert outside.requests == []
            assert pod.requests[0].values(DESTINATION) == [pod.address]


def set_metadata(namespace: str, value: dict[str, object]) -> HttpFilter:
    """A filter before ours that puts dynamic metadata on every request."""
    from envoy_data_plane.envoy.extensions.filters.http.set_metadata.v3 import Config, Metadata
    from envoy_data_plane.google.protobuf import Struct

    config = Config(metadata=[Metadata(metadata_namespace=namespace, value=Struct.from_dict(value))])
    return HttpFilter(name="envoy.filters.http.set_metadata", typed_config=PackedMessage.pack(config))


async def test_the_subset_hint_reaches_the_handler() -> None:
    """C15, the protocol's part: what an earlier filter wrote is in the arrival's metadata."""
    hint = {"x-gateway-destination-endpoint-subset": ["10.0.0.1:8000", 7, ""]}
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        async with gateway(handler, filters_before=[set_metadata("envoy.lb.subset_hint", hint)]) as gw:
            for framing in FRAMINGS:
                assert (await post(gw, framing, b"x" * 100_000)).status_code == 200
                assert handler.arrivals[-1].metadata["envoy.lb.subset_hint"] == hint


async def test_a_refusal_by_an_earlier_filter_passes_through() -> None:
    """Its response goes through our stream, which then starts with a response."""
    from envoy_data_plane.envoy.config.rbac.v3 import Rbac as Rules
    from envoy_data_plane.envoy.extensions.filters.http.rbac.v3 import Rbac

    nobody = HttpFilter(
        name="envoy.filters.http.rbac", typed_config=PackedMessage.pack(Rbac(rules=Rules(policies={})))
    )
    handler = StubHandler()
    async with gateway(handler, observation=ResponseObservation.STREAM, filters_before=[nobody]) as gw:
        response = await post(gw, Framing.CONTENT_LENGTH, b"{}")
        assert response.status_code == 403
        await settled(gw, handler)
        assert handler.arrivals == []
        assert gw.server.stats.protocol_errors == 0


async def test_over_tls() -> None:
    async with upstream() as pod:
        handler = StubHandler(pod.address)
        tls = fixed_context(self_signed())
        async with gateway(handler, tls=tls) as gw:
            for framing in FRAMINGS:
                assert (await post(gw, framing, b"x" * 200_000)).status_code == 200


async def test_a_client_that_leaves_as_it_is_decided_is_still_told_of() -> None:
    """C21: our answer, and the id in it, may come too late for Envoy; its log then has the id it made itself."""
    released: dict[str, asyncio.Event] = {}

    async def decide(handler: StubHandler, arrival: Arrival) -> Routed:
        released[arrival.path] = asyncio.Event()
        await released[arrival.path].wait()
        return handler.routed(set_headers=(("x-picker-request-id", arrival.path),))

    async with upstream() as pod:
        handler = StubHandler(pod.address, decide=decide)
        async with gateway(handler) as gw:
            for number in range(30):
                path = f"/{number}"
                _, writer = await asyncio.open_connection("127.0.0.1", gw.envoy.port)
                writer.write(f"POST {path} HTTP/1.1\r\nhost: a\r\ncontent-length: 2\r\n\r\n{{}}".encode())
                await writer.drain()
                await eventually(lambda path=path: path in released)
                writer.transport.abort()
                released[path].set()
            await settled(gw, handler)
            await eventually(lambda: len(gw.logged) == 30)
            made = {
                dict(arrival.headers)["x-picker-request-id"]: arrival.path for arrival in handler.arrivals
            }
            told = {made.get(entry.request_id, entry.request_id) for entry in gw.logged}
            assert told == set(released)


@pytest.mark.parametrize("observation", MODES)
async def test_clients_that_leave_at_any_moment_leave_nothing(observation: ResponseObservation) -> None:
    """C21: while held, after our answer, mid-stream, during the upload, or never."""
    never = asyncio.Event()

    async def by_path(handler: StubHandler, arrival: Arrival) -> Routed:
        if arrival.path == "/held":
            await never.wait()
        return handler.routed()

    async def slow(request: web.Request, body: bytes) -> web.StreamResponse:
        if request.path == "/before-headers":
            await asyncio.sleep(20)
        if request.path == "/mid-stream":
            return await pod.stream_events(request, 1000, pause=0.05)
        return web.Response(body=body)

    async with upstream(slow) as pod:
        handler = StubHandler(pod.address, decide=by_path)
        async with gateway(handler, observation=observation) as gw:
            async with gw.client() as client:

                async def leave(path: str) -> None:
                    with pytest.raises(httpx.TimeoutException):
                        await client.post(path, content=b"{}", timeout=httpx.Timeout(30, read=0.3))

                async def leave_mid_stream() -> None:
                    async with client.stream("POST", "/mid-stream", content=b"{}") as response:
                        await anext(response.aiter_raw())

                async def leave_during_upload() -> None:
                    _, writer = await asyncio.open_connection("127.0.0.1", gw.envoy.port)
                    writer.write(b"POST / HTTP/1.1\r\nhost: a\r\ncontent-length: 1000\r\n\r\nhalf")
                    await writer.drain()
                    writer.close()

                async def stay() -> None:
                    assert (await client.post("/", content=b"{}")).status_code == 200

                await asyncio.gather(
                    *(leave("/held") for _ in range(10)),
                    *(leave("/before-headers") for _ in range(10)),
                    *(leave_mid_stream() for _ in range(10)),
                    *(leave_during_upload() for _ in range(10)),
                    *(stay() for _ in range(10)),
                )
            await settled(gw, handler)
            assert handler.cancelled == 10
            assert all(len(exchange.finishes) == 1 for exchange in handler.exchanges)
            if observation is ResponseObservation.ACCESS_LOG:
                # The end of each routed request is told, whoever ended it.
                asked = {dict(arrival.headers)["x-picker-request-id"] for arrival in handler.arrivals}
                await eventually(lambda: asked <= {entry.request_id for entry in gw.logged})

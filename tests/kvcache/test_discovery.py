"""Asking engines for their event addresses."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from picker.kvcache.discovery import DiscoveryError, EventAddresses, discover_sources, parse_sources


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as session:
        yield session


async def serve(answer: Any, status: int = 200) -> TestServer:
    async def handler(_request: web.Request) -> web.Response:
        return web.json_response(answer, status=status)

    app = web.Application()
    app.router.add_get("/kv_event_sources", handler)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    return server


async def test_the_host_is_always_the_one_that_was_asked(session: aiohttp.ClientSession) -> None:
    """The shape of a vLLM 0.32 answer, two ranks."""
    answer = {
        "0": {"endpoint": "tcp://*:5557", "replay_endpoint": "tcp://0.0.0.0:6557", "topic": "kv"},
        "1": {"endpoint": "tcp://10.0.0.9:5558", "replay_endpoint": None},
    }
    server = await serve(answer)
    found = await discover_sources(session, f"http://127.0.0.1:{server.port}/")
    assert found == {
        0: EventAddresses("tcp://127.0.0.1:5557", "tcp://127.0.0.1:6557"),
        1: EventAddresses("tcp://127.0.0.1:5558", None),
    }
    await server.close()


def test_an_ipv6_host_is_bracketed() -> None:
    for wildcard in ("*", "[::]", "::"):
        body = b'{"0": {"endpoint": "tcp://%s:5557"}}' % wildcard.encode()
        assert parse_sources(body, "fd00::5") == {0: EventAddresses("tcp://[fd00::5]:5557", None)}


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({}, 404),
        ([], 200),
        ({"0": {}}, 200),
        ({"x": {"endpoint": "tcp://*:1"}}, 200),
        ({"0": {"endpoint": "ipc://x"}}, 200),
    ],
)
async def test_an_engine_that_does_not_tell_is_an_error_with_a_reason(
    session: aiohttp.ClientSession, answer: Any, status: int
) -> None:
    server = await serve(answer, status)
    with pytest.raises(DiscoveryError):
        await discover_sources(session, f"http://127.0.0.1:{server.port}")
    await server.close()


async def test_an_answer_without_end_is_cut_off(session: aiohttp.ClientSession) -> None:
    server = await serve("x" * (2 << 20))
    with pytest.raises(DiscoveryError, match="more to say"):
        await discover_sources(session, f"http://127.0.0.1:{server.port}")
    await server.close()


async def test_nobody_there_is_an_error_too(session: aiohttp.ClientSession) -> None:
    server = await serve({})
    await server.close()
    with pytest.raises(DiscoveryError, match="cannot be asked"):
        await discover_sources(session, f"http://127.0.0.1:{server.port}")

"""Session affinity through a real Envoy: by header, by cookie, and how it ends."""

from __future__ import annotations

import asyncio
import http.cookies
import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from picker.simulation.envoy_config import ResponseObservation
from picker.simulation.mock_engine import MockEngineSettings
from tests.e2e.stack import Stack, running_stack

ENGINES = [MockEngineSettings(name=f"pod-{number}", prefill_rate=1e6) for number in range(3)]
HINTS = {"session_finish": "accept", "fairness_id": "accept"}
_PROMPTS = count(1)


async def pod_of(stack: Stack, **headers: str) -> str:
    """Where a request goes that shares no prefix with any other."""
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    answer = await stack.complete([next(_PROMPTS)] * 20, headers=named)
    assert answer["status"] == 200
    await stack.settled()
    return str(answer["headers"]["x-inference-pod"])


@pytest.mark.parametrize("affinity", ["prefer", "sticky"])
async def test_a_session_stays_until_it_is_finished(tmp_path: Path, affinity: str) -> None:
    sessions = {"affinity": affinity, "header": "x-chat"}
    settings: dict[str, Any] = {"sessions": sessions, "policy": {"hints": HINTS}}
    async with running_stack(tmp_path, ENGINES, settings=settings) as stack:
        homes = {}
        for chat in ("a", "b"):
            went = {await pod_of(stack, x_chat=chat) for _ in range(6)}
            assert len(went) == 1
            (homes[chat],) = went
        assert {await pod_of(stack, x_session_affinity="agent") for _ in range(6)} != set(homes)
        assert len({await pod_of(stack) for _ in range(20)}) == 3, "who has no session is spread"
        assert await pod_of(stack, x_chat="a") == homes["a"]

        known = stack.app.sessions.stats
        assert (known.known, known.moved) == (3, 0)
        assert await pod_of(stack, x_chat="a", x_picker_session_finish="1") == homes["a"]
        assert (known.known, known.ended["finished"]) == (2, 1)
        for engine in stack.engines:
            assert all("x-picker-session-finish" not in each.headers for each in engine.served)
            assert any("x-chat" in each.headers for each in engine.served) == (
                engine.settings.name in homes.values()
            )


async def test_it_moves_when_its_pod_may_not_be_used_and_a_tenant_has_sessions_of_its_own(
    tmp_path: Path,
) -> None:
    settings: dict[str, Any] = {
        "sessions": {"affinity": "sticky", "header": "x-chat"},
        "policy": {"hints": HINTS},
    }
    async with running_stack(tmp_path, ENGINES, settings=settings) as stack:
        home = await pod_of(stack, x_chat="a", x_picker_tenant="acme")
        others = {await pod_of(stack, x_chat="a", x_picker_tenant=f"tenant-{n}") for n in range(12)}
        assert len(others) > 1, "the same id of other tenants"
        pool = stack.app.settings.pool.file
        assert pool is not None
        document = json.loads(pool.read_text())
        for entry in document["endpoints"]:
            entry["cordoned"] = entry["name"] == home
        version = stack.app.pool.version
        pool.write_text(json.dumps(document))
        while stack.app.pool.version == version:
            await asyncio.sleep(0.02)
        moved = {await pod_of(stack, x_chat="a", x_picker_tenant="acme") for _ in range(4)}
        assert len(moved) == 1
        assert moved != {home}


async def test_a_cookie_begins_a_session_where_responses_pass_through(tmp_path: Path) -> None:
    settings = {"sessions": {"affinity": "prefer", "cookie": "picker", "ttl": 60}}
    async with running_stack(
        tmp_path, ENGINES, settings=settings, observation=ResponseObservation.STREAM
    ) as stack:
        first = await stack.complete([next(_PROMPTS)] * 20)
        cookie = http.cookies.SimpleCookie(first["headers"].getall("set-cookie")[0])["picker"]
        assert cookie["max-age"] == "60"
        home = first["headers"]["x-inference-pod"]
        for _ in range(6):
            stack.session.cookie_jar.clear()
            answer = await stack.complete(
                [next(_PROMPTS)] * 20, headers={"cookie": f"theirs=1; picker={cookie.value}"}
            )
            assert answer["headers"]["x-inference-pod"] == home
            assert "set-cookie" not in answer["headers"]
        stack.session.cookie_jar.clear()
        second = await stack.complete([next(_PROMPTS)] * 20)
        assert http.cookies.SimpleCookie(second["headers"]["set-cookie"])["picker"].value != cookie.value
        assert stack.app.sessions.stats.known == 2


async def test_no_cookie_is_made_where_nobody_would_hear_of_it(tmp_path: Path) -> None:
    settings = {"sessions": {"affinity": "prefer", "cookie": "picker"}}
    async with running_stack(tmp_path, ENGINES[:1], settings=settings) as stack:
        answer = await stack.complete([next(_PROMPTS)] * 20)
        assert (answer["status"], "set-cookie" in answer["headers"]) == (200, False)
        assert stack.app.sessions.stats.known == 0

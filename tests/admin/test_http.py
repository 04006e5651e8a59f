"""The admin HTTP server."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest

from picker.telemetry import ClassStats, EndpointStats

from .conftest import DECISION, Admin, Get


async def test_health_does_not_depend_on_readiness(admin: Admin, get: Get) -> None:
    admin.not_ready = "the pool is not synced"
    await admin.serve()
    async with get("/healthz") as answer:
        assert (answer.status, await answer.text()) == (200, "ok\n")
    async with get("/readyz") as answer:
        assert (answer.status, await answer.text()) == (503, "the pool is not synced\n")
    admin.not_ready = None
    async with get("/readyz") as answer:
        assert answer.status == 200


async def test_metrics(admin: Admin, get: Get) -> None:
    admin.classes = [ClassStats("premium", 512, waiting_requests=3)]
    await admin.serve()
    async with get("/metrics") as answer:
        assert answer.headers["Content-Type"].startswith("text/plain")
        assert 'picker_queue_requests{policy_class="premium"} 3.0' in await answer.text()


async def test_status(admin: Admin, get: Get) -> None:
    admin.classes = [ClassStats("premium", 3, deficit=7), ClassStats("regular", 1)]
    admin.endpoints = [EndpointStats("u1", "pod-a", "10.0.0.1:80", taints=("gpu:NoSchedule",), kv_usage=0.5)]
    await admin.serve()
    async with get("/status") as answer:
        status = await answer.json()
    premium = status["queues"]["classes"][0]
    assert (premium["name"], premium["weight_share"], premium["deficit"]) == ("premium", 0.75, 7)
    assert premium["recent_share"] is None
    (pod,) = status["pool"]["endpoints"]
    assert (pod["name"], pod["taints"], pod["kv_usage"], pod["engine_running"]) == (
        "pod-a",
        ["gpu:NoSchedule"],
        0.5,
        None,
    )


async def test_decisions(admin: Admin, get: Get) -> None:
    admin.telemetry.decisions.add(DECISION)
    await admin.serve()
    async with get("/decisions?limit=5") as answer:
        (decision,) = (await answer.json())["decisions"]
    assert decision["candidates"][0]["terms"]["uncached_tokens"] == 600
    async with get("/decisions/abc-1") as answer:
        assert await answer.json() == decision
    async with get("/decisions?policy_class=regular") as answer:
        assert (await answer.json())["decisions"] == []


@pytest.mark.parametrize(
    ("path", "status"),
    [
        ("/decisions/unknown", 404),
        ("/decisions/%0d%0aX: y", 404),
        ("/decisions?limit=-1", 400),
        ("/decisions?limit=x", 400),
        ("/decisions?limit=99999999999999999999", 400),
        ("/nothing", 404),
    ],
)
async def test_bad_questions_are_answered_in_json(admin: Admin, get: Get, path: str, status: int) -> None:
    await admin.serve()
    async with get(path) as answer:
        assert answer.status == status
        assert (await answer.json())["error"]


async def test_beyond_loopback_only_metrics_and_health_without_a_token(admin: Admin, get: Get) -> None:
    await admin.serve(host="0.0.0.0")
    for path, status in (("/metrics", 200), ("/healthz", 200), ("/readyz", 200), ("/", 200)):
        async with get(path) as answer:
            assert answer.status == status, path
    for path in ("/status", "/decisions", "/decisions/abc-1", "/events", "/nothing"):
        async with get(path) as answer:
            assert answer.status == 401, path
            assert "token" in (await answer.json())["error"]


async def test_token(admin: Admin, get: Get, tmp_path: Path) -> None:
    token_file = tmp_path / "token"
    token_file.write_text("s3cret\n")
    await admin.serve(token_file=token_file, public_metrics=False)
    for authorization, status in (
        ("Bearer s3cret", 200),
        ("bearer s3cret", 200),
        ("Bearer wrong", 401),
        ("Bearer ", 401),
        ("Basic s3cret", 401),
        ("s3cret", 401),
        ("Bearer s3cr\u00e9t", 401),
    ):
        for path in ("/status", "/metrics"):
            async with get(path, Authorization=authorization) as answer:
                assert answer.status == status, (path, authorization)
    token_file.write_text("rotated")
    async with get("/status", Authorization="Bearer rotated") as answer:
        assert answer.status == 200


@pytest.mark.parametrize("content", [None, "", "  \n"])
async def test_a_token_file_without_a_token_locks_everybody_out(
    admin: Admin, get: Get, tmp_path: Path, content: str | None
) -> None:
    token_file = tmp_path / "token"
    if content is not None:
        token_file.write_text(content)
    await admin.serve(token_file=token_file)
    async with get("/status", Authorization="Bearer ") as answer:
        assert answer.status == 401


async def test_a_foreign_page_that_resolves_to_this_machine_sees_nothing(admin: Admin, get: Get) -> None:
    await admin.serve()
    for host, status in (
        ("evil.example:9090", 401),
        ("localhost:9090", 200),
        ("[::1]:9090", 200),
        ("::1", 401),
    ):
        async with get("/status", Host=host) as answer:
            assert answer.status == status, host


async def test_the_dashboard_may_run_its_own_script_only(admin: Admin, get: Get) -> None:
    await admin.serve()
    async with get("/") as answer:
        page, policy = await answer.text(), answer.headers["Content-Security-Policy"]
        assert answer.headers["X-Frame-Options"] == "DENY"
    assert "default-src 'none'" in policy
    assert "script-src 'sha256-" in policy
    assert "unsafe" not in policy
    assert "http://" not in page.replace("http://www.w3.org/", "")
    assert "https://" not in page


async def read_event(stream: aiohttp.StreamReader) -> tuple[str, object]:
    block = (await stream.readuntil(b"\n\n")).decode()
    name, data = block.strip().split("\n")
    return name.removeprefix("event: "), json.loads(data.removeprefix("data: "))


async def test_events(admin: Admin, get: Get) -> None:
    admin.classes = [ClassStats("premium", 1)]
    admin.telemetry.decisions.add(DECISION)
    await admin.serve()
    async with get("/events") as answer:
        assert answer.headers["Content-Type"] == "text/event-stream"
        assert (await read_event(answer.content))[0] == "history"
        name, state = await read_event(answer.content)
        assert name == "state"
        assert isinstance(state, dict)
        assert state["decisions"][0]["id"] == "abc-1"
        admin.classes = [ClassStats("premium", 1, waiting_requests=9)]
        name, state = await read_event(answer.content)
        assert isinstance(state, dict)
        assert state["queues"]["classes"][0]["waiting_requests"] == 9


async def test_watchers_of_events_are_bounded_and_their_places_freed(admin: Admin, get: Get) -> None:
    await admin.serve()
    answers = [await get("/events") for _ in range(33)]
    names = [[(await read_event(answer.content))[0] for _ in range(3)][-1] for answer in answers]
    assert sorted(names) == ["refused"] + ["state"] * 32
    for answer in answers:
        answer.close()


async def test_stopping_ends_open_streams(admin: Admin, get: Get) -> None:
    await admin.serve()
    async with get("/events") as answer:
        await read_event(answer.content)
        stop = asyncio.create_task(admin.stack.aclose())
        rest = await asyncio.wait_for(answer.content.read(), 20)
        assert rest
        await stop


async def test_history_over_the_feed(admin: Admin, get: Get) -> None:
    for second in range(4):
        admin.clock[0] = float(second)
        admin.classes = [ClassStats("a", 1, waiting_requests=1, dispatched_cost=10 * second)]
        admin.telemetry.shares.sample(admin.classes, admin.clock[0])
    await admin.serve()
    async with get("/events") as answer:
        name, history = await read_event(answer.content)
    assert name == "history"
    assert history == [{"age": 0.0, "shares": {"a": [1.0, 1.0]}}]

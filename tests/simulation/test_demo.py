"""What the demo measures and shows, and the demo itself with a real Envoy."""

from __future__ import annotations

import asyncio
import json
import re
import signal
import sys
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from rich.console import Console
from rich.text import Text

from picker.simulation.demo_view import ClassFigures, Monitor
from picker.simulation.mock_engine import MockEngine, MockEngineSettings
from picker.simulation.traffic import Record


def status(**classes: tuple[int, int]) -> dict[str, Any]:
    """Picker's /status with, for each class, its waiting requests and dispatched tokens."""
    views = [
        {
            "name": name,
            "weight_share": 0.5,
            "waiting_requests": waiting,
            "oldest_wait": 0.0,
            "dispatched_cost": cost,
        }
        for name, (waiting, cost) in classes.items()
    ]
    return {"queues": {"classes": views}}


def monitor() -> Monitor:
    engine = MockEngine(MockEngineSettings(name="pod-0", kv_events=False))
    return Monitor([engine], {name: ClassFigures(name) for name in ("a", "b")})


def test_shares_count_only_while_every_class_waits() -> None:
    watched = monitor()
    watched.take_status(status(a=(0, 1000), b=(3, 0)))
    watched.take_status(status(a=(1, 2000), b=(3, 0)))
    assert watched.classes["a"].share is None
    watched.take_status(status(a=(1, 2300), b=(3, 100)))
    watched.take_status(status(a=(0, 9000), b=(3, 100)))
    watched.take_status(status(a=(2, 9500), b=(3, 100)))
    assert watched.classes["a"].share == pytest.approx(0.75)
    assert watched.classes["b"].share == pytest.approx(0.25)
    assert watched.classes["b"].longest_queue == 3


def test_answers_and_failures_are_told_apart() -> None:
    watched = monitor()
    good = Record("a", due=1.0, sent=1.0, first_token=1.5, done=2.0, status=200, endpoint="pod-0")
    good.prompt_tokens, good.cached_tokens = 100, 25
    watched.take_record(good)
    watched.take_record(Record("b", 1.0, 1.0, done=1.1, status=429))
    watched.take_record(Record("b", 1.0, 1.0, error="ServerDisconnectedError"))
    summary = watched.as_json(3.0)
    assert summary["answered"] == 1
    assert summary["statuses"] == {"200": 1, "429": 1, "ServerDisconnectedError": 1}
    assert summary["cache_hit_share"] == 0.25
    assert summary["classes"]["a"]["ttft_p50"] == 0.5
    assert summary["classes"]["b"]["refused"] == 2
    assert summary["pods"]["pod-0"]["answered"] == 1


def test_the_view_fits_a_terminal_of_80_columns() -> None:
    watched = monitor()
    watched = Monitor(watched.engines, {name: ClassFigures(name) for name in ("premium", "standard")})
    for cost in (1000, 2000):
        watched.take_status(status(premium=(1000, cost), standard=(1000, 0)))
    for record in (Record("standard", 0.0, 0.0, 99.25, 99.5, 200) for _ in range(10_000)):
        watched.take_record(record)
    console = Console(width=80, record=True, file=None, quiet=True)
    with console.capture() as captured:
        console.quiet = False
        console.print(watched.render(Text("title"), 0.5))
    assert "…" not in captured.get()
    assert "10000" in captured.get()


async def start_demo(*options: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "picker", "demo", *options),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=None,
    )


@pytest.fixture
async def running_demo() -> AsyncIterator[asyncio.subprocess.Process]:
    process = await start_demo("--duration", "600")
    yield process
    if process.returncode is None:
        process.kill()
    await process.wait()


@pytest.mark.e2e
async def test_the_demo_ends_with_a_summary_and_exit_0() -> None:
    process = await start_demo("--requests", "100", "--json")
    output, errors = await process.communicate()
    assert process.returncode == 0, errors.decode()
    summary = json.loads(output)
    assert summary["answered"] == 100
    assert summary["statuses"] == {"200": 100}
    assert summary["cache_hit_share"] > 0.1
    assert sum(pod["answered"] for pod in summary["pods"].values()) == 100


@pytest.mark.e2e
async def test_the_curl_line_works_and_ctrl_c_is_clean(running_demo: asyncio.subprocess.Process) -> None:
    assert running_demo.stdout is not None
    assert running_demo.stderr is not None
    text = ""
    while (found := re.search(r"curl (\S+) .*-d '(.*)'", text)) is None:
        line = await running_demo.stdout.readline()
        assert line, (await running_demo.stderr.read()).decode()
        text += line.decode()
    headers = {"x-picker-policy-class": "premium"}
    async with (
        aiohttp.ClientSession() as session,
        session.post(found[1], data=found[2], headers=headers) as response,
    ):
        assert response.status == 200
        assert (await response.json())["usage"]["completion_tokens"] == 8
    running_demo.send_signal(signal.SIGINT)
    output, errors = await running_demo.communicate()
    assert running_demo.returncode == 0
    assert b"requests answered" in output
    assert b"Traceback" not in errors

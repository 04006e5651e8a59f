"""Several processes read requests and one decides, behind a real Envoy: shares are exact over all of them, and the end
of one of them is the end of its own requests only.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from picker.faces.crew import Crew, CrewStats
from picker.simulation.envoy_config import ResponseObservation
from picker.simulation.mock_engine import MockEngineSettings
from tests.e2e.stack import Stack, running_stack
from tests.e2e.test_shares import CLASS_HEADER, policy

pytestmark = pytest.mark.e2e

# Few streams fit into a connection, so that Envoy opens many and no face is left out.
TWO_FACES: dict[str, Any] = {
    "settings": {"extproc": {"workers": 2}, "queue": {"drain_notice": 0, "drain_grace": 5}},
    "streams_per_connection": 4,
}


def crew_of(stack: Stack) -> Crew:
    crew = stack.app.faces
    assert isinstance(crew, Crew)
    return crew


async def eventually(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


def served_by_each(crew: Crew) -> list[float]:
    """Requests that each face had placed when it last said so."""
    return [counts["extproc"]["routed"] for counts in crew.tally.last.values()]  # type: ignore[misc]


async def test_both_faces_serve_and_the_shares_are_exact_over_them(tmp_path: Path) -> None:
    engine = MockEngineSettings(
        max_num_seqs=4, prefill_rate=512 * 80.0, num_blocks=40_000, max_num_batched_tokens=8192
    )
    async with running_stack(tmp_path, [engine], policy=policy((512, 128), 1536), **TWO_FACES) as stack:
        order: list[str] = []

        async def ask(number: int, name: str) -> None:
            answer = await stack.complete([number] * 512, headers={CLASS_HEADER: name})
            assert answer["status"] == 200, answer
            order.append(name)

        async with asyncio.TaskGroup() as group:
            for number in range(160):
                group.create_task(ask(number, ("premium", "regular")[number % 2]))
        assert 58 <= order[:80].count("premium") <= 70
        crew = crew_of(stack)
        await eventually(lambda: sum(served_by_each(crew)) == len(order))
        assert len(served_by_each(crew)) == 2
        assert min(served_by_each(crew)) > 0
        # Every end was told by Envoy's access log, to whichever face its connection goes.
        await stack.settled()
        assert stack.app.exchanges.stats.ended_by_access_log == len(order)
        load = stack.app.ledger.load(0)
        assert (load.running, load.prefill_tokens) == (0, 0)
        # A repeated prompt is known to be cached: keys made in a face are those that events bring to the core.
        await stack.complete([1] * 512, headers={CLASS_HEADER: "regular"})
        assert next(iter(stack.app.telemetry.decisions)).cached_tokens == 496
        await eventually(lambda: sum(served_by_each(crew)) == len(order) + 1)
        text = stack.app.telemetry.metrics.expose()[0].decode()
        assert "picker_faces 2.0" in text
        assert f"picker_extproc_routed_total {len(order) + 1}.0" in text
        assert f"picker_tokenized_prompts_total {len(order) + 1}.0" in text


async def test_a_face_that_is_killed_takes_only_its_own_requests_along(tmp_path: Path) -> None:
    engine = MockEngineSettings(max_num_seqs=64, prefill_rate=1e6, decode_time=0.002, num_blocks=40_000)
    tls = {"settings": {"extproc": {"workers": 2, "tls": {"mode": "self-signed"}}}, "picker_tls": True}
    options = TWO_FACES | tls | {"observation": ResponseObservation.STREAM}
    async with running_stack(tmp_path, [engine], **options) as stack:
        crew = crew_of(stack)

        async def stream(number: int) -> bool:
            """Whether the whole answer came."""
            body = {"model": "tiny", "prompt": [number] * 64, "max_tokens": 30, "stream": True}
            try:
                async with stack.session.post(f"{stack.url}/v1/completions", json=body) as response:
                    return response.status == 200 and (await response.read()).endswith(b"data: [DONE]\n\n")
            except aiohttp.ClientError:
                return False

        streams = [asyncio.create_task(stream(number)) for number in range(40)]
        await eventually(lambda: stack.app.ledger.load(0).running == 40)
        first = crew.seats[0]
        of_each = [seat.requests for seat in crew.seats]
        assert min(of_each) > 0
        assert sum(of_each) == 40
        assert first.process is not None
        os.kill(first.process.pid, signal.SIGKILL)
        # What it held is free as soon as its connection breaks; the others' bookings stand.
        await eventually(lambda: stack.app.ledger.load(0).running == of_each[1])
        whole = await asyncio.gather(*streams)
        assert sum(whole) == of_each[1]
        await eventually(lambda: stack.app.ledger.load(0).running == 0)
        assert (await stack.complete([3] * 20))["status"] == 200
        await eventually(lambda: crew.stats.running == 2)
        assert crew.stats.restarts == 1
        answers = await asyncio.gather(*(stack.complete([n] * 20) for n in range(40)))
        assert {answer["status"] for answer in answers} == {200}
        await stack.settled()


async def test_who_waits_leaves_with_its_face_and_is_refused_at_the_end(tmp_path: Path) -> None:
    """The engine reads one prompt for longer than the test lasts, and the policy sends it no other meanwhile."""
    engine = MockEngineSettings(prefill_rate=1.0, shutdown_grace=0.0)
    queue = {"drain_notice": 0, "drain_grace": 0.2, "assumed_prefill_rate": 1.0}
    changes = {"settings": {"extproc": {"workers": 2}, "queue": queue}}
    async with running_stack(
        tmp_path, [engine], policy=policy((512, 128), 1), **TWO_FACES | changes
    ) as stack:
        crew = crew_of(stack)
        refused: list[str | int] = []

        async def ask(number: int) -> None:
            answer = await stack.complete([number] * 512)
            refused.append(answer["headers"].get("x-picker-dropped-reason", answer["status"]))

        asked = [asyncio.create_task(ask(number)) for number in range(31)]
        await eventually(lambda: len(stack.app.queue) == 30)
        # The stream of what was sent is over, as its response does not pass here: only who waits is a face's.
        await eventually(lambda: sum(seat.requests for seat in crew.seats) == 30)
        first, second = (seat.requests for seat in crew.seats)
        assert crew.seats[0].process is not None
        os.kill(crew.seats[0].process.pid, signal.SIGKILL)
        await eventually(lambda: len(stack.app.queue) == second)
        await eventually(lambda: refused == [500] * first)
        await stack.app.drain()
        await eventually(lambda: refused == [500] * first + ["shutting_down"] * second)
        assert stack.app.ledger.load(0).running == 1
        for task in asked:
            task.cancel()
        await stack.settled()


@pytest.mark.slow
async def test_a_face_that_hangs_is_replaced(tmp_path: Path) -> None:
    async with running_stack(tmp_path, [MockEngineSettings()], **TWO_FACES) as stack:
        crew = crew_of(stack)
        assert crew.seats[0].process is not None
        os.kill(crew.seats[0].process.pid, signal.SIGSTOP)
        async with asyncio.timeout(60):
            while crew.stats != CrewStats(running=2, restarts=1):
                await asyncio.sleep(0.1)
        answers = await asyncio.gather(*(stack.complete([n] * 20) for n in range(20)))
        assert {answer["status"] for answer in answers} == {200}


@pytest.mark.slow
async def test_no_request_is_lost_when_connections_are_renewed(tmp_path: Path) -> None:
    """A minute and a half of requests one after another, on connections that live for a minute."""
    async with running_stack(tmp_path, [MockEngineSettings(prefill_rate=1e6)], **TWO_FACES) as stack:
        end = asyncio.get_running_loop().time() + 90

        async def client(number: int) -> set[int]:
            seen: set[int] = set()
            while asyncio.get_running_loop().time() < end:
                seen.add((await stack.complete([number] * 40))["status"])
                await asyncio.sleep(0.02)
            return seen

        seen = await asyncio.gather(*(client(number) for number in range(12)))
        assert set().union(*seen) == {200}
        await stack.settled()

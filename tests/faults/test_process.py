"""Picker told to stop, killed, paused, blocked, unable to log, and under a clock that jumps."""

from __future__ import annotations

import asyncio
import signal
import time
from pathlib import Path

import pytest

from picker.simulation.envoy_config import ResponseObservation
from tests.faults.client import Answer, End
from tests.faults.cluster import MODES, FaultCluster, cluster
from tests.faults.test_engines import HELD, ends, many, only_good_answers

# A process whose event loop can be blocked (SIGUSR1) and whose wall clock can be stepped (SIGUSR2: an hour back).
_TROUBLE = """
import signal, time
_real, _offset = time.time, [0.0]
time.time = lambda: _real() + _offset[0]
signal.signal(signal.SIGUSR1, lambda *_: time.sleep(2.0))
signal.signal(signal.SIGUSR2, lambda *_: _offset.__setitem__(0, _offset[0] - 3600.0))
"""


async def four_run_and_the_rest_waits(
    faulty: FaultCluster, count: int, events: int
) -> list[asyncio.Task[Answer]]:
    tasks = [asyncio.create_task(faulty.client.send(events=events, pause=0.02)) for _ in range(count)]
    await faulty.held(count - 4)
    await faulty.client.has_begun(4)
    return tasks


def settings(grace: float) -> dict[str, dict[str, float]]:
    return {"queue": {"drain_grace": grace}}


@pytest.mark.parametrize("observation", MODES)
async def test_told_to_stop_it_lets_everybody_finish_within_the_grace(
    tmp_path: Path, observation: ResponseObservation
) -> None:
    async with cluster(
        tmp_path, engines=1, policy=HELD, settings=settings(20.0), observation=observation
    ) as faulty:
        tasks = await four_run_and_the_rest_waits(faulty, 8, events=30)
        faulty.picker.signal(signal.SIGTERM)
        assert ends(list(await asyncio.gather(*tasks))) == {End.WHOLE: 8}
        assert await faulty.picker.ended() == 0
        assert faulty.picker.complaints() == []


async def test_told_to_stop_with_a_short_grace_it_refuses_who_waits(tmp_path: Path) -> None:
    """Those that run are the gateway's: they finish without it."""
    async with cluster(tmp_path, engines=1, policy=HELD, settings=settings(0.3)) as faulty:
        tasks = await four_run_and_the_rest_waits(faulty, 10, events=100)
        faulty.picker.signal(signal.SIGTERM)
        assert await faulty.picker.ended() == 0
        answers = list(await asyncio.gather(*tasks))
        assert ends(answers) == {End.WHOLE: 4, End.REFUSED: 6}
        refused = [each for each in answers if each.end is End.REFUSED]
        assert {(each.status, each.reason) for each in refused} == {(503, "shutting_down")}
        assert all(each.retry_after is not None and int(each.retry_after) >= 1 for each in refused)
        assert faulty.picker.complaints() == []
        # Nobody is there: a clean error of the gateway's, at once.
        assert (await faulty.client.send()).end is End.GATEWAY_ERROR
        await faulty.picker.start()
        await only_good_answers(faulty, 4)
        await faulty.picker.idle()


@pytest.mark.parametrize("observation", MODES)
async def test_killed(tmp_path: Path, observation: ResponseObservation) -> None:
    """Who waits gets a clean error; who runs finishes, or is cut where responses pass through Picker."""
    async with cluster(tmp_path, engines=1, policy=HELD, observation=observation) as faulty:
        tasks = await four_run_and_the_rest_waits(faulty, 10, events=60)
        faulty.picker.signal(signal.SIGKILL)
        assert await faulty.picker.ended() == -signal.SIGKILL
        answers = list(await asyncio.gather(*tasks))
        running = End.WHOLE if observation is ResponseObservation.ACCESS_LOG else End.CUT
        assert ends(answers) == {running: 4, End.GATEWAY_ERROR: 6}
        assert {each.status for each in answers if each.end is End.GATEWAY_ERROR} <= {500, 502, 503, 504}
        await faulty.picker.start()
        await only_good_answers(faulty, 4)
        await faulty.picker.idle()


@pytest.mark.parametrize("observation", MODES)
async def test_paused_for_five_seconds(tmp_path: Path, observation: ResponseObservation) -> None:
    async with cluster(tmp_path, engines=1, policy=HELD, observation=observation) as faulty:
        tasks = await four_run_and_the_rest_waits(faulty, 12, events=40)
        faulty.picker.signal(signal.SIGSTOP)
        tasks += [asyncio.create_task(faulty.client.send()) for _ in range(10)]
        await asyncio.sleep(5.0)
        faulty.picker.signal(signal.SIGCONT)
        assert ends(list(await asyncio.gather(*tasks))) == {End.WHOLE: 22}
        metrics = await faulty.picker.idle()
        assert metrics["picker_extproc_internal_errors_total"] == 0
        assert metrics["picker_event_loop_lag_seconds"] > 3


async def test_a_blocked_event_loop(tmp_path: Path) -> None:
    async with cluster(tmp_path, engines=1, policy=HELD, preamble=_TROUBLE) as faulty:
        tasks = await four_run_and_the_rest_waits(faulty, 8, events=30)
        faulty.picker.signal(signal.SIGUSR1)
        tasks += [asyncio.create_task(faulty.client.send()) for _ in range(10)]
        assert ends(list(await asyncio.gather(*tasks))) == {End.WHOLE: 18}
        assert (await faulty.picker.idle())["picker_event_loop_lag_seconds"] > 1


async def test_the_wall_clock_jumps(tmp_path: Path) -> None:
    """Waits, deadlines and ages go by the monotonic clock."""
    policy = HELD.replace("quantum: 512", "quantum: 512, max_queue_wait: 20")
    async with cluster(tmp_path, engines=1, policy=policy, preamble=_TROUBLE) as faulty:
        tasks = await four_run_and_the_rest_waits(faulty, 8, events=30)
        faulty.picker.signal(signal.SIGUSR2)
        started = time.monotonic()
        assert ends(list(await asyncio.gather(*tasks))) == {End.WHOLE: 8}
        assert time.monotonic() - started < 20
        metrics = await faulty.picker.idle()
        assert metrics["picker_endpoint_report_age_seconds"] < 60
        assert metrics["picker_queue_wait_seconds_sum"] < 60
        await only_good_answers(faulty, 4)


async def test_a_full_disk_under_the_log(tmp_path: Path) -> None:
    async with cluster(
        tmp_path, settings={"log": {"level": "debug"}}, log=Path("/dev/full"), policy=HELD
    ) as faulty:
        assert ends(await many(faulty, 30)) == {End.WHOLE: 30}
        metrics = await faulty.picker.idle()
        assert metrics["picker_log_lost_lines_total"] > 30
        assert metrics["picker_extproc_internal_errors_total"] == 0
        faulty.picker.signal(signal.SIGTERM)
        assert await faulty.picker.ended() == 0


async def test_its_gateway_dies(tmp_path: Path) -> None:
    """And the access log with it: engines that report themselves idle clear what was booked on them."""
    async with cluster(tmp_path, engines=1, policy=HELD) as faulty:
        tasks = await four_run_and_the_rest_waits(faulty, 8, events=500)
        before = (await faulty.picker.metrics())["picker_event_loop_tasks"]
        faulty.envoy.kill()
        await asyncio.gather(*tasks)
        metrics = await faulty.picker.idle()
        assert metrics["picker_ledger_reaped_total"] == 4
        assert metrics["picker_event_loop_tasks"] < before
        assert faulty.picker.complaints() == []

"""Engines that die, refuse, stall and lie, under a client that checks every byte."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from picker.simulation.envoy_config import ResponseObservation
from tests.faults.client import Answer, End
from tests.faults.cluster import MODES, FaultCluster, cluster

HELD = """
default_policy_family: all
uncached_isl_buckets: [{min_tokens: 0, bucket: any}]
policy_classes:
  - {name: all, policy_family: all, cache_bucket: any, quantum: 512, max_running_per_worker: 4}
"""

LIES = {
    "busy for ever": 'vllm:num_requests_running{engine="0"} 1e9\nvllm:num_requests_waiting{engine="0"} 1e9\n',
    "negative": 'vllm:num_requests_running{engine="0"} -5\nvllm:kv_cache_usage_perc{engine="0"} -1\n',
    "not a number": 'vllm:num_requests_running{engine="0"} NaN\nvllm:kv_cache_usage_perc{engine="0"} +Inf\n',
    "idle": 'vllm:num_requests_running{engine="0"} 0\nvllm:num_requests_waiting{engine="0"} 0\n',
    "garbage": "\x00\x01{{{{\n" * 1000,
    "a flood": 'vllm:num_requests_running{engine="0"} 1\n' + "x{y='z'} 1\n" * 2_000_000,
    "nothing": "",
}


async def many(faulty: FaultCluster, count: int, **options: float) -> list[Answer]:
    return list(await asyncio.gather(*(faulty.client.send(**options) for _ in range(count))))  # type: ignore[arg-type]


async def only_good_answers(faulty: FaultCluster, count: int = 20, seconds: float = 10.0) -> None:
    """Wait until every one of so many requests is served well: Picker has seen who is there."""
    async with asyncio.timeout(seconds):
        while any(answer.end is not End.WHOLE for answer in await many(faulty, count)):
            await asyncio.sleep(0.1)


def ends(answers: list[Answer]) -> Counter[End]:
    return Counter(answer.end for answer in answers)


@pytest.mark.parametrize("observation", MODES)
async def test_one_dies_in_the_middle_of_its_streams_and_comes_back(
    tmp_path: Path, observation: ResponseObservation
) -> None:
    async with cluster(tmp_path, observation=observation) as faulty:
        dying, other = faulty.engines
        running = asyncio.create_task(many(faulty, 20, events=100, pause=0.03))
        await faulty.client.has_begun(20)
        await dying.die()
        answers = await running
        assert ends(answers) == {End.CUT: 10, End.WHOLE: 10}
        before = other.served
        await only_good_answers(faulty)
        assert other.served - before >= 20
        await dying.start()
        served = dying.served
        async with asyncio.timeout(60):
            while dying.served == served:
                assert ends(await many(faulty, 4)) == {End.WHOLE: 4}
        await faulty.picker.idle()
        assert faulty.picker.complaints() == []


@pytest.mark.parametrize("observation", MODES)
async def test_all_die_and_return(tmp_path: Path, observation: ResponseObservation) -> None:
    async with cluster(tmp_path, observation=observation, policy=HELD) as faulty:
        running = asyncio.create_task(many(faulty, 40, events=100, pause=0.03))
        await faulty.held(32)
        await faulty.client.has_begun(8)
        for engine in faulty.engines:
            await engine.die()
        answers = await running
        assert ends(answers)[End.CUT] == 8
        assert {each.status for each in answers if each.end is not End.CUT} == {503}
        assert ends(answers)[End.NO_ANSWER] == 0
        await faulty.picker.idle()
        for engine in faulty.engines:
            await engine.start()
        await only_good_answers(faulty, 8)
        await faulty.picker.idle()
        assert faulty.picker.complaints() == []


async def test_one_stalls(tmp_path: Path) -> None:
    """Its requests wait as long as it does; the others never, and its booked work keeps new ones away."""
    async with cluster(tmp_path, policy=HELD) as faulty:
        stalled, other = faulty.engines
        stalled.stalls_at = 3
        first = [asyncio.create_task(faulty.client.send(events=10, timeout=120.0)) for _ in range(30)]
        async with asyncio.timeout(60):
            while sum(task.done() for task in first) < 26:
                await asyncio.sleep(0.02)
        assert stalled.served == 4
        assert ends(await many(faulty, 40)) == {End.WHOLE: 40}
        assert (stalled.served, sum(task.done() for task in first)) == (4, 26)
        assert other.served == 66
        stalled.stalls_at = None
        assert ends(list(await asyncio.gather(*first))) == {End.WHOLE: 30}
        await faulty.picker.idle()


async def test_one_takes_requests_and_never_answers(tmp_path: Path) -> None:
    """Clients that give up free their places, there and here."""
    async with cluster(tmp_path, engines=1, policy=HELD) as faulty:
        faulty.engines[0].silent = True
        impatient = asyncio.gather(*(faulty.client.send(timeout=1.0) for _ in range(12)))
        await faulty.held(8)
        assert ends(list(await impatient)) == {End.NO_ANSWER: 12}
        await faulty.picker.idle()
        faulty.engines[0].silent = False
        assert ends(await many(faulty, 8)) == {End.WHOLE: 8}
        await faulty.picker.idle()


async def test_one_lies_in_its_metrics(tmp_path: Path) -> None:
    """Whatever it says, requests are served, our own count stays right and nothing grows."""
    async with cluster(tmp_path, policy=HELD) as faulty:
        liar, _ = faulty.engines
        await many(faulty, 10)
        before = faulty.picker.rss()
        for lie in LIES.values():
            liar.metrics = lie
            # Longer than the pause between two scrapes.
            await asyncio.sleep(0.3)
            assert ends(await many(faulty, 30)) == {End.WHOLE: 30}
            await faulty.picker.idle()
        assert faulty.picker.rss() - before < 50e6
        liar.metrics = None
        assert (await faulty.picker.idle())["picker_extproc_internal_errors_total"] == 0


async def test_all_say_that_they_are_busy(tmp_path: Path) -> None:
    """Then requests wait as long as they may, and go as soon as an engine says otherwise."""
    policy = HELD.replace("quantum: 512", "quantum: 512, max_queue_wait: 1.0")
    async with cluster(tmp_path, engines=1, policy=policy) as faulty:
        faulty.engines[0].metrics = LIES["busy for ever"]
        await faulty.picker.until("picker_endpoint_foreign_requests", 1)
        answers = await many(faulty, 5)
        assert {(each.end, each.status, each.reason) for each in answers} == {(End.REFUSED, 429, "deadline")}
        held = asyncio.create_task(many(faulty, 5))
        await faulty.held(5)
        faulty.engines[0].metrics = None
        assert ends(await held) == {End.WHOLE: 5}
        await faulty.picker.idle()

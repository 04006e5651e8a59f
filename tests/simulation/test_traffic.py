"""The traffic client against a mock engine."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from picker.simulation.mock_engine import MockEngine, MockEngineSettings
from picker.simulation.traffic import (
    Record,
    Result,
    TrafficClass,
    TrafficClient,
    percentile,
    poisson,
    requests,
)

FAST = MockEngineSettings(name="pod-a", prefill_rate=1e7, iteration_time=1e-4)
GOLD = TrafficClass(
    "gold", weight=3.0, groups=2, prefix_tokens=64, tail_tokens=16, headers={"x-class": "gold"}
)
LEAD = TrafficClass("lead", weight=1.0, groups=1, prefix_tokens=32, tail_tokens=16, stream=False)


async def test_a_closed_loop_sends_the_total_and_records_each() -> None:
    seen: list[Record] = []
    async with MockEngine(FAST) as engine, TrafficClient(engine.addresses.url, "tiny") as client:
        sources = [(requests(GOLD, 1000, 1), 4), (requests(LEAD, 1000, 1), 2)]
        result = await client.closed_loop(sources, seen.append, total=40)
        assert len(engine.served) == 40
        assert {served.headers.get("x-class") for served in engine.served} == {"gold", None}
    assert seen == result.records
    assert all(record.ok for record in seen)
    assert {record.endpoint for record in seen} == {"pod-a"}
    assert result.statuses == {"200": 40}
    gold = result.of("gold")
    assert all(record.prompt_tokens == 80 and record.output_tokens == 8 for record in gold)
    assert max(record.cached_tokens for record in gold) == 64
    assert 0.0 < result.hit_share < 0.8
    for record in seen:
        assert record.first_token is not None
        assert record.done is not None
        assert record.due <= record.sent <= record.first_token <= record.done


async def test_an_open_loop_sends_by_the_clock_and_mixes_by_weight() -> None:
    arrivals = list(itertools.takewhile(lambda item: item[0] < 0.2, poisson([GOLD, LEAD], 500.0, 1000, 3)))
    async with MockEngine(FAST) as engine, TrafficClient(engine.addresses.url, "tiny") as client:
        result = await client.open_loop(poisson([GOLD, LEAD], 500.0, 1000, 3), duration=0.2)
    assert len(result.records) == len(arrivals)
    expected = Counter(request.traffic_class for _, request in arrivals)
    assert {name: len(result.of(name)) for name in expected} == expected
    assert expected["gold"] > 2 * expected["lead"]
    assert all(record.sent >= record.due for record in result.records)


async def test_refusals_and_dead_servers_are_records_too() -> None:
    async with MockEngine(FAST) as engine, TrafficClient(engine.addresses.url, "other-model") as client:
        refused = await client.send(next(requests(GOLD, 1000, 1)))
    assert (refused.status, refused.ok) == (404, False)
    async with TrafficClient(engine.addresses.url, "tiny") as client:
        dead = await client.send(next(requests(GOLD, 1000, 1)))
    assert dead.status is None
    assert dead.error == "ClientConnectorError"
    assert Result([refused, dead]).statuses == {"404": 1, "ClientConnectorError": 1}


def test_requests_are_the_same_for_the_same_seed_and_share_prefixes() -> None:
    first, again = (list(itertools.islice(requests(GOLD, 1000, 7), 20)) for _ in range(2))
    assert first == again
    assert first != list(itertools.islice(requests(GOLD, 1000, 8), 20))
    assert len({tuple(request.prompt[:64]) for request in first}) == 2
    assert len({tuple(request.prompt) for request in first}) == 20


async def test_a_closed_loop_needs_an_end() -> None:
    async with TrafficClient("http://127.0.0.1:1", "tiny") as client:
        with pytest.raises(ValueError, match="duration or a total"):
            await client.closed_loop([])


def test_percentile_is_nearest_rank() -> None:
    assert percentile([], 0.5) is None
    assert percentile(range(100), 0.99) == 99
    assert percentile([3.0], 0.5) == 3.0

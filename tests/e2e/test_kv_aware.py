"""Locality on real parts: prompts go where their prefix is, and Picker knows what the engine will report."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path

import pytest

from picker.kvcache.keys import block_keys, root_key
from picker.kvcache.matching import Tier
from picker.simulation.envoy_config import ResponseObservation
from picker.simulation.mock_engine import MockEngineSettings
from tests.e2e.stack import Stack, running_stack

pytestmark = pytest.mark.e2e

PREFIXES, TAILS, BLOCK = 8, 4, 16
ENGINES = 4


def prompt(prefix: int, tail: int) -> list[int]:
    """20 blocks of a shared prefix and two blocks of its own."""
    return [prefix * 3 + 1] * (20 * BLOCK) + [500 + tail] * (2 * BLOCK)


def predicted(stack: Stack) -> list[int]:
    """Cached tokens that each decision counted on, oldest first."""
    return [each.candidates[0].cached_tokens for each in reversed(list(stack.app.telemetry.decisions))]


@pytest.mark.parametrize("observation", ResponseObservation)
async def test_repeated_prefixes_go_to_the_pod_that_holds_them(
    tmp_path: Path, observation: ResponseObservation
) -> None:
    engines = [MockEngineSettings(name=f"pod-{number}", prefill_rate=1e6) for number in range(ENGINES)]
    async with running_stack(tmp_path, engines, observation=observation) as stack:
        homes: dict[int, Counter[str]] = {prefix: Counter() for prefix in range(PREFIXES)}
        reported = []
        for tail in range(TAILS):
            for prefix in range(PREFIXES):
                answer = await stack.complete(prompt(prefix, tail))
                assert answer["status"] == 200, answer
                homes[prefix][answer["headers"]["x-inference-pod"]] += 1
                reported.append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
                await stack.settled()
        assert all(len(pods) == 1 for pods in homes.values()), homes
        assert len({next(iter(pods)) for pods in homes.values()}) > 1, "cold prefixes spread"
        assert reported[:PREFIXES] == [0] * PREFIXES
        assert reported[PREFIXES:] == [20 * BLOCK] * (PREFIXES * (TAILS - 1))
        assert predicted(stack) == reported


async def test_what_engines_report_is_compared_with_the_predictions(tmp_path: Path) -> None:
    """Where responses pass through and the operator asks for it."""
    engines = [MockEngineSettings(name="pod-0", prefill_rate=1e6)]
    settings = {"extproc": {"observe": "usage"}}
    async with running_stack(
        tmp_path, engines, settings=settings, observation=ResponseObservation.STREAM
    ) as stack:
        for tail in range(TAILS):
            await stack.complete(prompt(1, tail))
            await stack.settled()
        # Of a batch, a real engine reports one prompt's figure: nothing to compare with.
        await stack.complete([prompt(1, 0), prompt(1, 1)])
        await stack.settled()
        stats = stack.app.accuracy.stats
        assert (stats.samples, stats.reported_tokens) == (TAILS, 20 * BLOCK * (TAILS - 1))
        assert stats.absolute_error == 0


async def test_how_fast_an_engine_decodes_is_learned_from_its_metrics(tmp_path: Path) -> None:
    engines = [MockEngineSettings(name="pod-0", prefill_rate=1e6, iteration_time=0.002)]
    async with running_stack(tmp_path, engines, settings={"pool": {"scrape_interval": 0.1}}) as stack:
        known = stack.app.calibration.inter_token.known
        async with asyncio.timeout(60):
            while not known:
                await stack.complete([1] * 32, max_tokens=200)
        assert known[0] == pytest.approx(0.002), "by the engine's own clock, however late it is"


async def test_events_alone_are_enough_to_know_what_is_cached(tmp_path: Path) -> None:
    """With predictions switched off in effect, what the engine stores is known from its events."""
    engines = [MockEngineSettings(name=f"pod-{number}", prefill_rate=1e6) for number in range(2)]
    settings = {"kvcache": {"bridge_ttl": 0.001}}
    async with running_stack(tmp_path, engines, settings=settings) as stack:
        first = await stack.complete(prompt(1, 1), max_tokens=40)
        async with asyncio.timeout(60):
            while stack.app.index.stats.stored < 24 or len(stack.app.predicted):
                await asyncio.sleep(0.01)
        again = await stack.complete(prompt(1, 1), max_tokens=40)
        assert again["headers"]["x-inference-pod"] == first["headers"]["x-inference-pod"]
        assert again["usage"]["prompt_tokens_details"]["cached_tokens"] == 21 * BLOCK
        assert predicted(stack)[-1] == 21 * BLOCK


async def test_a_restarted_engine_is_not_believed_to_be_warm(tmp_path: Path) -> None:
    """Neither by what it stored before nor by what was sent to it before."""
    settings = MockEngineSettings(name="pod-0", prefill_rate=1e6)
    async with running_stack(tmp_path, [settings], settings={"kvcache": {"bridge_ttl": 60}}) as stack:
        await stack.complete(prompt(1, 1))
        async with asyncio.timeout(60):
            while stack.app.index.stats.stored < 22:
                await asyncio.sleep(0.01)
        async with stack.session.post(f"{stack.engines[0].addresses.url}/reset_prefix_cache") as response:
            assert response.status == 200
        await stack.complete([7] * 64)
        async with asyncio.timeout(60):
            while stack.app.index.blocks_of(0) > 8:
                await asyncio.sleep(0.01)
        answer = await stack.complete(prompt(1, 1))
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert predicted(stack)[-1] == 0


async def test_engines_are_asked_for_their_events_unless_they_are_said_to_have_none(tmp_path: Path) -> None:
    """Nobody told Picker where the first engine publishes; of the second it was told that it does not."""
    engines = [MockEngineSettings(name=f"pod-{number}", prefill_rate=1e6) for number in range(2)]
    extras = [{"kv_events": None, "kv_replay": None}, {"kv_events": False, "kv_replay": None}]
    async with running_stack(tmp_path, engines, endpoint_extras=extras) as stack:
        app = stack.app
        async with asyncio.timeout(60):
            while not app.kv_events.connected:
                await asyncio.sleep(0.01)
        assert [app.kv_events.is_connected(endpoint.spec.uid) for endpoint in app.pool] == [True, False]
        await asyncio.gather(*(stack.complete(prompt(prefix, 0)) for prefix in range(4)))
        await stack.settled()
        async with asyncio.timeout(60):
            while not app.index.blocks_of(0):
                await asyncio.sleep(0.01)
        assert not app.index.blocks_of(1)


async def test_blocks_in_a_slower_tier_are_expected_to_be_reported_whole(tmp_path: Path) -> None:
    """They count for less in a decision; the engine reports each of them as cached all the same."""
    engines = [MockEngineSettings(name="pod-0", prefill_rate=1e6)]
    settings = {"extproc": {"observe": "usage"}}
    async with running_stack(
        tmp_path, engines, settings=settings, observation=ResponseObservation.STREAM
    ) as stack:
        app, ids = stack.app, [*prompt(0, 0), 7]
        keys = block_keys(ids, BLOCK)
        await stack.complete(ids)
        await stack.settled()
        async with asyncio.timeout(60):
            while app.index.blocks_of(0) < len(keys):
                await asyncio.sleep(0.01)
        app.predicted.drop(0)
        app.index.add(0, keys, root_key(BLOCK, None), Tier.HOST)
        app.index.remove(0, keys)
        answer = await stack.complete(ids)
        await stack.settled()
        assert predicted(stack)[-1] == 22 * BLOCK * 3 // 4
        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 22 * BLOCK
        stats = app.accuracy.stats
        assert (stats.predicted_tokens, stats.reported_tokens) == (22 * BLOCK, 22 * BLOCK)

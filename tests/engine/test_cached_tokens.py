"""Cached tokens: what Picker counts on when it decides is what the engine then reports, through a real Envoy."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from picker.kvcache.discovery import EventAddresses, discover_sources
from picker.simulation.envoy_config import ResponseObservation
from tests.e2e.stack import Stack, gateway
from tests.engine.recorder import Recorder, recording
from tests.engine.vllm import BLOCK, BLOCKS, MODEL, Vllm

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"

EVENTS_ONLY = {"kvcache": {"bridge_ttl": 0.001}}
"""Predictions from our own decisions are gone before anybody can use them: only events count."""

_USABLE = BLOCKS - 1


@dataclass(slots=True)
class Figures:
    """(predicted, reported) cached tokens of each request."""

    pairs: list[tuple[int, int]] = field(default_factory=list)

    def worst(self) -> int:
        return max(abs(predicted - reported) for predicted, reported in self.pairs)

    def __str__(self) -> str:
        exact = sum(predicted == reported for predicted, reported in self.pairs)
        predicted, reported = map(sum, zip(*self.pairs, strict=True))
        return (
            f"{len(self.pairs)} requests, {exact} exact, worst {self.worst()} tokens; "
            f"{predicted} cached tokens predicted, {reported} reported"
        )


@dataclass(slots=True)
class Bench:
    """The engine behind Picker and Envoy, and a second listener to its events."""

    stack: Stack
    recorder: Recorder
    figures: Figures = field(default_factory=Figures)

    async def ask(self, path: str, **body: Any) -> dict[str, Any]:
        """Send it through Envoy, note both figures, and wait until its events are in the index."""
        answer = await self.noted(path, **body)
        await self.stack.settled()
        await self.heard()
        return answer

    async def noted(self, path: str, **body: Any) -> dict[str, Any]:
        """Send it and note both figures."""
        answer = await self.post(path, **body)
        latest = next(iter(self.stack.app.telemetry.decisions))
        self.figures.pairs.append((latest.candidates[0].cached_tokens, cached_of(answer["usage"])))
        return answer

    async def post(self, path: str, **body: Any) -> dict[str, Any]:
        body = {"model": MODEL, "temperature": 0, **body}
        async with self.stack.session.post(self.stack.url + path, json=body) as response:
            answer: dict[str, Any] = await response.json()
            assert response.status == 200, answer
            return answer

    async def complete(self, prompt: Any, tokens: int = 1, **body: Any) -> dict[str, Any]:
        return await self.ask("/v1/completions", prompt=prompt, max_tokens=tokens, ignore_eos=True, **body)

    async def heard(self) -> None:
        """Picker has applied what the engine has published, no more comes, and short-lived predictions are over."""
        app = self.stack.app
        stats = app.kv_events.stream_stats
        async with asyncio.timeout(30):
            while app.settings.kvcache.bridge_ttl < 1 and len(app.predicted):
                await asyncio.sleep(0.02)
            while True:
                before = (self.recorder.messages, stats.live + stats.replayed)
                await asyncio.sleep(0.15)
                if before == (self.recorder.messages, stats.live + stats.replayed):
                    return

    @property
    def indexed(self) -> int:
        """Blocks that the index has of the engine."""
        (endpoint,) = self.stack.app.pool
        return self.stack.app.index.blocks_of(endpoint.slot)


def cached_of(usage: dict[str, Any]) -> int:
    details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
    cached: int | None = details.get("cached_tokens", usage.get("cache_read_input_tokens"))
    return cached or 0


@asynccontextmanager
async def bench(directory: Path, engine: Vllm, **options: Any) -> AsyncIterator[Bench]:
    """Starts with the engine's cache empty, whatever ran before, and Picker knowing it."""
    settings = {"tokens": {"models": {MODEL: engine.model}}, **options.pop("settings", {})}
    _, events, _ = engine.ports
    async with (
        recording(f"tcp://127.0.0.1:{events}") as recorder,
        gateway(directory, [engine.pool_entry], settings=settings, **options) as stack,
    ):
        await reset(engine, stack.session)
        await connected(stack)
        made = Bench(stack, recorder)
        # The engine tells of a reset with its next request.
        await made.complete([3] * (BLOCK + 1))
        made.figures.pairs.clear()
        yield made


async def reset(engine: Vllm, session: aiohttp.ClientSession) -> None:
    async with session.post(f"{engine.url}/reset_prefix_cache") as response:
        assert response.status == 200


async def connected(stack: Stack) -> None:
    """Picker hears the engine's events and has read its metrics."""
    (endpoint,) = stack.app.pool
    async with asyncio.timeout(60):
        while not stack.app.kv_events.connected >> endpoint.slot & 1 or endpoint.report is None:
            await asyncio.sleep(0.05)


def words(seed: int, count: int) -> str:
    chosen = random.Random(seed)
    sounds = ["ka", "ri", "mo", "tel", "un", "sha", "ven", "dor", "ix", "pla"]
    return " ".join("".join(chosen.choices(sounds, k=2)) for _ in range(count))


def ids(seed: int, blocks: int) -> list[int]:
    return random.Random(seed).choices(range(4, 1000), k=blocks * BLOCK)


@pytest.mark.parametrize("observation", ResponseObservation)
async def test_conversations_over_all_apis(
    vllm: Vllm, tmp_path: Path, say: Callable[[str], None], observation: ResponseObservation
) -> None:
    """The same conversation grows turn by turn, now through one API and now through another: all share its cache."""
    settings = {**EVENTS_ONLY, "extproc": {"observe": "usage"}}
    async with bench(tmp_path, vllm, settings=settings, observation=observation) as test:
        for seed in range(3):
            turns: list[dict[str, Any]] = [{"role": "user", "content": words(seed, 60)}]
            system = {"role": "system", "content": "Be brief, and name the river."}
            for turn in range(3):
                chat = await test.ask(CHAT, messages=[system, *turns], max_tokens=40, ignore_eos=True)
                await test.ask(RESPONSES, input=turns, instructions=system["content"], max_output_tokens=4)
                await test.ask(MESSAGES, messages=turns, system=system["content"], max_tokens=4)
                said = chat["choices"][0]["message"]["content"] or ""
                turns += [
                    {"role": "assistant", "content": said},
                    {"role": "user", "content": words(100 + 10 * seed + turn, 20)},
                ]
        say(f"conversations, {observation}: {test.figures}")
        assert test.figures.worst() <= BLOCK
        assert sum(reported > 0 for _, reported in test.figures.pairs) > len(test.figures.pairs) // 2
        if observation is ResponseObservation.STREAM:
            stats = test.stack.app.accuracy.stats
            assert stats.absolute_error == sum(abs(a - b) for a, b in test.figures.pairs)


async def test_prompts_of_every_shape(vllm: Vllm, tmp_path: Path, say: Callable[[str], None]) -> None:
    text, tokens = words(1, 80), ids(1, 3)
    async with bench(tmp_path, vllm, settings=EVENTS_ONLY) as test:
        for _ in range(2):
            await test.complete(text)
            await test.complete(text + " and another end")
            await test.complete(tokens)
            await test.complete(text, cache_salt="a")
            await test.complete(text, cache_salt="b")
            await test.complete("short")
        say(f"prompts of every shape: {test.figures}")
        assert test.figures.worst() <= BLOCK
        # A prompt that fills its last block is computed from there on, and so a block is missing each time.
        assert test.figures.pairs[8] == (2 * BLOCK, 2 * BLOCK)


async def test_batches(vllm: Vllm, tmp_path: Path, say: Callable[[str], None]) -> None:
    """Of a batch the engine reports the last prompt's cached tokens only, and Picker counts on all of them."""
    one, other = [*ids(7, 3), 5], [*ids(8, 2), 5]
    async with bench(tmp_path, vllm, settings=EVENTS_ONLY) as test:
        await test.complete([one, other])
        await test.complete(one)
        await test.complete([one, other])
        say(f"batches: {test.figures}")
        assert test.figures.pairs == [(0, 0), (3 * BLOCK, 3 * BLOCK), (5 * BLOCK, 2 * BLOCK)]


async def test_generated_tokens_are_known_too(vllm: Vllm, tmp_path: Path, say: Callable[[str], None]) -> None:
    prompt = ids(4, 1)
    async with bench(tmp_path, vllm, settings=EVENTS_ONLY) as test:
        answer = await test.complete(prompt, tokens=4 * BLOCK, return_token_ids=True)
        history = prompt + answer["choices"][0]["token_ids"]
        await test.complete([*history, 5, 6, 7])
        say(f"generated tokens: {test.figures}")
        assert test.figures.worst() <= BLOCK
        assert test.figures.pairs[-1][1] == 4 * BLOCK


async def test_eviction(vllm: Vllm, tmp_path: Path, say: Callable[[str], None]) -> None:
    """Three times as much as the engine can hold, some prompts more often than others."""
    choices = random.Random(5)
    prompts = [ids(10 + number, choices.randint(8, 30)) for number in range(12)]
    weights = [1 / (rank + 1) for rank in range(len(prompts))]
    async with bench(tmp_path, vllm, settings=EVENTS_ONLY) as test:
        for prompt in choices.choices(prompts, weights, k=60):
            cut = choices.choice([len(prompt), len(prompt) // 2])
            await test.complete([*prompt[:cut], choices.randrange(4, 1000)])
            assert test.indexed <= _USABLE
        say(f"eviction: {test.figures}; {test.recorder.removed} blocks removed, {test.indexed} indexed")
        assert test.figures.worst() <= BLOCK
        assert test.recorder.removed > 2 * _USABLE
        assert any(reported for _, reported in test.figures.pairs)


async def test_many_at_once_leave_the_index_right(
    vllm: Vllm, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """More than the engine has blocks for: it lets some wait, puts others back, and evicts meanwhile."""
    prompts = [ids(40 + number, 3) for number in range(12)]
    async with bench(tmp_path, vllm, settings=EVENTS_ONLY) as test:
        posts = [
            test.post("/v1/completions", prompt=prompt, max_tokens=400, ignore_eos=True, priority=number % 3)
            for number, prompt in enumerate(prompts)
        ]
        await asyncio.gather(*posts)
        await test.stack.settled()
        await test.heard()
        assert 0 < test.indexed <= _USABLE
        for prompt in prompts:
            await test.complete([*prompt, 9])
        say(f"after many at once: {test.figures}; {test.recorder.removed} blocks removed")
        assert test.figures.worst() <= BLOCK
        assert test.stack.app.kv_events.block_stats.unknown_removals == 0


async def test_our_own_decisions_bridge_until_events_come(
    vllm: Vllm, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """With the default settings: right at once after an answer, without waiting for events."""
    async with bench(tmp_path, vllm) as test:
        for seed in range(4):
            for _ in range(3):
                await test.noted("/v1/completions", prompt=[*ids(60 + seed, 4), 5], max_tokens=1)
        say(f"bridged: {test.figures}")
        assert test.figures.worst() <= BLOCK


async def test_a_late_picker_learns_from_a_replay(
    vllm: Vllm, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """It starts when the engine's cache is warm already."""
    prompt = [*ids(80, 6), 5]
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
    async with bench(tmp_path / "first", vllm) as test:
        await test.complete(prompt)
    _, events, _ = vllm.ports
    async with (
        recording(f"tcp://127.0.0.1:{events}") as recorder,
        gateway(
            tmp_path / "second",
            [vllm.pool_entry],
            settings={"tokens": {"models": {MODEL: vllm.model}}, **EVENTS_ONLY},
        ) as stack,
    ):
        late = Bench(stack, recorder)
        await connected(stack)
        # Asked for with the first message that is not number 0.
        await late.complete(ids(81, 2))
        await late.complete(prompt)
        say(f"late: {late.figures}; {stack.app.kv_events.stream_stats.replayed} messages replayed")
        assert late.figures.pairs[-1] == (6 * BLOCK, 6 * BLOCK)


async def test_a_reset_is_heard_of_with_the_next_request(
    vllm: Vllm, tmp_path: Path, say: Callable[[str], None]
) -> None:
    prompt = [*ids(90, 5), 5]
    async with bench(tmp_path, vllm, settings=EVENTS_ONLY) as test:
        await test.complete(prompt)
        await reset(vllm, test.stack.session)
        await test.complete(ids(91, 2))
        await test.complete(prompt)
        await test.complete(prompt)
        say(f"reset: {test.figures}")
        assert test.figures.pairs == [(0, 0), (0, 0), (0, 0), (5 * BLOCK, 5 * BLOCK)]


async def test_the_engine_tells_its_figures_and_where_its_events_are(vllm: Vllm, tmp_path: Path) -> None:
    async with bench(tmp_path, vllm) as test:
        (endpoint,) = test.stack.app.pool
        assert endpoint.report is not None
        assert (endpoint.report.num_blocks, endpoint.block_size) == (BLOCKS, BLOCK)
        assert (endpoint.report.running, endpoint.report.waiting) == (0, 0)
        _, events, replay = vllm.ports
        assert await discover_sources(test.stack.session, vllm.url) == {
            0: EventAddresses(f"tcp://127.0.0.1:{events}", f"tcp://127.0.0.1:{replay}")
        }

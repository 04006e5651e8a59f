"""Ends: clients that leave, and an engine that dies and comes back."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

from tests.engine.test_cached_tokens import EVENTS_ONLY, bench, connected, ids
from tests.engine.vllm import BLOCK, MODEL, Vllm


async def test_a_client_that_leaves_frees_engine_and_picker(
    vllm: Vllm, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """Half of them while the engine generates, half while they wait in its queue: it runs 8 at most."""
    prompts = [[*ids(200 + number, 2), 5] for number in range(12)]
    async with bench(tmp_path, vllm, settings=EVENTS_ONLY) as test:
        (endpoint,) = test.stack.app.pool

        async def leave(prompt: list[int]) -> None:
            body = {"model": MODEL, "prompt": prompt, "max_tokens": 1900, "ignore_eos": True, "stream": True}
            async with test.stack.session.post(f"{test.stack.url}/v1/completions", json=body) as response:
                await response.content.read()

        clients = [asyncio.create_task(leave(prompt)) for prompt in prompts]
        async with asyncio.timeout(60):
            while endpoint.report is None or endpoint.report.running == 0 or endpoint.report.waiting == 0:
                await asyncio.sleep(0.05)
        busy = (endpoint.report.running, endpoint.report.waiting)
        for client in clients:
            client.cancel()
        await asyncio.gather(*clients, return_exceptions=True)
        await test.stack.settled()
        load = test.stack.app.ledger.load(endpoint.slot)
        assert (load.prefill_tokens, load.running) == (0, 0)
        async with asyncio.timeout(30):
            while endpoint.report.running or endpoint.report.waiting:
                await asyncio.sleep(0.05)
        await test.heard()
        for prompt in prompts:
            await test.complete(prompt)
        say(f"abort with {busy[0]} running and {busy[1]} waiting, then: {test.figures}")
        assert test.figures.worst() <= BLOCK


async def test_a_restarted_engine_is_cold_and_then_warm_again(
    vllm: Vllm, tmp_path: Path, say: Callable[[str], None]
) -> None:
    """Killed and started on the same ports: Picker takes it up again without being told, and forgets as well what
    it had sent while the engine was away."""
    prompt = [*ids(300, 6), 5]
    async with bench(tmp_path, vllm, settings=EVENTS_ONLY) as test:
        await test.complete(prompt)
        await test.complete(prompt)
        vllm.kill()
        async with test.stack.session.post(
            f"{test.stack.url}/v1/completions", json={"model": MODEL, "prompt": prompt}
        ) as response:
            assert response.status == 503
        await test.stack.settled()
        say("vLLM: starting again ...")
        await asyncio.to_thread(vllm.start)
        await connected(test.stack)
        async with asyncio.timeout(10):
            while not test.stack.app.kv_events.stream_stats.restarts:
                await asyncio.sleep(0.05)
        await test.complete(prompt)
        await test.complete(prompt)
        await test.complete([*prompt[:BLOCK], *ids(301, 2)])
        say(f"restart: {test.figures}")
        cached = 6 * BLOCK
        assert test.figures.pairs == [(0, 0), (cached, cached), (0, 0), (cached, cached), (BLOCK, BLOCK)]

"""Recordings for whoever listens: nothing without a listener, all of it with one, and a bound on both."""

from __future__ import annotations

import asyncio
import json

import pytest

from picker.policy import Policy
from picker.queueing.work import Work
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from picker.telemetry.live_recording import HEARTBEAT, Listener, LiveRecording, TooManyListeners


def work(tokens: list[int], *, tenant: str = "") -> Work:
    demand = Demand(len(tokens), PromptKeys.of_tokens([tokens]))
    policy_class = Policy.default().profile("m").resolve(None, len(tokens))
    return Work("r", 0.0, demand, policy_class, tenant=tenant, expected_output_tokens=9)


async def text(listener: Listener) -> str:
    async with asyncio.timeout(60):
        return await anext(aiter(listener))


async def test_a_listener_hears_what_comes_after_it() -> None:
    live = LiveRecording(lambda: 0.0)
    assert not live.wanted
    live.take(work([1] * 64), "dispatched", 1, 16)
    listener = live.listen()
    assert live.wanted
    live.take(work([1] * 128, tenant="alice"), "dispatched", 5, 16)
    live.take(work([2] * 64), "deadline", None, 16)
    first, second = map(json.loads, (await text(listener)).splitlines())
    assert (first["input_length"], first["output_length"], len(first["hash_ids"])) == (128, 5, 2)
    assert (second["outcome"], second["output_length"]) == ("deadline", 9)
    assert "alice" not in json.dumps(first)
    listener.leave()
    assert not live.wanted


async def test_two_listeners_cannot_be_put_together() -> None:
    live = LiveRecording(lambda: 0.0)
    listeners = [live.listen(), live.listen()]
    live.take(work([1] * 64, tenant="a"), "dispatched", 1, 16)
    first, second = [json.loads(await text(listener)) for listener in listeners]
    assert first["hash_ids"] != second["hash_ids"]
    assert first["tenant"] != second["tenant"]


async def test_who_is_too_slow_is_told_how_much_is_missing() -> None:
    live = LiveRecording(lambda: 0.0, backlog=2)
    listener = live.listen()
    for _ in range(5):
        live.take(work([1] * 64), "dispatched", 1, 16)
    assert len((await text(listener)).splitlines()) == 2
    live.take(work([1] * 64), "dispatched", 1, 16)
    assert json.loads(await text(listener))["lost"] == 3


async def test_a_silent_picker_gives_signs_of_life() -> None:
    live = LiveRecording(lambda: 0.0, heartbeat=0.01)
    assert await text(live.listen()) == HEARTBEAT


async def test_listeners_are_few_and_end_with_the_service() -> None:
    live = LiveRecording(lambda: 0.0, max_listeners=2)
    listeners = [live.listen(), live.listen()]
    with pytest.raises(TooManyListeners):
        live.listen()
    live.take(work([1] * 64), "dispatched", 1, 16)
    live.close()
    for listener in listeners:
        async with asyncio.timeout(60):
            assert len([line async for line in listener]) == 1
    live.listen()

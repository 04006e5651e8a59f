"""The sweep on the event loop: all of it, and never all at once."""

from __future__ import annotations

import asyncio

from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys, root_key
from picker.kvcache.predicted import PredictedIndex
from picker.kvcache.sweeper import Sweeper
from tests.kvcache.fake_engine import until

KEYS = block_keys(range(5000), 1)


async def test_what_fades_is_swept_between_the_turns_of_others() -> None:
    index, predicted = KvIndex(), PredictedIndex()
    # No time at all: a chunk in each turn.
    sweeper = Sweeper(index.sweep, lambda limit: predicted.sweep(0.0, limit), slice_seconds=0.0)
    index.on_fading = predicted.on_fading = sweeper.start
    index.add(0, KEYS, root_key(1, None))
    predicted.predict(0, KEYS, 0.0, ttl=10.0, capacity=10_000)
    index.drop(0)
    predicted.drop(0)
    loop, turns = asyncio.get_running_loop(), 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        loop.call_soon(turn)

    loop.call_soon(turn)
    await until(lambda: not index.sweep(0) and not predicted.sweep(0.0, 0))
    assert turns > 10


async def test_it_rests_when_all_is_done_and_starts_again() -> None:
    asked: list[int] = []

    def sweep(limit: int) -> bool:
        asked.append(limit)
        return False

    sweeper = Sweeper(sweep)
    sweeper.start()
    sweeper.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(asked) == 1
    sweeper.start()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert len(asked) == 2

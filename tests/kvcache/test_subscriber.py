"""KV events over real sockets: losses, replays, restarts, removals, floods."""

from __future__ import annotations

import asyncio
import operator
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest

from picker.kvcache.events import AllBlocksCleared
from picker.kvcache.index import KvIndex
from picker.kvcache.keys import block_keys
from picker.kvcache.sources import KvEventLimits, KvEvents
from picker.kvcache.stream import StreamLimits
from picker.kvcache.subscriber import SubscriberLimits
from tests.kvcache.fake_engine import FakeEngine, until
from tests.kvcache.wire import SIZE, as_row, hashes, payload, removed, stored, tokens

QUICK = KvEventLimits(
    subscriber=SubscriberLimits(replay_idle=0.5, reconnect_first=0.01, reconnect_longest=0.05)
)


@dataclass(frozen=True)
class Spec:
    uid: str
    kv_events: str | None
    kv_replay: str | None = None
    engine: str = "vllm"

    @property
    def name(self) -> str:
        return f"pod-{self.uid}"


@dataclass(frozen=True)
class Endpoint:
    slot: int
    spec: Spec


class Listener:
    """KvEvents over an index of its own."""

    def __init__(self, limits: KvEventLimits = QUICK) -> None:
        self.index = KvIndex()
        self.sizes: list[tuple[int, int]] = []
        self.events: KvEvents[Endpoint] = KvEvents(
            self.index,
            on_block_size=lambda endpoint, size: self.sizes.append((endpoint.slot, size)),
            limits=limits,
        )

    @property
    def stats(self) -> Any:
        return self.events.stream_stats

    def cached(self, token_ids: Sequence[int], **names: Any) -> dict[int, int]:
        matches = self.index.find_matches(block_keys(token_ids, SIZE, **names), (1 << 64) - 1)
        return {slot: match.blocks for slot, match in matches.items()}


def endpoint(engine: FakeEngine, slot: int = 0, *, uid: str = "a", replay: bool = True) -> Endpoint:
    return Endpoint(slot, Spec(uid, engine.address, engine.replay_address if replay else None))


@asynccontextmanager
async def following(
    *engines: FakeEngine, replay: bool = True, limits: KvEventLimits = QUICK
) -> AsyncIterator[Listener]:
    """A listener that has connected to the engines and asked them for their past."""
    listener = Listener(limits)
    listener.events.reconcile(
        endpoint(engine, slot, uid=str(slot), replay=replay) for slot, engine in enumerate(engines)
    )
    try:
        for engine in engines:
            await engine.subscribed()
            if replay:
                await until(partial(operator.eq, engine.asked, [0]))
        await until(lambda: listener.events.connected == (1 << len(engines)) - 1)
        yield listener
    finally:
        listener.events.close()
        for engine in engines:
            await engine.stop()


PROMPT = tokens(8)


def block(number: int, prompt: Sequence[int] = PROMPT) -> bytes:
    """A payload that stores one block of the prompt."""
    names = hashes(prompt)
    body = prompt[number * SIZE : (number + 1) * SIZE]
    return payload(stored(body, parent=names[number - 1] if number else None, block_hashes=[names[number]]))


async def test_events_reach_the_index() -> None:
    engine = FakeEngine()
    async with following(engine) as listener:
        await engine.send(block(0), block(1))
        await until(lambda: listener.cached(PROMPT) == {0: 2})
        assert listener.sizes == [(0, SIZE)]
        await engine.send(payload(AllBlocksCleared()))
        await until(lambda: listener.cached(PROMPT) == {})


async def test_one_ranks_clear_does_not_touch_the_other() -> None:
    """C31, over two sources."""
    first, second = FakeEngine(), FakeEngine()
    async with following(first, second) as listener:
        await first.send(block(0), block(1))
        await second.send(block(0), block(1))
        await until(lambda: listener.cached(PROMPT) == {0: 2, 1: 2})
        await first.send(payload(AllBlocksCleared()), block(0))
        await until(lambda: listener.cached(PROMPT) == {0: 1, 1: 2})


@pytest.mark.parametrize("topics", [True, False], ids=["replies with topic", "replies without topic"])
async def test_lost_messages_are_replayed_once(topics: bool) -> None:
    """C32: 0,1,2 arrive, 3..5 are lost, 6 depends on 4."""
    engine = FakeEngine(topics=topics)
    async with following(engine) as listener:
        await engine.send(*map(block, (0, 1, 2)))
        await engine.send(*map(block, (3, 4, 5)), lose=True)
        await engine.send(block(6))
        await until(lambda: listener.cached(PROMPT) == {0: 7})
        await engine.resend(6)
        await engine.send(block(7))
        await until(lambda: listener.cached(PROMPT) == {0: 8})
        # The request for 0 is the one that every subscriber makes when it connects.
        assert engine.asked == [0, 3]
        assert (listener.stats.gaps, listener.stats.missed, listener.stats.losses) == (1, 3, 0)
        assert listener.stats.duplicates == 2  # 6 in the replay, and 6 again
        # A duplicate applied twice would survive this.
        await engine.send(payload(removed(hashes(PROMPT)[6:7])))
        await until(lambda: listener.cached(PROMPT) == {0: 6})


@pytest.mark.parametrize("how", ["silent", "forgotten", "no replay address"])
async def test_messages_lost_for_good_take_the_endpoints_entries_with_them(how: str) -> None:
    """C32: never over-credited, and counted."""
    engine = FakeEngine()
    async with following(engine, replay=how != "no replay address") as listener:
        await engine.send(block(0), block(1))
        await until(lambda: listener.cached(PROMPT) == {0: 2})
        engine.silent = how == "silent"
        engine.memory = 1
        await engine.send(block(2), lose=True)
        await engine.send(block(3))
        await until(lambda: listener.stats.losses == 1)
        assert listener.cached(PROMPT) == {}
        fresh = tokens(2, start=50)
        await engine.send(block(0, fresh))
        await until(lambda: listener.cached(fresh) == {0: 1})
        assert listener.stats.gaps == 1


async def test_a_short_sequence_frame_is_skipped_and_its_message_replayed() -> None:
    """C32."""
    engine = FakeEngine()
    async with following(engine) as listener:
        await engine.send(block(0))
        await engine.send(block(1), lose=True)
        await engine.send_frames(b"kv", b"\0\0\0\1", engine.history[1])
        await engine.send_frames(b"kv")
        await engine.send(block(2))
        await until(lambda: listener.cached(PROMPT) == {0: 3})
        assert (listener.stats.bad_frames, engine.asked) == (2, [0, 1])


async def test_frames_without_a_topic_are_read() -> None:
    engine = FakeEngine()
    async with following(engine) as listener:
        await engine.send_frames((0).to_bytes(8, "big"), block(0))
        await until(lambda: listener.cached(PROMPT) == {0: 1})


async def test_a_warm_engine_is_known_before_its_next_event() -> None:
    engine = FakeEngine()
    await engine.send(*map(block, range(6)))
    async with following(engine) as listener:
        await until(lambda: listener.cached(PROMPT) == {0: 6})
        await engine.send(block(6))
        await until(lambda: listener.cached(PROMPT) == {0: 7})
        assert engine.asked == [0]


async def test_joining_in_the_middle_asks_for_the_beginning() -> None:
    """C32: the first live message has number 5, and the first request was not answered."""
    engine = FakeEngine()
    engine.silent = True
    async with following(engine) as listener:
        await until(lambda: listener.stats.replay_failures == 1)
        engine.silent = False
        await engine.send(*map(block, range(5)), lose=True)
        await engine.send(block(5))
        await until(lambda: listener.cached(PROMPT) == {0: 6})
        assert engine.asked == [0, 0]


async def test_an_engine_that_starts_again_is_a_new_one() -> None:
    """At the same address, with an empty cache and the sequence back at 0, before it says anything."""
    engine = FakeEngine()
    async with following(engine) as listener:
        await engine.send(*map(block, range(4)))
        await until(lambda: listener.cached(PROMPT) == {0: 4})
        await engine.stop()
        await until(lambda: not listener.events.connected)
        again = FakeEngine()
        again.rebind(engine)
        try:
            await again.subscribed()
            await until(lambda: listener.cached(PROMPT) == {})
            assert listener.stats.restarts == 1
            await again.send(block(0))
            await until(lambda: listener.cached(PROMPT) == {0: 1})
        finally:
            await again.stop()


@pytest.mark.parametrize("first", [0, 2])
async def test_a_sequence_that_goes_back_is_a_restart(first: int) -> None:
    """Without a reconnection being seen, and even if its first messages are lost."""
    engine, fresh = FakeEngine(), tokens(4, start=50)
    async with following(engine) as listener:
        await engine.send(*map(block, range(6)))
        await until(lambda: listener.cached(PROMPT) == {0: 6})
        engine.history.clear()
        await engine.send(*(block(number, fresh) for number in range(first)), lose=True)
        await engine.send(block(first, fresh))
        await until(lambda: listener.cached(fresh) == {0: first + 1})
        assert listener.cached(PROMPT) == {}
        assert listener.stats.restarts == 1


async def test_nothing_of_a_pod_that_is_gone_comes_back() -> None:
    """C35: events still in the pipe at the deletion, then a new pod in the same slot and at the same address."""
    engine = FakeEngine()
    async with following(engine) as listener:
        await engine.send(block(0))
        await until(lambda: listener.cached(PROMPT) == {0: 1})
        many = tokens(1000, start=100)
        await engine.send(*(block(number, many[: 8 * SIZE]) for number in [*range(8)] * 125))
        listener.events.reconcile([])
        assert (len(listener.index), len(listener.events)) == (0, 0)
        # A new pod, uid b, whose engine happens to have the address: only its own events count.
        engine.history.clear()
        listener.events.reconcile([endpoint(engine, uid="b")])
        await engine.subscribed()
        assert listener.cached(PROMPT) == {}
        await engine.send(block(0, many[: 8 * SIZE]))
        await until(lambda: listener.cached(many) == {0: 1})
        assert listener.index.blocks_of(0) == 1


async def test_a_hundred_pods_come_and_go_without_a_trace() -> None:
    """C35."""
    engine, listener = FakeEngine(), Listener()
    before = len(asyncio.all_tasks())
    descriptors = open_descriptors()
    for number in range(100):
        listener.events.reconcile([endpoint(engine, slot=number % 3, uid=str(number))])
        await asyncio.sleep(0)
        assert len(listener.events) == 1
    listener.events.reconcile([])
    assert (len(listener.events), len(asyncio.all_tasks())) == (0, before)
    assert (listener.events.stats.opened, listener.events.stats.closed) == (100, 100)
    await until(lambda: open_descriptors() <= descriptors + 10)
    listener.events.close()
    await engine.stop()


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


async def test_garbage_does_not_cost_the_connection() -> None:
    """C37: unknown types, bytes that are no batch, then a good one."""
    engine = FakeEngine()
    async with following(engine) as listener:
        first = as_row(stored(PROMPT[:SIZE]))
        await engine.send(
            payload(first, ["BlockMoved", 1], {"type": "BlockStored"}), b"\xc1garbage", block(1)
        )
        await until(lambda: listener.cached(PROMPT) == {0: 2})
        assert (listener.stats.unknown_events, listener.stats.malformed_events) == (1, 2)
        assert engine.asked == [0]


async def test_adapters_over_the_wire() -> None:
    """C38."""
    adapted, base = FakeEngine(), FakeEngine()
    async with following(adapted, base) as listener:
        two = PROMPT[: 2 * SIZE]
        await adapted.send(payload(stored(two, lora_name="ad1", extra_keys=[["ad1"], ["ad1"]])))
        await base.send(payload(stored(two)))
        await until(lambda: listener.cached(two, adapter="ad1") == {0: 2} and listener.cached(two) == {1: 2})
        assert listener.cached(two, adapter="ad2") == listener.cached(two, salt="s") == {}


async def test_offloaded_blocks_over_the_wire() -> None:
    """C39."""
    engine = FakeEngine()
    async with following(engine) as listener:
        two, names = PROMPT[: 2 * SIZE], hashes(PROMPT)[:2]
        await engine.send(payload(stored(two)), payload(stored([], block_hashes=names, medium="CPU")))
        await engine.send(payload(removed(names, medium="GPU")))
        await until(lambda: listener.index.stats.removed == 2)
        match = listener.index.find_matches(block_keys(two, SIZE), 1)[0]
        assert (match.device, match.host) == (0, 2)
        await engine.send(payload(removed(names, medium="CPU")))
        await until(lambda: listener.cached(two) == {})


async def test_an_engine_may_connect_to_us() -> None:
    listener = Listener()
    listener.events.reconcile([Endpoint(0, Spec("a", "tcp://127.0.0.1:*"))])
    (address,) = listener.events.addresses()
    engine = FakeEngine(connect_to=address)
    await engine.subscribed()
    await engine.send(block(0))
    await until(lambda: listener.cached(PROMPT) == {0: 1})
    listener.events.close()
    await engine.stop()


async def test_an_address_that_cannot_be_used_is_counted_once_and_hurts_nobody() -> None:
    engine, listener = FakeEngine(), Listener()
    bad = Endpoint(1, Spec("bad", "nonsense"))
    for _ in range(3):
        listener.events.reconcile([bad, endpoint(engine)])
    assert (listener.events.stats.bad_addresses, len(listener.events)) == (1, 1)
    await engine.subscribed()
    await engine.send(block(0))
    await until(lambda: listener.cached(PROMPT) == {0: 1})
    listener.events.reconcile([endpoint(engine, uid="bad", slot=1)])
    assert len(listener.events) == 1
    listener.events.close()
    await engine.stop()


async def test_a_replay_address_that_cannot_be_used_is_a_replay_that_fails() -> None:
    engine, listener = FakeEngine(), Listener()
    listener.events.reconcile([Endpoint(0, Spec("a", engine.address, "nonsense"))])
    await engine.subscribed()
    await until(lambda: listener.stats.replay_failures == 1)
    await engine.send(block(0))
    await until(lambda: listener.cached(PROMPT) == {0: 1})
    listener.events.close()
    await engine.stop()


async def test_an_endpoint_without_events_has_no_subscriber() -> None:
    listener = Listener()
    listener.events.reconcile([Endpoint(0, Spec("a", None))])
    assert len(listener.events) == 0
    listener.events.close()


async def test_an_engine_that_moved_is_followed_to_its_new_address() -> None:
    first, second, listener = FakeEngine(), FakeEngine(), Listener()
    listener.events.reconcile([endpoint(first)])
    await first.subscribed()
    await first.send(block(0))
    await until(lambda: listener.cached(PROMPT) == {0: 1})
    listener.events.reconcile([endpoint(second)])
    assert listener.cached(PROMPT) == {}
    await second.subscribed()
    await second.send(block(0), block(1))
    await until(lambda: listener.cached(PROMPT) == {0: 2})
    listener.events.close()
    for engine in (first, second):
        await engine.stop()


async def test_a_flood_is_applied_whole_and_in_order() -> None:
    engine = FakeEngine()
    async with following(engine) as listener:
        many = tokens(2000, start=100)
        names = hashes(many)
        flood = [
            payload(
                stored(
                    many[n * SIZE : (n + 1) * SIZE],
                    parent=names[n - 1] if n else None,
                    block_hashes=[names[n]],
                )
            )
            for n in range(2000)
        ]
        await engine.send(*flood)
        await until(lambda: listener.cached(many) == {0: 2000})
        assert (listener.stats.gaps, listener.events.block_stats.parked, engine.asked) == (0, 0, [0])


async def test_what_waits_for_a_replay_is_bounded() -> None:
    engine = FakeEngine()
    limits = replace(QUICK, stream=StreamLimits(messages=3), subscriber=SubscriberLimits(replay_idle=30))
    async with following(engine, limits=limits) as listener:
        await engine.send(block(0))
        await until(lambda: listener.cached(PROMPT) == {0: 1})
        engine.silent = True
        await engine.send(block(1), lose=True)
        await engine.send(*map(block, range(2, 8)))
        await until(lambda: listener.stats.losses == 1)
        assert listener.cached(PROMPT) == {}
        fresh = tokens(1, start=50)
        await engine.send(payload(stored(fresh)))
        await until(lambda: listener.cached(fresh) == {0: 1})


async def test_replays_of_many_engines_take_turns() -> None:
    engines = [FakeEngine() for _ in range(4)]
    for engine in engines:
        await engine.send(*map(block, range(4)))
    engines[0].silent = True
    async with following(*engines, limits=replace(QUICK, concurrent_replays=1)) as listener:
        await until(lambda: listener.cached(PROMPT) == {1: 4, 2: 4, 3: 4})
        await until(lambda: listener.stats.replay_failures == 1)

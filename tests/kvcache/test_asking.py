"""Engines that are asked where they publish their KV events: real HTTP, real ZMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from picker.kvcache.asking import Answer, AskingSettings, SourceAsking
from picker.kvcache.discovery import EventAddresses
from picker.kvcache.index import KvIndex
from picker.kvcache.sources import KvEventLimits, KvEvents
from picker.kvcache.subscriber import SubscriberLimits
from tests.kvcache.fake_engine import FakeEngine, until
from tests.kvcache.wire import payload, stored, tokens

QUICK = AskingSettings(interval=0.01, longest=0.02, timeout=1.0)
LIMITS = KvEventLimits(subscriber=SubscriberLimits(reconnect_first=0.01, reconnect_longest=0.05))
STORE = payload(stored(tokens(1)))


@dataclass(frozen=True)
class Spec:
    uid: str
    metrics_url: str | None
    authority: str = ""
    rank: int = 0
    engine: str = "vllm"
    kv_events: str | None = None
    kv_replay: str | None = None
    ask_kv_events: bool = True

    @property
    def name(self) -> str:
        return self.uid


@dataclass(frozen=True)
class Endpoint:
    slot: int
    spec: Spec


@dataclass
class Route:
    """What an engine's `/kv_event_sources` answers, and how often it was asked; None: 404, as before vLLM 0.31."""

    answer: dict[str, Any] | None = None
    asked: int = 0

    def publish(self, *engines: FakeEngine) -> None:
        """As vLLM answers that binds its sockets anywhere."""
        self.answer = {
            str(rank): {
                "endpoint": engine.address.replace("127.0.0.1", "*"),
                "replay_endpoint": engine.replay_address.replace("127.0.0.1", "*"),
                "topic": "kv",
            }
            for rank, engine in enumerate(engines)
        }

    async def handle(self, _request: web.Request) -> web.Response:
        self.asked += 1
        if self.answer is None:
            raise web.HTTPNotFound
        return web.json_response(self.answer)


@dataclass
class Side:
    """Picker's side: who follows and who asks, and the engines' HTTP server."""

    server: TestServer
    route: Route
    index: KvIndex = field(default_factory=KvIndex)
    engines: list[FakeEngine] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.events: KvEvents[Endpoint] = KvEvents(self.index, limits=LIMITS)
        self.asking = SourceAsking(self.events.told, self.events.is_connected, QUICK)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.port}"

    def engine(self) -> FakeEngine:
        self.engines.append(FakeEngine())
        return self.engines[-1]

    def spec(self, uid: str = "a", **changes: Any) -> Spec:
        return Spec(uid, **({"metrics_url": self.url + "/metrics"} | changes))

    def follow(self, *specs: Spec) -> None:
        endpoints = [Endpoint(slot, spec) for slot, spec in enumerate(specs)]
        self.events.reconcile(endpoints)
        self.asking.update(specs)

    async def connected(self, mask: int) -> None:
        await until(lambda: self.events.connected == mask)


@asynccontextmanager
async def picker() -> AsyncIterator[Side]:
    route = Route()
    app = web.Application()
    app.router.add_get("/kv_event_sources", route.handle)
    server = TestServer(app, host="127.0.0.1")
    await server.start_server()
    side = Side(server, route)
    try:
        yield side
    finally:
        await side.asking.close()
        side.events.close()
        for engine in side.engines:
            await engine.stop()
        await server.close()


async def test_events_come_from_where_the_engine_says() -> None:
    async with picker() as side:
        engine = side.engine()
        side.route.publish(engine)
        side.follow(side.spec())
        await engine.subscribed()
        await engine.send(STORE)
        await until(lambda: side.index.blocks_of(0) == 1)
        assert side.asking.stats.answers[Answer.FOUND] >= 1


async def test_ranks_in_one_process_are_asked_for_together() -> None:
    async with picker() as side:
        engines = side.engine(), side.engine()
        side.route.publish(*engines)
        side.follow(side.spec("a"), side.spec("b", rank=1))
        assert side.asking.stats.targets == 1
        await side.connected(0b11)
        await engines[1].send(STORE)
        await until(lambda: side.index.blocks_of(1) == 1)
        assert side.index.blocks_of(0) == 0


async def test_a_single_source_is_the_engines_own_whatever_rank_it_calls_itself() -> None:
    async with picker() as side:
        side.route.publish(side.engine())
        side.follow(side.spec(rank=3))
        await side.connected(0b1)


async def test_an_engine_is_asked_until_it_answers_and_not_while_its_events_come() -> None:
    async with picker() as side:
        side.follow(side.spec())
        await until(lambda: side.route.asked >= 3)
        assert side.asking.stats.answers[Answer.FAILED] >= 2
        side.route.publish(side.engine())
        await side.connected(0b1)
        asked = side.route.asked
        await asyncio.sleep(10 * QUICK.longest)
        assert side.route.asked == asked


async def test_a_restart_on_other_ports_is_found() -> None:
    async with picker() as side:
        old, new = side.engine(), side.engine()
        side.route.publish(old)
        side.follow(side.spec())
        await side.connected(0b1)
        await old.send(STORE)
        await until(lambda: side.index.blocks_of(0) == 1)
        side.route.publish(new)
        await old.stop()
        await new.subscribed()
        assert side.index.blocks_of(0) == 0
        await side.connected(0b1)


async def test_an_engine_that_publishes_no_more_is_not_followed_any_more() -> None:
    async with picker() as side:
        engine = side.engine()
        side.route.publish(engine)
        side.follow(side.spec())
        await side.connected(0b1)
        side.route.answer = {}
        await engine.stop()
        await until(lambda: len(side.events) == 0)
        assert side.asking.stats.answers[Answer.NONE] >= 1


@pytest.mark.parametrize(
    "changes",
    [{"kv_events": "tcp://127.0.0.1:1"}, {"ask_kv_events": False}, {"engine": "sglang"}],
    ids=["given", "denied", "other engine"],
)
async def test_who_need_not_be_asked_never_is(changes: dict[str, Any]) -> None:
    async with picker() as side:
        side.follow(side.spec(**changes))
        assert side.asking.stats.targets == 0


async def test_an_engine_without_metrics_is_asked_at_its_own_address() -> None:
    async with picker() as side:
        side.route.publish(side.engine())
        side.follow(side.spec(metrics_url=None, authority=f"127.0.0.1:{side.server.port}"))
        await side.connected(0b1)


async def test_an_answer_for_somebody_who_has_left_changes_nothing() -> None:
    async with picker() as side:
        side.follow(side.spec())
        side.follow()
        side.events.told("a", EventAddresses("tcp://127.0.0.1:1", None))
        assert len(side.events) == 0
        assert side.asking.stats.targets == 0


async def test_what_the_spec_says_goes_before_what_the_engine_says() -> None:
    async with picker() as side:
        told, given = side.engine(), side.engine()
        side.route.publish(told)
        side.follow(side.spec())
        await side.connected(0b1)
        side.follow(side.spec(kv_events=given.address))
        await given.subscribed()
        await side.connected(0b1)
        side.events.told("a", EventAddresses(told.address, None))
        assert side.events.addresses() == [given.address]

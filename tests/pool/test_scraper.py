"""The scraper against pages that answer, hang, lie, vanish and come back."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from picker.pool.endpoint import EndpointSpec, EngineKind, EngineReport
from picker.pool.scraper import ScrapeFailure, Scraper, ScraperSettings
from tests.pool.waiting import until

FAST = ScraperSettings(interval=0.01, tick=0.001, max_backoff=0.02, timeout=0.2, max_bytes=10_000)
VLLM = 'vllm:num_requests_running{engine="0"} 7\nvllm:num_requests_running{engine="1"} 2\n'

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Engine:
    """A server whose /metrics answer is whatever the test says at the moment."""

    def __init__(self) -> None:
        self.handler: Handler = self.page(VLLM)
        self.asked = asyncio.Event()
        self.requests = 0
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self.server = TestServer(app, host="0.0.0.0")

    @staticmethod
    def page(text: str, status: int = 200) -> Handler:
        async def answer(_: web.Request) -> web.Response:
            return web.Response(text=text, status=status)

        return answer

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.requests += 1
        self.asked.set()
        return await self.handler(request)

    def spec(
        self, uid: str = "a", rank: int = 0, engine: EngineKind = EngineKind.VLLM, host: str = "127.0.0.1"
    ) -> EndpointSpec:
        port = self.server.port
        assert port is not None
        url = f"http://{host}:{port}/metrics"
        return EndpointSpec(uid, uid, host, port, rank=rank, engine=engine, metrics_url=url)


class Reports:
    """Collects reports; `next` waits for one that comes after the call."""

    def __init__(self) -> None:
        self.by_uid: dict[str, EngineReport] = {}
        self._came = asyncio.Event()

    def take(self, uid: str, report: EngineReport) -> None:
        self.by_uid[uid] = report
        self._came.set()

    async def next(self) -> None:
        self._came.clear()
        await asyncio.wait_for(self._came.wait(), 60)


@pytest.fixture
async def engine() -> AsyncIterator[Engine]:
    engine = Engine()
    await engine.server.start_server()
    yield engine
    await engine.server.close()


@pytest.fixture
def reports() -> Reports:
    return Reports()


@pytest.fixture
async def scraper(reports: Reports) -> AsyncIterator[Scraper]:
    scraper = Scraper(reports.take, FAST)
    yield scraper
    await scraper.close()


async def test_an_endpoint_that_is_the_whole_process_reads_all_its_ranks(
    engine: Engine, reports: Reports, scraper: Scraper
) -> None:
    scraper.update([engine.spec()])
    await reports.next()
    assert reports.by_uid["a"].running == 9
    assert scraper.stats.scrapes >= 1


async def test_ranks_that_share_a_page_are_asked_for_once_and_read_their_own(
    engine: Engine, reports: Reports, scraper: Scraper
) -> None:
    held = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await held.wait()
        return web.Response(text=VLLM)

    engine.handler = answer
    scraper.update([engine.spec("a", rank=0), engine.spec("b", rank=1)])
    await asyncio.wait_for(engine.asked.wait(), 60)
    held.set()
    await reports.next()
    assert (reports.by_uid["a"].running, reports.by_uid["b"].running) == (7, 2)
    assert engine.requests == scraper.stats.targets == 1


async def test_an_engine_of_another_kind_than_said_is_recognised(
    engine: Engine, reports: Reports, scraper: Scraper
) -> None:
    engine.handler = engine.page("sglang:num_running_reqs 3\n")
    scraper.update([engine.spec(engine=EngineKind.VLLM)])
    await reports.next()
    assert reports.by_uid["a"].running == 3


async def test_an_endpoint_without_a_metrics_address_is_left_alone(scraper: Scraper) -> None:
    scraper.update([EndpointSpec("a", "a", "127.0.0.1", 1, metrics_url=None)])
    assert (scraper.stats.targets, scraper.stats.stale) == (0, 0)


async def hang(request: web.Request) -> web.Response:
    await asyncio.sleep(60)
    raise AssertionError


async def break_off(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b"vllm:num_requests_running 1\n")
    assert request.transport is not None
    request.transport.abort()
    return response


async def redirect(_: web.Request) -> web.Response:
    raise web.HTTPFound("/elsewhere")


@pytest.mark.parametrize(
    ("handler", "reason"),
    [
        (Engine.page("no", status=500), ScrapeFailure.STATUS),
        (redirect, ScrapeFailure.STATUS),
        (Engine.page(VLLM * 1000), ScrapeFailure.TOO_LARGE),
        (Engine.page("<html>"), ScrapeFailure.UNRECOGNISED),
        (Engine.page("vllm:num_requests_running NaN"), ScrapeFailure.UNRECOGNISED),
        (hang, ScrapeFailure.TIMEOUT),
        (break_off, ScrapeFailure.PROTOCOL),
    ],
)
async def test_a_scrape_that_gives_nothing_is_counted_by_reason_and_tried_again(
    engine: Engine, reports: Reports, scraper: Scraper, handler: Handler, reason: ScrapeFailure
) -> None:
    if reason is not ScrapeFailure.TIMEOUT:
        # A machine that stalls must not be taken for an engine that hangs.
        scraper.settings = replace(FAST, timeout=60.0)
    engine.handler = handler
    scraper.update([engine.spec()])
    await until(lambda: scraper.stats.failures[reason] >= 1)
    assert reports.by_uid == {}
    assert sum(scraper.stats.failures.values()) == scraper.stats.failures[reason]
    engine.handler = engine.page(VLLM)
    await reports.next()
    assert reports.by_uid["a"].running == 9


async def test_a_stale_endpoint_shows_and_recovers(engine: Engine, reports: Reports) -> None:
    """C47: a metrics port that refuses makes its endpoint stale, no other's, until scrapes return."""
    now = 100.0
    scraper = Scraper(reports.take, FAST, clock=lambda: now)
    other = Engine()
    await other.server.start_server()
    try:
        lost, kept = other.spec("lost"), engine.spec("kept")
        scraper.update([lost, kept])
        await until(lambda: len(reports.by_uid) == 2)
        assert scraper.stats.stale == 0
        await other.server.close()
        await until(lambda: scraper.stats.stale == 1)
        assert scraper.stats.failures[ScrapeFailure.CONNECT] > 0
        now += FAST.stale_after + 1
        await until(lambda: reports.by_uid["kept"].at == now)
        assert scraper.stats.stale == 1
        returned = Engine()
        returned.server = TestServer(returned.server.app, host="0.0.0.0", port=lost.port)
        await returned.server.start_server()
        await until(lambda: scraper.stats.stale == 0)
        assert reports.by_uid["lost"].at == now
        await returned.server.close()
    finally:
        await scraper.close()


async def test_an_endpoint_that_never_answers_becomes_stale_too(reports: Reports) -> None:
    now = 100.0
    scraper = Scraper(reports.take, FAST, clock=lambda: now)
    scraper.update([EndpointSpec("a", "a", "127.0.0.1", 1, metrics_url="http://127.0.0.1:1/metrics")])
    assert scraper.stats.stale == 0
    now += FAST.stale_after + 1
    assert scraper.stats.stale == 1
    scraper.update([])
    assert scraper.stats.stale == 0
    await scraper.close()


async def test_an_answer_on_its_way_is_dropped_when_its_endpoint_leaves(
    engine: Engine, reports: Reports, scraper: Scraper
) -> None:
    held = asyncio.Event()

    async def answer(_: web.Request) -> web.Response:
        await held.wait()
        return web.Response(text=VLLM)

    engine.handler = answer
    scraper.update([engine.spec("old")])
    await asyncio.wait_for(engine.asked.wait(), 60)
    # Another pod under the same address, while the old pod's answer is on its way.
    scraper.update([engine.spec("new")])
    engine.handler = engine.page("vllm:num_requests_running 1\n")
    held.set()
    await reports.next()
    assert set(reports.by_uid) == {"new"}
    assert reports.by_uid["new"].running == 1


async def test_no_more_scrapes_at_once_than_allowed(reports: Reports, engine: Engine) -> None:
    at_once = most = 0

    async def answer(_: web.Request) -> web.Response:
        nonlocal at_once, most
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(0.01)
        at_once -= 1
        return web.Response(text=VLLM)

    engine.handler = answer
    scraper = Scraper(reports.take, ScraperSettings(interval=0.01, tick=0.01, concurrency=2))
    scraper.update([engine.spec(str(number), host=f"127.0.0.{number}") for number in range(1, 9)])
    await until(lambda: len(reports.by_uid) == 8)
    await scraper.close()
    assert most == 2


async def test_tasks_and_targets_are_gone_after_many_comings_and_goings(
    engine: Engine, reports: Reports, scraper: Scraper
) -> None:
    before = len(asyncio.all_tasks())
    for number in range(100):
        scraper.update([engine.spec(str(number))])
    scraper.update([])
    await until(lambda: len(asyncio.all_tasks()) <= before)
    assert scraper.stats.targets == 0

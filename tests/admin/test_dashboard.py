"""The dashboard in a real browser. Leaves its screenshots in tests/.artifacts/."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from picker.telemetry import ClassStats, DecisionRecord, EndpointStats
from picker.telemetry.decisions import Candidate, Rejection

from .chromium import Page, chromium
from .conftest import DECISION, Admin

pytestmark = pytest.mark.browser

ARTIFACTS = Path(__file__).parents[1] / ".artifacts"
QUANTA = {"premium": 512, "regular": 128, "batch": 64}
PODS = [f"llama-70b-{name}" for name in ("7fq2x", "9k4mt", "b8zvw", "c5hnd", "jx62p", "r4t9s")]


class Traffic:
    """A plausible afternoon: three classes, batch pausing now and then, and six pods of unlike warmth."""

    def __init__(self, admin: Admin) -> None:
        self._admin = admin
        self._random = random.Random(7)
        self._stats = {name: ClassStats(name, quantum) for name, quantum in QUANTA.items()}
        self._serial = 0
        admin.endpoints = [
            EndpointStats(
                f"uid-{i}",
                name,
                f"10.4.0.{11 + i}:8000",
                ready=i != 5,
                taints=("spot=true:PreferNoSchedule",) if i == 4 else (),
                num_blocks=19_200,
                block_size=16,
                report_age=0.4,
            )
            for i, name in enumerate(PODS)
        ]

    def second(self, now: float) -> None:
        draw = self._random
        self._admin.clock[0] = now
        for name, stats in self._stats.items():
            idle = name == "batch" and 90 < now % 240 < 150
            waiting = 0 if idle else max(0, min(60, stats.waiting_requests + draw.randint(-4, 4)))
            sent = 0 if idle else round(QUANTA[name] * draw.uniform(70, 110))
            self._stats[name] = replace(
                stats,
                waiting_requests=waiting,
                waiting_tokens=waiting * 1400,
                waiting_cached_tokens=waiting * 500,
                oldest_wait=waiting * QUANTA["premium"] / QUANTA[name] * 0.035,
                deficit=0 if idle else draw.randrange(QUANTA[name]),
                dispatched_cost=stats.dispatched_cost + sent,
                dispatched_requests=stats.dispatched_requests + sent // 600,
                dropped={"deadline": 3, "queue_full_requests": 12} if name == "batch" else {},
            )
            if sent:
                self._admin.telemetry.decisions.add(self._decision(name, now))
        self._admin.classes = list(self._stats.values())
        self._admin.telemetry.shares.sample(self._admin.classes, now)
        self._admin.endpoints = [
            replace(
                each,
                prefill_tokens=draw.randrange(500, 9000) if each.ready else 0,
                running=draw.randrange(3, 18) if each.ready else 0,
                foreign=2 if i == 1 else 0,
                kv_usage=0.94 if i == 2 else 0.3 + 0.08 * i,
                cached_blocks=(17_000, 12_400, 18_900, 6_200, 2_100, 0)[i],
            )
            for i, each in enumerate(self._admin.endpoints)
        ]

    def _decision(self, name: str, now: float) -> DecisionRecord:
        draw = self._random
        self._serial += 1
        prompt = draw.randrange(300, 4000)
        held = [0, *(draw.randrange(0, prompt) for _ in range(3)), 0]
        candidates = []
        for i, cached in enumerate(held):
            booked, running = draw.randrange(0, 3000), draw.randrange(0, 12)
            terms = {
                "uncached_tokens": prompt - cached,
                "booked_prefill_tokens": booked,
                "running_requests": running,
            }
            cost = prompt - cached + booked + 20.0 * running
            candidates.append(Candidate(f"10.4.0.{11 + i}:8000", PODS[i], cost, cached, terms))
        candidates.sort(key=lambda each: each.total)
        refused = name == "batch" and self._serial % 9 == 0
        best = candidates[0]
        return DecisionRecord(
            id=f"4fd1c09ab3e7-{self._serial}",
            at=1_790_000_000 + now,
            policy_class=name,
            outcome="deadline" if refused else "dispatched",
            model="llama-70b",
            prompt_tokens=prompt,
            cached_tokens=max(held),
            uncached_tokens=prompt - max(held),
            cost=max(1, prompt - max(held)),
            wait=draw.uniform(0, 512 / QUANTA[name]),
            deficit=draw.randrange(QUANTA[name]),
            chosen="" if refused else best.endpoint,
            candidates=() if refused else tuple(candidates),
            rejected=(Rejection("10.4.0.16:8000", PODS[5], "not_ready"),),
        )


@pytest.fixture
async def page(tmp_path: Path) -> AsyncIterator[Page]:
    async with chromium(tmp_path / "profile") as page:
        yield page


async def test_live_light_and_dark_with_a_decision_explained(admin: Admin, page: Page) -> None:
    traffic = Traffic(admin)
    for second in range(300):
        traffic.second(float(second))
    await admin.serve()

    async def afternoon() -> None:
        second = 300.0
        while True:
            traffic.second(second)
            second += 1
            await asyncio.sleep(1)

    running = asyncio.create_task(afternoon())
    try:
        for dark in (False, True):
            await page.look(width=1360, height=1180, dark=dark)
            await page.open(admin.url)
            await page.until("document.querySelectorAll('#chart path').length >= 6")
            await page.until("document.querySelectorAll('#decisions tr').length === 40")
            first = await page.evaluate("document.querySelector('#decisions tr').dataset.id")
            await page.until(f"document.querySelector('#decisions tr').dataset.id !== {first!r}")
            await page.until("document.querySelector('#live').textContent === 'live'")
            await asyncio.sleep(5)  # let the sparklines of the picture grow
            await page.screenshot(ARTIFACTS / f"dashboard-{'dark' if dark else 'light'}.png")
        assert await page.evaluate("document.querySelectorAll('#classes tr').length") == 3
        assert await page.evaluate("document.querySelectorAll('.pod').length") == 6
        assert await page.evaluate("document.querySelectorAll('.pod.off').length") == 1

        await page.evaluate("document.querySelector('#pause').click()")
        await page.evaluate("document.querySelector('#decisions tr:not(:has(.refused))').click()")
        await page.until("document.querySelector('#why-dialog').open")
        assert "charged" in await page.evaluate("document.querySelector('#why-dialog p').textContent")
        assert await page.evaluate("document.querySelectorAll('#why-dialog .stack').length") == 5
        await page.screenshot(ARTIFACTS / "dashboard-decision.png")
        await page.evaluate("[...document.querySelectorAll('#why-dialog button')].at(-1).click()")
        await page.until("!document.querySelector('#why-dialog').open && !location.hash")
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running
    assert page.problems == []


async def test_what_clients_send_is_shown_as_text(admin: Admin, page: Page) -> None:
    nasty = "<img src=x onerror=\"document.title='owned'\"><script>document.title='owned'</script>"
    admin.classes = [ClassStats("premium", 1)]
    admin.telemetry.decisions.add(
        msgspec.structs.replace(DECISION, id=nasty, model=nasty, policy_class=nasty)
    )
    admin.endpoints = [EndpointStats("u", nasty, nasty, taints=(nasty,))]
    await admin.serve()
    await page.open(admin.url)
    await page.until("document.querySelectorAll('#decisions tr').length === 1")
    await page.evaluate("document.querySelector('#decisions tr').click()")
    await page.until("document.querySelector('#why-dialog').open")
    assert nasty in await page.evaluate("document.querySelector('#why-dialog').textContent")
    assert await page.evaluate("document.querySelectorAll('main img, main script, dialog img').length") == 0
    assert await page.evaluate("document.title") == "Picker"
    assert page.problems == []


async def test_an_idle_picker_says_so(admin: Admin, page: Page) -> None:
    admin.not_ready = "the pool is not synced"
    await admin.serve()
    await page.look(width=420, height=900, dark=False)
    await page.open(admin.url)
    await page.until("document.querySelector('#ready').textContent === 'the pool is not synced'")
    text = await page.evaluate("document.body.innerText")
    for phrase in ("No requests yet.", "The pool has no endpoints.", "No work was dispatched"):
        assert phrase in text
    assert await page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "fits a phone"
    await page.screenshot(ARTIFACTS / "dashboard-idle-phone.png")
    assert page.problems == []


async def test_token(admin: Admin, page: Page, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("s3cret")
    await admin.serve(host="0.0.0.0", token_file=token)
    await page.open(admin.url)
    await page.until("!document.querySelector('#gate').hidden")
    for given, expression in (
        ("wrong", "document.querySelector('#why').textContent.includes('token')"),
        ("s3cret", "document.querySelector('#live').textContent === 'live'"),
    ):
        await page.evaluate(f"document.querySelector('#token').value = {given!r}")
        await page.evaluate("document.querySelector('#gate').requestSubmit()")
        await page.until(expression)

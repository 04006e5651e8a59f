"""Mixed load through two real Envoys, one for each way of observing responses, with everything going wrong that may:
clients that leave, pods that come, go and die, policies that change, KV events by the thousand. Every byte is checked,
shares are right in every window, memory is flat, and at the end nothing is left.

`PICKER_SOAK_SECONDS` says how long (default: three minutes).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import aiohttp
import pytest
import zmq.asyncio

from picker.simulation.envoy import EnvoyProcess
from picker.simulation.envoy_config import EnvoyOptions, ResponseObservation, bootstrap
from tests.faults.client import CheckingClient, End
from tests.faults.cluster import FaultCluster, cluster, write_pool
from tests.faults.engine import CheckedEngine
from tests.faults.test_kv_publishers import Publisher
from tests.support.ports import free_ports

pytestmark = pytest.mark.soak

SECONDS = float(os.environ.get("PICKER_SOAK_SECONDS", "180"))
WINDOW = 15.0
CLIENTS_A_CLASS = 60
CLASS_HEADER = "x-picker-policy-class"
QUANTA = ((400, 100), (300, 300), (200, 50), (1000, 500))
PROMPT_TOKENS = 100
PATIENCE = 300.0  # even of a machine that has little time for us
COST = "picker_dispatched_cost_tokens_total"
GROWTH_BYTES = 15e6
BLOCKS = "picker_endpoint_cached_blocks"

POLICY = """
default_policy_family: regular
uncached_isl_buckets: [{{min_tokens: 0, bucket: any}}]
policy_classes:
  - {{name: premium, policy_family: premium, cache_bucket: any, quantum: {0}, max_running_per_worker: 4}}
  - {{name: regular, policy_family: regular, cache_bucket: any, quantum: {1}, max_running_per_worker: 4}}
"""
# What may be said above the level of information while all this goes on.
EXPECTED_LINES = ("KV events", "kv events")
EXPECTED_ENDS = {
    (End.WHOLE, 200, ""),
    (End.CUT, 200, ""),  # its engine died
    (End.GATEWAY_ERROR, 503, ""),  # the engine that was chosen has just died
    (End.GATEWAY_ERROR, 502, ""),  # the same, in the middle of its answer's head
    (End.NO_ANSWER, 0, ""),  # a client that left
}


@dataclass(frozen=True, slots=True)
class Share:
    """The premium class's part of the work of a window."""

    measured: float
    due: float
    tolerance: float

    @property
    def error(self) -> float:
        return abs(self.measured - self.due)


@dataclass(slots=True)
class Soak:
    faulty: FaultCluster
    clients: list[CheckingClient]
    publishers: list[Publisher]
    policy: Path
    dice: random.Random = field(default_factory=lambda: random.Random(20))
    running: bool = True
    engines_die: bool = False
    deaths: int = 0
    ends: Counter[tuple[End, int, str]] = field(default_factory=Counter)
    unexpected: Counter[str] = field(default_factory=Counter)
    memory: list[tuple[float, int]] = field(default_factory=list)
    shares: list[Share] = field(default_factory=list)
    unjudged_windows: int = (
        0  # in which a class had nothing waiting once, or the machine little time for all this
    )

    async def keep_asking(self, name: str, number: int) -> None:
        """One client of a class: asks again as soon as it is answered; now and then it leaves before."""
        dice = random.Random(f"{name} {number}")
        while self.running:
            client = dice.choice(self.clients)
            patience = dice.choice((0.1, 0.3, 0.6)) if dice.random() < 0.1 else PATIENCE
            answer = await client.send(
                events=3,
                pause=0.05,
                tokens=PROMPT_TOKENS,
                headers={CLASS_HEADER: name},
                timeout=patience,
                padding=dice.choice((0, 500, 5000, 100_000)) if dice.random() < 0.2 else None,
            )
            client.answers.clear()
            assert answer.end is not End.NO_ANSWER or patience < 1, "somebody waited in vain"
            end = (answer.end, answer.status, answer.reason)
            self.ends[end] += 1
            if end not in EXPECTED_ENDS:
                self.unexpected[answer.detail] += 1

    async def send_what_is_no_inference(self) -> None:
        bodies = (b"{", b"", b'{"prompt": 5}', b'{"prompt": [-1]}', b"\xff" * 100, b"[" * 5000)
        while self.running:
            client = self.dice.choice(self.clients)
            async with client.session.get(f"{client.url}/v1/models") as response:
                await response.read()
            body = self.dice.choice(bodies)
            async with client.session.post(f"{client.url}/v1/completions", data=body) as response:
                assert response.status == 400, await response.read()
            await asyncio.sleep(0.1)

    async def change_the_pool(self) -> None:
        """Three of four pods, another one out each time; at times one dies where it stands."""
        engines = self.faulty.engines
        while self.running:
            out = self.dice.randrange(len(engines))
            self.write_pool([engine for number, engine in enumerate(engines) if number != out])
            await asyncio.sleep(2.0)
            self.write_pool(engines)
            await asyncio.sleep(1.0)
            if self.engines_die:
                self.deaths += 1
                dying = self.dice.choice(engines)
                await dying.die()
                await asyncio.sleep(0.5)
                await dying.start()

    def write_pool(self, engines: list[CheckedEngine]) -> None:
        ports = {e.address: p.port for e, p in zip(self.faulty.engines, self.publishers, strict=True)}
        extras = [{"kv_events": f"tcp://127.0.0.1:{ports[engine.address]}"} for engine in engines]
        write_pool(self.faulty.pool, engines, each=extras)

    async def flood_with_events(self) -> None:
        number = 1000  # the blocks of lower ones would be found in the clients' prompts
        while self.running:
            publisher = self.dice.choice(self.publishers)
            for _ in range(500):
                number += 1
                await publisher.store(number, blocks=4)
            await publisher.frames(b"kv", publisher.sequence.to_bytes(8, "big"), self.dice.randbytes(200))
            publisher.sequence += 1
            if self.dice.random() < 0.1:
                await publisher.reopen()
            await asyncio.sleep(0.5)

    async def watch_memory(self, started: float) -> None:
        while self.running:
            self.memory.append((time.monotonic() - started, self.faulty.picker.rss()))
            await asyncio.sleep(1.0)

    async def measure_shares(self, seconds: float) -> None:
        """A window after the other, each with quanta of its own; in every second one engines die.

        What is sent to an engine that has just died comes back at once. The queue drains into it, and for that
        moment nobody waits and no share is due: those windows are not judged.
        """
        picker, end, number = self.faulty.picker, time.monotonic() + seconds, 0
        while time.monotonic() + WINDOW <= end:
            quanta = QUANTA[number % len(QUANTA)]
            number += 1
            self.engines_die = number % 2 == 0
            self.policy.with_suffix(".new").write_text(POLICY.format(*quanta))
            self.policy.with_suffix(".new").replace(self.policy)
            await asyncio.sleep(2.0)
            before = await picker.by_class(COST)
            busy = await self._always_waiting(WINDOW - 2.0)
            after = await picker.by_class(COST)
            done = {name: after[name] - before[name] for name in after}
            total = max(1.0, sum(done.values()))
            turn = max(quanta) + PROMPT_TOKENS
            if busy and not self.engines_die and total > 20 * turn:
                # A turn may be cut at either end of the window.
                self.shares.append(
                    Share(done["premium"] / total, quanta[0] / sum(quanta), 0.01 + 2 * turn / total)
                )
            else:
                self.unjudged_windows += 1
            print(
                f"{seconds - (end - time.monotonic()):6.0f} s  premium {done['premium'] / total:.3f},"
                f" due {quanta[0] / sum(quanta):.3f}; {total / (WINDOW - 2) / PROMPT_TOKENS:.0f} requests/s,"
                f" {picker.rss() / 1e6:.0f} MB, {sum(self.ends.values())} ended",
                flush=True,
            )

    async def _always_waiting(self, seconds: float) -> bool:
        """Whether each class had somebody waiting at each look during that time."""
        end, always = time.monotonic() + seconds, True
        while time.monotonic() < end:
            waiting = await self.faulty.picker.by_class("picker_queue_requests")
            always &= min(waiting.values()) > 0
            await asyncio.sleep(0.5)
        return always

    async def publishers_are_heard(self) -> None:
        """Point Picker at the publishers, and wait until it follows each of them."""
        self.write_pool(self.faulty.engines)
        for number, publisher in enumerate(self.publishers):
            async with asyncio.timeout(30):
                while not (await self.faulty.picker.by_endpoint(BLOCKS)).get(
                    self.faulty.engines[number].address
                ):
                    await publisher.store(number + 1)
                    await asyncio.sleep(0.05)


@asynccontextmanager
async def soaking(directory: Path) -> AsyncIterator[Soak]:
    context = zmq.asyncio.Context()
    publishers = [Publisher(port, context) for port in free_ports(4)]
    settings: dict[str, dict[str, Any]] = {
        "pool": {"stale_after": 0.5},
        "kvcache": {"max_blocks": 20_000, "predicted_ttl": 5.0, "bridge_ttl": 5.0},
        "tokens": {"cache": 4 << 20},
        "queue": {"max_wait": PATIENCE},
    }
    async with AsyncExitStack() as exits:
        exits.callback(context.destroy, linger=0)
        for publisher in publishers:
            publisher.open()
            exits.callback(publisher.close)
        faulty = await exits.enter_async_context(
            cluster(directory, engines=4, policy=POLICY.format(*QUANTA[0]), settings=settings)
        )
        options = EnvoyOptions(
            picker=("127.0.0.1", faulty.picker.extproc_port), observation=ResponseObservation.STREAM
        )
        (directory / "streaming").mkdir()
        streaming = EnvoyProcess(bootstrap(options).to_json(), directory=directory / "streaming")
        await exits.enter_async_context(streaming)
        connector = aiohttp.TCPConnector(limit=0, force_close=True)
        session = await exits.enter_async_context(aiohttp.ClientSession(connector=connector))
        other = CheckingClient(f"http://127.0.0.1:{streaming.port}", session)
        yield Soak(faulty, [faulty.client, other], publishers, directory / "policy.yaml")


async def test_soak(tmp_path: Path) -> None:
    async with soaking(tmp_path) as soak:
        picker = soak.faulty.picker
        await asyncio.gather(*(client.send() for client in soak.clients for _ in range(20)))
        await soak.publishers_are_heard()
        first = await picker.idle()
        descriptors = picker.descriptors()
        started = time.monotonic()
        clients = [
            asyncio.create_task(soak.keep_asking(name, number))
            for name in ("premium", "regular")
            for number in range(CLIENTS_A_CLASS)
        ]
        troubles = [
            asyncio.create_task(work)
            for work in (
                soak.send_what_is_no_inference(),
                soak.change_the_pool(),
                soak.flood_with_events(),
                soak.watch_memory(started),
            )
        ]
        measuring = asyncio.create_task(soak.measure_shares(SECONDS))
        # Whoever fails first ends the run.
        done, _ = await asyncio.wait([measuring, *clients, *troubles], return_when=asyncio.FIRST_COMPLETED)
        soak.running = False
        for task in done:
            task.result()
        await asyncio.gather(*clients, *troubles)
        for engine in soak.faulty.engines:
            if engine.is_down:
                await engine.start()
        soak.write_pool(soak.faulty.engines)
        last = await picker.idle(30.0)
        _report(soak, first, last)

        assert set(soak.ends) <= EXPECTED_ENDS, (soak.ends, soak.unexpected, picker.complaints()[-5:])
        assert soak.ends[End.WHOLE, 200, ""] > 0.8 * sum(soak.ends.values())
        assert [share for share in soak.shares if share.error > share.tolerance] == []
        assert _growth(soak.memory) < GROWTH_BYTES
        assert last["picker_extproc_internal_errors_total"] == 0
        assert last["picker_extproc_protocol_errors_total"] == 0
        assert last["picker_log_lost_lines_total"] == 0
        booked = last["picker_ledger_bookings_total"]
        assert booked == last["picker_ledger_releases_total"] + last["picker_ledger_reaped_total"]
        unexpected = [
            line for line in picker.complaints() if not any(each in line for each in EXPECTED_LINES)
        ]
        assert unexpected == []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(20):
                while picker.descriptors() > descriptors + 4:
                    await asyncio.sleep(0.5)
        assert picker.descriptors() <= descriptors + 4
        # Each of the gateways' threads has a stream of its own for its log; some may be new.
        assert (await picker.metrics())["picker_event_loop_tasks"] <= first["picker_event_loop_tasks"] + 16


def _growth(memory: list[tuple[float, int]]) -> float:
    """Bytes that the trend adds over the second half of the run; until then caches fill."""
    last = memory[-1][0]
    kept = [(at, size) for at, size in memory if at > last / 2]
    times, sizes = zip(*kept, strict=True)
    return float(linear_regression(times, sizes).slope * (times[-1] - times[0]))


def _report(soak: Soak, first: dict[str, float], last: dict[str, float]) -> None:
    sizes = [size for _, size in soak.memory]
    print(
        f"\n{sum(soak.ends.values())} requests:", *(f"{k[0]} {k[1]}: {n}" for k, n in soak.ends.most_common())
    )
    errors = [share.error for share in soak.shares] or [0.0]
    print(
        f"shares: {len(soak.shares)} windows, {soak.unjudged_windows} not judged,"
        f" error at most {max(errors):.4f}, median {median(errors):.4f}"
    )
    print(
        f"memory: {sizes[0] / 1e6:.0f} MB at first, {sizes[-1] / 1e6:.0f} at last, {max(sizes) / 1e6:.0f} at most;"
        f" the trend of the second half adds {_growth(soak.memory) / 1e6:.1f} MB"
    )
    print(f"{soak.deaths} deaths of engines")
    for name in (
        "kv_messages",
        "kv_losses",
        "pool_file_loads",
        "policy_loads",
        "ledger_reaped",
        "never_sent",
    ):
        key = f"picker_{name}_total"
        print(f"{key}: {last[key] - first[key]:.0f}")

"""Publishers of KV events that die, come back, flood and send garbage, while requests are served."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from tests.faults.client import End
from tests.faults.cluster import FaultCluster, cluster
from tests.faults.test_engines import ends, many
from tests.support.ports import free_ports

BLOCK = 16


@dataclass(slots=True)
class Publisher:
    """A PUB socket on a port that it keeps through `close` and `open`."""

    port: int
    context: zmq.asyncio.Context
    socket: zmq.asyncio.Socket | None = None
    sequence: int = 0

    def open(self) -> None:
        self.socket = self.context.socket(zmq.PUB)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.SNDHWM, 100_000)
        self.socket.bind(f"tcp://127.0.0.1:{self.port}")
        self.sequence = 0

    def close(self) -> None:
        if self.socket is not None:
            self.socket.close(linger=0)
            self.socket = None

    async def reopen(self) -> None:
        """As after a restart; the system takes a moment to give the port back."""
        self.close()
        async with asyncio.timeout(60):
            while self.socket is None:
                try:
                    self.open()
                except zmq.ZMQError:
                    self.close()
                    await asyncio.sleep(0.02)

    async def frames(self, *frames: bytes) -> None:
        assert self.socket is not None
        await self.socket.send_multipart(list(frames))

    async def store(self, first: int, blocks: int = 1) -> None:
        """One good batch: a prompt of so many blocks, of tokens that only `first` has."""
        hashes = [first * 1000 + number for number in range(blocks)]
        event = {
            "type": "BlockStored",
            "block_hashes": hashes,
            "parent_block_hash": None,
            "token_ids": [first % 50_000 + 1] * (BLOCK * blocks),
            "block_size": BLOCK,
            "medium": "GPU",
        }
        payload = msgspec.msgpack.encode([0.0, [event], 0])
        await self.frames(b"kv", self.sequence.to_bytes(8, "big"), payload)
        self.sequence += 1


@asynccontextmanager
async def publishing(directory: Path) -> AsyncIterator[tuple[FaultCluster, Publisher]]:
    """One engine with events, connected: its first block is in the index."""
    (port,) = free_ports(1)
    context = zmq.asyncio.Context()
    publisher = Publisher(port, context)
    publisher.open()
    try:
        extras = {"kv_events": f"tcp://127.0.0.1:{port}"}
        async with cluster(directory, engines=1, pool_extras=extras) as faulty:
            await known(faulty, publisher)
            yield faulty, publisher
    finally:
        publisher.close()
        context.destroy(linger=0)


async def known(faulty: FaultCluster, publisher: Publisher) -> None:
    """Publish until Picker has heard: a subscriber misses what was said before it came."""
    before = (await faulty.picker.metrics())["picker_kv_events_total"]
    async with asyncio.timeout(60):
        while (await faulty.picker.metrics())["picker_kv_events_total"] == before:
            await publisher.store(7)
            await asyncio.sleep(0.05)


async def test_one_dies_and_restarts(tmp_path: Path) -> None:
    async with publishing(tmp_path) as (faulty, publisher):
        for number in range(3):
            await publisher.store(number + 100, blocks=20)
            publisher.close()
            assert ends(await many(faulty, 10)) == {End.WHOLE: 10}
            await publisher.reopen()
            await known(faulty, publisher)
            assert ends(await many(faulty, 10)) == {End.WHOLE: 10}
        metrics = await faulty.picker.idle()
        assert metrics["picker_kv_engine_restarts_total"] + metrics["picker_kv_losses_total"] >= 3
        assert metrics["picker_endpoint_cached_blocks"] == 1, "only what the last process has said"


async def test_one_floods(tmp_path: Path) -> None:
    """30,000 messages as fast as they go: requests are served meanwhile, and the loop is never held for long."""
    async with publishing(tmp_path) as (faulty, publisher):
        before = faulty.picker.rss()

        async def flood() -> None:
            for number in range(30_000):
                await publisher.store(number + 10, blocks=4)
                if number % 100 == 0:
                    await asyncio.sleep(0)

        flooding = asyncio.create_task(flood())
        while not flooding.done():
            assert ends(await many(faulty, 10)) == {End.WHOLE: 10}
        await flooding
        metrics = await faulty.picker.idle()
        assert metrics["picker_extproc_internal_errors_total"] == 0
        assert metrics["picker_event_loop_lag_seconds"] < 1.0
        assert metrics["picker_kv_bad_messages_total"] == 0
        assert faulty.picker.rss() - before < 200e6


async def test_one_sends_garbage(tmp_path: Path) -> None:
    """Bad frames and bad events are counted; the connection stays, and what is good is taken."""
    dice = random.Random(5)
    async with publishing(tmp_path) as (faulty, publisher):
        before = faulty.picker.rss()
        for _ in range(300):
            kind = dice.randrange(5)
            junk = dice.randbytes(dice.randrange(0, 2000))
            sequence = publisher.sequence.to_bytes(8, "big")
            if kind == 0:
                await publisher.frames(junk)
            elif kind == 1:
                await publisher.frames(b"kv", junk[:7], junk)
            elif kind == 2:
                await publisher.frames(b"kv", sequence, junk)
                publisher.sequence += 1
            elif kind == 3:
                await publisher.frames(*[junk] * dice.randrange(4, 20))
            else:
                bomb = b"\x93\x00\xdd\xff\xff\xff\xff" + b"\x91" * 20_000
                await publisher.frames(b"kv", sequence, bomb)
                publisher.sequence += 1
        assert ends(await many(faulty, 20)) == {End.WHOLE: 20}
        await known(faulty, publisher)
        metrics = await faulty.picker.idle()
        assert metrics["picker_kv_bad_messages_total"] > 50
        assert metrics["picker_kv_malformed_events_total"] > 20
        assert faulty.picker.rss() - before < 50e6
        assert not [line for line in faulty.picker.complaints() if "Traceback" in line]

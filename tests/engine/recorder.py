"""What the engine computed, told by its own KV events: token ids of whole blocks, chained by its hashes.

Reads the wire without Picker's decoder, so that the two can be compared.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import zmq
import zmq.asyncio


@dataclass(slots=True)
class Recorder:
    """The blocks stored since it was made: hash -> (hash of the parent, token ids)."""

    blocks: dict[int, tuple[int | None, list[int]]] = field(default_factory=dict)
    messages: int = 0
    removed: int = 0
    heard: asyncio.Condition = field(default_factory=asyncio.Condition)

    def chains(self) -> list[list[int]]:
        """Token ids from the first block on, of each block that no other follows."""
        parents = {parent for parent, _ in self.blocks.values()}
        return [self._chain(leaf) for leaf in self.blocks if leaf not in parents]

    def _chain(self, leaf: int) -> list[int]:
        tokens: list[int] = []
        at: int | None = leaf
        while at is not None and at in self.blocks:
            at, block = self.blocks[at]
            tokens = block + tokens
        return tokens

    async def computed(self, prompts: Sequence[Sequence[int]], *, timeout: float = 10.0) -> bool:
        """Whether each prompt is how some chain of blocks begins; waits for events that have yet to come."""
        wanted = [list(prompt) for prompt in prompts]

        def all_there() -> bool:
            chains = self.chains()
            return all(any(chain[: len(ids)] == ids for chain in chains) for ids in wanted)

        try:
            async with asyncio.timeout(timeout), self.heard:
                await self.heard.wait_for(all_there)
        except TimeoutError:
            return False
        return True

    def take(self, payload: bytes) -> None:
        self.messages += 1
        for event in msgspec.msgpack.decode(payload)[1]:
            if event["type"] == "BlockStored":
                self._store(event)
            elif event["type"] == "BlockRemoved":
                self.removed += len(event["block_hashes"])

    def _store(self, event: dict[str, Any]) -> None:
        parent, size, tokens = event["parent_block_hash"], event["block_size"], event["token_ids"]
        for number, name in enumerate(event["block_hashes"]):
            self.blocks[name] = (parent, tokens[number * size : (number + 1) * size])
            parent = name


@asynccontextmanager
async def recording(address: str) -> AsyncIterator[Recorder]:
    """Record what the engine at this ZMQ address publishes while the block lasts."""
    recorder = Recorder()
    context = zmq.asyncio.Context()
    socket = context.socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(address)
    async with asyncio.timeout(10):
        await monitor.recv_multipart()
    follower = asyncio.create_task(_follow(recorder, socket))
    try:
        yield recorder
    finally:
        follower.cancel()
        await asyncio.gather(follower, return_exceptions=True)
        socket.disable_monitor()
        context.destroy(linger=0)


async def _follow(recorder: Recorder, socket: zmq.asyncio.Socket) -> None:
    while True:
        _, _, payload = await socket.recv_multipart()
        recorder.take(payload)
        async with recorder.heard:
            recorder.heard.notify_all()

"""KV events over ZMQ, as vLLM 0.32 publishes them (distributed/kv_events.py).

A PUB socket sends `[topic, sequence, payload]`; a ROUTER socket answers `[b"", start]` with every kept batch
from `start` on as `[b"", topic, sequence, payload]`, then `[b"", b"", END, b""]`. A sequence is 8 bytes, big
endian, from 0 at the start of the process. The payload is msgpack: `[timestamp, [event maps], rank]`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from time import time

import msgspec
import zmq
import zmq.asyncio

from picker.simulation.token_blocks import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

END = b"\xff" * 8


def encode_event(event: CacheEvent) -> dict[str, object]:
    """One event as the map that vLLM sends, field for field."""
    match event:
        case BlockStored():
            return {
                "type": "BlockStored",
                "block_hashes": event.block_hashes,
                "parent_block_hash": event.parent_block_hash,
                "token_ids": event.token_ids,
                "block_size": event.block_size,
                "lora_id": None,
                "medium": "GPU",
                "lora_name": event.lora_name,
                "extra_keys": event.extra_keys,
                "group_idx": 0,
                "kv_cache_spec_kind": "full_attention",
            }
        case BlockRemoved():
            return {
                "type": "BlockRemoved",
                "block_hashes": (event.block_hash,),
                "medium": "GPU",
                "group_idx": 0,
            }
        case AllBlocksCleared():
            return {"type": "AllBlocksCleared"}


def encode_batch(timestamp: float, events: Sequence[CacheEvent], rank: int = 0) -> bytes:
    """A payload frame. `timestamp` is wall-clock seconds."""
    return msgspec.msgpack.encode((timestamp, [encode_event(event) for event in events], rank))


class KvPublisher:
    """Binds both sockets when started; port 0 takes a free one. Keeps `buffer` batches for replay."""

    def __init__(
        self,
        host: str = "127.0.0.1",
        port: int = 0,
        replay_port: int = 0,
        *,
        topic: str = "",
        rank: int = 0,
        buffer: int = 10_000,
        clock: Callable[[], float] = time,
    ) -> None:
        self._bind = (_tcp(host, port), _tcp(host, replay_port))
        self._topic = topic.encode()
        self._rank = rank
        self._kept: deque[tuple[int, bytes]] = deque(maxlen=buffer)
        self._clock = clock
        self._next = 0
        self._context: zmq.asyncio.Context | None = None
        self._publish: zmq.Socket[bytes] | None = None
        self._serving: asyncio.Task[None] | None = None
        self.endpoint = ""
        self.replay_endpoint = ""

    @property
    def topic(self) -> str:
        return self._topic.decode()

    def start(self, topic: str | None = None) -> None:
        """Bind. `topic` replaces the one given before, for names that hold a port only known by now.

        Raises zmq.ZMQError when an address is taken.
        """
        if topic is not None:
            self._topic = topic.encode()
        context = zmq.asyncio.Context()
        publish = zmq.Socket(context, zmq.PUB)
        replay = context.socket(zmq.ROUTER)
        self._context, self._publish = context, publish
        try:
            publish.bind(self._bind[0])
            replay.bind(self._bind[1])
        except zmq.ZMQError:
            self._destroy()
            raise
        self.endpoint = _last_endpoint(publish)
        self.replay_endpoint = _last_endpoint(replay)
        self._serving = asyncio.get_running_loop().create_task(self._serve_replays(replay))

    def publish(self, events: Sequence[CacheEvent]) -> None:
        """Send one batch. Does nothing without events. Never blocks: slow subscribers lose messages."""
        if not events:
            return
        if self._publish is None:
            raise RuntimeError("the publisher is not started")
        sequence, payload = self._next, encode_batch(self._clock(), events, self._rank)
        self._next += 1
        self._kept.append((sequence, payload))
        self._publish.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload], zmq.NOBLOCK)

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._serving
        self._destroy()

    def _destroy(self) -> None:
        if self._publish is not None:
            self._publish.close(linger=0)
        if self._context is not None:
            self._context.destroy(linger=0)

    async def _serve_replays(self, socket: zmq.asyncio.Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            if len(frames) != 3 or len(frames[2]) != 8:
                continue
            client, _, start = frames
            first = int.from_bytes(start, "big")
            for sequence, payload in list(self._kept):
                if sequence >= first:
                    await socket.send_multipart(
                        [client, b"", self._topic, sequence.to_bytes(8, "big"), payload]
                    )
            await socket.send_multipart([client, b"", b"", END, b""])


def _tcp(host: str, port: int) -> str:
    return f"tcp://{host}:{port or '*'}"


def _last_endpoint(socket: zmq.Socket[bytes] | zmq.asyncio.Socket) -> str:
    endpoint = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(endpoint, bytes)
    return endpoint.rstrip(b"\0").decode()

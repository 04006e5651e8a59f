"""The KV publisher against recorded frames, and over real sockets."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from picker.simulation.kv_publisher import END, KvPublisher, encode_batch
from picker.simulation.token_blocks import AllBlocksCleared, BlockRemoved, BlockStored, CacheEvent

GOLDEN = Path(__file__).parents[1] / "golden" / "vllm-0.32" / "recording.jsonl"


def from_recording(event: dict[str, Any]) -> CacheEvent:
    if event["type"] == "BlockStored":
        extra = tuple(None if keys is None else tuple(keys) for keys in event["extra_keys"])
        return BlockStored(
            event["block_hashes"],
            event["parent_block_hash"],
            event["token_ids"],
            event["block_size"],
            event["lora_name"],
            extra,
        )
    if event["type"] == "BlockRemoved":
        return BlockRemoved(event["block_hashes"][0])
    return AllBlocksCleared()


def test_payloads_equal_a_real_servers_byte_for_byte() -> None:
    compared = 0
    for line in GOLDEN.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "event":
            timestamp, events, rank = record["decoded"]
            payload = encode_batch(timestamp, [from_recording(event) for event in events], rank)
            assert payload == base64.b64decode(record["payload_b64"])
            compared += 1
    assert compared == 344


@pytest.fixture
async def publisher() -> AsyncIterator[KvPublisher]:
    publisher = KvPublisher(topic="kv@127.0.0.1:8000@tiny", buffer=3, clock=lambda: 12.5)
    publisher.start()
    yield publisher
    await publisher.close()


@pytest.fixture
async def context() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


async def replay(context: zmq.asyncio.Context, publisher: KvPublisher, start: int) -> list[list[bytes]]:
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    await socket.send_multipart([b"", start.to_bytes(8, "big")])
    replies: list[list[bytes]] = []
    while not replies or replies[-1][2] != END:
        replies.append(await socket.recv_multipart())
    return replies


async def test_replay_gives_the_kept_batches_and_an_end_mark(
    publisher: KvPublisher, context: zmq.asyncio.Context
) -> None:
    assert await replay(context, publisher, 0) == [[b"", b"", END, b""]]
    for block in range(5):
        publisher.publish([BlockRemoved(block)])
    replies = await replay(context, publisher, 0)
    assert [int.from_bytes(reply[2], "big") for reply in replies[:-1]] == [2, 3, 4]
    assert {reply[1] for reply in replies[:-1]} == {b"kv@127.0.0.1:8000@tiny"}
    assert msgspec.msgpack.decode(replies[0][3]) == [
        12.5,
        [{"type": "BlockRemoved", "block_hashes": [2], "medium": "GPU", "group_idx": 0}],
        0,
    ]
    assert await replay(context, publisher, 999) == [[b"", b"", END, b""]]


async def test_a_malformed_replay_request_does_not_stop_the_next(
    publisher: KvPublisher, context: zmq.asyncio.Context
) -> None:
    socket = context.socket(zmq.DEALER)
    socket.connect(publisher.replay_endpoint)
    for frames in ([b""], [b"", b"short"], [b"", b"", b"", b""]):
        await socket.send_multipart(frames)
    assert await replay(context, publisher, 0) == [[b"", b"", END, b""]]


async def test_batches_are_numbered_from_zero_and_empty_ones_are_not_sent(
    publisher: KvPublisher, context: zmq.asyncio.Context
) -> None:
    socket = context.socket(zmq.SUB)
    socket.subscribe(b"kv@")
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
    socket.connect(publisher.endpoint)
    await monitor.recv_multipart()
    socket.disable_monitor()
    # A subscription reaches the publisher a little after the handshake: publish until the first arrives.
    seen: list[list[bytes]] = []
    sent = 0
    while not seen:
        publisher.publish([BlockRemoved(7)])
        sent += 1
        if await socket.poll(20):
            seen.append(await socket.recv_multipart())
    publisher.publish([])
    publisher.publish([AllBlocksCleared()])
    while int.from_bytes(seen[-1][1], "big") != sent:
        seen.append(await socket.recv_multipart())
    topic, _, payload = seen[-1]
    assert topic == b"kv@127.0.0.1:8000@tiny"
    assert msgspec.msgpack.decode(payload)[1] == [{"type": "AllBlocksCleared"}]


async def test_a_taken_port_is_an_error(publisher: KvPublisher) -> None:
    other = KvPublisher(port=int(publisher.endpoint.rpartition(":")[2]))
    with pytest.raises(zmq.ZMQError):
        other.start()

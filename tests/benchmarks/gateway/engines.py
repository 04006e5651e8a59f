"""Engines that cost next to nothing: every address of this host answers on one port, and 64 pods tell KV events.

    python -m tests.benchmarks.gateway.engines [--pods N] [--events-per-second N]

Prints one line of JSON: the HTTP port, and the port of each pod's KV events. A request gets a small JSON answer at
once; with the header `x-chunks: N` it gets N server-sent events, a few at a time, as engines send them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from itertools import count
from random import Random

import msgspec
import zmq

from tests.benchmarks.gateway.wire import Message

BLOCK = 16
BLOCKS_A_MESSAGE = 4
EVENT = b'data: {"id":"cmpl-1","choices":[{"index":0,"text":" token","finish_reason":null}]}\n\n'
EVENTS_AT_ONCE = 10
JSON_ANSWER = b'{"id":"cmpl-1","choices":[{"index":0,"text":" token","finish_reason":"length"}]}'
METRICS = b"""# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.25
# TYPE vllm:cache_config_info gauge
vllm:cache_config_info{block_size="16",num_gpu_blocks="50000",engine="0"} 1.0
"""


def _whole(content_type: bytes, body: bytes) -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n" % (content_type, len(body))
    return head + body


WHOLE_ANSWER = _whole(b"application/json", JSON_ANSWER)
METRICS_ANSWER = _whole(b"text/plain", METRICS)
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
STREAM_CHUNK = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)


class EngineConnection(asyncio.Protocol):
    """One keep-alive connection, one request at a time."""

    def __init__(self) -> None:
        self._message = Message()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        if not self._message.feed(data):
            return
        head, self._message = self._message.head, Message()
        if head.startswith(b"GET"):
            self._transport.write(METRICS_ANSWER)
        elif chunks := _chunks(head):
            asyncio.get_running_loop().create_task(self._stream(chunks))
        else:
            self._transport.write(WHOLE_ANSWER)

    async def _stream(self, chunks: int) -> None:
        self._transport.write(STREAM_HEAD)
        for start in range(0, chunks, EVENTS_AT_ONCE):
            if self._transport.is_closing():
                return
            self._transport.write(STREAM_CHUNK * min(EVENTS_AT_ONCE, chunks - start))
            await asyncio.sleep(0)
        self._transport.write(b"0\r\n\r\n")


def _chunks(head: bytes) -> int:
    _, found, rest = head.partition(b"x-chunks: ")
    return int(rest.split(b"\r\n", 1)[0]) if found else 0


async def publish(sockets: list[zmq.Socket[bytes]], a_second: float) -> None:
    """The pods store new blocks one after the other, as pods know nothing of each other: `a_second` messages of four
    blocks from all of them together.
    """
    dice = Random(1)
    for serial in count():
        await asyncio.sleep(1 / a_second)
        event = {
            "type": "BlockStored",
            "block_hashes": [dice.getrandbits(63) for _ in range(BLOCKS_A_MESSAGE)],
            "parent_block_hash": None,
            "token_ids": [dice.randrange(50_000) for _ in range(BLOCK * BLOCKS_A_MESSAGE)],
            "block_size": BLOCK,
            "medium": "GPU",
        }
        sequence = (serial // len(sockets)).to_bytes(8, "big")
        socket = sockets[serial % len(sockets)]
        socket.send_multipart([b"kv", sequence, msgspec.msgpack.encode([0.0, [event], 0])])


async def run(pods: int, events_per_second: float) -> None:
    server = await asyncio.get_running_loop().create_server(EngineConnection, "0.0.0.0", 0)
    context = zmq.Context()
    sockets = [context.socket(zmq.PUB) for _ in range(pods)]
    ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in sockets]
    print(json.dumps({"http": server.sockets[0].getsockname()[1], "kv": ports}), flush=True)
    if events_per_second:
        await publish(sockets, events_per_second)
    await asyncio.Event().wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--pods", type=int, default=64)
    parser.add_argument("--events-per-second", type=float, default=320.0)
    options = parser.parse_args()
    asyncio.run(run(options.pods, options.events_per_second))


if __name__ == "__main__":
    main()

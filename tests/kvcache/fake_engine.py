"""An engine's event sockets: PUB and ROUTER on ports of their own, told by the test what to send and what to lose."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress

import zmq
import zmq.asyncio

END = b"\xff" * 8


class FakeEngine:
    """Numbers its payloads from 0 and remembers the latest `memory` for replays.

    `topics` says whether replies have a topic frame (vLLM from 0.26 on). `silent` answers no replay request.
    """

    def __init__(self, *, topics: bool = True, memory: int = 10_000, connect_to: str | None = None) -> None:
        self.topics = topics
        self.memory = memory
        self.silent = False
        self.asked: list[int] = []
        self.history: list[bytes] = []
        self._context = zmq.asyncio.Context()
        self._publisher = self._context.socket(zmq.XPUB)
        self._publisher.setsockopt(zmq.LINGER, 0)
        self._publisher.setsockopt(zmq.SNDHWM, 0)
        self._publisher.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._router = self._context.socket(zmq.ROUTER)
        self._router.setsockopt(zmq.LINGER, 0)
        self._router.setsockopt(zmq.SNDHWM, 0)
        if connect_to is None:
            self._publisher.bind("tcp://127.0.0.1:0")
            self.address = self._publisher.getsockopt_string(zmq.LAST_ENDPOINT)
        else:
            self._publisher.connect(connect_to)
            self.address = connect_to
        self._router.bind("tcp://127.0.0.1:0")
        self.replay_address = self._router.getsockopt_string(zmq.LAST_ENDPOINT)
        self._server = asyncio.create_task(self._serve())

    def rebind(self, other: FakeEngine) -> None:
        """Take over the addresses of an engine that has been stopped: the same pod, a new process."""
        for socket, address in ((self._publisher, other.address), (self._router, other.replay_address)):
            socket.unbind(socket.getsockopt_string(zmq.LAST_ENDPOINT))
            socket.bind(address)
        self.address, self.replay_address = other.address, other.replay_address

    async def subscribed(self) -> None:
        """Wait until somebody listens: what is sent from now on arrives."""
        async with asyncio.timeout(60):
            while await self._publisher.recv() != b"\x01":
                pass  # an unsubscription

    async def send(self, *payloads: bytes, lose: bool = False) -> None:
        """Publish; or only number and remember, as if lost on the way."""
        for payload in payloads:
            self.history.append(payload)
            if not lose:
                await self.resend(len(self.history) - 1)

    async def resend(self, seq: int) -> None:
        await self.send_frames(b"kv@10.0.0.1:8000@tiny", seq.to_bytes(8, "big"), self.history[seq])

    async def send_frames(self, *frames: bytes) -> None:
        await self._publisher.send_multipart(frames)

    async def stop(self) -> None:
        if self._publisher.closed:
            return
        self._server.cancel()
        with suppress(asyncio.CancelledError):
            await self._server
        self._publisher.close()
        self._router.close()
        self._context.term()

    async def _serve(self) -> None:
        while True:
            client, _empty, start = await self._router.recv_multipart()
            self.asked.append(int.from_bytes(start, "big"))
            if self.silent:
                continue
            oldest = max(0, len(self.history) - self.memory)
            topic = [b"kv@10.0.0.1:8000@tiny"] if self.topics else []
            for seq in range(max(self.asked[-1], oldest), len(self.history)):
                frames = [client, b"", *topic, seq.to_bytes(8, "big"), self.history[seq]]
                await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", *([b""] if self.topics else []), END, b""])


async def until(condition: Callable[[], object]) -> None:
    """Wait for something that sockets bring about; fails after half a minute."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.002)

"""Asking an engine to send past event messages again: one ZMQ DEALER request and its stream of answers."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple

import zmq

from picker.kvcache.pump import Pump, SocketReader, Turnstile

SEQ_BYTES = 8
_END = b"\xff" * SEQ_BYTES


class Message(NamedTuple):
    seq: int
    payload: bytes


class BadFrames(Exception):
    """Frames that are no message."""


def parse_message(frames: Sequence[bytes]) -> Message:
    """`[topic?, seq, payload]`, and the same after an empty delimiter: the last two frames count.

    Raises BadFrames where there is no sequence number of 8 bytes.
    """
    if len(frames) < 2 or len(frames[-2]) != SEQ_BYTES:
        raise BadFrames
    return Message(int.from_bytes(frames[-2], "big"), frames[-1])


def is_end(frames: Sequence[bytes]) -> bool:
    """Is this the mark behind the last answer? Its place depends on the engine's version: -1 as last or last
    but one.
    """
    return _END in frames[-2:]


class ReplayRequest:
    """One request: the messages from `start` on. Exactly one of `on_end` and `on_failure` is called, unless
    closed.

    It waits for its turn first: an engine may have tens of megabytes to send, and there may be many engines.
    `idle` is the longest wait for the next answer, in seconds.
    """

    def __init__(
        self,
        address: str,
        start: int,
        *,
        context: zmq.Context[zmq.Socket[bytes]],
        pump: Pump,
        turns: Turnstile,
        idle: float,
        queued_replies: int,
        on_message: Callable[[Message], None],
        on_bad_frames: Callable[[], None],
        on_end: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._address = address
        self._start = start
        self._context = context
        self._pump = pump
        self._turns = turns
        self._idle = idle
        self._queued_replies = queued_replies
        self._on_message = on_message
        self._on_bad_frames = on_bad_frames
        self._on_end = on_end
        self._on_failure = on_failure
        self._loop = asyncio.get_running_loop()
        self._reader: SocketReader | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._heard = 0.0
        self._closed = False
        turns.enter(self._send)

    def close(self) -> None:
        """Give up the request. Answers that still come are dropped."""
        if self._closed:
            return
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
        if self._reader is not None:
            self._reader.close()
        self._turns.leave(self._send)

    def _send(self) -> None:
        socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IPV6, 1)
        # The engine drops answers that do not fit into the queues between us, so ours is large.
        socket.setsockopt(zmq.RCVHWM, self._queued_replies)
        self._reader = SocketReader(socket, self._pump, self._on_frames)
        self._heard = self._loop.time()
        try:
            socket.connect(self._address)
            socket.send_multipart([b"", self._start.to_bytes(SEQ_BYTES, "big")])
        except zmq.ZMQError:
            self._timer = self._loop.call_later(0, self._fail)
        else:
            self._timer = self._loop.call_later(self._idle, self._check)

    def _on_frames(self, frames: list[bytes]) -> None:
        self._heard = self._loop.time()
        if is_end(frames):
            self.close()
            self._on_end()
            return
        try:
            message = parse_message(frames)
        except BadFrames:
            self._on_bad_frames()
        else:
            self._on_message(message)

    def _check(self) -> None:
        assert self._reader is not None
        quiet = self._loop.time() - self._heard
        # An answer that waits for its turn to be read counts: we are the slow side then.
        if quiet < self._idle or self._reader.has_more():
            self._timer = self._loop.call_later(max(self._idle - quiet, self._idle / 4), self._check)
            return
        self._fail()

    def _fail(self) -> None:
        self.close()
        self._on_failure()

"""Fair reading of many sockets on one event loop: a bounded amount of work per pass, everybody in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import zmq

#: Reads until its socket is empty or the given number of bytes is read. Returns the bytes read: as many as
#: given, or more, mean that something may be left.
Reader = Callable[[int], int]

# What a message costs beside its bytes.
_MESSAGE_COST = 128


class Pump:
    """Runs readers that have something to read, in turn, `budget` bytes in all per pass of the event loop.

    However many engines flood it, it holds the loop for about the time that applying `budget` bytes takes (a
    few milliseconds with the default), and then lets everything else run first.
    """

    def __init__(self, budget: int = 16_384, *, turn: int = 4_096) -> None:
        self._budget = budget
        self._turn = turn
        self._ready: dict[Reader, None] = {}
        self._scheduled = False

    def wake(self, reader: Reader) -> None:
        """The reader has, or may have, something to read. Cheap to repeat."""
        self._ready.setdefault(reader)
        self._schedule()

    def forget(self, reader: Reader) -> None:
        """Do not call this reader any more."""
        self._ready.pop(reader, None)

    def _schedule(self) -> None:
        if self._ready and not self._scheduled:
            self._scheduled = True
            asyncio.get_running_loop().call_soon(self._pass)

    def _pass(self) -> None:
        self._scheduled = False
        spent = 0
        try:
            while self._ready and spent < self._budget:
                reader = next(iter(self._ready))
                del self._ready[reader]
                read = reader(self._turn)
                if read >= self._turn:
                    self._ready.setdefault(reader)
                spent += read
        finally:
            # Also after an error of one reader, which the loop reports: the others must go on.
            self._schedule()


class Turnstile:
    """At most `limit` holders at a time; the others wait for their turn, in order."""

    def __init__(self, limit: int) -> None:
        self._free = limit
        self._queue: dict[Callable[[], None], None] = {}

    def enter(self, go: Callable[[], None]) -> None:
        """Call `go` as soon as there is room, now if there is."""
        if self._free:
            self._free -= 1
            go()
        else:
            self._queue[go] = None

    def leave(self, go: Callable[[], None]) -> None:
        """Give the turn back, or stop waiting for it."""
        if go in self._queue:
            del self._queue[go]
        elif self._queue:
            following = next(iter(self._queue))
            del self._queue[following]
            following()
        else:
            self._free += 1


class SocketReader:
    """Gives the messages of a ZMQ socket to a callback, through a pump, until it is closed. Owns the socket.

    ZMQ signals by edge on its file descriptor: after each signal the socket must be read until it is empty,
    which the pump sees to. Must be made on the running event loop.
    """

    def __init__(
        self, socket: zmq.Socket[bytes], pump: Pump, on_message: Callable[[list[bytes]], None]
    ) -> None:
        self.socket = socket
        self._pump = pump
        self._on_message = on_message
        self._loop = asyncio.get_running_loop()
        self._descriptor = socket.fileno()
        self._loop.add_reader(self._descriptor, pump.wake, self._read)
        # What came before we began to watch gave its signal already.
        pump.wake(self._read)

    def has_more(self) -> bool:
        """Is there a message that was not read yet?"""
        if not self.socket.poll(0):
            return False
        # Asking may have taken the signal from the descriptor.
        self._pump.wake(self._read)
        return True

    def close(self) -> None:
        """Nothing is given to the callback after this, whatever is in the socket."""
        if not self.socket.closed:
            self._loop.remove_reader(self._descriptor)
            self._pump.forget(self._read)
            self.socket.close(linger=0)

    def _read(self, budget: int) -> int:
        read = 0
        while read < budget and not self.socket.closed:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            read += _MESSAGE_COST + sum(map(len, frames))
            self._on_message(frames)
        return read

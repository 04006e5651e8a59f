"""The place of one face: its process, the connection to it, and another process when it ends."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from math import inf

from picker.extproc.handover import Decider
from picker.faces.answering import Answering
from picker.faces.channel import Channel
from picker.faces.messages import Counted, FromCore, FromFace, Listening, Logged, Stop
from picker.faces.protocol import core_end
from picker.faces.tally import Tally

log = logging.getLogger(__name__)

_FIRST_BACKOFF, _MAX_BACKOFF = 0.2, 30.0
# A face that lived so long did not fail for what it met at its start: the next one need not wait.
_LONG_LIFE = 60.0
# Faces say something every second. One that has been silent for so long hangs.
_SILENCE = 30.0
# How long a process may take to end that has lost its connection.
_LAST_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a seat has of the core. greet: what a new face is told first. logged: takes entries of the access
    log. changed: a face serves or has ceased to.
    """

    decider: Decider
    tally: Tally
    greet: Callable[[], tuple[FromCore, ...]]
    logged: Callable[[str, bool], None]
    changed: Callable[[], None]
    clock: Callable[[], float]


class Seat:
    """`keep` runs until `stop`. started: whether the first process came to serve."""

    def __init__(self, number: int, core: Surroundings) -> None:
        self.number = number
        self.serving = False
        self.restarts = 0
        self.started: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._core = core
        self._stopping = asyncio.Event()
        self.process: asyncio.subprocess.Process | None = None
        self._new_connection()

    @property
    def requests(self) -> int:
        """Of this face, those that wait for their decision or are followed."""
        return len(self._answering)

    @property
    def silent(self) -> bool:
        return self._heard_at + _SILENCE < self._core.clock()

    def send(self, message: FromCore) -> None:
        self._channel.send(message)

    def kill(self) -> None:
        """End the process whatever it is doing."""
        if self.process is not None and self.process.returncode is None:
            self.process.kill()

    def stop(self) -> None:
        """Have the face end what is open and then itself; no other follows."""
        self._stopping.set()
        self.send(Stop())

    async def keep(self) -> None:
        backoff = _FIRST_BACKOFF
        while not self._stopping.is_set():
            began = self._core.clock()
            ending = await self._live()
            if self._stopping.is_set():
                return
            self.restarts += 1
            if self._core.clock() - began > _LONG_LIFE:
                backoff = _FIRST_BACKOFF
            log.error("face %d %s; another starts in %.1f s", self.number, ending, backoff)
            try:
                await asyncio.wait_for(self._stopping.wait(), backoff)
            except TimeoutError:
                backoff = min(2 * backoff, _MAX_BACKOFF)

    async def _live(self) -> str:
        """One process, from its start to its end; how it ended."""
        self._new_connection()
        ours, theirs = socket.socketpair()
        command = (sys.executable, "-m", "picker.faces", str(theirs.fileno()))
        try:
            with theirs:
                self.process = await asyncio.create_subprocess_exec(
                    *command, pass_fds=(theirs.fileno(),), stdin=asyncio.subprocess.DEVNULL
                )
        except OSError as error:
            # No memory or no place for another process: perhaps later.
            ours.close()
            self._end()
            return f"did not start: {error}"
        self._heard_at = self._core.clock()
        for message in self._core.greet():
            self.send(message)
        await self._channel.connect(ours)
        await self._lost.wait()
        try:
            status = await asyncio.wait_for(self.process.wait(), _LAST_SECONDS)
        except TimeoutError:
            self.kill()
            status = await self.process.wait()
        return f"ended with status {status}"

    def _new_connection(self) -> None:
        self._heard_at = inf
        self._lost = asyncio.Event()
        self._channel: Channel[FromCore, FromFace] = Channel(core_end(), self._take, self._end)
        self._answering = Answering(self._core.decider, self._channel.send)

    def _take(self, message: FromFace) -> None:
        match message:
            case Logged(request_id, ok):
                self._core.logged(request_id, ok)
            case Counted(rooms):
                self._heard_at = self._core.clock()
                self._core.tally.count(self.number, rooms)
            case Listening():
                self._serves(True)
            case _:
                self._answering.take(message)

    def _end(self) -> None:
        """The connection is over: what the face held is free at once, whatever its process still does."""
        self._heard_at = inf
        self._answering.close()
        self._core.tally.gone(self.number)
        self._serves(False)
        self._lost.set()

    def _serves(self, serving: bool) -> None:
        self.serving = serving
        if not self.started.done():
            self.started.set_result(serving)
        self._core.changed()

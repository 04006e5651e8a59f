"""What runs in a face's process: one `Face` whose decisions are made by the core at the other end of a socket."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
import sys
import time
from collections.abc import Collection
from dataclasses import dataclass

from picker import garbage
from picker.extproc.health import HealthState
from picker.faces.asking import Asking
from picker.faces.channel import Channel
from picker.faces.face import Face
from picker.faces.messages import (
    Answer,
    Counted,
    Failed,
    FromCore,
    FromFace,
    Listening,
    Logged,
    Pool,
    Ready,
    Refusal,
    Rewrites,
    Stop,
    Welcome,
)
from picker.faces.protocol import face_end
from picker.faces.tally import ProcessStats, counts_of
from picker.policy.rewrites import ModelRewrites
from picker.settings import Settings, SettingsError
from picker.telemetry import configure_logging

log = logging.getLogger(__name__)

COUNT_EVERY = 1.0


@dataclass(slots=True)
class KnownPool:
    """The pool as the core told of it last."""

    sizes: tuple[int, ...] = ()
    names: frozenset[str] = frozenset()

    def block_sizes(self) -> Collection[int]:
        return self.sizes

    def adapters(self) -> Collection[str]:
        return self.names


class Child:
    """Lives from the core's welcome until the core says stop, or is gone."""

    def __init__(self) -> None:
        self.channel: Channel[FromFace, FromCore] = Channel(face_end(), self._take, self._lost)
        self._asking = Asking(self.channel.send)
        self._pool = KnownPool()
        self._health = HealthState()
        self._rewrites = ModelRewrites()
        self._face: Face | None = None
        self._welcome: asyncio.Future[Settings] = asyncio.get_running_loop().create_future()
        self._over = asyncio.Event()

    async def run(self, end: socket.socket) -> None:
        await self.channel.connect(end)
        try:
            settings = await self._welcome
        except ConnectionResetError:
            return
        configure_logging(settings.log.level, settings.log.format)
        face = Face(
            settings,
            self._asking,
            self._pool,
            self._health,
            lambda request_id, ok: self.channel.send(Logged(request_id, ok)),
            time.monotonic,
            shares_port=True,
        )
        self._face = face
        face.take_rewrites(self._rewrites)
        await face.serve()
        self.channel.send(Listening())
        garbage.expect_little()
        counting = asyncio.create_task(self._count(face))
        await self._over.wait()
        await face.stop()
        counting.cancel()
        self.channel.send(_counted(face))
        self.channel.close()

    async def _count(self, face: Face) -> None:
        while True:
            self.channel.send(_counted(face))
            await asyncio.sleep(COUNT_EVERY)

    def _take(self, message: FromCore) -> None:
        match message:
            case Answer() | Refusal() | Failed():
                self._asking.take(message)
            case Pool(block_sizes, adapters):
                self._pool.sizes, self._pool.names = block_sizes, adapters
            case Rewrites(rules):
                self._rewrites = rules
                if self._face is not None:
                    self._face.take_rewrites(rules)
            case Ready(ready):
                self._health.update(synced=ready)
            case Welcome(settings):
                self._welcome.set_result(Settings.model_validate_json(settings))
            case Stop():
                self._over.set()

    def _lost(self) -> None:
        self._asking.close()
        self._over.set()
        if not self._welcome.done():
            self._welcome.set_exception(ConnectionResetError("the core is gone"))


def _counted(face: Face) -> Counted:
    return Counted(counts_of(face.sources() | {"face": ProcessStats()}))


def main(descriptor: int) -> None:
    """Talk to the core by the socket with this number until it is done with us."""
    # A terminal's interrupt reaches every process of it, but it is the core that says when to stop.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    try:
        asyncio.run(_live(socket.socket(fileno=descriptor)))
    except (OSError, SettingsError) as error:
        log.critical("this face cannot serve: %s", error)
        sys.exit(1)


async def _live(end: socket.socket) -> None:
    await Child().run(end)

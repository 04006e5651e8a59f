"""All faces together, as the core sees them: started, told, heard, and stopped."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

from picker.extproc.handover import Decider
from picker.extproc.health import HealthState
from picker.faces import messages
from picker.faces.messages import FromCore, Ready, Rewrites, Welcome
from picker.faces.seat import Seat, Surroundings
from picker.faces.tally import ROOMS, Tally
from picker.policy.rewrites import ModelRewrites
from picker.pool.pool import Pool
from picker.rpc import address_of
from picker.settings import Settings

log = logging.getLogger(__name__)

_START_SECONDS = 60.0
_STOP_SECONDS = 10.0
_LOOK_EVERY = 0.5


@dataclass(slots=True)
class CrewStats:
    """running: faces that serve now. restarts: times that one ended by itself and another was started."""

    running: int = 0
    restarts: int = 0


class Crew:
    """`extproc.workers` processes that share a port, and whose requests `decider` decides.

    `logged` hears of the entries of the gateway's access log. Of `pool` and `health` the faces are told; whether any
    of them serves becomes a part of `health`.
    """

    def __init__(
        self,
        settings: Settings,
        decider: Decider,
        pool: Pool,
        health: HealthState,
        logged: Callable[[str, bool], None],
        clock: Callable[[], float],
    ) -> None:
        self.tally = Tally()
        self._settings = settings
        self._pool = pool
        self._health = health
        self._core = Surroundings(decider, self.tally, self._greetings, logged, self._changed, clock)
        self.seats: list[Seat] = []
        self._tasks: list[asyncio.Task[None]] = []
        self._reserved: socket.socket | None = None
        self._rewrites = ModelRewrites()
        self._told = self._news()
        pool.subscribe(lambda change: self._tell_news())

    @property
    def stats(self) -> CrewStats:
        return CrewStats(sum(seat.serving for seat in self.seats), sum(seat.restarts for seat in self.seats))

    @property
    def open_streams(self) -> int:
        """Streams that faces had open when they last said so, and requests of theirs that the core has now."""
        streams: int = self.tally.room("extproc").active_streams
        return streams + sum(seat.requests for seat in self.seats)

    @property
    def log_stats(self) -> SimpleNamespace:
        """As a face's, of all of them, when they last said so."""
        return self.tally.room("access_log")

    def sources(self) -> dict[str, Any]:
        """What all faces have counted, by room, and the state of the faces themselves."""
        return {room: partial(self.tally.room, room) for room in ROOMS} | {"faces": lambda: self.stats}

    async def serve(self) -> int:
        """Start all faces and wait until they serve; the port. Raises OSError when it is taken or one cannot serve."""
        extproc = self._settings.extproc
        self._reserved = _reserve(extproc.host, extproc.port)
        port: int = self._reserved.getsockname()[1]
        self._welcome = Welcome(_part_of(self._settings, port).model_dump_json())
        self.seats = [Seat(number, self._core) for number in range(extproc.workers)]
        self._tasks = [asyncio.create_task(seat.keep()) for seat in self.seats]
        started = asyncio.gather(*(seat.started for seat in self.seats))
        try:
            all_serve = all(await asyncio.wait_for(started, _START_SECONDS))
        except TimeoutError:
            all_serve = False
        if not all_serve:
            await self.stop()
            raise OSError("a face does not come to serve; the log says why")
        self._tasks += [asyncio.create_task(self._follow_health()), asyncio.create_task(self._look_after())]
        return port

    async def stop(self) -> None:
        """Have every face end what is open, and wait for the end of its process."""
        for seat in self.seats:
            seat.stop()
        if self.seats:
            await asyncio.wait(self._tasks[: len(self.seats)], timeout=_STOP_SECONDS)
        for seat in self.seats:
            seat.kill()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._reserved is not None:
            self._reserved.close()

    def _greetings(self) -> tuple[FromCore, ...]:
        return self._welcome, *self._told

    def take_rewrites(self, rules: ModelRewrites) -> None:
        """From now on requests go on under other models' names by these rules."""
        self._rewrites = rules
        self._tell_news()

    def _news(self) -> tuple[FromCore, ...]:
        shape = messages.Pool(tuple(sorted(self._pool.block_sizes())), frozenset(self._pool.adapters()))
        return shape, Rewrites(self._rewrites), Ready(self._health.ready)

    def _changed(self) -> None:
        self._health.update(serving=any(seat.serving for seat in self.seats))

    def _tell_news(self) -> None:
        """Tell the faces of the pool, of the rewrites and of our readiness, as far as that has changed."""
        news = self._news()
        for message, told in zip(news, self._told, strict=True):
            if message != told:
                for seat in self.seats:
                    seat.send(message)
        self._told = news

    async def _follow_health(self) -> None:
        while True:
            changed = self._health.changed
            self._tell_news()
            await changed.wait()

    async def _look_after(self) -> None:
        while True:
            await asyncio.sleep(_LOOK_EVERY)
            # Block sizes become known without a change of the pool.
            self._tell_news()
            for seat in self.seats:
                if seat.silent:
                    log.error("face %d is silent and is ended", seat.number)
                    seat.kill()


def _reserve(host: str, port: int) -> socket.socket:
    """A socket that is bound to the port and never listens: the port stays ours while faces come and go.

    Raises OSError when somebody else has it: sharing is for our faces only, so nobody may have it yet.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as alone:
        alone.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            alone.bind(address)
        except OSError as error:
            raise OSError(f"cannot listen on {address_of(host, port)}: {error.strerror}") from error
    shared = socket.socket(family, kind, protocol)
    shared.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    shared.bind(address)
    return shared


def _part_of(settings: Settings, port: int) -> Settings:
    """The settings of one face: the port that all share, and its part of what they may take together."""
    faces = settings.extproc.workers

    def part(whole: int) -> int:
        return -(-whole // faces)

    extproc = settings.extproc.model_copy(
        update={
            "port": port,
            # One body must fit, whatever the number of faces.
            "total_body_limit": max(
                part(settings.extproc.total_body_limit), settings.requests.max_body_bytes
            ),
            "max_streams": part(settings.extproc.max_streams),
        }
    )
    tokens = settings.tokens.model_copy(
        update={"threads": part(settings.tokens.threads), "cache": part(settings.tokens.cache)}
    )
    return settings.model_copy(update={"extproc": extproc, "tokens": tokens})

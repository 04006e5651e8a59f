"""The core's end of one face: its requests that wait, and those that were placed and are followed."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial

from msgspec.structs import replace

from picker.extproc import handover
from picker.extproc.handler import Refused
from picker.extproc.handover import Decider, Placed, Progress
from picker.faces.messages import (
    Answer,
    Answered,
    Decide,
    Failed,
    Finished,
    FromCore,
    Leave,
    Prefilled,
    Refusal,
    Served,
)

log = logging.getLogger(__name__)

AboutRequests = Decide | Leave | Served | Answered | Prefilled | Finished


class Answering:
    """Has the requests of one face decided, and tells it by `send`. When the face is gone, `close` frees all that it
    held.
    """

    def __init__(self, decider: Decider, send: Callable[[FromCore], None]) -> None:
        self._decider = decider
        self._send = send
        self._waiting: dict[int, Callable[[], None]] = {}
        self._placed: dict[int, Progress] = {}

    def __len__(self) -> int:
        """Requests that wait or are followed."""
        return len(self._waiting) + len(self._placed)

    def take(self, message: AboutRequests) -> None:
        serial = message.serial
        if isinstance(message, Decide):
            self._decide(message)
        elif isinstance(message, Leave):
            leave = self._waiting.pop(serial, None)
            if leave is not None:
                leave()
        elif isinstance(message, Finished):
            # Once a face has said this, the request is nobody's any more.
            progress = self._placed.pop(serial, None)
            if progress is not None:
                progress.finished(message.delivered, message.usage)
        elif (progress := self._placed.get(serial)) is not None:
            _pass_on(message, progress)

    def close(self) -> None:
        """The face is gone, and its streams with it: who waited has left, and what was placed is over."""
        waiting, self._waiting = self._waiting, {}
        placed, self._placed = self._placed, {}
        for leave in waiting.values():
            leave()
        for progress in placed.values():
            progress.finished(False, None)

    def _decide(self, message: Decide) -> None:
        serial = message.serial
        # It waits from now on, as the answer may come within the call.
        self._waiting[serial] = _nothing
        try:
            leave = self._decider.begin(message.prepared, partial(self._tell, serial))
        except Exception as error:
            self._tell(serial, error)
            return
        if serial in self._waiting:
            self._waiting[serial] = leave

    def _tell(self, serial: int, answer: handover.Answer) -> None:
        if self._waiting.pop(serial, None) is None:
            handover.never_taken(answer)
        elif isinstance(answer, Placed):
            if answer.progress is not None:
                self._placed[serial] = answer.progress
            self._send(Answer(serial, replace(answer, progress=None), answer.progress is not None))
        elif isinstance(answer, Refused):
            self._send(Refusal(serial, answer))
        else:
            log.error("deciding failed", exc_info=answer)
            self._send(Failed(serial))


def _pass_on(message: Served | Answered | Prefilled, progress: Progress) -> None:
    match message:
        case Served(_, authority):
            progress.served(authority)
        case Answered(_, ok):
            progress.answered(ok)
        case Prefilled(_, at):
            progress.prefilled(at)


def _nothing() -> None:
    """How to leave while the answer is still being asked for."""

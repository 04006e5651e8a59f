"""The face's end: requests that wait for the core's answer, and what becomes of those that were placed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import count

from msgspec import Struct
from msgspec.structs import replace

from picker.extproc import handover
from picker.extproc.handler import Refused
from picker.extproc.handover import Prepared
from picker.extproc.usage import Usage
from picker.faces.messages import (
    Answer,
    Answered,
    Decide,
    Failed,
    Finished,
    FromFace,
    Leave,
    Prefilled,
    Refusal,
    Served,
)

_CORE_IS_GONE = Refused(503, "shutting_down", "The endpoint picker is shutting down.", retry_after=1.0)


class DecidingFailed(Exception):
    """The core could not decide; its log says why."""


class Asking:
    """A `Decider` that asks the core by messages; `send` takes them."""

    def __init__(self, send: Callable[[FromFace], None]) -> None:
        self._send = send
        self._serials = count()
        self._waiting: dict[int, Callable[[handover.Answer], None]] = {}
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def begin(self, prepared: Prepared, tell: Callable[[handover.Answer], None]) -> Callable[[], None]:
        serial = next(self._serials)
        if self._closed:
            tell(_CORE_IS_GONE)
        else:
            self._waiting[serial] = tell
            self._send(Decide(serial, prepared))
        return partial(self._leave, serial)

    def take(self, message: Answer | Refusal | Failed) -> None:
        """An answer has come, perhaps to somebody who has left meanwhile."""
        answer = self._answer(message)
        tell = self._waiting.pop(message.serial, None)
        if tell is not None:
            tell(answer)
        else:
            handover.never_taken(answer)

    def close(self) -> None:
        """The core is gone: there will be no more answers."""
        self._closed = True
        waiting, self._waiting = self._waiting, {}
        for tell in waiting.values():
            tell(_CORE_IS_GONE)

    def _answer(self, message: Answer | Refusal | Failed) -> handover.Answer:
        match message:
            case Answer(serial, placed, followed):
                return replace(placed, progress=_Told(serial, self._send)) if followed else placed
            case Refusal(_, refused):
                return refused
            case Failed():
                return DecidingFailed()

    def _leave(self, serial: int) -> None:
        if self._waiting.pop(serial, None) is not None:
            self._send(Leave(serial))


class _Told(Struct, frozen=True):
    """The `Progress` of a request, as messages to the core."""

    serial: int
    send: Callable[[FromFace], None]

    def served(self, authority: str) -> None:
        self.send(Served(self.serial, authority))

    def answered(self, ok: bool) -> None:
        self.send(Answered(self.serial, ok))

    def prefilled(self, at: float) -> None:
        self.send(Prefilled(self.serial, at))

    def finished(self, delivered: bool, usage: Usage | None) -> None:
        self.send(Finished(self.serial, delivered, usage))

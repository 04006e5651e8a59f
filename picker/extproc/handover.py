"""What passes between the side that reads requests and the side that decides about them.

The reading side has streams, bodies and tokens. The deciding side has the queue, the index and the ledger. They meet
in the plain values of this file and nowhere else, so that they can live in one process or in several.

Values that are made for each request are msgspec's Structs, here and elsewhere: a frozen dataclass takes ten times as
long to make.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Protocol

from msgspec import Struct

from picker.extproc.handler import Facts, Refused
from picker.extproc.stages import Stages
from picker.extproc.usage import Usage
from picker.requests import Hints, Route
from picker.selection.selector import Demand


class Prepared(Struct, frozen=True, array_like=True):
    """A request that has been read: all that deciding needs of it. Its body stays where it was read.

    received_at: when its headers came, on the clock of both sides. observes_response: its response passes through
    Picker. gateway_id: the id that the gateway gave it at ingress. new_session: its session's id was made for it, and
    the client is to be told. renamed: where its body names another model than `model`, with which it goes on. stages:
    what reading it took.
    """

    route: Route
    hints: Hints
    demand: Demand
    received_at: float
    observes_response: bool
    model: str | None = None
    max_tokens: int | None = None
    gateway_id: str | None = None
    new_session: bool = False
    renamed: tuple[tuple[int, int], ...] = ()
    stages: Stages = ()


class Progress(Protocol):
    """Hears how a request goes on that was placed. Quick, and raises nothing."""

    def served(self, authority: str) -> None:
        """The endpoint that the gateway says it really used."""

    def answered(self, ok: bool) -> None:
        """The engine has read the prompt, at the latest now; or, where it is not `ok`, will not read it any more."""

    def prefilled(self, at: float) -> None:
        """The engine had read the prompt at that time, and not much earlier."""

    def finished(self, delivered: bool, usage: Usage | None) -> None:
        """The stream is over. Said exactly once. delivered: the gateway got the destination."""


class Placed(Struct, frozen=True, array_like=True):
    """Where a request goes: the value of the destination header, or None in shadow mode.

    progress: who wants to hear how it goes on; None where nothing is booked.
    """

    endpoint: str | None
    progress: Progress | None = None
    set_headers: tuple[tuple[str, str], ...] = ()
    facts: Facts | None = None


# An exception stands for a fault of the deciding side's own.
Answer = Placed | Refused | BaseException


def never_taken(answer: Answer) -> None:
    """Who asked has left before this answer: free what it holds."""
    if isinstance(answer, Placed) and answer.progress is not None:
        answer.progress.finished(False, None)


class Decider(Protocol):
    def begin(self, prepared: Prepared, tell: Callable[[Answer], None]) -> Callable[[], None]:
        """Have the request decided, now or when its turn comes; `tell` hears of it once. Returned is how to leave
        before that; afterwards leaving changes nothing.
        """


class PoolShape(Protocol):
    """What reading needs to know of the pool."""

    def block_sizes(self) -> Iterable[int]:
        """The sizes of the endpoints' KV blocks, in tokens."""

    def adapters(self) -> Collection[str]:
        """The models that engines have named as LoRA adapters of theirs."""

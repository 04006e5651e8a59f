"""Everything that the core and a face ever say to each other.

A `serial` names a request among those of one face and one connection; the face gives it. What is not about a request
has none.
"""

from __future__ import annotations

from msgspec import Struct

from picker.extproc.handler import Refused
from picker.extproc.handover import Placed, Prepared
from picker.extproc.usage import Usage
from picker.policy.rewrites import ModelRewrites

Counts = dict[str, dict[str, float | dict[str, float]]]
"""Room -> field -> number, or label's value -> number."""


# From a face to the core


class Listening(Struct, tag="listening", array_like=True, frozen=True):
    """The face serves from now on."""


class Decide(Struct, tag="d", array_like=True, frozen=True):
    """A request has been read and wants its decision."""

    serial: int
    prepared: Prepared


class Leave(Struct, tag="l", array_like=True, frozen=True):
    """Its client left; an answer that is under way is given back by a `Finished`."""

    serial: int


class Served(Struct, tag="s", array_like=True, frozen=True):
    serial: int
    authority: str


class Answered(Struct, tag="a", array_like=True, frozen=True):
    serial: int
    ok: bool


class Prefilled(Struct, tag="p", array_like=True, frozen=True):
    serial: int
    at: float


class Finished(Struct, tag="f", array_like=True, frozen=True):
    """Said once of each request that was placed and is followed; the last of it."""

    serial: int
    delivered: bool
    usage: Usage | None = None


class Logged(Struct, tag="log", array_like=True, frozen=True):
    """An entry of the gateway's access log. ok: the client got an answer that is no error."""

    request_id: str
    ok: bool


class Counted(Struct, tag="counted", array_like=True, frozen=True):
    """What the face has counted since it started; once a second."""

    rooms: Counts


FromFace = Listening | Decide | Leave | Served | Answered | Prefilled | Finished | Logged | Counted


# From the core to a face


class Welcome(Struct, tag="welcome", array_like=True, frozen=True):
    """The first message: the settings (JSON), in which sizes are this face's part and the port is the one to share."""

    settings: str


class Pool(Struct, tag="pool", array_like=True, frozen=True):
    """What reading needs to know of the pool: sizes of KV blocks in tokens, and names of LoRA adapters."""

    block_sizes: tuple[int, ...]
    adapters: frozenset[str]


class Rewrites(Struct, tag="rewrites", array_like=True, frozen=True):
    """Which requests go on under another model's name."""

    rules: ModelRewrites


class Ready(Struct, tag="ready", array_like=True, frozen=True):
    """What the health service is to say."""

    ready: bool


class Answer(Struct, tag="a", array_like=True, frozen=True):
    """The request was placed (`progress` is None on the way). followed: the core wants to hear how it goes on."""

    serial: int
    placed: Placed
    followed: bool


class Refusal(Struct, tag="r", array_like=True, frozen=True):
    serial: int
    refused: Refused


class Failed(Struct, tag="failed", array_like=True, frozen=True):
    """Deciding failed; the core's log says why."""

    serial: int


class Stop(Struct, tag="stop", array_like=True, frozen=True):
    """End what is open, and then yourself."""


FromCore = Welcome | Pool | Rewrites | Ready | Answer | Refusal | Failed | Stop

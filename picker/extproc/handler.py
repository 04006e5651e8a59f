"""What the ext_proc server asks of the deciding side, and what that side answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from msgspec import Struct

from picker.extproc.stages import Stages

Headers = Sequence[tuple[str, str]]


class Arrival(Struct, frozen=True):
    """A whole request as the gateway handed it over; nothing of it has gone upstream yet.

    `headers` have lower-case names, keep duplicates and order, and leave the pseudo headers out. `body` is
    the bytes as the client sent them (still compressed, if they were). `has_body` is False only when the
    headers ended the request, so an empty body and no body can be told apart. `metadata` is Envoy's
    `filter_metadata`: namespace -> plain JSON-like values. `received_at` is on the server's clock (seconds).

    `observes_response`: the gateway sends the response through Picker, so `Exchange.finished` means that the
    response is over. Otherwise its end is learned elsewhere (access log, engine metrics).
    """

    method: str
    path: str
    authority: str
    headers: Headers
    body: bytes
    has_body: bool
    metadata: Mapping[str, Any]
    received_at: float
    observes_response: bool


class Exchange(Protocol):
    """Follows one routed request from the decision to the end of its ext_proc stream.

    Its methods must be quick and must not raise; what they raise is logged and counted, never sent on.
    """

    @property
    def wants_response_body(self) -> bool: ...

    def response_headers(self, status: int, headers: Headers, served: str | None) -> None:
        """The response began. `served` is the endpoint that the gateway says it really used, if it says."""

    def response_chunk(self, data: bytes) -> None:
        """A piece of the response body: the first one always, the others only where `wants_response_body`."""

    def finished(self, delivered: bool) -> None:
        """The stream is over, in whatever way. Called exactly once for each `Routed`, even one never sent.

        `delivered`: the destination was handed to the gateway, which may have acted on it.
        """


class Facts(Struct, frozen=True, array_like=True):
    """How a decision came about, for traces: the request's id, its class, tokens cached and charged, its stages, and
    the endpoint (`ip:port`) if it got one.
    """

    request_id: str
    policy_class: str
    cached_tokens: int
    cost: int
    stages: Stages
    endpoint: str | None = None


class Routed(Struct, frozen=True):
    """Send the request to `endpoint`: `ip:port`, or a fallback list `ip:port,ip:port` in order of preference; None
    (shadow mode) leaves the gateway to route it as it would without Picker.

    `body` None forwards the client's bytes untouched. `set_headers` overwrite; `remove_headers` go first.
    `response_headers` are added to the response, if it passes through Picker.
    """

    endpoint: str | None
    exchange: Exchange
    set_headers: tuple[tuple[str, str], ...] = ()
    remove_headers: tuple[str, ...] = ()
    body: bytes | None = None
    response_headers: tuple[tuple[str, str], ...] = ()


class Refused(Struct, frozen=True, array_like=True):
    """Answer the client with an error in the OpenAI shape.

    `reason` is a machine word from a closed set (`x-picker-dropped-reason`, a metric label); `message` is for
    people. `retry_after` is in seconds. `kind` is the OpenAI error type; by default it follows from `status`.
    """

    status: int
    reason: str
    message: str
    retry_after: float | None = None
    kind: str | None = None
    param: str | None = None
    code: str | None = None
    facts: Facts | None = None


class RequestHandler(Protocol):
    """Decides where requests go."""

    async def route(self, arrival: Arrival) -> Routed | Refused:
        """Decide. Cancelled when the client or the gateway goes away while this waits."""

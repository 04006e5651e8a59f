"""A response that passes by, as far as the deciding side wants to hear of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus

from picker.extproc.handler import Headers
from picker.extproc.handover import Progress
from picker.extproc.usage import Usage, UsageReader


@dataclass(slots=True)
class Followed:
    """The `Exchange` of a request that has been placed. `usage` reads what the engine reports, where that is wanted.

    clock: seconds, the same that the deciding side goes by.
    """

    progress: Progress
    clock: Callable[[], float]
    usage: UsageReader | None = None
    # A stream has begun whose first event is still to come.
    streaming: bool = False
    # It was answered with an error: nothing was generated.
    failed: bool = False

    @property
    def wants_response_body(self) -> bool:
        return self.usage is not None

    def response_headers(self, status: int, headers: Headers, served: str | None) -> None:
        """Engines send the headers of a stream at once and its first event when the prompt is read; of an answer
        in one piece they send the headers when all of it is written, which times no prefill. An error may be the
        gateway's own, and is a sign of none.
        """
        if served:
            self.progress.served(served)
        self.streaming = any(
            name == "content-type" and value.startswith("text/event-stream") for name, value in headers
        )
        if not self.streaming:
            self.failed = status >= HTTPStatus.BAD_REQUEST
            self.progress.answered(not self.failed)

    def response_chunk(self, data: bytes) -> None:
        if self.streaming and data:
            self.streaming = False
            self.progress.prefilled(self.clock())
        if self.usage is not None:
            self.usage.feed(data)

    def finished(self, delivered: bool) -> None:
        usage = self.usage.usage() if self.usage is not None else None
        self.progress.finished(delivered, Usage(output_tokens=0) if self.failed else usage)


class Unfollowed:
    """The `Exchange` of a request that booked nothing."""

    wants_response_body = False

    def response_headers(self, status: int, headers: Headers, served: str | None) -> None:
        pass

    def response_chunk(self, data: bytes) -> None:
        pass

    def finished(self, delivered: bool) -> None:
        pass

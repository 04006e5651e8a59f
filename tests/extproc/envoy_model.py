"""What Envoy accepts on an ext_proc stream in FULL_DUPLEX_STREAMED mode: a small reference model.

After `endpoint-picker-protocol` findings with Envoy 1.40: an answer is spurious unless its phase has been sent and
the answers before it have come; a spurious answer fails the request.
"""

from __future__ import annotations

from dataclasses import dataclass

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingResponse

from picker.extproc.body import MAX_PIECE_BYTES
from tests.support.messages import kind


class Spurious(AssertionError):
    """Envoy would have failed the request here."""


@dataclass(slots=True)
class Direction:
    """The request's or the response's way through the processor."""

    name: str
    sent: bytes = b""  # to the processor
    headers_sent: bool = False
    body_ended: bool = False
    trailers_sent: bool = False

    got: bytes = b""  # back from it
    headers_answered: bool = False
    body_answered: bool = False
    trailers_answered: bool = False

    @property
    def ended(self) -> bool:
        """All has been sent to the processor."""
        return self.body_ended or self.trailers_sent

    @property
    def answered(self) -> bool:
        """Nothing more is expected from the processor."""
        return self.headers_answered and (self.body_answered or self.trailers_answered)

    def take_headers(self) -> None:
        self._expect(self.headers_sent and not self.headers_answered, "an answer to the headers")
        self.headers_answered = True

    def take_piece(self, data: bytes, last: bool) -> None:
        self._expect(self.headers_answered and not self.answered, "a piece of the body")
        self._expect(len(data) <= MAX_PIECE_BYTES, "a piece so large")
        self._expect(bool(data) or last, "an empty piece")
        self.got += data
        self._expect(self.sent.startswith(self.got), "bytes that were not sent")
        if last:
            self._expect(not self.trailers_sent, "an end of the body before the trailers")
            self._expect(self.body_ended and self.got == self.sent, "an end of the body")
            self.body_answered = True

    def take_trailers(self) -> None:
        self._expect(self.trailers_sent and not self.trailers_answered, "an answer to the trailers")
        self._expect(self.headers_answered and self.got == self.sent, "an answer to the trailers yet")
        self.trailers_answered = True

    def _expect(self, allowed: bool, what: str) -> None:
        if not allowed:
            raise Spurious(f"{self.name}: Envoy does not expect {what} in {self}")


class EnvoyModel:
    """Both directions, and the error response that can take the place of everything."""

    def __init__(self) -> None:
        self.request = Direction("request")
        self.response = Direction("response")
        self.immediate: int | None = None

    def take(self, reply: ProcessingResponse) -> None:
        """One message from the processor. Raises `Spurious`."""
        if self.immediate is not None:
            raise Spurious("something after the immediate response")
        match kind(reply):
            case "immediate_response":
                if self.request.headers_answered or self.response.headers_sent:
                    raise Spurious("an immediate response after the request went on")
                self.immediate = reply.immediate_response.status.code
            case "request_headers":
                self.request.take_headers()
            case "request_body":
                streamed = _streamed(reply.request_body)
                self.request.take_piece(*streamed)
            case "request_trailers":
                self.request.take_trailers()
            case "response_headers":
                self.response.take_headers()
            case "response_body":
                self.response.take_piece(*_streamed(reply.response_body))
            case "response_trailers":
                self.response.take_trailers()
            case other:
                raise Spurious(f"a message of kind {other}")


def _streamed(body: object) -> tuple[bytes, bool]:
    mutation = body.response.body_mutation  # type: ignore[attr-defined]
    if mutation.WhichOneof("mutation") != "streamed_response":
        raise Spurious("a body answer that is not streamed")
    return mutation.streamed_response.body, mutation.streamed_response.end_of_stream

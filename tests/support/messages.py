"""ext_proc messages as a gateway sends them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from envoy.service.ext_proc.v3.external_processor_pb2 import ProcessingRequest, ProcessingResponse

from picker.extproc.conversation import BodyMode

FULL_DUPLEX = (BodyMode.FULL_DUPLEX_STREAMED, BodyMode.FULL_DUPLEX_STREAMED)


def request_headers(
    method: str = "POST",
    path: str = "/v1/completions",
    *,
    headers: Iterable[tuple[str, str]] = (),
    end: bool = False,
    modes: tuple[BodyMode, BodyMode] | None = FULL_DUPLEX,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
) -> ProcessingRequest:
    """The first message of a stream. `modes`: the declared body modes, None for a gateway that says nothing."""
    message = ProcessingRequest()
    pseudo = ((":method", method), (":path", path), (":authority", "models.example"), (":scheme", "http"))
    for name, value in (*pseudo, *headers):
        message.request_headers.headers.headers.add(key=name, raw_value=value.encode("latin-1"))
    message.request_headers.end_of_stream = end
    if modes is not None:
        message.protocol_config.request_body_mode, message.protocol_config.response_body_mode = modes
    add_metadata(message, metadata)
    return message


def request_body(
    data: bytes, *, end: bool = False, metadata: Mapping[str, Mapping[str, Any]] | None = None
) -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_body.body = data
    message.request_body.end_of_stream = end
    add_metadata(message, metadata)
    return message


def request_trailers() -> ProcessingRequest:
    message = ProcessingRequest()
    message.request_trailers.trailers.headers.add(key="checksum", raw_value=b"1")
    return message


def response_headers(
    status: int = 200,
    *,
    headers: Iterable[tuple[str, str]] = (),
    end: bool = False,
    metadata: Mapping[str, Mapping[str, Any]] | None = None,
) -> ProcessingRequest:
    message = ProcessingRequest()
    for name, value in ((":status", str(status)), *headers):
        message.response_headers.headers.headers.add(key=name, raw_value=value.encode("latin-1"))
    message.response_headers.end_of_stream = end
    add_metadata(message, metadata)
    return message


def response_body(data: bytes, *, end: bool = False) -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_body.body = data
    message.response_body.end_of_stream = end
    return message


def response_trailers() -> ProcessingRequest:
    message = ProcessingRequest()
    message.response_trailers.trailers.headers.add(key="grpc-status", raw_value=b"0")
    return message


def add_metadata(message: ProcessingRequest, metadata: Mapping[str, Mapping[str, Any]] | None) -> None:
    for namespace, values in (metadata or {}).items():
        message.metadata_context.filter_metadata[namespace].update(values)


def kind(reply: ProcessingResponse) -> str:
    return str(reply.WhichOneof("response"))


def set_header_values(reply: ProcessingResponse) -> dict[str, list[str]]:
    """The headers that a headers, body or immediate reply sets: name -> values in order."""
    which = kind(reply)
    part = getattr(reply, which)
    mutation = part.headers if which == "immediate_response" else part.response.header_mutation
    values: dict[str, list[str]] = {}
    for option in mutation.set_headers:
        values.setdefault(option.header.key, []).append(option.header.raw_value.decode())
    return values


def streamed_pieces(replies: Iterable[ProcessingResponse], which: str) -> list[tuple[bytes, bool]]:
    """(bytes, end_of_stream) of every streamed reply of a direction: `request_body` or `response_body`."""
    pieces = []
    for reply in replies:
        if kind(reply) == which:
            mutation = getattr(reply, which).response.body_mutation
            assert mutation.WhichOneof("mutation") == "streamed_response"
            pieces.append((mutation.streamed_response.body, mutation.streamed_response.end_of_stream))
    return pieces

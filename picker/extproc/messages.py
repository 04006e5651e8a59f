"""The replies Picker sends on an ext_proc stream, built from protoc messages.

Replies that never change are built once. Source of the rules: `external_processor.proto` of Envoy's API v3.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from envoy.config.core.v3.base_pb2 import HeaderValueOption
from envoy.service.ext_proc.v3.external_processor_pb2 import (
    BodyResponse,
    CommonResponse,
    HeaderMutation,
    HeadersResponse,
    HttpHeaders,
    ProcessingResponse,
    TrailersResponse,
)
from google.protobuf.struct_pb2 import Struct, Value

from picker.extproc.errors import error_json
from picker.extproc.handler import Refused

DESTINATION_HEADER = "x-gateway-destination-endpoint"
SERVED_KEY = "x-gateway-destination-endpoint-served"
LB_NAMESPACE = "envoy.lb"
REASON_HEADER = "x-picker-dropped-reason"

_OVERWRITE = HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
_APPEND = HeaderValueOption.APPEND_IF_EXISTS_OR_ADD

# "Go on, nothing changed", for each phase where Picker has nothing to say.
REQUEST_HEADERS_UNCHANGED = ProcessingResponse(request_headers=HeadersResponse())
REQUEST_BODY_UNCHANGED = ProcessingResponse(request_body=BodyResponse())
REQUEST_TRAILERS_UNCHANGED = ProcessingResponse(request_trailers=TrailersResponse())
RESPONSE_HEADERS_UNCHANGED = ProcessingResponse(response_headers=HeadersResponse())
RESPONSE_BODY_UNCHANGED = ProcessingResponse(response_body=BodyResponse())
RESPONSE_TRAILERS_UNCHANGED = ProcessingResponse(response_trailers=TrailersResponse())


def destination_on_headers(
    endpoint: str | None, set_headers: tuple[tuple[str, str], ...], remove_headers: tuple[str, ...]
) -> ProcessingResponse:
    """The answer to the request headers: go to `endpoint`, said as a header and as `envoy.lb` metadata.

    Without an endpoint, only the headers are changed.
    """
    reply = ProcessingResponse()
    _direct(reply, reply.request_headers.response, endpoint, set_headers, remove_headers)
    return reply


def destination_on_body(
    endpoint: str | None,
    set_headers: tuple[tuple[str, str], ...],
    remove_headers: tuple[str, ...],
    body: bytes | None,
) -> ProcessingResponse:
    """The answer to a BUFFERED body, where the headers still wait and can be changed with it.

    A changed `body` gets its new content-length, once; an untouched one (None) is not sent back at all.
    """
    reply = ProcessingResponse()
    common = reply.request_body.response
    if body is not None:
        set_headers = (*set_headers, ("content-length", str(len(body))))
        common.body_mutation.body = body
    _direct(reply, common, endpoint, set_headers, remove_headers)
    return reply


def request_piece(data: bytes, last: bool) -> ProcessingResponse:
    reply = ProcessingResponse()
    streamed = reply.request_body.response.body_mutation.streamed_response
    streamed.body = data
    streamed.end_of_stream = last
    return reply


def response_piece(data: bytes, last: bool) -> ProcessingResponse:
    reply = ProcessingResponse()
    streamed = reply.response_body.response.body_mutation.streamed_response
    streamed.body = data
    streamed.end_of_stream = last
    return reply


def response_headers(added: tuple[tuple[str, str], ...]) -> ProcessingResponse:
    """The answer to the response headers: they stay, and these come on top, beside any of the same name."""
    if not added:
        return RESPONSE_HEADERS_UNCHANGED
    reply = ProcessingResponse()
    mutation = reply.response_headers.response.header_mutation
    for name, value in added:
        _set_header(mutation, name, value, _APPEND)
    return reply


def hold(seconds: float) -> ProcessingResponse:
    """Ask Envoy to wait longer than its `message_timeout` for the answer to the message just read."""
    reply = ProcessingResponse()
    reply.override_message_timeout.FromMilliseconds(int(seconds * 1000))
    return reply


def immediate(refused: Refused) -> ProcessingResponse:
    """The whole response to the client, in place of the upstream's."""
    reply = ProcessingResponse()
    response = reply.immediate_response
    response.status.code = refused.status  # the enum's numbers are HTTP's own
    response.body = error_json(refused)
    response.details = f"picker_{refused.reason}"
    _set_header(response.headers, "content-type", "application/json")
    _set_header(response.headers, REASON_HEADER, refused.reason)
    if refused.retry_after is not None:
        _set_header(response.headers, "retry-after", str(max(1, math.ceil(refused.retry_after))))
    return reply


def split_headers(message: HttpHeaders) -> tuple[dict[str, str], list[tuple[str, str]]]:
    """The pseudo headers by name, and the others in order. Bytes beyond ASCII are read as latin-1: never fails."""
    pseudo = {}
    headers = []
    for header in message.headers.headers:
        name, raw = header.key, header.raw_value
        value = raw.decode("latin-1") if raw else header.value
        if name[:1] == ":":
            pseudo[name] = value
        else:
            headers.append((name, value))
    return pseudo, headers


def plain_metadata(namespaces: Mapping[str, Struct]) -> dict[str, Any]:
    """`filter_metadata` as plain values. Depth is bounded by the protobuf parser (100)."""
    return {name: _plain_struct(struct) for name, struct in namespaces.items()}


def _plain_struct(struct: Struct) -> dict[str, Any]:
    return {key: _plain_value(value) for key, value in struct.fields.items()}


def _plain_value(value: Value) -> Any:
    match value.WhichOneof("kind"):
        case "struct_value":
            return _plain_struct(value.struct_value)
        case "list_value":
            return [_plain_value(item) for item in value.list_value.values]
        case "null_value" | None:
            return None
        case kind:
            return getattr(value, kind)


def _direct(
    reply: ProcessingResponse,
    common: CommonResponse,
    endpoint: str | None,
    set_headers: Iterable[tuple[str, str]],
    remove_headers: Iterable[str],
) -> None:
    mutation = common.header_mutation
    for name, value in set_headers:
        _set_header(mutation, name, value)
    mutation.remove_headers.extend(remove_headers)
    if endpoint is None:
        return
    _set_header(mutation, DESTINATION_HEADER, endpoint)
    common.clear_route_cache = True
    reply.dynamic_metadata.fields[LB_NAMESPACE].struct_value.fields[
        DESTINATION_HEADER
    ].string_value = endpoint


def _set_header(
    mutation: HeaderMutation, name: str, value: str, action: HeaderValueOption.HeaderAppendAction = _OVERWRITE
) -> None:
    option = mutation.set_headers.add()
    option.append_action = action
    option.header.key = name
    option.header.raw_value = value.encode("latin-1", "replace")

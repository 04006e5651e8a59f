"""Envoy's gRPC access log as a source of completions, where responses do not pass through Picker.

Envoy sends one entry for each finished request, in batches. Joined on a request header that Envoy itself set at
ingress, an entry says when a request that Picker routed is over, and how.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3.als_pb2 import StreamAccessLogsMessage
from google.protobuf.message import DecodeError

from picker.rpc import Call, Receiver, RpcServer, Status

log = logging.getLogger(__name__)

METHOD = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
REQUEST_ID_HEADER = "x-picker-request-id"
MAX_REQUEST_ID_CHARS = 128


#: Told of each request that is over: its id, and the status of its response, 0 where the client got none.
AccessLogSink = Callable[[str, int], None]


@dataclass(slots=True)
class AccessLogStats:
    active_streams: int = 0
    entries: int = 0
    without_request_id: int = 0
    refused_streams: int = 0
    sink_errors: int = 0


class AccessLogService:
    """Serves `envoy.service.accesslog.v3.AccessLogService`: passes HTTP entries on, keeps nothing.

    Envoy holds one stream for each of its worker threads; `max_streams` bounds them. `client_names` as for
    `ExtProcServer`: who may not ask may not tell either.
    """

    def __init__(
        self, sink: AccessLogSink, *, max_streams: int = 1024, client_names: frozenset[str] = frozenset()
    ) -> None:
        self.stats = AccessLogStats()
        self._sink = sink
        self._max_streams = max_streams
        self._client_names = client_names

    def add_to(self, server: RpcServer) -> None:
        server.add(METHOD, lambda call: _Stream(self, call), client_names=self._client_names)

    def open(self, call: Call) -> bool:
        """Count one stream more, or turn it away."""
        if self.stats.active_streams >= self._max_streams:
            self.stats.refused_streams += 1
            call.end(Status.RESOURCE_EXHAUSTED, "too many access log streams")
            return False
        self.stats.active_streams += 1
        return True

    def pass_on(self, entry: HTTPAccessLogEntry) -> None:
        self.stats.entries += 1
        request_id = entry.request.request_headers.get(REQUEST_ID_HEADER, "")
        if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
            self.stats.without_request_id += 1
            return
        try:
            self._sink(request_id, entry.response.response_code.value)
        except Exception:
            self.stats.sink_errors += 1
            log.exception("taking an access log entry failed")


class _Stream(Receiver):
    """One of the gateway's worker threads."""

    def __init__(self, service: AccessLogService, call: Call) -> None:
        self._service = service
        self._call = call
        self._counted = service.open(call)

    def received(self, message: bytes) -> None:
        try:
            logs = StreamAccessLogsMessage.FromString(message).http_logs
        except DecodeError:
            self._call.end(Status.INTERNAL, "not a StreamAccessLogsMessage")
            return
        for entry in logs.log_entry:
            self._service.pass_on(entry)

    def half_closed(self) -> None:
        self._call.send(b"")  # an empty StreamAccessLogsResponse
        self._call.end()

    def closed(self) -> None:
        self._service.stats.active_streams -= self._counted

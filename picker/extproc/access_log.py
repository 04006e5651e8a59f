"""Envoy's gRPC access log as a source of completions, where responses do not pass through Picker.

Envoy sends one entry for each finished request, in batches. Joined on a request header that Envoy itself set at
ingress, an entry says when a request that Picker routed is over, and how.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

import grpc
from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc

from picker.extproc.tls import refuse_strangers

log = logging.getLogger(__name__)

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


class AccessLogService(als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]  # the stub is untyped
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

    def add_to(self, server: grpc.aio.Server) -> None:
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self, server)

    async def StreamAccessLogs(
        self,
        request_iterator: AsyncIterator[als_pb2.StreamAccessLogsMessage],
        context: grpc.aio.ServicerContext[als_pb2.StreamAccessLogsMessage, als_pb2.StreamAccessLogsResponse],
    ) -> als_pb2.StreamAccessLogsResponse:
        await refuse_strangers(self._client_names, context)
        if self.stats.active_streams >= self._max_streams:
            self.stats.refused_streams += 1
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many access log streams")
        self.stats.active_streams += 1
        try:
            async for message in request_iterator:
                for entry in message.http_logs.log_entry:
                    self._pass_on(entry)
        finally:
            self.stats.active_streams -= 1
        return als_pb2.StreamAccessLogsResponse()

    def _pass_on(self, entry: HTTPAccessLogEntry) -> None:
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

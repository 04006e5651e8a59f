"""Envoy's gRPC access log as a source of completions, where responses do not pass through Picker.

Envoy sends one entry for each finished request, in batches. Joined on a request header that Envoy itself set at
ingress, an entry says when a request that Picker routed is over, how, and where it ran.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Protocol

import grpc
from envoy.data.accesslog.v3.accesslog_pb2 import AccessLogCommon, HTTPAccessLogEntry
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc
from google.protobuf.duration_pb2 import Duration

from picker.extproc.tls import refuse_strangers

log = logging.getLogger(__name__)

REQUEST_ID_HEADER = "x-picker-request-id"
MAX_REQUEST_ID_CHARS = 128


class AccessLogSink(Protocol):
    def __call__(
        self,
        request_id: str,
        upstream: str | None,
        status: int,
        first_byte_s: float | None,
        last_byte_s: float | None,
    ) -> None:
        """One request is over.

        `upstream` is the `ip:port` that answered (None: none was reached). `status` is 0 when the client got no
        response. Times are seconds from when the gateway began to send the request upstream, which leaves out
        its wait for the decision: to the first byte from the upstream, and to the last to the client.
        """


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
        common = entry.common_properties
        request_id = entry.request.request_headers.get(REQUEST_ID_HEADER, "")
        if not 0 < len(request_id) <= MAX_REQUEST_ID_CHARS:
            self.stats.without_request_id += 1
            return
        try:
            self._sink(
                request_id,
                _upstream(common),
                entry.response.response_code.value,
                _seconds_upstream(common, "time_to_first_upstream_rx_byte"),
                _seconds_upstream(common, "time_to_last_downstream_tx_byte"),
            )
        except Exception:
            self.stats.sink_errors += 1
            log.exception("taking an access log entry failed")


def _upstream(common: AccessLogCommon) -> str | None:
    address = common.upstream_remote_address.socket_address
    if not address.address:
        return None
    host = f"[{address.address}]" if ":" in address.address else address.address
    return f"{host}:{address.port_value}"


def _seconds_upstream(common: AccessLogCommon, name: str) -> float | None:
    """A time of the entry, which are all since the request arrived, from the start of its way upstream."""
    if not common.HasField(name) or not common.HasField("time_to_first_upstream_tx_byte"):
        return None
    return _seconds(getattr(common, name)) - _seconds(common.time_to_first_upstream_tx_byte)


def _seconds(duration: Duration) -> float:
    return float(duration.seconds + duration.nanos / 1e9)

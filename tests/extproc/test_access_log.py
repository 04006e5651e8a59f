"""Envoy's access log as a source of completions; whoever sends it is not trusted to be sane."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from envoy.data.accesslog.v3.accesslog_pb2 import HTTPAccessLogEntry
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc

from picker.extproc.access_log import MAX_REQUEST_ID_CHARS, AccessLogService
from tests.support.servers import eventually, listening


def entry(request_id: str | None = "r-1", *, status: int = 200) -> HTTPAccessLogEntry:
    logged = HTTPAccessLogEntry()
    if request_id is not None:
        logged.request.request_headers["x-picker-request-id"] = request_id
    logged.response.response_code.value = status
    return logged


def message(*entries: HTTPAccessLogEntry) -> als_pb2.StreamAccessLogsMessage:
    batch = als_pb2.StreamAccessLogsMessage()
    batch.http_logs.log_entry.extend(entries)
    return batch


@asynccontextmanager
async def logging_to(service: AccessLogService) -> AsyncIterator[als_pb2_grpc.AccessLogServiceStub]:
    async with (
        listening(service) as port,
        grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel,
    ):
        yield als_pb2_grpc.AccessLogServiceStub(channel)


class Sink(list[tuple[Any, ...]]):
    def __call__(self, *values: Any) -> None:
        self.append(values)


async def test_each_entry_of_a_batch_is_passed_on() -> None:
    sink = Sink()
    async with logging_to(AccessLogService(sink)) as stub:
        call = stub.StreamAccessLogs()
        await call.write(message(entry("a"), entry("b", status=503)))
        await eventually(lambda: len(sink) == 2)
        assert sink == [("a", 200), ("b", 503)]
        await call.done_writing()
        await call


async def test_a_client_that_left_got_no_status() -> None:
    sink = Sink()
    bare = HTTPAccessLogEntry()
    bare.request.request_headers["x-picker-request-id"] = "a"
    async with logging_to(AccessLogService(sink)) as stub:
        call = stub.StreamAccessLogs()
        await call.write(message(bare))
        await eventually(lambda: bool(sink))
        assert sink == [("a", 0)]


@pytest.mark.parametrize("request_id", [None, "", "x" * (MAX_REQUEST_ID_CHARS + 1)])
async def test_an_entry_without_a_sane_id_is_counted_and_dropped(request_id: str | None) -> None:
    sink = Sink()
    service = AccessLogService(sink)
    async with logging_to(service) as stub:
        call = stub.StreamAccessLogs()
        await call.write(als_pb2.StreamAccessLogsMessage())
        await call.write(message(entry(request_id), entry("x" * MAX_REQUEST_ID_CHARS)))
        await eventually(lambda: service.stats.entries == 2)
        assert len(sink) == service.stats.without_request_id == 1


async def test_a_sink_that_raises_does_not_end_the_log() -> None:
    seen: list[str] = []

    def sink(request_id: str, *rest: object) -> None:
        seen.append(request_id)
        raise RuntimeError("no room")

    service = AccessLogService(sink)
    async with logging_to(service) as stub:
        call = stub.StreamAccessLogs()
        await call.write(message(entry("a"), entry("b")))
        await eventually(lambda: service.stats.sink_errors == 2)
        assert seen == ["a", "b"]


async def test_the_number_of_logs_is_bounded() -> None:
    service = AccessLogService(Sink(), max_streams=1)
    async with logging_to(service) as stub:
        first = stub.StreamAccessLogs()
        await first.write(message(entry("a")))
        await eventually(lambda: service.stats.active_streams == 1)
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await stub.StreamAccessLogs(iter([message(entry("b"))]))
        assert error.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        first.cancel()
        await eventually(lambda: service.stats.active_streams == 0)

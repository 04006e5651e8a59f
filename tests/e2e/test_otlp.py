"""Spans as a collector gets them: OTLP over HTTP, from a Picker that was only told where to send them."""

from __future__ import annotations

from pathlib import Path

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from picker.simulation.mock_engine import MockEngineSettings
from tests.e2e.stack import running_stack

pytestmark = pytest.mark.e2e

TRACE = "0af7651916cd43dd8448eb211c80319c"


async def test_a_collector_gets_the_spans_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[ExportTraceServiceRequest] = []

    async def take(request: web.Request) -> web.Response:
        assert request.content_type == "application/x-protobuf"
        received.append(ExportTraceServiceRequest.FromString(await request.read()))
        return web.Response(content_type="application/x-protobuf")

    collector = web.Application()
    collector.router.add_post("/v1/traces", take)
    async with TestServer(collector) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", str(server.make_url("")))
        settings = {"telemetry": {"tracing": True}}
        async with running_stack(tmp_path, [MockEngineSettings(name="pod-0")], settings=settings) as stack:
            answer = await stack.complete(
                [7] * 100, headers={"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            )
            assert answer["status"] == 200, answer
        # Picker has stopped, and sent first what it still had.
        resources = [resource for message in received for resource in message.resource_spans]
    names = {attribute.key: attribute.value.string_value for attribute in resources[0].resource.attributes}
    assert names["service.name"] == "picker"
    spans = {
        span.name: span for resource in resources for scope in resource.scope_spans for span in scope.spans
    }
    assert {"picker.route", "picker.tokenize", "picker.queue"} <= spans.keys()
    assert {span.trace_id.hex() for span in spans.values()} == {TRACE}
    attributes = {attribute.key: attribute.value for attribute in spans["picker.route"].attributes}
    assert attributes["gen_ai.usage.input_tokens"].int_value == 100

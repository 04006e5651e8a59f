"""Spans as a collector gets them: OTLP over HTTP, from a Picker that was only told where to send them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from picker.simulation.mock_engine import MockEngineSettings
from tests.e2e.stack import running_stack

pytestmark = pytest.mark.e2e

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"


async def test_a_collector_gets_the_spans_of_a_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[dict[str, Any]] = []

    async def take(request: web.Request) -> web.Response:
        assert request.headers["x-team"] == "a b"
        received.append(await request.json())
        return web.json_response({})

    collector = web.Application()
    collector.router.add_post("/v1/traces", take)
    async with TestServer(collector) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", str(server.make_url("")))
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-team=a%20b")
        settings = {"telemetry": {"tracing": True}}
        async with running_stack(tmp_path, [MockEngineSettings(name="pod-0")], settings=settings) as stack:
            context = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "tracestate": "vendor=1"}
            answer = await stack.complete([7] * 100, headers=context)
            assert answer["status"] == 200, answer
        # Picker has stopped, and sent first what it still had.
    [resource] = [resource for message in received for resource in message["resourceSpans"]]
    assert {"key": "service.name", "value": {"stringValue": "picker"}} in resource["resource"]["attributes"]
    [scope] = resource["scopeSpans"]
    assert scope["scope"]["name"] == "picker"
    spans = {span["name"]: span for span in scope["spans"]}
    assert {"picker.route", "picker.tokenize", "picker.queue"} <= spans.keys()
    assert {span["traceId"] for span in spans.values()} == {TRACE}
    route = spans["picker.route"]
    assert (route["parentSpanId"], route["traceState"], route["kind"]) == (CLIENT_SPAN, "vendor=1", 2)
    assert spans["picker.queue"]["parentSpanId"] == route["spanId"]
    assert int(route["startTimeUnixNano"]) < int(route["endTimeUnixNano"])
    assert route["status"] == {"code": 0, "message": ""}
    assert {"key": "gen_ai.usage.input_tokens", "value": {"intValue": "100"}} in route["attributes"]
    assert {"key": "picker.estimated", "value": {"boolValue": False}} in route["attributes"]


async def test_a_collector_that_is_away_costs_a_warning_and_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    settings = {"telemetry": {"tracing": True}}
    async with running_stack(tmp_path, [MockEngineSettings(name="pod-0")], settings=settings) as stack:
        context = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01"}
        assert (await stack.complete([7] * 100, headers=context))["status"] == 200
    assert "spans cannot be sent to http://127.0.0.1:9/v1/traces" in caplog.text

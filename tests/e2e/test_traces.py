"""Traces through real parts: from the client by way of Picker to the engine, as one."""

from __future__ import annotations

from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from picker.simulation.mock_engine import MockEngineSettings
from picker.telemetry.tracing import Tracing
from tests.e2e.stack import Stack, running_stack

pytestmark = pytest.mark.e2e

TRACE = "0af7651916cd43dd8448eb211c80319c"
CLIENT_SPAN = "b7ad6b7169203331"
CONTEXT = {"traceparent": f"00-{TRACE}-{CLIENT_SPAN}-01", "tracestate": "vendor=1"}
STAGES = ("parse", "tokenize", "hash", "lookup", "queue", "reply")


def spans(stack: Stack, exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    """All that were ended so far, by name; no more are made afterwards."""
    assert stack.app.faces.pipeline.tracing is not None
    stack.app.faces.pipeline.tracing.close()
    stack.app.faces.pipeline.tracing = None
    return {span.name: span for span in exporter.get_finished_spans()}


async def test_a_trace_goes_on_from_the_client_to_the_engine(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with running_stack(tmp_path, [MockEngineSettings(name="pod-0")]) as stack:
        stack.app.faces.pipeline.tracing = Tracing(0.0, "1.0", exporter)
        answer = await stack.complete([7] * 100, headers=CONTEXT)
        assert answer["status"] == 200, answer
        found = spans(stack, exporter)
        served = stack.engines[0].served[-1].headers
        authority = next(iter(stack.app.pool)).spec.authority
    route = found["picker.route"]
    assert route.parent is not None
    assert (f"{route.parent.trace_id:032x}", f"{route.parent.span_id:016x}") == (TRACE, CLIENT_SPAN)
    assert served.getall("traceparent") == [f"00-{TRACE}-{route.context.span_id:016x}-01"]
    assert served.getall("tracestate") == ["vendor=1"]
    assert found.keys() == {"picker.route", *(f"picker.{stage}" for stage in STAGES)}
    assert all(found[f"picker.{stage}"].parent == route.context for stage in STAGES)
    assert route.attributes is not None
    assert route.attributes["picker.outcome"] == "dispatched"
    assert route.attributes["gen_ai.usage.input_tokens"] == 100
    assert route.attributes["server.address"] == authority


async def test_a_refusal_is_an_error_of_its_span(tmp_path: Path) -> None:
    exporter = InMemorySpanExporter()
    async with running_stack(tmp_path, [MockEngineSettings(name="pod-0")]) as stack:
        stack.app.faces.pipeline.tracing = Tracing(1.0, "1.0", exporter)
        answer = await stack.complete([7] * 10, headers={"x-picker-allowed-endpoints": "10.255.0.1:1"})
        assert answer["status"] == 503, answer
        route = spans(stack, exporter)["picker.route"]
    assert route.attributes is not None
    assert route.attributes["picker.outcome"] == "no_endpoint"
    assert (route.status.is_ok, route.status.description) == (False, "no_endpoint")


async def test_without_tracing_the_clients_context_passes_untouched(tmp_path: Path) -> None:
    async with running_stack(tmp_path, [MockEngineSettings(name="pod-0")]) as stack:
        assert stack.app.faces.pipeline.tracing is None
        await stack.complete([7] * 10, headers=CONTEXT)
        served = stack.engines[0].served[-1].headers
    assert (served["traceparent"], served["tracestate"]) == (CONTEXT["traceparent"], "vendor=1")


async def test_every_stage_of_the_catalogue_is_observed(tmp_path: Path) -> None:
    async with running_stack(tmp_path, [MockEngineSettings(name="pod-0")]) as stack:
        await stack.complete("one two three four")
        text, _ = stack.app.telemetry.metrics.expose()
    lines = text.decode().splitlines()
    for stage in (*STAGES, "select"):
        assert f'picker_stage_seconds_count{{stage="{stage}"}} 1.0' in lines
    assert sum(line.startswith("picker_stage_seconds_count") for line in lines) == len(STAGES) + 1
    assert "picker_decision_seconds_count 1.0" in lines

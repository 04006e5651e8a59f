"""Traces: one span a request with its stages, in the caller's trace and on to the upstream."""

from __future__ import annotations

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from picker.extproc.handler import Facts
from picker.extproc.handover import Prepared
from picker.requests import Hints, Route
from picker.selection.prompt_keys import PromptKeys
from picker.selection.selector import Demand
from picker.telemetry.tracing import Tracing

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def spans_of(ratio: float, headers: list[tuple[str, str]]) -> tuple[dict[str, ReadableSpan], dict[str, str]]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(ratio, "1.0", exporter)
    request = tracing.begin(headers)
    request.stages([("parse", 0.25), ("tokenize", 0.5)])
    demand = Demand(10, PromptKeys.of_tokens([range(10)]))
    prepared = Prepared(Route.COMPLETIONS, Hints(), demand, 0.0, True, model="m")
    request.decided(prepared, Facts("r1", "default", 0, 10, (), "10.0.0.1:8000"), "dispatched")
    request.end()
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}, dict(request.headers)


def test_the_callers_trace_is_joined_and_passed_on() -> None:
    spans, headers = spans_of(0.0, [("traceparent", PARENT), ("tracestate", "vendor=1")])
    span = spans["picker.route"]
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert span.parent is not None
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert headers == {
        "traceparent": f"00-0af7651916cd43dd8448eb211c80319c-{span.context.span_id:016x}-01",
        "tracestate": "vendor=1",
    }


def test_stages_are_children_with_their_own_time() -> None:
    spans, _ = spans_of(1.0, [])
    stage = spans["picker.parse"]
    assert stage.parent == spans["picker.route"].context
    assert stage.start_time is not None
    assert stage.end_time is not None
    assert stage.end_time - stage.start_time == 250_000_000
    assert spans["picker.tokenize"].start_time == stage.end_time, "one follows the other"


def test_the_decision_is_on_the_span() -> None:
    spans, _ = spans_of(1.0, [])
    attributes = spans["picker.route"].attributes
    assert attributes is not None
    assert (attributes["gen_ai.request.model"], attributes["picker.policy_class"]) == ("m", "default")
    assert attributes["gen_ai.usage.input_tokens"] == 10
    assert (attributes["picker.outcome"], attributes["server.address"]) == ("dispatched", "10.0.0.1:8000")


def test_what_is_not_sampled_is_not_recorded_but_passed_on_as_such() -> None:
    for headers in ([], [("traceparent", PARENT[:-1] + "0")]):
        spans, sent = spans_of(0.0, headers)
        assert spans == {}
        assert int(sent["traceparent"].rpartition("-")[2], 16) & 1 == 0, "the flag that says sampled"


def test_a_malformed_context_starts_a_new_trace() -> None:
    spans, _ = spans_of(1.0, [("traceparent", "00-zz-\x00-01")])
    assert spans["picker.route"].parent is None

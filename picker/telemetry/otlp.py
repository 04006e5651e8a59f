"""Spans to a collector: OTLP over HTTP in its JSON form (opentelemetry-proto, `docs/specification.md`).

The SDK's own exporter needs the package opentelemetry-proto, whose modules xds-protos brings in an older version under
the same names: whichever is installed last wins, and with pip that is the older one. The JSON form needs neither.
"""

from __future__ import annotations

import json
import logging
import ssl
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote

from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

log = logging.getLogger(__name__)

_DEFAULT_ENDPOINT = "http://localhost:4318"
_DEFAULT_TIMEOUT = 10.0


class OtlpJsonExporter(SpanExporter):
    """Reads where to send from the standard variables of the environment: `OTEL_EXPORTER_OTLP_[TRACES_]ENDPOINT`,
    `_HEADERS`, `_TIMEOUT` and `_CERTIFICATE`. Called from a thread of the SDK's, so it may wait for the collector.
    """

    def __init__(self, environment: Mapping[str, str]) -> None:
        def read(name: str) -> str | None:
            traces, general = f"OTEL_EXPORTER_OTLP_TRACES_{name}", f"OTEL_EXPORTER_OTLP_{name}"
            return environment.get(traces) or environment.get(general)

        base = environment.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT_ENDPOINT
        own = environment.get("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
        self.endpoint = own or f"{base.rstrip('/')}/v1/traces"
        self._headers = {"Content-Type": "application/json", **_headers(read("HEADERS") or "")}
        self._timeout = float(read("TIMEOUT") or _DEFAULT_TIMEOUT)
        self._tls = ssl.create_default_context(cafile=read("CERTIFICATE"))
        self._failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        body = json.dumps(encode(spans)).encode()
        request = urllib.request.Request(self.endpoint, body, self._headers)
        try:
            with urllib.request.urlopen(request, timeout=self._timeout, context=self._tls):
                self._failing = False
                return SpanExportResult.SUCCESS
        except (OSError, ValueError) as error:
            if not self._failing:
                log.warning("spans cannot be sent to %s: %s", self.endpoint, error)
            self._failing = True
            return SpanExportResult.FAILURE


def encode(spans: Sequence[ReadableSpan]) -> dict[str, Any]:
    """The JSON of an `ExportTraceServiceRequest`. All spans are of one process, so of one resource and one scope."""
    if not spans:
        return {"resourceSpans": []}
    scope = spans[0].instrumentation_scope
    scope_spans = {
        "scope": {"name": scope.name, "version": scope.version or ""} if scope is not None else {},
        "spans": [_span(span) for span in spans],
    }
    resource = {"attributes": _attributes(spans[0].resource.attributes)}
    return {"resourceSpans": [{"resource": resource, "scopeSpans": [scope_spans]}]}


def _span(span: ReadableSpan) -> dict[str, Any]:
    context = span.get_span_context()
    assert context is not None
    return {
        "traceId": f"{context.trace_id:032x}",
        "spanId": f"{context.span_id:016x}",
        "parentSpanId": f"{span.parent.span_id:016x}" if span.parent is not None else "",
        "traceState": context.trace_state.to_header(),
        "name": span.name,
        # OTLP counts the kinds from 1, with 0 for "not said".
        "kind": span.kind.value + 1,
        "startTimeUnixNano": str(span.start_time),
        "endTimeUnixNano": str(span.end_time),
        "attributes": _attributes(span.attributes or {}),
        "status": {"code": span.status.status_code.value, "message": span.status.description or ""},
    }


def _attributes(attributes: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [{"key": key, "value": _value(value)} for key, value in attributes.items()]


def _value(value: object) -> dict[str, Any]:
    match value:
        case bool():
            return {"boolValue": value}
        case int():
            # 64-bit integers are strings in the JSON form of protobuf.
            return {"intValue": str(value)}
        case float():
            return {"doubleValue": value}
        case _:
            return {"stringValue": str(value)}


def _headers(text: str) -> dict[str, str]:
    """`name=value,name=value`, values percent-encoded."""
    pairs = (item.partition("=") for item in text.split(",") if "=" in item)
    return {name.strip(): unquote(value.strip()) for name, _, value in pairs}

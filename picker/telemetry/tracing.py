"""OpenTelemetry traces, where they are switched on: a span for each request, with its stages as children.

The trace context comes from the request's W3C headers and goes on to the upstream, so that Picker's time shows
between the gateway's span and the engine's. Needs the extra `otel`; nothing here is imported without it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from opentelemetry import trace
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from picker.telemetry.otlp import OtlpJsonExporter

if TYPE_CHECKING:
    from opentelemetry.trace import Span, Tracer

    from picker.extproc.handler import Facts
    from picker.extproc.handover import Prepared

CONTEXT_HEADERS = ("traceparent", "tracestate")

_PROPAGATOR = TraceContextTextMapPropagator()


class RequestTrace:
    """One request's span. `headers` are to be set on the request that goes upstream."""

    __slots__ = ("_span", "_tracer", "headers")

    def __init__(self, tracer: Tracer, span: Span) -> None:
        self._tracer = tracer
        self._span = span
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, trace.set_span_in_context(span))
        self.headers = tuple(carrier.items())

    def stages(self, taken: Sequence[tuple[str, float]]) -> None:
        """Stages (name, seconds) that followed one another; the last one ended just now."""
        if not self._span.is_recording():
            return
        end = time.time_ns()
        for name, seconds in reversed(taken):
            start = end - int(seconds * 1e9)
            child = self._tracer.start_span(
                f"picker.{name}", context=trace.set_span_in_context(self._span), start_time=start
            )
            child.end(end)
            end = start

    def decided(self, prepared: Prepared, facts: Facts, outcome: str) -> None:
        """The queue's answer: "dispatched", or the reason of a refusal."""
        if self._span.is_recording():
            self._span.set_attributes(_attributes(prepared, facts, outcome))

    def end(self, error: str | None = None) -> None:
        """The request has left, or was refused for the reason given."""
        if error is not None:
            self._span.set_status(trace.StatusCode.ERROR, error)
        self._span.end()


class Tracing:
    """Makes a trace for each request. `ratio` (0..1) of those are recorded about which nobody decided before."""

    def __init__(self, ratio: float, version: str, exporter: SpanExporter | None = None) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "picker", "service.version": version}),
            sampler=ParentBased(TraceIdRatioBased(ratio)),
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter or OtlpJsonExporter(os.environ)))
        self._tracer = self._provider.get_tracer("picker", version)

    def begin(self, headers: Iterable[tuple[str, str]]) -> RequestTrace:
        """Start from a request's headers (lower-case names)."""
        carrier = {name: value for name, value in headers if name in CONTEXT_HEADERS}
        span = self._tracer.start_span(
            "picker.route", context=_PROPAGATOR.extract(carrier), kind=trace.SpanKind.SERVER
        )
        return RequestTrace(self._tracer, span)

    def close(self) -> None:
        """Send what has not been sent."""
        self._provider.shutdown()


def _attributes(prepared: Prepared, facts: Facts, outcome: str) -> Mapping[str, str | int | float | bool]:
    attributes: dict[str, str | int | float | bool] = {
        "gen_ai.request.model": prepared.model or "",
        "gen_ai.usage.input_tokens": prepared.demand.raw_tokens,
        "picker.request_id": facts.request_id,
        "picker.policy_class": facts.policy_class,
        "picker.outcome": outcome,
        "picker.cached_tokens": facts.cached_tokens,
        "picker.cost": facts.cost,
        "picker.estimated": not prepared.demand.prompt.lengths,
    }
    if facts.endpoint is not None:
        attributes["server.address"] = facts.endpoint
    return attributes

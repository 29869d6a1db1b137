"""One OpenTelemetry span for each pick, as a child of the client's trace; exists only with the extra `otel` and a flag.

Spans are made after the pick from its start and end, so that nothing is spent where tracing is off, and exported in
the background. They carry no part of the prompt.
"""

from opentelemetry import trace
from opentelemetry.exporter.otlp.json.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import DEFAULT_ON
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from extproc.core.decision import Decision
from extproc.core.exchange import RequestFacts
from extproc.errors import PickError

SPAN_NAME = "kvmesh.pick"


class PickTracing:
    """Exports spans to one OTLP/HTTP address, as JSON; a client that has decided not to be sampled is not."""

    def __init__(self, *, otlp_endpoint: str) -> None:
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "kvmesh-extproc"}), sampler=DEFAULT_ON, shutdown_on_exit=False
        )
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=otlp_endpoint)))
        self._tracer = self._provider.get_tracer("kvmesh")
        self._propagator = TraceContextTextMapPropagator()

    def record(
        self, facts: RequestFacts, outcome: Decision | PickError, *, started_unix_ns: int, ended_unix_ns: int
    ) -> None:
        """Record one pick, routed or refused."""
        carrier = {"traceparent": facts.traceparent} if facts.traceparent else {}
        span = self._tracer.start_span(
            SPAN_NAME,
            context=self._propagator.extract(carrier),
            kind=trace.SpanKind.SERVER,
            start_time=started_unix_ns,
            attributes=_attributes(facts, outcome),
        )
        if isinstance(outcome, PickError):
            span.set_status(trace.Status(trace.StatusCode.ERROR, outcome.reason))
        span.end(end_time=ended_unix_ns)

    def close(self) -> None:
        """Export what is left."""
        self._provider.shutdown()


def _attributes(facts: RequestFacts, outcome: Decision | PickError) -> dict[str, str | int | list[str]]:
    attributes: dict[str, str | int | list[str]] = {
        "url.path": facts.path.partition("?")[0],
        "kvmesh.request_id": facts.request_id,
    }
    if isinstance(outcome, PickError):
        return attributes | {"kvmesh.reason": outcome.reason, "http.response.status_code": outcome.status}
    return attributes | {
        "kvmesh.endpoint": outcome.endpoints[0],
        "kvmesh.prompt_tokens": outcome.prompt_tokens,
        "kvmesh.matched_tokens": outcome.matched_tokens,
        "kvmesh.degraded": list(outcome.degraded),
    }

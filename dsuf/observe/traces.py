"""Traces of turns, for a collector that speaks OTLP over HTTP; by OpenTelemetry's own library, an optional extra.

A turn is traced once it is over, from the times that were noted on its way: nothing is done for it while it runs, and a
thread of the library sends what there is. A caller's `traceparent` makes its trace the parent, and its word on whether
to sample is followed; for others `share` of the turns is traced. A collector that is away costs traces, nothing else.
"""

import logging
import threading
import time
from collections.abc import Mapping, Sequence

import msgspec

from dsuf.errors import CommandError

try:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor
    from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
    from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
except ImportError:
    HAS_OPENTELEMETRY = False
else:
    HAS_OPENTELEMETRY = True

Attributes = Mapping[str, str | int | float | bool]
EXTRA = "opentelemetry-sdk, opentelemetry-exporter-otlp-proto-http (the extra `otel`)"
_SEND_S = 2.0  # for what is left at the end
_PATIENCE_S = 5.0  # with a collector that does not answer


class Passage(msgspec.Struct, frozen=True):
    """A part of a turn between two times of the monotonic clock, in seconds."""

    name: str
    start_s: float
    stop_s: float


class TurnTrace(msgspec.Struct, frozen=True, kw_only=True):
    """A turn: the whole, what is said of it, its parts, and the headers that may name a parent. `failure` names the
    error that ended it."""

    whole: Passage
    parts: Sequence[Passage]
    attributes: Attributes
    headers: Mapping[str, str]
    failure: str | None = None


class Traces:
    """Sends traces to `endpoint`, the whole URL (`http://collector:4318/v1/traces`).

    Raises `CommandError` where the library is missing.
    """

    def __init__(self, endpoint: str, *, share: float, node: str, version: str) -> None:
        if not HAS_OPENTELEMETRY:
            raise CommandError(f"otlp_endpoint: traces need {EXTRA}")
        names = {"service.name": "dsuf", "service.version": version}
        resource = Resource.create(names | ({"service.instance.id": node} if node else {}))
        self._provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(share)),
                                        shutdown_on_exit=False)  # fmt: skip
        self._exporter = OTLPSpanExporter(endpoint=endpoint, timeout=_PATIENCE_S)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        logging.getLogger("opentelemetry").setLevel(logging.ERROR)  # it warns of every try
        self._tracer = self._provider.get_tracer("dsuf", version)
        self._propagator = TraceContextTextMapPropagator()

    def record(self, turn: TurnTrace) -> None:
        """Trace a turn that is over."""
        skew_ns = time.time_ns() - time.monotonic_ns()
        span = self._tracer.start_span(
            turn.whole.name, self._propagator.extract(turn.headers), SpanKind.SERVER, turn.attributes,
            start_time=_to_ns(turn.whole.start_s, skew_ns),
        )  # fmt: skip
        if span.is_recording():
            inside = set_span_in_context(span)
            for part in turn.parts:
                child = self._tracer.start_span(part.name, inside, start_time=_to_ns(part.start_s, skew_ns))
                child.end(_to_ns(part.stop_s, skew_ns))
            if turn.failure is not None:
                span.set_status(Status(StatusCode.ERROR, turn.failure))
        span.end(_to_ns(turn.whole.stop_s, skew_ns))

    def close(self) -> None:
        """Send what is left, for a few seconds at most. Blocks."""
        flush = threading.Thread(target=self._provider.force_flush, name="dsuf-traces", daemon=True)
        flush.start()
        flush.join(_SEND_S)
        self._exporter.shutdown()  # type: ignore[no-untyped-call]  # or the library would try again and again to send what is left
        self._provider.shutdown()


def _to_ns(seconds: float, skew_ns: int) -> int:
    """A time of the monotonic clock as nanoseconds since 1970."""
    return int(seconds * 1e9) + skew_ns

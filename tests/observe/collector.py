"""A collector of traces on loopback, which speaks OTLP over HTTP as the protocol's own types read it."""

import contextlib
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


class Collector:
    """What arrived: spans, each with its attributes as plain values; `url` is where to send."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        self.resources: list[dict[str, Any]] = []
        self.url = ""

    def take(self, body: bytes) -> None:
        """One export."""
        for group in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.resources.append(read_attributes(group.resource))
            self.spans += [span for scope in group.scope_spans for span in scope.spans]


def read_attributes(holder: Any) -> dict[str, Any]:
    """The attributes of a span or a resource."""
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in holder.attributes}


@contextlib.contextmanager
def collecting() -> Iterator[Collector]:
    """A running collector."""
    collector = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path == "/v1/traces"
            collector.take(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        collector.url = f"http://127.0.0.1:{server.server_port}/v1/traces"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield collector
        finally:
            server.shutdown()
            thread.join()

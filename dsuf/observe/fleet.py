"""Metrics of a node among others: the directory, and what comes from peers and goes to them.

A node alone has them too, at zero, so that dashboards and alerts need not know; but for whether the directory is
reached, of which zero would be an alert.
"""

from collections.abc import Callable
from typing import Literal

import msgspec
from prometheus_client import CollectorRegistry, Counter, Gauge

from dsuf.observe.histogram import Histogram

PullResult = Literal["whole", "missed", "late", "failed", "refused"]
"""All that was asked for came; the peer had it no longer; its time ran out; it broke; there was no room for it here."""

_PULL_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60)


class Fleet(msgspec.Struct, frozen=True, kw_only=True):
    """What a node sees of the others: living members besides itself, directory entries that it knows, whether the
    directory is reached, members left alone for a time, connections by transport, members that refuse this node or are
    refused by it, connections of others that were refused in all."""

    members: int = 0
    entries: int = 0
    reached: bool = True
    suspects: int = 0
    tcp: int = 0
    rdma: int = 0
    refusing: int = 0
    refused: int = 0


class FleetMetrics:
    """The fleet's part of a node's metrics, in `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._fleet: Callable[[], Fleet] = Fleet
        self._registry = registry
        self._add_gauges(registry)
        self._resyncs = Counter("dsuf_fleet_directory_resyncs", "Members read anew after a gap", registry=registry)
        self._errors = Counter("dsuf_fleet_directory_errors", "Directory calls that failed", registry=registry)
        self._pulls = Counter("dsuf_peer_pulls", "Caches asked of peers", ["result"], registry=registry)
        self._bytes = Counter("dsuf_peer_pulled_bytes", "Bytes read from peers", registry=registry)
        self._tokens = Counter("dsuf_peer_pulled_tokens", "Positions taken from peers", registry=registry)
        self._served = Counter("dsuf_peer_served_bytes", "Bytes given to peers", registry=registry)
        self._seconds = Histogram("dsuf_peer_pull_seconds", "Asking a peer until its cache is here", _PULL_S, registry)

    def watch(self, fleet: Callable[[], Fleet]) -> None:
        """Ask `fleet` whenever the metrics are read; once."""
        self._fleet = fleet
        up = Gauge("dsuf_fleet_directory_up", "Whether the directory is reached", registry=self._registry)
        up.set_function(lambda: self._fleet().reached)

    def count_resync(self) -> None:
        """A member's entries were read anew, since a message was missed."""
        self._resyncs.inc()

    def count_error(self) -> None:
        """A call to the directory failed or took too long."""
        self._errors.inc()

    def count_pull(self, result: PullResult, tokens: int = 0, seconds: float = 0.0) -> None:
        """A cache was asked of a peer: what came of it, the positions that it brought, how long it took."""
        self._pulls.labels(result).inc()
        self._tokens.inc(tokens)
        self._seconds.observe(seconds)

    def count_pulled(self, size_bytes: int) -> None:
        """So many bytes came from a peer."""
        self._bytes.inc(size_bytes)

    def count_served(self, size_bytes: int) -> None:
        """So many bytes went to a peer."""
        self._served.inc(size_bytes)

    def _add_gauges(self, registry: CollectorRegistry) -> None:
        gauges: dict[str, tuple[str, Callable[[], float]]] = {
            "dsuf_fleet_members": ("Living nodes besides this one", lambda: self._fleet().members),
            "dsuf_fleet_directory_entries": ("Prefixes known to be with peers", lambda: self._fleet().entries),
            "dsuf_peer_refusals": (
                "Members to which there is no connection, since it or this node refuses",
                lambda: self._fleet().refusing,
            ),
            "dsuf_peer_refused_connections": (
                "Connections to this node that were refused",
                lambda: self._fleet().refused,
            ),
            "dsuf_peer_suspects": ("Peers left alone for a time", lambda: self._fleet().suspects),
        }
        for name, (text, value) in gauges.items():
            Gauge(name, text, registry=registry).set_function(value)
        by_transport = Gauge("dsuf_peer_connections", "Connections to peers", ["transport"], registry=registry)
        by_transport.labels("tcp").set_function(lambda: self._fleet().tcp)
        by_transport.labels("rdma").set_function(lambda: self._fleet().rdma)

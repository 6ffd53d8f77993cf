"""Metrics in Prometheus' text format: `dsuf_…`, and again under the names that other servers' dashboards query.

Every figure is recorded once; the other names (`aliases`) are made when the metrics are read. Labels only take values
from the code (routes, statuses, stages), never from a client.
"""

from collections.abc import Callable, Mapping
from functools import partial
from typing import Literal

import msgspec
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    ProcessCollector,
    disable_created_metrics,
    generate_latest,
)

from dsuf.observe.aliases import Rate, SglangNames, VllmNames
from dsuf.observe.fleet import FleetMetrics
from dsuf.observe.histogram import Histogram
from dsuf.types import Finish, Usage

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_WAIT_S = (0.001, 0.003, 0.01, 0.03, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 60, 150, 300, 600)
_GAP_S = (0.001, 0.002, 0.004, 0.008, 0.016, 0.03, 0.06, 0.12, 0.25, 0.5, 1, 2, 5, 10)
_LAG_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 1)
_TOKENS = (1, 10, 100, 1_000, 3_000, 10_000, 30_000, 100_000, 300_000, 1_000_000)
_FEW = tuple(range(1, 18))


class Load(msgspec.Struct, frozen=True, kw_only=True):
    """What a node carries now: turns that the engine holds, turns that wait (in all, and by class of priority), device
    pages by state, part of them in use (0 to 1)."""

    running: int = 0
    waiting: int = 0
    waiting_by: Mapping[str, int] = msgspec.field(default_factory=dict)
    pages: Mapping[str, int] = msgspec.field(default_factory=dict)
    cache_usage: float = 0.0


class Metrics:
    """All metrics of one node, in a registry of their own; `fleet` has those of a node among others."""

    def __init__(self, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = registry = CollectorRegistry()
        self._load: Callable[[], Load] = Load
        self._sessions: Callable[[], Mapping[str, int]] = dict
        self._gap_bound_s = float("inf")
        self._largest_gap_s = 0.0
        self._tokens = Rate()
        ProcessCollector(registry=registry)
        self._add_gauges(registry)
        self._add_turns(registry)
        self._add_drafts(registry)
        self._add_gaps(registry)
        self._add_sessions(registry)
        self._add_loop(registry)
        self._add_http(registry)
        self.fleet = FleetMetrics(registry)
        self._aliases = CollectorRegistry()
        self._aliases.register(VllmNames(registry, model_name))
        self._aliases.register(SglangNames(registry, model_name, self._tokens))

    def watch_load(self, load: Callable[[], Load]) -> None:
        """Ask `load` whenever the metrics are read."""
        self._load = load

    def promise_gap(self, seconds: float) -> None:
        """The scheduler keeps the gap between a stream's tokens under `seconds` while prompts are computed."""
        self._gap_bound_s = seconds
        self._gap_bound.set(seconds)

    def watch_sessions(self, counters: Callable[[], Mapping[str, int]]) -> None:
        """Ask `counters` for entries, bytes and leases of the session caches whenever the metrics are read."""
        self._sessions = counters

    def count_response(self, endpoint: str, status: int) -> None:
        """An HTTP response went out; `endpoint` is the route, not the path that was sent."""
        self._responses.labels(endpoint, str(status)).inc()

    def count_disconnect(self, stage: str) -> None:
        """A client left while its turn was at `stage`."""
        self._gone.labels(stage).inc()

    def count_conversion_error(self, endpoint: str) -> None:
        """The renderer refused a request of the route `endpoint`."""
        self._conversions.labels(endpoint).inc()

    def count_malformed_call(self) -> None:
        """A reply held a tool call block that the parser dropped."""
        self._lost_calls.inc()

    def observe_lag(self, lag_s: float) -> None:
        """One wake-up of the event loop came `lag_s` late."""
        self._lag.observe(lag_s)

    def observe_queue(self, seconds: float) -> None:
        """A turn was admitted after waiting for `seconds`."""
        self._queue.observe(seconds)

    def observe_step(self, seconds: float) -> None:
        """The engine finished a step."""
        self._step.observe(seconds)

    def count_drafts(self, drafted: int, accepted: int, turns: int = 1) -> None:
        """In a step so many turns verified `drafted` drafts each and kept the first `accepted` of them."""
        self._rounds.inc(turns)
        self._drafted.inc(drafted * turns)
        self._accepted.inc(accepted * turns)
        while len(self._accepted_counts) < accepted:
            self._accepted_counts.append(self._accepted_at.labels(str(len(self._accepted_counts))))
        for count in self._accepted_counts[:accepted]:
            count.inc(turns)

    def count_lookup(self, result: Literal["hit", "miss", "failed", "late"], tokens: int = 0) -> None:
        """A turn looked for a session cache and took over `tokens` positions of one."""
        self._lookups.labels(result).inc()
        self._restored.inc(tokens)

    def count_handoff(self, result: Literal["taken", "failed"], tokens: int = 0) -> None:
        """A prompt that a peer computes was taken over, `tokens` positions of it; or something of that failed."""
        self._handoffs.labels(result).inc()
        self._taken.inc(tokens)

    def observe_restore(self, seconds: float) -> None:
        """A kept session cache was verified and given to the engine."""
        self._restore.observe(seconds)

    def count_commit(self, result: Literal["kept", "refused", "failed", "late"]) -> None:
        """A turn left a commit point behind, or there was no room for it, or it could not be copied out."""
        self._commits.labels(result).inc()

    def count_evictions(self, entries: int) -> None:
        """So many commit points made room."""
        self._evictions.inc(entries)

    def count_withdrawal(self) -> None:
        """A commit point was withdrawn, since a use of it failed."""
        self._withdrawn.inc()

    def count_checksum_failure(self) -> None:
        """A kept session cache was not what had been written."""
        self._damaged.inc()

    def count_failed_step(self) -> None:
        """The engine raised in a step."""
        self._steps_failed.inc()

    def observe_first_token(self, seconds: float) -> None:
        """A turn has its first token, `seconds` after submission."""
        self._first_token.observe(seconds)
        self._tokens.add(1)

    def observe_tokens(self, tokens: int, seconds: float, turns: int = 1) -> None:
        """So many turns got `tokens` more each, `seconds` after the ones before."""
        self._gap.observe(seconds / tokens, tokens * turns)
        self._tokens.add(tokens * turns)
        self._step_tokens.observe(tokens, turns)

    def observe_gap(self, seconds: float, turns: int = 1) -> None:
        """So many streams waited so long between two steps that gave them tokens."""
        if seconds > self._largest_gap_s:
            self._largest_gap_s = seconds
            self._largest_gap.set(seconds)
        if seconds > self._gap_bound_s:
            self._gap_violations.inc(turns)

    def count_preemption(self) -> None:
        """A running turn was put back for one of better priority."""
        self._preemptions.inc()

    def count_audit(self, result: Literal["same", "different", "skipped", "given up"]) -> None:
        """A turn with drafts was computed again without, or could not be, or had to give way."""
        self._audits.labels(result).inc()

    def finish_turn(self, reason: Finish | str, usage: Usage, seconds: float) -> None:
        """A turn ended with `stop`, `length`, or `abort` where the client left, `seconds` after submission."""
        self._finished.labels(reason).inc()
        self._request.observe(seconds)
        self._request_prompt.observe(usage.prompt_tokens)
        self._request_generation.observe(usage.completion_tokens)
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._generation_tokens.inc(usage.completion_tokens)
        self._cache_queries.inc(usage.prompt_tokens)
        self._cache_hits.inc(usage.cached_tokens)
        for source in ("device", "host", "peer", "computed"):
            self._sources.labels(source).inc(getattr(usage, f"{source}_tokens"))

    def fail_turn(self, error: str) -> None:
        """A turn ended by the error class named `error`."""
        self._failed.labels(error).inc()

    def render(self) -> bytes:
        """All metrics as text, of type `CONTENT_TYPE`."""
        return generate_latest(self._registry) + generate_latest(self._aliases)

    def _add_gauges(self, registry: CollectorRegistry) -> None:
        """Gauges that are read when asked for."""
        running = Gauge("dsuf_requests_running", "Turns that the engine holds", registry=registry)
        waiting = Gauge("dsuf_requests_waiting", "Turns that wait", registry=registry)
        usage = Gauge("dsuf_cache_usage_ratio", "Part of the cache in use", registry=registry)
        by_class = Gauge("dsuf_queue_turns", "Turns that wait, by class of priority", ["priority"], registry=registry)
        for name in ("first", "normal", "last"):
            by_class.labels(name).set_function(partial(self._count_waiting, name))
        pages = Gauge("dsuf_pages", "Device pages by state", ["state"], registry=registry)
        for name in ("used", "cached", "free"):
            pages.labels(name).set_function(partial(self._count_pages, name))
        running.set_function(lambda: self._load().running)
        waiting.set_function(lambda: self._load().waiting)
        usage.set_function(lambda: self._load().cache_usage)

    def _add_turns(self, registry: CollectorRegistry) -> None:
        """What turns took and how they ended."""
        self._prompt_tokens = Counter("dsuf_prompt_tokens", "Prompt tokens", registry=registry)
        self._generation_tokens = Counter("dsuf_generation_tokens", "Generated tokens", registry=registry)
        self._cache_queries = Counter("dsuf_prefix_cache_queries", "Prompt tokens looked up", registry=registry)
        self._cache_hits = Counter("dsuf_prefix_cache_hits", "Prompt tokens not computed", registry=registry)
        self._sources = Counter("dsuf_prompt_source_tokens", "Prompt tokens by origin", ["source"], registry=registry)
        self._finished = Counter("dsuf_requests_finished", "Turns ended", ["finished_reason"], registry=registry)
        self._failed = Counter("dsuf_requests_failed", "Turns ended by an error", ["error"], registry=registry)
        self._preemptions = Counter("dsuf_preemptions", "Turns put back to let others run", registry=registry)
        self._first_token = _histogram("dsuf_time_to_first_token_seconds", "Until the first token", _WAIT_S, registry)
        self._gap = _histogram("dsuf_inter_token_seconds", "Time a token after the first", _GAP_S, registry)
        self._request = _histogram("dsuf_request_seconds", "Submission to the last token", _WAIT_S, registry)
        self._queue = _histogram("dsuf_queue_seconds", "Submission to admission", _WAIT_S, registry)
        self._request_prompt = _histogram("dsuf_request_prompt_tokens", "Prompt length", _TOKENS, registry)
        self._request_generation = _histogram("dsuf_request_generation_tokens", "Answer length", _TOKENS, registry)

    def _add_drafts(self, registry: CollectorRegistry) -> None:
        """What speculation gained: tokens a step are 1 + accepted / rounds."""
        self._rounds = Counter("dsuf_draft_rounds", "Steps of a turn that verified drafts", registry=registry)
        self._drafted = Counter("dsuf_draft_tokens", "Drafts verified", registry=registry)
        self._accepted = Counter("dsuf_draft_accepted_tokens", "Drafts kept", registry=registry)
        self._accepted_at = Counter(
            "dsuf_draft_accepted_at_position", "Drafts kept, by place in their block", ["position"], registry=registry
        )
        self._accepted_counts: list[Counter] = []  # the children of the one above, which are slow to look up

        self._audits = Counter(
            "dsuf_speculation_audits", "Turns computed again without drafts", ["result"], registry=registry
        )

    def _add_gaps(self, registry: CollectorRegistry) -> None:
        """The promise on the gap between tokens, and how it is kept."""
        self._gap_bound = Gauge(
            "dsuf_decode_gap_bound_seconds", "Bound on the gap between a stream's tokens", registry=registry
        )
        self._largest_gap = Gauge("dsuf_decode_gap_largest_seconds", "Largest such gap so far", registry=registry)
        self._gap_violations = Counter(
            "dsuf_decode_gap_violations", "Such gaps over the bound", registry=registry
        )  # fmt: skip

    def _add_sessions(self, registry: CollectorRegistry) -> None:
        """Session caches that outlive their turn."""
        name = "dsuf_session_cache"
        self._lookups = Counter(f"{name}_lookups", "Turns that looked for one", ["result"], registry=registry)
        self._restored = Counter(f"{name}_hit_tokens", "Positions taken over", registry=registry)
        self._restore = _histogram(f"{name}_restore_seconds", "Verifying one and copying it in", _GAP_S, registry)
        self._commits = Counter(f"{name}_commits", "Commit points left behind", ["result"], registry=registry)
        self._evictions = Counter(f"{name}_evictions", "Commit points that made room", registry=registry)
        self._withdrawn = Counter(f"{name}_withdrawn", "Commit points whose use failed", registry=registry)
        self._handoffs = Counter(f"{name}_handoffs", "Prompts taken from a peer", ["result"], registry=registry)
        self._taken = Counter(f"{name}_handoff_tokens", "Positions taken from peers", registry=registry)
        self._damaged = Counter(f"{name}_checksum_failures", "Commit points found damaged", registry=registry)
        for what, text in (("entries", "Commit points kept"), ("bytes", "Bytes of them"), ("leases", "Uses of them")):
            Gauge(f"{name}_{what}", text, registry=registry).set_function(partial(self._count_sessions, what))

    def _count_waiting(self, priority: str) -> float:
        """Turns of one class that wait."""
        return self._load().waiting_by.get(priority, 0)

    def _count_pages(self, state: str) -> float:
        """Device pages in one state."""
        return self._load().pages.get(state, 0)

    def _count_sessions(self, what: str) -> float:
        """One of the counters that `watch_sessions` gave."""
        return self._sessions().get(what, 0)

    def _add_loop(self, registry: CollectorRegistry) -> None:
        """The engine's steps and the event loop."""
        self._step = _histogram("dsuf_step_seconds", "Engine step", _GAP_S, registry)
        self._step_tokens = _histogram("dsuf_step_tokens", "Tokens that a step gave a stream", _FEW, registry)
        self._steps_failed = Counter("dsuf_steps_failed", "Engine steps that raised", registry=registry)
        self._lag = _histogram("dsuf_loop_lag_seconds", "Lateness of the event loop", _LAG_S, registry)

    def _add_http(self, registry: CollectorRegistry) -> None:
        """What `api/` counts."""
        self._responses = Counter("dsuf_http_responses", "Responses", ["endpoint", "status"], registry=registry)
        self._gone = Counter("dsuf_client_disconnects", "Clients that left early", ["stage"], registry=registry)
        self._conversions = Counter(
            "dsuf_conversion_errors", "Refused by the renderer", ["endpoint"], registry=registry
        )
        self._lost_calls = Counter("dsuf_malformed_calls", "Tool call blocks not parsed", registry=registry)


def _histogram(name: str, text: str, buckets: tuple[float, ...], registry: CollectorRegistry) -> Histogram:
    """A histogram with `buckets` as upper bounds."""
    return Histogram(name, text, buckets, registry)

"""Whether the node is alive and ready, judged by what makes progress and not by what claims to."""

import asyncio
import time
from collections.abc import Callable, Mapping

import msgspec

from dsuf.api.parts import Readiness
from dsuf.config import Settings
from dsuf.kv.sessions import Sessions
from dsuf.node.reload import Reload
from dsuf.observe.lag import LoopLag
from dsuf.observe.metrics import Metrics
from dsuf.sched.scheduler import Limits, Scheduler
from dsuf.types import Engine

SLACK_S = 5.0  # beyond the scheduler's own deadlines; it normally reports trouble before this runs out
TICK_S = 5.0  # a loop that stood still for so long is told of once, when it runs again


class Pulse:
    """Implements `api.parts.Status`. `starting` says what the node is still doing, None once it serves."""

    def __init__(self, settings: Settings, metrics: Metrics) -> None:
        self.starting: str | None = "starting"
        self.lag = LoopLag(metrics.observe_lag)
        self._draining = False
        self._settings = settings
        self._metrics = metrics
        self._scheduler: Scheduler | None = None
        self._engine: Engine | None = None
        self._sessions: Sessions | None = None
        self._reload: Reload | None = None
        self._fleet: Callable[[], Mapping[str, object]] | None = None
        self._patience_s = 0.0

    @property
    def draining(self) -> bool:
        """Whether new turns are refused for good."""
        return self._draining

    def watch(self, scheduler: Scheduler, engine: Engine, limits: Limits, sessions: Sessions | None = None) -> None:
        """Judge by `scheduler` from now on."""
        self._scheduler, self._engine, self._sessions = scheduler, engine, sessions
        self._patience_s = limits.probe_s + limits.step_deadline_s + SLACK_S

    def watch_reload(self, reload: Reload) -> None:
        """Tell what `reload` could not read."""
        self._reload = reload

    def watch_fleet(self, facts: Callable[[], Mapping[str, object]]) -> None:
        """Show what `facts` tells of the fleet from now on."""
        self._fleet = facts

    def begin_drain(self) -> None:
        """Not ready from now on."""
        self._draining = True

    def liveness(self) -> Readiness:
        """Fails where only a new process would help, or may: the engine is stuck or failing."""
        failing = self._trouble()
        return Readiness(not failing, failing)

    def readiness(self) -> Readiness:
        """Fails also while starting and draining."""
        failing = self._trouble()
        if self.starting is not None:
            failing.append(f"starting: {self.starting}")
        if self._draining:
            failing.append("draining")
        return Readiness(not failing, failing, self._degraded())

    def metrics_text(self) -> bytes:
        """All metrics in Prometheus' text format."""
        return self._metrics.render()

    def facts(self) -> Mapping[str, object]:
        """Settings that matter to a client, what is held now, and the lag of the loop."""
        settings = self._settings
        return {
            "prefill": settings.prefill,
            "prefill_chunk_tokens": settings.prefill_chunk_tokens,
            "role": settings.role,
            "decode_gap_s": settings.decode_gap_s,
            "drafts": settings.drafts,
            "turn_timeout_s": settings.turn_timeout_s,
            "queue_timeout_s": settings.queue_timeout_s,
            "queue_limit": settings.queue_limit,
            "turns": dict(self._scheduler.counters()) if self._scheduler else {},
            "engine": dict(self._engine.counters()) if self._engine else {},
            "session_cache": dict(self._sessions.counters()) if self._sessions else {},
            "fleet": dict(self._fleet()) if self._fleet else {},
            "tasks": len(asyncio.all_tasks()),
            "loop_lag": msgspec.to_builtins(self.lag.summarise()),
        }

    def flush_cache(self) -> int:
        """Drop the session caches that nobody uses; how many commit points that were."""
        return self._sessions.flush() if self._sessions is not None else 0

    def _degraded(self) -> list[str]:
        """What fails and is no reason not to be asked: files that could not be read again, parts of the fleet."""
        facts = self._fleet() if self._fleet else {}
        refusals = facts.get("refusals")
        found = [f"files: {self._reload.trouble}"] if self._reload is not None and self._reload.trouble else []
        found += [f"directory: {facts['trouble']}"] if facts.get("trouble") else []
        if isinstance(refusals, dict):
            found += [f"peers: {node}: {why}" for node, why in refusals.items()]
        return found

    def _trouble(self) -> list[str]:
        """What is wrong with the engine or the loop that drives it."""
        if self._scheduler is None:
            return []
        if self._scheduler.trouble is not None:
            return [self._scheduler.trouble]
        now_s, failing = time.monotonic(), []
        if (silent_s := now_s - self._scheduler.progressed_s) > self._patience_s:
            failing.append(f"engine: no step or probe for {silent_s:.0f} s")
        if (silent_s := now_s - self.lag.last_tick_s) > TICK_S:
            failing.append(f"loop: no tick for {silent_s:.0f} s")
        return failing

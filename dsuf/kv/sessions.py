"""Session caches from turn to turn: what an attached turn takes over, and what it leaves behind.

The scheduler calls it between steps. Whatever goes wrong here costs the reuse, never the turn.
"""

import asyncio
import time
from collections.abc import Mapping

from dsuf.kv.arena import Arena
from dsuf.kv.entry import DamagedCache, Entry, checksum, verify
from dsuf.kv.prefix import Match
from dsuf.kv.trace import Trace, make_trace, trace_prompt
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.types import Engine, SessionCache, Turn

DEADLINE_S = 5.0


class Sessions:
    """The session caches of one engine. All methods run on the event loop; digests and checksums do not."""

    def __init__(self, engine: Engine, arena: Arena, metrics: Metrics, *, deadline_s: float = DEADLINE_S) -> None:
        self.arena = arena
        self._engine = engine
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._prompts: dict[str, Trace] = {}
        self._sources: dict[str, Entry] = {}
        self._sealing: set[asyncio.Task[None]] = set()
        self._one_by_one = asyncio.Lock()
        metrics.watch_sessions(arena.counters)

    async def restore(self, turn: Turn) -> int:
        """Fill the empty cache of an attached turn as far as something kept allows; how many positions that are."""
        try:
            async with asyncio.timeout(self._deadline_s):
                prompt = await asyncio.to_thread(trace_prompt, self._engine.fingerprint, turn.prompt)
                self._prompts[turn.id] = prompt
                if self._sealing:  # what the turn before left behind may be about to be published
                    await asyncio.wait(self._sealing)
            match = self.arena.index.find(prompt)
        except Exception as error:
            self._fail("lookup", turn.id, error)
            return 0
        if match is None:
            self._metrics.count_lookup("miss")
            return 0
        return match.length if await self._load(turn.id, match) else 0

    async def commit(self, turn: Turn, length: int) -> None:
        """Keep the cache of an attached turn, which holds `length` positions or, after the prompt, about as many."""
        try:
            prompt = self._prompts.get(turn.id)
            if prompt is None or self._known(prompt, length):
                return
            async with asyncio.timeout(self._deadline_s):
                cache = await self._engine.export_session(turn.id)
        except Exception as error:
            self._fail("export", turn.id, error)
            return
        if cache.length:
            task = asyncio.create_task(self._keep(turn, cache))
            self._sealing.add(task)
            task.add_done_callback(self._sealing.discard)

    def blame(self, turn: str) -> None:
        """`turn` made a step fail; if it may be what it took over, that is withdrawn."""
        if (entry := self._sources.pop(turn, None)) is not None:
            self._withdraw(entry, "step", turn)

    def trust(self, turn: str) -> None:
        """`turn` has its first token: what it took over was good."""
        self._sources.pop(turn, None)

    def forget(self, turn: str) -> None:
        """`turn` is detached."""
        self._prompts.pop(turn, None)
        self._sources.pop(turn, None)

    def flush(self) -> int:
        """Drop everything that is kept; how many commit points that were."""
        return self.arena.clear()

    def counters(self) -> Mapping[str, int]:
        """What is kept and in use, as `Arena.counters`, and turns that are known: zero when idle, like leases."""
        return {**self.arena.counters(), "turns": len(self._prompts)}

    async def close(self) -> None:
        """Wait for what is being sealed, then drop everything."""
        if self._sealing:
            await asyncio.wait(self._sealing, timeout=self._deadline_s)
        self.flush()

    def _known(self, prompt: Trace, length: int) -> bool:
        """Whether the first `length` positions of `prompt` are kept already, which is a use of them."""
        if length > prompt.length:
            return False
        entry = self.arena.index.find_exact(prompt, length)
        if entry is not None:
            self.arena.credit(entry)
        return entry is not None

    async def _load(self, turn: str, match: Match) -> bool:
        """Verify what was found and give it to the engine; whether that worked."""
        entry, started_s = match.entry, time.monotonic()
        self.arena.lease(entry)
        try:
            async with asyncio.timeout(self._deadline_s):
                await asyncio.to_thread(verify, entry)
                await self._engine.import_session(turn, entry.cache, match.length)
        except Exception as error:
            if isinstance(error, DamagedCache):
                self._metrics.count_checksum_failure()
            self._fail("import", turn, error)
            self._withdraw(entry, "import", turn)
            return False
        finally:
            self.arena.release(entry)
        self.arena.credit(entry)
        self._sources[turn] = entry
        self._metrics.count_lookup("hit", match.length)
        self._metrics.observe_restore(time.monotonic() - started_s)
        return True

    async def _keep(self, turn: Turn, cache: SessionCache) -> None:
        """Keep `cache` unless it is kept already; one at a time, so that two turns do not keep the same."""
        async with self._one_by_one:
            try:
                await self._seal(turn, cache)
            except Exception as error:
                self._fail("export", turn.id, error)

    async def _seal(self, turn: Turn, cache: SessionCache) -> None:
        """Make room for `cache`, take its checksum, then let it be found."""
        trace = await asyncio.to_thread(make_trace, cache.fingerprint, turn.prompt.salt, cache.ids, turn.prompt.spans)
        if self._known(trace, cache.length):
            return
        evicted = self.arena.evicted
        entry = self.arena.reserve(trace, cache)
        self._metrics.count_evictions(self.arena.evicted - evicted)
        if entry is None:
            self._metrics.count_commit("refused")
            return
        try:
            self.arena.publish(entry, await asyncio.to_thread(checksum, cache))
            self._metrics.count_commit("kept")
        finally:
            if entry.state == "filling":
                self.arena.withdraw(entry)

    def _withdraw(self, entry: Entry, what: str, turn: str) -> None:
        """A use of `entry` failed once; it gets no second chance."""
        log_event("session cache withdrawn", level="warning", what=what, turn=turn, length=entry.cache.length)
        if entry.state == "ready":
            self._metrics.count_withdrawal()
        self.arena.withdraw(entry)

    def _fail(self, what: str, turn: str, error: Exception) -> None:
        """Something went wrong; the turn goes on without."""
        if what != "export":
            self._metrics.count_lookup("failed")
        else:
            self._metrics.count_commit("failed")
        log_event("session cache failed", level="warning", error=error, what=what, turn=turn)

"""Session caches from turn to turn: the pages that a turn gets, what it takes over, and what it leaves behind.

A turn is admitted, attached by its caller, restored, computed, detached, released. Whatever goes wrong with a cache
costs the reuse, never the turn.
"""

import asyncio
import time
from collections.abc import Callable, Mapping

from dsuf.errors import ContextTooLong
from dsuf.kv.arena import Arena
from dsuf.kv.aside import Aside
from dsuf.kv.attach import Restored
from dsuf.kv.calls import work
from dsuf.kv.handoff import WAIT_S
from dsuf.kv.holding import Holding
from dsuf.kv.keeper import Copy, Keeper, Step
from dsuf.kv.loader import Loader
from dsuf.kv.pages import PagePool
from dsuf.kv.point import DamagedCache, HostPage
from dsuf.kv.sources import Sources
from dsuf.kv.trace import ID_BYTES, Trace, trace_prompt
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.types import Engine, Prompt, Turn

__all__ = ["DEADLINE_S", "Restored", "Sessions"]

DEADLINE_S = 5.0
_ATTEMPTS = 3


class Sessions:
    """The pages and session caches of one engine. All methods run on the event loop; digests and checksums do not.

    `on_room` is called when pages came free other than by `release`: a copy was made of them.
    """

    def __init__(self, engine: Engine, arena: Arena, metrics: Metrics, *, deadline_s: float = DEADLINE_S) -> None:
        self.on_room: Callable[[], None] = lambda: None
        self.arena, self.layout = arena, engine.layout
        arena.replay_tokens = engine.layout.replay_tokens
        self.pool = PagePool(engine.layout.pages, arena.tree.prune)
        self._metrics, self._deadline_s = metrics, deadline_s
        self._held: dict[str, Holding] = {}
        self._traced: tuple[Prompt, Trace] | None = None
        self._loader = Loader(engine, arena, self.pool, lambda: self.on_room())
        self._keeper = Keeper(engine, arena, self.pool, metrics, deadline_s, lambda: self.on_room())
        self._aside = Aside(arena)
        self._sources = Sources(self.layout, arena, self.pool)
        metrics.watch_sessions(self.counters)

    def pages_for(self, turn: Turn) -> int:
        """Pages that `turn` can ever need."""
        tokens = len(turn.prompt.ids) + turn.sampling.max_tokens + self.layout.overrun_tokens
        return self.layout.pages_for(tokens)

    def check(self, turn: Turn) -> None:
        """Raise `ContextTooLong` where `turn` needs more pages than there are."""
        wanted = self.pages_for(turn)
        if wanted > self.layout.pages:
            raise ContextTooLong(
                f"the cache has room for {self.layout.pages * self.layout.page_tokens} tokens, but the request needs "
                f"{wanted * self.layout.page_tokens}: {len(turn.prompt.ids)} in the prompt, "
                f"{turn.sampling.max_tokens} for the answer, in pages of {self.layout.page_tokens}"
            )

    async def admit(
        self, turn: Turn, *, limit: int | None = None, peer_from: int | None = None
    ) -> tuple[int, ...] | None:  # fmt: skip
        """The pages of `turn`, which are its own until `release`; None where there is no room now.

        Finds what it can take over, and shares whole pages of that which are on the device. With a `limit` the turn
        begins to compute there or before. What a peer sent for it begins at `peer_from`. Raises `ContextTooLong`.
        """
        self.check(turn)
        trace = None
        try:
            async with asyncio.timeout(self._deadline_s):
                trace = await self.trace(turn)
        except Exception as error:
            self._fail(turn.id, error)
        else:
            await self.wait_for(trace, WAIT_S)
        return self._reserve(Holding(turn, trace, limit, peer_from))

    async def foresee(self, turn: Turn, patience_s: float = WAIT_S) -> tuple[Trace, int]:
        """The trace of a prompt, and the position at which it would begin to compute now, if it were admitted. What it
        goes on from is waited for, for so long at most."""
        trace = await self.trace(turn)
        await self.wait_for(trace, patience_s)
        return trace, self._sources.foresee(trace)

    async def trace(self, turn: Turn) -> Trace:
        """The trace of a prompt. The last one is kept, since who finds no room comes again."""
        if self._traced is None or self._traced[0] is not turn.prompt:
            size_bytes = len(turn.prompt.ids) * ID_BYTES
            self._traced = turn.prompt, await work(size_bytes, trace_prompt, self.layout, turn.prompt)
        return self._traced[1]

    async def restore(self, turn: Turn) -> Restored | None:
        """Let the attached `turn` take over what was found for it.

        None where that failed in such a way that it cannot go on in its pages, since others use some of them, or the
        engine may still be about it: it has to be detached, released and admitted again.
        """
        holding = self._held[turn.id]
        started_s = time.monotonic()
        try:
            for left in reversed(range(_ATTEMPTS)):
                if not holding.choice.length or await self._load(holding):
                    break
                self._sources.look_again(holding, last=not left)
                if not self._sources.own_rest(holding):
                    return None
        except TimeoutError:
            return None
        self._aside.give_up(turn.id)
        restored = holding.choice.restored()
        self._metrics.count_lookup("hit" if restored.start else "miss", restored.start)
        self._metrics.observe_restore(time.monotonic() - started_s)
        return restored

    def state_tokens(self, turn: str) -> int:
        """How long the state was that `turn` goes on from, before it was cut to what the turn shares; 0 without one."""
        holding = self._held.get(turn)
        return 0 if holding is None or holding.point is None else holding.point.head.length

    def advance(self, turn: str, length: int) -> None:
        """The first `length` positions of the prompt of `turn` are computed: its whole pages can be shared."""
        holding = self._held.get(turn)
        if holding is not None and not holding.failed:
            self._sources.name(holding, min(length, len(holding.turn.prompt.ids)) // self.layout.page_tokens)

    def commit(self, turn: Turn, length: int, step: Step | None = None) -> asyncio.Task[None]:
        """Keep the cache of an attached turn as all steps launched so far leave it, about `length` positions.

        `step` is the one just launched, whose failure undoes it. The returned task ends when the turn may be detached;
        it never fails. The call to the engine is on its way when this returns, in the order of calls.
        """
        holding = self._held.get(turn.id)
        if holding is None or holding.trace is None or holding.failed or self._known(holding.trace, length):
            return asyncio.create_task(_nothing())
        try:
            return self._keeper.commit(holding, length, step)
        except Exception as error:
            self._metrics.count_commit("failed")
            log_event("session cache failed", level="warning", error=error, what="export", turn=turn.id)
            return asyncio.create_task(_nothing())

    def can_keep(self, turn: str, length: int) -> bool:
        """Whether there is room now for a commit point of an attached turn at `length`."""
        holding = self._held.get(turn)
        if holding is None or holding.trace is None or holding.failed:
            return False
        return self.arena.has_room(holding.trace, length, self.layout.state_bytes)

    def put_aside(self, turn: Turn, length: int, step: Step | None) -> asyncio.Task[bool]:
        """As `commit`, and hold on to what was kept until the turn takes it over, or `give_up`; whether it was kept.

        The task, which never fails, ends when the turn may be detached.
        """
        holding = self._held[turn.id]
        before = holding.latest
        reading = self.commit(turn, length, step)
        copy = None if holding.latest is before else holding.latest
        return asyncio.create_task(self._put_aside(holding, length, reading, copy))

    def give_up(self, turn: str) -> None:
        """`turn`, whose state may have been put aside, does not come again; idempotent."""
        self._aside.give_up(turn)

    def commit_pages(self, turn: Turn, length: int) -> asyncio.Task[None]:
        """Keep the whole pages within the first `length` positions of the prompt, which are computed, without a state:
        a peer can take them while the prompt goes on. The task ends when they are kept."""
        holding = self._held.get(turn.id)
        if holding is None or holding.trace is None or holding.failed or length < self.layout.page_tokens:
            return asyncio.create_task(_nothing())
        return self._keeper.commit_pages(holding, length)

    def blame(self, turn: str) -> None:
        """`turn` made a step fail; if it may be what it took over, that is withdrawn, and what it made of it."""
        holding = self._held.get(turn)
        if holding is None:
            return
        holding.failed = True
        if holding.trusted:
            return
        if holding.choice.length:
            self._discredit(holding, None)
        for page in holding.pages:
            self.pool.forget(page)
        for point in holding.made:
            self.arena.withdraw(point)

    def trust(self, turn: str) -> None:
        """`turn` has its first token: what it took over was good."""
        if (holding := self._held.get(turn)) is not None and not holding.trusted:
            holding.trusted = True
            holding.made.clear()

    def release(self, turn: str) -> None:
        """`turn` is detached, or was not attached at all: its pages are given back. Idempotent."""
        holding = self._held.pop(turn, None)
        if holding is not None:
            self._sources.let_go(holding)
            self.pool.release(holding.pages)
            holding.latest = None  # which knows the turn in turn
            if holding.trace is not None:
                self.arena.expect_no_more(holding.trace)

    def flush(self) -> int:
        """Drop everything that is kept, or about to be, and not in use; how many commit points that were."""
        self._keeper.drop()
        self.pool.forget_all()
        return self.arena.clear()

    def counters(self) -> Mapping[str, int]:
        """What is kept, as `Arena.counters`, and pages that are cached; and what is in use, which is zero when idle:
        turns, copies under way, pages that are held."""
        own = {"turns": len(self._held), "copies": self._keeper.under_way}
        pages = {"pages_held": self.pool.held, "pages_cached": self.pool.cached}
        return {**self.arena.counters(), **own, **pages}

    @property
    def kept(self) -> asyncio.Event:
        """Set when something is published the next time."""
        return self._keeper.kept

    async def wait_for(self, prompt: Trace, seconds: float) -> None:
        """Wait, for so long at most, for the copies on their way now of turns that `prompt` goes on from."""
        await self._keeper.wait_for(prompt, seconds)

    async def settle(self) -> None:
        """Wait, within the deadline, for all copies that are on their way."""
        await self._keeper.drain()

    async def close(self) -> None:
        """Wait for what is on its way, then drop everything."""
        await self.settle()
        self._aside.clear()
        self.flush()

    def _reserve(self, holding: Holding) -> tuple[int, ...] | None:
        """Choose sources and pages at once, so that nothing changes between the two."""
        wanted = self.pages_for(holding.turn)
        shared = self._sources.look(holding, lambda page, node: node.device is not None)
        table = {page: node.device for page, node in shared.items() if node.device is not None}
        self.pool.retain(list(table.values()))
        fresh = self.pool.take(wanted - len(table))
        if fresh is None:
            self.pool.release(list(table.values()))
            self._sources.let_go(holding)
            return None
        holding.shared = set(table)
        holding.pages = [table[page] if page in table else fresh.pop() for page in range(wanted)]
        self._held[holding.turn.id] = holding
        if holding.trace is not None:
            self.arena.expect(holding.trace)
        return tuple(holding.pages)

    async def _load(self, holding: Holding) -> bool:
        """Whether the turn could take over what was chosen; what failed is withdrawn.

        Raises `TimeoutError`, after which nobody knows what the engine has done; but what waited behind a long step is
        as good as before.
        """
        try:
            await self._loader.load(holding, self._deadline_s)
        except TimeoutError as error:
            self._fail(holding.turn.id, error)
            raise
        except Exception as error:
            self._fail(holding.turn.id, error)
            if isinstance(error, DamagedCache):
                self._metrics.count_checksum_failure()
            self._discredit(holding, error.page if isinstance(error, DamagedCache) else None)
            return False
        if holding.point is not None:
            self.arena.credit(holding.point)
        self._sources.name(holding, holding.choice.length // self.layout.page_tokens)
        return True

    async def _put_aside(
        self, holding: Holding, length: int, reading: asyncio.Task[None], copy: Copy | None
    ) -> bool:  # fmt: skip
        """Hold on to what `copy` makes, or, where there was none to make, to what is kept already."""
        await reading
        if copy is not None:
            await copy.ended.wait()  # all that it waits for has a deadline
            return self._aside.put(holding.turn.id, copy.point)
        trace = holding.trace
        known = trace is not None and not holding.failed and length <= trace.length
        return self._aside.put(holding.turn.id, self.arena.find_exact(trace, length) if known and trace else None)

    def _known(self, trace: Trace, length: int) -> bool:
        """Whether a state at `length` of the prompt is kept already, which is a use of it."""
        point = self.arena.find_exact(trace, length) if length <= trace.length else None
        if point is not None:
            self.arena.credit(point)
        return point is not None

    def _discredit(self, holding: Holding, damaged: HostPage | None) -> None:
        """A use of what `holding` took over failed once; it gets no second chance."""
        log_event("session cache withdrawn", level="warning", turn=holding.turn.id, length=holding.choice.length)
        self._metrics.count_withdrawal()
        self._sources.discredit(holding, damaged)

    def _fail(self, turn: str, error: Exception) -> None:
        """Something went wrong, or took too long; the turn goes on without."""
        if isinstance(error, TimeoutError):
            self._metrics.count_lookup("late")
            log_event("session cache late", what="import", turn=turn)
            return
        self._metrics.count_lookup("failed")
        log_event("session cache failed", level="warning", error=error, what="import", turn=turn)


async def _nothing() -> None:
    """No copy is to be made."""

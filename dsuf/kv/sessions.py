"""Session caches from turn to turn: the pages that a turn gets, what it takes over, and what it leaves behind.

A turn is admitted, attached by its caller, restored, computed, detached, released. Whatever goes wrong with a cache
costs the reuse, never the turn.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence

from dsuf.errors import ContextTooLong
from dsuf.kv.arena import Arena, Match
from dsuf.kv.attach import NOTHING, Place, Restored, choose
from dsuf.kv.holding import Holding
from dsuf.kv.keeper import Keeper, Step
from dsuf.kv.loader import Loader
from dsuf.kv.pages import PagePool
from dsuf.kv.point import DamagedCache, HostPage
from dsuf.kv.prefix import Node
from dsuf.kv.trace import Trace, trace_prompt
from dsuf.observe.log import log_event
from dsuf.observe.metrics import Metrics
from dsuf.types import Engine, Turn

__all__ = ["DEADLINE_S", "Restored", "Sessions"]

DEADLINE_S = 5.0
_ATTEMPTS = 3


class Sessions:
    """The pages and session caches of one engine. All methods run on the event loop; digests and checksums do not."""

    def __init__(self, engine: Engine, arena: Arena, metrics: Metrics, *, deadline_s: float = DEADLINE_S) -> None:
        self.arena = arena
        self.pool = PagePool(engine.layout.pages, arena.tree.prune)
        self._engine, self._layout = engine, engine.layout
        self._metrics, self._deadline_s = metrics, deadline_s
        self._held: dict[str, Holding] = {}
        self._loader = Loader(engine, arena)
        self._keeper = Keeper(engine, arena, self.pool, metrics, deadline_s)
        metrics.watch_sessions(self.counters)

    @property
    def on_room(self) -> Callable[[], None]:
        """Called when pages came free other than by `release`: a copy was made of them."""
        return self._keeper.on_room

    @on_room.setter
    def on_room(self, call: Callable[[], None]) -> None:
        self._keeper.on_room = call

    def pages_for(self, turn: Turn) -> int:
        """Pages that `turn` can ever need."""
        tokens = len(turn.prompt.ids) + turn.sampling.max_tokens + self._layout.overrun_tokens
        return self._layout.pages_for(tokens)

    def check(self, turn: Turn) -> None:
        """Raise `ContextTooLong` where `turn` needs more pages than there are."""
        wanted = self.pages_for(turn)
        if wanted > self._layout.pages:
            raise ContextTooLong(
                f"the cache has room for {self._layout.pages * self._layout.page_tokens} tokens, but the request needs "
                f"{wanted * self._layout.page_tokens}: {len(turn.prompt.ids)} in the prompt, "
                f"{turn.sampling.max_tokens} for the answer, in pages of {self._layout.page_tokens}"
            )

    async def admit(self, turn: Turn, peer_from: int | None = None) -> tuple[int, ...] | None:
        """The pages of `turn`, which are its own until `release`; None where there is no room now.

        Finds what it can take over, and shares whole pages of that which are on the device. What a peer sent for it
        begins at `peer_from`. Raises `ContextTooLong`.
        """
        self.check(turn)
        trace = None
        try:
            async with asyncio.timeout(self._deadline_s):
                trace = await asyncio.to_thread(trace_prompt, self._layout, turn.prompt)
                await self._keeper.wait_for(trace)  # what the turn before left behind may be about to be published
        except Exception as error:
            self._fail(turn.id, error)
        return self._reserve(turn, trace, peer_from)

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
                self._choose_again(holding, last=not left)
                if not self._own_rest(holding):
                    return None
        except TimeoutError:
            return None
        restored = holding.choice.restored()
        self._metrics.count_lookup("hit" if restored.start else "miss", restored.start)
        self._metrics.observe_restore(time.monotonic() - started_s)
        return restored

    def advance(self, turn: str, length: int) -> None:
        """The first `length` positions of the prompt of `turn` are computed: its whole pages can be shared."""
        holding = self._held.get(turn)
        if holding is not None and not holding.failed:
            self._name(holding, min(length, len(holding.turn.prompt.ids)) // self._layout.page_tokens)

    def commit(self, turn: Turn, length: int, step: Step | None = None) -> asyncio.Task[None]:
        """Keep the cache of an attached turn as all steps launched so far leave it, about `length` positions.

        `step` is the one just launched, whose failure undoes it. The returned task ends when the turn may be detached;
        it never fails. The call to the engine is on its way when this returns, in the order of calls.
        """
        holding = self._held.get(turn.id)
        if holding is None or holding.trace is None or holding.failed or self._known(holding.trace, length):
            return asyncio.create_task(_nothing())
        return self._keeper.commit(holding, length, step)

    def commit_pages(self, turn: Turn, length: int) -> asyncio.Task[None]:
        """Keep the whole pages within the first `length` positions of the prompt, which are computed, without a state:
        a peer can take them while the prompt goes on. The task ends when they are kept."""
        holding = self._held.get(turn.id)
        if holding is None or holding.trace is None or holding.failed or length < self._layout.page_tokens:
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
            self._let_go(holding)
            self.pool.release(holding.pages)

    def flush(self) -> int:
        """Drop everything that is kept and not in use; how many commit points that were."""
        self.pool.forget_all()
        return self.arena.clear()

    def counters(self) -> Mapping[str, int]:
        """What is kept, as `Arena.counters`, and pages that are cached; and what is in use, which is zero when idle:
        turns, copies under way, pages that are held."""
        own = {"turns": len(self._held), "copies": self._keeper.under_way}
        pages = {"pages_held": self.pool.held, "pages_cached": self.pool.cached}
        return {**self.arena.counters(), **own, **pages}

    async def close(self) -> None:
        """Wait for what is on its way, then drop everything."""
        await self._keeper.drain()
        self.flush()

    def _reserve(self, turn: Turn, trace: Trace | None, peer_from: int | None) -> tuple[int, ...] | None:
        """Choose sources and pages at once, so that nothing changes between the two."""
        holding = Holding(turn, trace, peer_from)
        shared = self._look(holding, lambda page, node: node.device is not None)
        table = {page: node.device for page, node in shared.items() if node.device is not None}
        self.pool.retain(list(table.values()))
        fresh = self.pool.take(self.pages_for(turn) - len(table))
        if fresh is None:
            self.pool.release(list(table.values()))
            self._let_go(holding)
            return None
        holding.shared = set(table)
        holding.pages = [table[n] if n in table else fresh.pop() for n in range(self.pages_for(turn))]
        self._held[turn.id] = holding
        return tuple(holding.pages)

    def _look(self, holding: Holding, shares: Callable[[int, Node], bool]) -> dict[int, Node]:
        """Choose sources for the turn of `holding`, and lease them; the pages that it shares on the device.

        `shares` says whether it can share the page of a node that has one.
        """
        trace = holding.trace
        if trace is None:
            return {}
        path = self.arena.tree.walk(trace) or [self.arena.tree.root(trace)]
        places = []
        for page, node in enumerate(path[1:]):
            if shares(page, node):
                places.append(Place(node.digest, "device"))
            elif node.host is not None:
                places.append(Place(node.digest, holding.source(page * self._layout.page_tokens)))
            else:
                break
        match = self.arena.find(path, trace)
        holding.choice = choose(
            places, [match.length] if match is not None else [], prompt=trace.length, layout=self._layout,
            begun=holding.source(match.length if match is not None else 0),
        )  # fmt: skip
        whole = holding.choice.length // self._layout.page_tokens
        self._pin(holding, path[whole])
        self._lease(holding, match, path[: whole + 1])
        return {page: path[page + 1] for page in range(whole) if places[page].source == "device"}

    def _pin(self, holding: Holding, node: Node) -> None:
        """Let `node` be the last that is known of the turn."""
        self.arena.tree.pin(node)
        if holding.node is not None:
            self.arena.tree.unpin(holding.node)
        holding.node = node

    def _lease(self, holding: Holding, match: Match | None, path: Sequence[Node]) -> None:
        """Keep what was chosen until it was copied."""
        if match is not None and holding.choice.point is not None:
            holding.point, holding.page = match.point, match.point.page
        elif any(extent.source in ("host", "peer") for extent in holding.choice.extents):
            holding.page = next(node.host for node in reversed(path) if node.host is not None)
        if holding.point is not None or holding.page is not None:
            holding.lease = self.arena.lease(holding.page, holding.point)

    def _own_rest(self, holding: Holding) -> bool:
        """Make sure that the pages behind what is taken over are the turn's own; whether they are."""
        whole = holding.choice.length // self._layout.page_tokens
        rest = [page for page in holding.shared if page >= whole]
        if any(self.pool.is_shared(holding.pages[page]) for page in rest):
            return False
        for page in rest:
            self.pool.forget(holding.pages[page])
        holding.shared.difference_update(rest)
        return True

    def _choose_again(self, holding: Holding, last: bool) -> None:
        """Choose among what is left, or nothing where enough was tried; the page table stays."""
        self._let_go(holding)
        if not last:
            self._look(holding, lambda page, node: page in holding.shared)
        elif holding.trace is not None:
            holding.choice = NOTHING
            self._pin(holding, self.arena.tree.root(holding.trace))

    async def _load(self, holding: Holding) -> bool:
        """Whether the turn could take over what was chosen; what failed is withdrawn.

        Raises `TimeoutError`, after which nobody knows what the engine has done.
        """
        try:
            await self._loader.load(holding, self._deadline_s)
        except Exception as error:
            self._fail(holding.turn.id, error)
            if isinstance(error, DamagedCache):
                self._metrics.count_checksum_failure()
            self._discredit(holding, error.page if isinstance(error, DamagedCache) else None)
            if isinstance(error, TimeoutError):
                raise
            return False
        if holding.point is not None:
            self.arena.credit(holding.point)
        self._name(holding, holding.choice.length // self._layout.page_tokens)
        return True

    def _name(self, holding: Holding, pages: int) -> None:
        """Let the first `pages` pages of the prompt be found on the device."""
        if holding.trace is None or holding.node is None:
            return
        nodes = self.arena.tree.follow(holding.node, holding.trace, pages)
        for node in nodes:
            self.pool.name(holding.pages[node.pages - 1], node)
        if nodes:
            self._pin(holding, nodes[-1])

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
        if damaged is not None:
            self.arena.withdraw_page(damaged)
        elif holding.point is not None:
            self.arena.withdraw(holding.point)
        elif holding.page is not None:
            self.arena.withdraw_page(holding.page)

    def _let_go(self, holding: Holding) -> None:
        """Nothing is read for the turn any more."""
        if holding.lease is not None:
            self.arena.release(holding.lease)
        if holding.node is not None:
            self.arena.tree.unpin(holding.node)
        holding.lease = holding.node = holding.point = holding.page = None

    def _fail(self, turn: str, error: Exception) -> None:
        """Something went wrong; the turn goes on without."""
        self._metrics.count_lookup("failed")
        log_event("session cache failed", level="warning", error=error, what="import", turn=turn)


async def _nothing() -> None:
    """No copy is to be made."""

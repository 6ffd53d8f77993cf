"""What a turn takes over: looking for it, keeping it from going away, and what becomes of it."""

from collections.abc import Callable, Sequence

from dsuf.kv.arena import Arena, Match
from dsuf.kv.attach import NOTHING, Choice, Place, Source, choose
from dsuf.kv.holding import Holding
from dsuf.kv.pages import PagePool
from dsuf.kv.point import HostPage
from dsuf.kv.prefix import Node
from dsuf.kv.trace import Trace
from dsuf.types import CacheLayout


class Sources:
    """The pages of `pool` and what is in `arena`, as sources of the beginning of a prompt."""

    def __init__(self, layout: CacheLayout, arena: Arena, pool: PagePool) -> None:
        self._layout, self._arena, self._pool = layout, arena, pool

    def look(self, holding: Holding, shares: Callable[[int, Node], bool]) -> dict[int, Node]:
        """Choose sources for the turn of `holding`, and lease them; the pages that it shares on the device.

        `shares` says whether it can share the page of a node that has one.
        """
        trace = holding.trace
        if trace is None:
            return {}
        path = self._arena.tree.walk(trace) or [self._arena.tree.root(trace)]
        if holding.limit is not None:
            del path[(holding.limit + self._layout.replay_tokens) // self._layout.page_tokens + 1 :]
        places, match, holding.choice = self._choose(path, trace, holding.limit, holding.source, shares)
        whole = holding.choice.length // self._layout.page_tokens
        self._pin(holding, path[whole])
        self._lease(holding, match, path[: whole + 1])
        return {page: path[page + 1] for page in range(whole) if places[page].source == "device"}

    def foresee(self, trace: Trace) -> int:
        """The position at which a turn with the prompt `trace` would begin to compute now; nothing is leased."""
        path = self._arena.tree.walk(trace)
        if not path:
            return 0
        *_, choice = self._choose(path, trace, None, lambda _: "host", lambda _, node: node.device is not None)
        return choice.start

    def _choose(
        self, path: Sequence[Node], trace: Trace, limit: int | None, source: Callable[[int], Source],
        shares: Callable[[int, Node], bool],
    ) -> tuple[list[Place], Match | None, Choice]:  # fmt: skip
        """The places of the pages that `trace` walks, the best commit point, and what to take over of both."""
        places = []
        for page, node in enumerate(path[1:]):
            if shares(page, node):
                places.append(Place(node.digest, "device"))
            elif node.host is not None:
                places.append(Place(node.digest, source(page * self._layout.page_tokens)))
            else:
                break
        match = self._arena.find(path, trace, limit)
        choice = choose(
            places, [match.length] if match is not None else [], prompt=trace.length, layout=self._layout,
            begun=source(match.length if match is not None else 0),
        )  # fmt: skip
        return places, match, choice

    def _pin(self, holding: Holding, node: Node) -> None:
        """Let `node` be the last that is known of the turn."""
        self._arena.tree.pin(node)
        if holding.node is not None:
            self._arena.tree.unpin(holding.node)
        holding.node = node

    def _lease(self, holding: Holding, match: Match | None, path: Sequence[Node]) -> None:
        """Keep what was chosen until it was copied."""
        if match is not None and holding.choice.point is not None:
            holding.point, holding.page = match.point, match.point.page
        elif any(extent.source in ("host", "peer") for extent in holding.choice.extents):
            holding.page = next(node.host for node in reversed(path) if node.host is not None)
        if holding.point is not None or holding.page is not None:
            holding.lease = self._arena.lease(holding.page, holding.point)

    def own_rest(self, holding: Holding) -> bool:
        """Make sure that the pages behind what is taken over are the turn's own; whether they are."""
        whole = holding.choice.length // self._layout.page_tokens
        rest = [page for page in holding.shared if page >= whole]
        if any(self._pool.is_shared(holding.pages[page]) for page in rest):
            return False
        for page in rest:
            self._pool.forget(holding.pages[page])
        holding.shared.difference_update(rest)
        return True

    def look_again(self, holding: Holding, last: bool) -> None:
        """Choose among what is left, or nothing where enough was tried; the page table stays."""
        self.let_go(holding)
        if not last:
            self.look(holding, lambda page, node: page in holding.shared)
        elif holding.trace is not None:
            holding.choice = NOTHING
            self._pin(holding, self._arena.tree.root(holding.trace))

    def name(self, holding: Holding, pages: int) -> None:
        """Let the first `pages` pages of the prompt be found on the device."""
        if holding.trace is None or holding.node is None:
            return
        nodes = self._arena.tree.follow(holding.node, holding.trace, pages)
        for node in nodes:
            self._pool.name(holding.pages[node.pages - 1], node)
        if nodes:
            self._pin(holding, nodes[-1])

    def discredit(self, holding: Holding, damaged: HostPage | None) -> None:
        """Withdraw what `holding` took over, or the page of it that is known to be `damaged`.

        Of pages with a state, the state; of pages without one, those from the host; then those on the device.
        """
        if damaged is not None:
            self._arena.withdraw_page(damaged)
        elif holding.point is not None:
            self._arena.withdraw(holding.point)
        elif holding.page is not None:
            self._arena.withdraw_page(holding.page)
        else:
            for page in holding.shared:
                self._pool.forget(holding.pages[page])

    def let_go(self, holding: Holding) -> None:
        """Nothing is read for the turn any more."""
        if holding.lease is not None:
            self._arena.release(holding.lease)
        if holding.node is not None:
            self._arena.tree.unpin(holding.node)
        holding.lease = holding.node = holding.point = holding.page = None

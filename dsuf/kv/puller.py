"""Getting the beginning of a prompt from peers before its turn queues: from who keeps it, or from who computes it."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Protocol

from dsuf.kv.directory.contract import Directory, Member
from dsuf.kv.pulls import Pull, Speed, bear_copying, bear_silence, budget_order, plan_pulls, rank_providers
from dsuf.kv.sessions import Sessions
from dsuf.kv.taker import Taker
from dsuf.observe.log import log_event
from dsuf.types import Turn

MOST_PROVIDERS = 2
"""Nodes that are asked to compute the same prompt, one after the other."""


class Peers(Protocol):
    """The other nodes, as far as caches are asked of them."""

    def taker(self, member: Member) -> Taker | None:
        """What takes caches over from `member`; None while it is left alone."""

    def speed(self, member: Member) -> Speed:
        """What its bytes cost."""

    def learn(self, member: Member, size_bytes: int, seconds: float) -> None:
        """So many bytes came from it in `seconds`."""

    async def is_alive(self, member: Member, seconds: float) -> bool:
        """Whether it gives a sign of life within `seconds`."""


class Puller:
    """Fills the arena of `sessions` from peers, as the directory says. `token_s` tells what computing a token of a
    prompt of so many takes here now, `patience` how many times as long a turn waits for what peers keep. With
    `delegates` prompts are computed by nodes that do nothing else, where there are any.
    """

    def __init__(
        self, sessions: Sessions, directory: Directory, peers: Peers, *, token_s: Callable[[int], float],
        patience: float = 1.0, delegates: bool = False,
    ) -> None:  # fmt: skip
        self._sessions, self._directory, self._peers = sessions, directory, peers
        self._token_s, self._patience, self._delegates = token_s, patience, delegates
        self._given = Counter[str]()

    async def take(self, turn: Turn) -> int | None:
        """Have what peers keep of the prompt of `turn` come here, as far as that is worth it, then let a peer compute
        the rest, where that is wanted; the position from which on it came from peers, None if nothing did.

        A failure costs what is left of the time that computing would have taken, times the patience, and nothing else.
        """
        starts = [await self.fetch(turn)]
        if self._delegates:
            starts.append(await self._delegate(turn))
        return min((start for start in starts if start is not None), default=None)

    async def fetch(self, turn: Turn) -> int | None:
        """As `take`, of what peers keep already."""
        layout, token_s = self._sessions.layout, self._token_s(len(turn.prompt.ids))
        wait_s = bear_copying(len(turn.prompt.ids), token_s, self._patience)
        trace, here = await self._sessions.foresee(turn, wait_s)
        pulls = plan_pulls(
            self._directory.find(trace, replay_tokens=layout.replay_tokens), prompt=trace.length, here=here,
            layout=layout, token_s=token_s, speed=self._peers.speed, patience=self._patience,
        )  # fmt: skip
        return await self._try_all(turn, here, pulls) if pulls else None

    async def _try_all(self, turn: Turn, here: int, pulls: tuple[Pull, ...]) -> int | None:
        """Ask one after the other, until one gave what it promised or the time is over."""
        began_s, budget_s = time.monotonic(), pulls[0].budget_s
        ends_s = began_s + budget_s
        starts, now = [], here
        for pull in pulls:
            left_s = min(pull.budget_s, ends_s - time.monotonic())
            taker = self._peers.taker(pull.member)
            if taker is None or left_s <= 0 or here + pull.tokens - now < self._sessions.layout.page_tokens:
                continue
            asked_s = time.monotonic()
            start = await taker.take(turn, False, left_s, pull.bear_s(left_s))
            if start is None:
                continue
            starts.append(start)
            now = (await self._sessions.foresee(turn))[1]
            self._learn(pull, now - here, time.monotonic() - asked_s)
        took_s = time.monotonic() - began_s
        log_event(
            "prompt asked of peers", level="debug", turn=turn.id, budget_s=budget_s, seconds=took_s, here=here, now=now,
            coming=pulls[0].coming,
        )  # fmt: skip
        return min(starts, default=None)

    def _learn(self, pull: Pull, tokens: int, seconds: float) -> None:
        """Remember what the bytes of so many tokens cost, unless they may have been waited for."""
        layout = self._sessions.layout
        if tokens > 0 and not pull.coming:
            self._peers.learn(pull.member, layout.pages_for(tokens) * layout.page_bytes, seconds)

    async def _delegate(self, turn: Turn) -> int | None:
        """Have a node that only computes prompts compute what is missing, and another one where that fails."""
        starts, tries, missing = [], 0, await self._count_missing(turn)
        token_s = self._token_s(len(turn.prompt.ids))
        ends_s = time.monotonic() + budget_order(missing, token_s)
        patience_s = bear_silence(missing, token_s) / MOST_PROVIDERS
        for provider in rank_providers(self._directory.members(), self._given):
            taker = self._peers.taker(provider)
            left_s = ends_s - time.monotonic()
            if taker is None or tries == MOST_PROVIDERS or left_s <= 0:
                continue
            tries += 1
            starts.append(await self._order(turn, provider, taker, left_s, patience_s))
            if await self._count_missing(turn) <= self._sessions.layout.page_tokens:
                break
        else:
            log_event("prompt computed here", level="debug", turn=turn.id, tries=tries)
        return min((start for start in starts if start is not None), default=None)

    async def _order(
        self, turn: Turn, provider: Member, taker: Taker, budget_s: float, patience_s: float
    ) -> int | None:  # fmt: skip
        """Have `provider` compute the prompt of `turn`, and count that it does, as long as it gives signs of life."""
        self._given[provider.node] += 1
        taking = asyncio.ensure_future(taker.take(turn, compute=True, budget_s=budget_s))
        try:
            while not (await asyncio.wait({taking}, timeout=patience_s / 2))[0]:
                if not await self._peers.is_alive(provider, patience_s / 2) and not taking.done():
                    log_event("peer silent", level="warning", peer=provider.node, turn=turn.id)
                    taker.avoid()
                    return None
            return taking.result()
        finally:
            taking.cancel()
            await asyncio.wait({taking})
            self._given[provider.node] -= 1
            self._given += Counter()  # without those that are zero

    async def _count_missing(self, turn: Turn) -> int:
        """Tokens of the prompt that would have to be computed here."""
        here = (await self._sessions.foresee(turn))[1]
        return len(turn.prompt.ids) - here

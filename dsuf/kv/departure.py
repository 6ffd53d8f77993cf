"""What a node that leaves gives away: its hot sessions, each to a peer that fetches it as long as this node answers."""

import asyncio
import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import Protocol

import msgspec
import numpy as np

from dsuf.errors import PeerError
from dsuf.kv.arena import Arena
from dsuf.kv.calls import work
from dsuf.kv.directory.contract import Directory, Member
from dsuf.kv.point import CommitPoint
from dsuf.kv.sessions import Sessions
from dsuf.kv.trace import ID_BYTES, Trace, trace_prompt
from dsuf.observe.log import log_event
from dsuf.types import Prompt, Sampling, Turn

MOST_SESSIONS = 256
AT_A_TIME = 4
ASK_S = 4.0
"""For a peer to say whether it will fetch a session, at most a third of the time that is left: one that stands still
should not cost others their time, one that is only busy should not be taken for such."""
LOOK_S = 0.05
"""How often the directory is looked at for what a peer has fetched; its news come several times a second."""
_NO_SAMPLING = Sampling(temperature=0.0, top_p=1.0, seed=0, max_tokens=1)


class Heir(Protocol):
    """A peer that can be told what to fetch."""

    async def invite(self, turn: Turn) -> bool:
        """Whether it will fetch what is kept here of the prompt of `turn`."""


class Heirs(Protocol):
    """All peers."""

    def giver(self, member: Member) -> Heir:
        """The peer that `member` is."""


class Departure:
    """Has peers fetch the sessions that are kept here, those of the most worth first."""

    def __init__(self, sessions: Sessions, directory: Directory, heirs: Heirs) -> None:
        self._sessions, self._directory, self._heirs = sessions, directory, heirs
        self._given: dict[str, int] = {}
        self._failed: set[str] = set()
        self._ends_s = 0.0

    async def run(self, seconds: float) -> int:
        """How many sessions other nodes keep now that only this one kept, after at most `seconds`. What the last turns
        leave behind counts too, though it is still being copied."""
        self._ends_s = time.monotonic() + seconds
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._sessions.settle()
        points = iter(find_leaves(self._sessions.arena)[:MOST_SESSIONS])
        moved = await asyncio.gather(*(self._move_some(points) for _ in range(AT_A_TIME)))
        return sum(moved)

    async def _move_some(self, points: Iterator[CommitPoint]) -> int:
        """One after the other, until none or no time is left."""
        moved = 0
        for point in points:
            if time.monotonic() >= self._ends_s:
                break
            moved += await self._move(point)
        return moved

    async def _move(self, point: CommitPoint) -> bool:
        """Have one session fetched; False where somebody has it already, or nobody wants it."""
        prompt = await work(point.head.length * ID_BYTES, read_prompt, point)
        trace = await work(point.head.length * ID_BYTES, trace_prompt, self._sessions.layout, prompt)
        turn = Turn(id=f"heir-{trace.chain[-1].hex()}-{trace.length}", prompt=prompt, sampling=_NO_SAMPLING)
        asked: set[str] = set()
        while not self._is_elsewhere(trace) and time.monotonic() < self._ends_s:
            members = [m for m in self._directory.members() if m.node not in asked | self._failed]
            if (heir := pick_heir(members, self._given)) is None:
                break
            asked.add(heir.node)
            self._given[heir.node] = self._given.get(heir.node, 0) + 1
            if await self._give(heir, turn, trace):
                return True
        return False

    async def _give(self, heir: Member, turn: Turn, trace: Trace) -> bool:
        """Whether `heir` fetches one. Where it fails to, nothing more is asked of it, and others have half of the time
        that is left."""
        left_s = self._ends_s - time.monotonic()
        try:
            async with asyncio.timeout(min(ASK_S, left_s / 3)):
                if not await self._heirs.giver(heir).invite(turn):
                    return False
            async with asyncio.timeout(left_s / 2):
                while not self._is_elsewhere(trace):  # noqa: ASYNC110 - the directory's news have no event for a prompt
                    await asyncio.sleep(LOOK_S)
        except (TimeoutError, PeerError, OSError) as error:
            self._failed.add(heir.node)
            log_event("session not moved", level="warning", peer=heir.node, reason=str(error) or type(error).__name__)
            return False
        return True

    def _is_elsewhere(self, trace: Trace) -> bool:
        """Whether a node that stays keeps as good as all of it."""
        layout = self._sessions.layout
        found = self._directory.find(trace, replay_tokens=layout.replay_tokens)
        enough = trace.length - layout.replay_tokens - layout.page_tokens
        return any(
            not c.member.draining and c.start(layout.page_tokens, layout.replay_tokens) >= enough for c in found
        )  # fmt: skip


def find_leaves(arena: Arena) -> list[CommitPoint]:
    """The commit points with a state that no longer one stands on, those of the most worth first."""
    return sorted(
        (point for point in arena.points() if point.head.stateful and _is_last(point)),
        key=lambda point: -point.worth,
    )


def _is_last(point: CommitPoint) -> bool:
    """Whether no other is a continuation of it, as far as pages tell."""
    page = point.page
    if page is None:
        return not any(True for _ in point.anchor.below())
    return not page.followers and all(p.head.length <= point.head.length for p in page.points if p.head.stateful)


def read_prompt(point: CommitPoint) -> Prompt:
    """The tokens, pictures and salt that `point` stands for."""
    size = point.page_tokens * ID_BYTES
    pieces, node = [], point.anchor
    while node.pages > 0:
        pieces.append(node.content[:size])
        assert node.parent is not None
        node = node.parent
    ids = b"".join(reversed(pieces)) + point.head.ids
    _, salt, _ = msgspec.json.decode(node.content, type=tuple[str, str, int])
    return Prompt(ids=tuple(np.frombuffer(ids, "<i8").tolist()), spans=point.head.spans, salt=salt)


def pick_heir(members: Sequence[Member], given: dict[str, int]) -> Member | None:
    """Who gets the next one: those that answer clients in turn, of those alike the one with most room."""
    able = [member for member in members if member.role != "prefill" and not member.draining]
    return min(able, key=lambda member: (given.get(member.node, 0), -member.room_bytes, member.node), default=None)

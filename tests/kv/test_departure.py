"""What a node that leaves gives away: which sessions, to whom, and what happens where a peer fails."""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable

import pytest

from dsuf.errors import PeerError
from dsuf.kv import departure
from dsuf.kv.departure import Departure, find_leaves, pick_heir, read_prompt
from dsuf.kv.directory.contract import Candidate, Member
from dsuf.kv.trace import trace_prompt
from dsuf.types import Span, Turn
from tests.kv.rig import Rig, ids
from tests.kv.test_puller import Known
from tests.toy import make_turn


class Heirs(Known):
    """Peers that fetch what they are told to at once, and the directory that says so."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        self.living = [Member(node=name, boot="1", room_bytes=1000) for name in names]
        self.fetched: list[tuple[str, Turn]] = []
        self.answer: Callable[[str], bool] = lambda name: True
        self.hold_s = 0.0
        self.frozen, self.lazy = set[str](), set[str]()
        self.asked = Counter[str]()

    def giver(self, member: Member) -> "Heir":
        return Heir(self, member)

    def find(self, trace: object, *, replay_tokens: int = 0) -> list[Candidate]:
        length = trace.length  # type: ignore[attr-defined]
        return [
            Candidate(member=member, length=length)
            for name, turn in self.fetched
            for member in self.living
            if member.node == name and turn.id.endswith(f"{trace.chain[-1].hex()}-{length}")  # type: ignore[attr-defined]
        ]


class Heir:
    """One of them."""

    def __init__(self, heirs: Heirs, member: Member) -> None:
        self.heirs, self.member = heirs, member

    async def invite(self, turn: Turn) -> bool:
        self.heirs.asked[self.member.node] += 1
        await asyncio.sleep(30.0 if self.member.node in self.heirs.frozen else self.heirs.hold_s)
        if self.member.node in self.heirs.lazy:
            return True
        if not self.heirs.answer(self.member.node):
            return False
        self.heirs.fetched.append((self.member.node, turn))
        return True


async def keep(rig: Rig, count: int) -> list[tuple[int, ...]]:
    """Conversations that share nothing, of two turns each."""
    found = []
    for number in range(count):
        first = await rig.run(make_turn(f"{number}-1", ids(20, [number])))
        second = await rig.run(make_turn(f"{number}-2", (*first.conversation, 5, 6, 7)))
        found.append(second.conversation[:-1])
    return found


async def leave(rig: Rig, heirs: Heirs, seconds: float = 5.0) -> int:
    """How many sessions were moved."""
    return await Departure(rig.sessions, heirs, heirs).run(seconds)


async def test_each_conversation_goes_to_one_peer_and_all_get_some() -> None:
    rig, heirs = Rig(), Heirs("a", "b", "c")
    conversations = await keep(rig, 6)
    assert await leave(rig, heirs) == 6
    assert sorted(turn.prompt.ids for _, turn in heirs.fetched) == sorted(conversations)
    assert Counter(name for name, _ in heirs.fetched) == {"a": 2, "b": 2, "c": 2}
    await rig.close()


async def test_what_others_keep_stays_where_it_is() -> None:
    rig, heirs = Rig(), Heirs("a")
    await keep(rig, 2)
    assert await leave(rig, heirs) == 2
    assert await leave(rig, heirs) == 0
    assert len(heirs.fetched) == 2
    await rig.close()


async def test_what_only_a_leaving_node_keeps_too_goes_on() -> None:
    rig, heirs = Rig(), Heirs("a")
    await keep(rig, 1)
    assert await leave(rig, heirs) == 1
    heirs.living = [Member(node="a", boot="1", draining=True), Member(node="b", boot="1")]
    assert await leave(rig, heirs) == 1
    assert [name for name, _ in heirs.fetched] == ["a", "b"]
    await rig.close()


async def test_nobody_is_there() -> None:
    rig, heirs = Rig(), Heirs()
    await keep(rig, 2)
    assert await leave(rig, heirs) == 0
    await rig.close()


async def test_what_a_peer_refuses_or_breaks_off_goes_to_another() -> None:
    rig, heirs = Rig(), Heirs("a", "b")
    await keep(rig, 4)

    def answer(name: str) -> bool:
        if name == "a":
            raise PeerError("planned")
        return True

    heirs.answer = answer
    assert await leave(rig, heirs) == 4
    heirs.fetched.clear()
    heirs.answer = lambda name: name == "a"
    assert await leave(rig, heirs) == 4
    heirs.fetched.clear()
    heirs.answer = lambda name: False
    assert await leave(rig, heirs) == 0
    await rig.close()


@pytest.mark.parametrize("silent", ["asked", "fetching"])
async def test_a_peer_that_stands_still_costs_no_session(monkeypatch: pytest.MonkeyPatch, silent: str) -> None:
    """It is asked by as many as there are at a time, and then by nobody."""
    monkeypatch.setattr(departure, "ASK_S", 0.3)
    rig, heirs = Rig(), Heirs("a", "b")
    await keep(rig, 12)
    (heirs.frozen if silent == "asked" else heirs.lazy).add("a")
    assert await leave(rig, heirs, 4.0) == 12
    assert {name for name, _ in heirs.fetched} == {"b"} and heirs.asked["a"] <= departure.AT_A_TIME
    await rig.close()


async def test_leaving_takes_no_longer_than_it_may() -> None:
    rig, heirs = Rig(), Heirs("a")
    await keep(rig, 3)
    heirs.hold_s = 30.0
    began_s = time.monotonic()
    assert await leave(rig, heirs, 0.2) == 0
    assert time.monotonic() - began_s < 15.0
    await rig.close()


async def test_what_the_last_turn_leaves_behind_goes_too() -> None:
    """Its copy is on its way when the node begins to leave."""
    rig, heirs = Rig(), Heirs("a")
    turn = make_turn("t", ids(30))
    restored = await rig.begin(turn)
    rig.engine.before = lambda name: 0.1 * (name not in ("step", "resume"))
    tokens = await rig.compute(turn, restored.start)
    ending = asyncio.ensure_future(rig.end(turn))
    await asyncio.sleep(0)
    assert await leave(rig, heirs) == 1
    await ending
    assert heirs.fetched[0][1].prompt.ids == (*turn.prompt.ids, *tokens[:-1])
    await rig.close()


@pytest.mark.parametrize("seed", range(5))
async def test_a_commit_point_tells_the_prompt_that_it_stands_for(seed: int) -> None:
    """Tokens, pictures and tenant: whoever asks for that prompt is led to that point."""
    rng, rig = random.Random(seed), Rig()
    span = Span(start=(at := rng.randrange(30)), stop=at + rng.randint(1, 9), digest=b"picture")
    turn = make_turn("t", [rng.randrange(900) for _ in range(rng.randint(40, 70))], spans=(span,), salt="tenant")
    done = await rig.run(turn)
    [point] = find_leaves(rig.arena)
    prompt = read_prompt(point)
    assert prompt.ids == done.conversation[:-1]
    assert (prompt.spans, prompt.salt) == ((span,), "tenant")
    trace = trace_prompt(rig.engine.layout, prompt)
    assert rig.arena.find_exact(trace, trace.length) is point
    await rig.close()


async def test_of_two_branches_both_are_leaves() -> None:
    rig = Rig()
    first = await rig.run(make_turn("t", ids(30)))
    for number in range(2):
        await rig.run(make_turn(f"b{number}", (*first.conversation, *[number] * 20)))
    prompts = [read_prompt(point).ids for point in find_leaves(rig.arena)]
    assert len(prompts) == 2 and all(len(prompt) > len(first.conversation) + 20 for prompt in prompts)
    await rig.close()


async def test_no_more_than_so_many_are_given_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(departure, "MOST_SESSIONS", 2)
    rig, heirs = Rig(), Heirs("a")
    await keep(rig, 4)
    assert await leave(rig, heirs) == 2
    await rig.close()


def test_the_heir_answers_clients_and_has_room() -> None:
    members = [
        Member(node="a", boot="1", role="prefill", room_bytes=9),
        Member(node="b", boot="1", draining=True, room_bytes=9),
        Member(node="c", boot="1", room_bytes=2), Member(node="d", boot="1", role="decode", room_bytes=3),
    ]  # fmt: skip
    heir = pick_heir(members, {})
    assert heir is not None and heir.node == "d"
    heir = pick_heir(members, {"d": 1})
    assert heir is not None and heir.node == "c"
    assert pick_heir(members[:2], {}) is None

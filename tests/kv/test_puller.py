"""Prompts fetched from peers before their turns queue: who is asked, for how long, who computes what nobody keeps."""

import asyncio
import time
from collections.abc import Mapping, Sequence

import pytest

from dsuf.kv import pulls
from dsuf.kv.directory.contract import Candidate, Health, Member
from dsuf.kv.puller import Puller
from dsuf.kv.pulls import Speed
from dsuf.kv.taker import Taker
from dsuf.kv.trace import Trace
from dsuf.types import Turn
from tests.kv.rig import ids
from tests.kv.test_handoff import Pair
from tests.toy import make_turn


class Known:
    """A directory that says what it was told."""

    def __init__(self) -> None:
        self.candidates: list[Candidate] = []
        self.living: list[Member] = []

    def find(self, trace: Trace, *, replay_tokens: int = 0) -> list[Candidate]:
        return self.candidates

    def members(self) -> list[Member]:
        return self.living

    def health(self) -> Health:
        return Health()

    def counters(self) -> Mapping[str, int]:
        return {}

    async def start(self) -> None: ...
    async def withdraw(self) -> None: ...
    async def close(self) -> None: ...


class Takers:
    """Implements `Peers` with a taker for each name."""

    def __init__(self) -> None:
        self.takers: dict[str, Taker] = {}
        self.learned: list[tuple[str, int]] = []
        self.silent: set[str] = set()

    def taker(self, member: Member) -> Taker | None:
        taker = self.takers.get(member.node)
        return None if taker is None or taker.avoids else taker

    def speed(self, member: Member) -> Speed:
        return Speed()

    def learn(self, member: Member, size_bytes: int, seconds: float) -> None:
        self.learned.append((member.node, size_bytes))

    async def is_alive(self, member: Member, seconds: float) -> bool:
        if member.node in self.silent:
            await asyncio.sleep(seconds)
        return member.node not in self.silent


class Scene:
    """A node and far ones, each of which the directory and a taker know by its name. Use within `async with`."""

    def __init__(
        self, *names: str, token_s: float = 0.01, patience: float = 1.0, delegates: bool = False, role: str = "both"
    ) -> None:  # fmt: skip
        self.pairs = {name: Pair(deadline_s=5.0) for name in names}
        self.near = self.pairs[names[0]].near
        self.directory, self.peers = Known(), Takers()
        for name, pair in self.pairs.items():
            self.peers.takers[name] = Taker(self.near.sessions, pair.giver, self.near.metrics, deadline_s=5.0)
            self.directory.living.append(Member(node=name, boot="1", role=role))  # type: ignore[arg-type]
        self.puller = Puller(
            self.near.sessions, self.directory, self.peers, token_s=lambda tokens: token_s, patience=patience,
            delegates=delegates,
        )  # fmt: skip

    async def __aenter__(self) -> "Scene":
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        for taker in self.peers.takers.values():
            while taker._leaving:
                await asyncio.wait(taker._leaving)
        if kind is None:
            for pair in self.pairs.values():
                await pair.close()

    async def keep(self, name: str, tokens: Sequence[int]) -> None:
        """Have a far node compute a conversation, and the directory know it."""
        done = await self.pairs[name].far.run(make_turn(f"kept-{name}", tokens))
        self.promise(name, len(done.conversation) - 1)

    def promise(self, name: str, length: int) -> None:
        """Have the directory say that a node keeps so much."""
        self.directory.candidates.append(Candidate(member=Member(node=name, boot="1"), length=length))

    async def start(self, turn: Turn) -> int:
        """Where `turn` would begin to compute here now."""
        return (await self.near.sessions.foresee(turn))[1]


async def test_what_a_peer_keeps_comes_here() -> None:
    async with Scene("a") as scene:
        await scene.keep("a", ids(60))
        turn = make_turn("t", ids(60, [1, 2, 3, 4]))
        assert await scene.puller.take(turn) == 0
        assert await scene.start(turn) == 60
        page_bytes = scene.near.engine.layout.page_bytes
        assert scene.peers.learned == [("a", 8 * page_bytes)]


async def test_nobody_is_asked_where_nobody_keeps_it() -> None:
    async with Scene("a") as scene:
        assert await scene.puller.take(make_turn("t", ids(60))) is None
        assert not scene.pairs["a"].giver.calls


async def test_nobody_is_asked_for_what_is_here() -> None:
    async with Scene("a") as scene:
        await scene.keep("a", ids(60))
        await scene.near.run(make_turn("own", ids(60)))
        assert await scene.puller.take(make_turn("t", ids(60, [1, 2]))) is None
        assert not scene.pairs["a"].giver.calls


async def test_the_next_peer_is_asked_where_one_has_it_no_longer() -> None:
    async with Scene("a", "b") as scene:
        await scene.keep("b", ids(60))
        scene.directory.candidates.insert(0, Candidate(member=Member(node="a", boot="1"), length=99))
        turn = make_turn("t", ids(62, [1, 2, 3]))
        assert await scene.puller.take(turn) == 0
        assert await scene.start(turn) == 60
        assert scene.pairs["a"].giver.calls["offer"] == 1
        assert [name for name, _ in scene.peers.learned] == ["b"]


async def test_the_next_peer_is_asked_where_one_breaks() -> None:
    async with Scene("a", "b") as scene:
        await scene.keep("a", ids(60))
        await scene.keep("b", ids(60))

        def fault(name: str, number: int) -> float:
            if name == "read":
                raise ConnectionResetError("planned")
            return 0.0

        scene.pairs["a"].giver.fault = fault
        turn = make_turn("t", ids(60, [1, 2, 3]))
        assert await scene.puller.take(turn) == 0
        assert await scene.start(turn) == 60
        assert scene.peers.takers["a"].avoids and not scene.peers.takers["b"].avoids


async def test_all_peers_together_take_no_longer_than_computing() -> None:
    """Three that never answer: what is spent is the budget of one."""
    async with Scene("a", "b", "c", token_s=0.02) as scene:
        for name, pair in scene.pairs.items():
            scene.promise(name, 60)
            pair.giver.fault = lambda name, number: 30.0 * (name == "offer")
        began_s = time.monotonic()
        assert await scene.puller.take(make_turn("t", ids(60, [1, 2]))) is None
        # 60 tokens of 20 ms are 1.2 s; beyond that there is only what a busy machine adds.
        assert 1.0 < time.monotonic() - began_s < 10
        assert scene.pairs["a"].giver.calls["offer"] == 1 and not scene.pairs["b"].giver.calls


@pytest.mark.parametrize("patience", [0.5, 60.0])
async def test_patience_waits_longer_than_computing_takes(patience: float) -> None:
    async with Scene("a", token_s=0.02, patience=patience) as scene:
        await scene.keep("a", ids(60))
        scene.pairs["a"].giver.fault = lambda name, number: 1.5 * (name == "offer")
        assert await scene.puller.take(make_turn("t", ids(60, [1, 2]))) == (None if patience < 1 else 0)


async def test_who_is_about_to_keep_it_is_asked_and_then_who_keeps_some() -> None:
    """Nothing is learned from one that may have waited; and nobody is asked for what came already."""
    for come in (True, False):
        async with Scene("a", "b") as scene:
            if come:
                await scene.pairs["a"].far.run(make_turn("kept", ids(60)))
            coming = Candidate(member=Member(node="a", boot="1"), coming=True)
            scene.directory.candidates.append(coming)
            await scene.keep("b", ids(30))
            turn = make_turn("t", ids(60, [1, 2, 3]))
            assert await scene.puller.take(turn) == 0
            assert await scene.start(turn) == (60 if come else 30)
            assert scene.pairs["a"].giver.calls["offer"] == 1
            assert [name for name, _ in scene.peers.learned] == ([] if come else ["b"])
            assert not scene.peers.takers["a"].avoids


async def test_a_peer_that_is_left_alone_is_not_asked() -> None:
    async with Scene("a", "b") as scene:
        await scene.keep("a", ids(60))
        await scene.keep("b", ids(60))
        scene.peers.takers["a"].avoid()
        assert await scene.puller.take(make_turn("t", ids(60, [1, 2]))) == 0
        assert not scene.pairs["a"].giver.calls


async def test_prompts_go_to_different_nodes_at_the_same_time() -> None:
    async with Scene("a", "b", delegates=True, role="prefill") as scene:
        turns = [make_turn(name, ids(40, [number])) for number, name in enumerate("xy")]
        assert await asyncio.gather(*map(scene.puller.take, turns)) == [0, 0]
        assert [pair.computed[-1] for pair in scene.pairs.values()] == [41, 41]
        assert not scene.puller._given


async def test_a_second_node_computes_what_the_first_one_failed_to() -> None:
    async with Scene("a", "b", delegates=True, role="prefill") as scene:

        def die() -> None:
            raise OSError("planned")

        scene.pairs["a"].on_chunk = die
        turn = make_turn("t", ids(40))
        assert await scene.puller.take(turn) == 0
        assert scene.pairs["a"].computed == [16] and scene.pairs["b"].computed[-1] == 40
        assert await scene.start(turn) > 30
        assert not scene.puller._given


async def test_orders_are_given_up_when_their_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each piece comes in time, but all of them would take too long; and the second node is not asked any more."""
    monkeypatch.setattr(pulls, "LEAST_ORDER_S", 0.3)
    async with Scene("a", "b", delegates=True, role="prefill", token_s=1e-4) as scene:
        scene.pairs["a"].giver.fault = lambda name, number: 0.2 * (name == "offer")
        began_s = time.monotonic()
        await scene.puller.take(make_turn("t", ids(60)))
        assert time.monotonic() - began_s < 10
        assert scene.pairs["a"].giver.calls["offer"] == 2 and not scene.pairs["b"].giver.calls


@pytest.mark.parametrize("tokens", [60, 100])
async def test_a_node_that_stands_still_costs_no_more_than_computing(
    monkeypatch: pytest.MonkeyPatch, tokens: int
) -> None:  # fmt: skip
    """It is left alone then, and one that only takes long is not taken for it."""
    monkeypatch.setattr(pulls, "LEAST_SILENCE_S", 0.1)
    async with Scene("a", "b", delegates=True, role="prefill", token_s=0.004) as scene:
        for name, pair in scene.pairs.items():
            pair.giver.fault = lambda call, number, name=name: (
                (  # type: ignore[misc]
                    60.0 if name == "a" else 0.4 if number == 1 else 0.0
                )
                * (call == "offer")
            )
        scene.peers.silent.add("a")
        began_s = time.monotonic()
        turn = make_turn("t", ids(tokens))
        assert await scene.puller.take(turn) == 0
        assert scene.pairs["b"].computed[-1] == tokens, "the other node took longer than its silence would be borne"
        assert 0.002 * tokens < time.monotonic() - began_s < 0.4 + 0.004 * tokens + 10
        assert scene.peers.takers["a"].avoids and not scene.peers.takers["b"].avoids
        assert not scene.puller._given
        await scene.pairs["a"].giver.leave(turn)


async def test_what_is_kept_is_fetched_before_the_rest_is_ordered() -> None:
    async with Scene("a", delegates=True, role="prefill") as scene:
        await scene.keep("a", ids(40))
        turn = make_turn("t", ids(40, [1] * 20))
        assert await scene.puller.take(turn) == 0
        assert scene.pairs["a"].computed[-1] == 60
        assert await scene.start(turn) > 50


async def test_a_turn_that_leaves_has_nothing_fetched() -> None:
    async with Scene("a", delegates=True, role="prefill") as scene:
        scene.pairs["a"].giver.fault = lambda name, number: 30.0 * (name == "offer")
        task = asyncio.ensure_future(scene.puller.take(make_turn("t", ids(40))))
        await asyncio.sleep(0.02)
        task.cancel()
        assert isinstance((await asyncio.gather(task, return_exceptions=True))[0], asyncio.CancelledError)
        assert not scene.puller._given

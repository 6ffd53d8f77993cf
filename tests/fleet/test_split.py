"""The network splits while caches travel: both sides go on, and are one fleet again afterwards."""

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from dsuf.errors import CommandError
from dsuf.trial.fleet import find_program
from dsuf.trial.program import Program, stop_all
from tests.fleet.network import HUB, Network, NotAllowed
from tests.fleet.rig import NO_THINKING, opening

pytestmark = [pytest.mark.full, pytest.mark.needs_redis, pytest.mark.timeout(300)]
NODES = 3
PORT, CONTROL_PORT, REDIS_PORT = 8000, 8100, 6379  # each namespace has all ports
ROUNDS = 3


class Split:
    """Three nodes in a network of three places, Redis at the hub, and a node alone at the fourth place."""

    def __init__(self, network: Network, folder: Path) -> None:
        self.network, self.secret = network, secrets.token_hex(16)
        redis = [find_program("redis-server"), "--port", str(REDIS_PORT), "--save", "", "--protected-mode", "no"]
        self.redis = Program("redis", [*network.within(HUB), *redis, "--dir", str(folder)], folder)
        self.nodes = [self._node(place, folder) for place in range(1, NODES + 2)]

    def _node(self, place: int, folder: Path) -> Program:
        flags = {
            "port": PORT, "control-host": self.network.address(place), "control-port": CONTROL_PORT,
            "node-id": f"node{place}", "prefill": "exact", "threads": 1, "cache-bytes": 96 << 20,
        }  # fmt: skip
        if place <= NODES:
            flags["redis-url"] = f"redis://{self.network.address(HUB)}:{REDIS_PORT}/0"
        words = [word for name, value in flags.items() for word in (f"--{name}", str(value))]
        command = [*self.network.within(place), sys.executable, "-m", "dsuf", "serve", *words]
        return Program(f"node{place}", command, folder, os.environ | {"DSUF_PEER_SECRET": self.secret})

    async def ask(self, place: int, path: str, body: Mapping[str, Any] | None = None) -> tuple[int, Any]:
        """What the node at `place` answers."""
        return await asyncio.to_thread(self.network.ask, place, PORT, path, body)

    async def say(self, place: int, messages: Sequence[Mapping[str, str]]) -> tuple[str, Mapping[str, int]]:
        """A turn at `place`: the reply, and where the prompt came from."""
        status, found = await self.ask(
            place, "/v1/chat/completions",
            {
                "model": "deepseek-flash", "messages": messages, "max_tokens": 6, "temperature": 0,
                "thinking": NO_THINKING,
            },
        )  # fmt: skip
        assert status == 200, found
        return found["choices"][0]["message"]["content"], found["usage"]["prompt_tokens_details"]

    async def facts(self, place: int) -> Mapping[str, Any]:
        """What the node at `place` tells of itself."""
        facts: Mapping[str, Any] = (await self.ask(place, "/server_info"))[1]["node"]
        return facts

    async def is_ready(self, place: int) -> bool:
        """Whether it takes turns."""
        try:
            return (await self.ask(place, "/readyz"))[0] == 200
        except OSError:
            return False

    async def wait_whole(self) -> None:
        """Wait until all know each other, and nothing is held."""

        async def whole(place: int) -> bool:
            facts = await self.facts(place)
            fleet, caches = facts["fleet"], facts["session_cache"]
            held = any(caches[name] for name in ("turns", "copies", "leases", "filling", "dying"))
            known = fleet["trouble"] is None and len(fleet["members"]) == NODES - 1 and not fleet["peers"]["suspects"]
            return known and not held and not fleet["guests"]["offers"] and not any(facts["turns"].values())

        for place in range(1, NODES + 1):
            await until(lambda place=place: whole(place))  # type: ignore[misc]


async def until(condition: Callable[[], Awaitable[bool]], within_s: float = 60.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not await condition():  # noqa: ASYNC110
            await asyncio.sleep(0.1)


@pytest.fixture
def split(tmp_path: Path) -> Iterator[Split]:
    """All of it; skips loudly where namespaces are not allowed."""
    try:
        find_program("redis-server")
        with Network(NODES + 1) as network:
            fleet = Split(network, tmp_path)
            try:
                for program in (fleet.redis, *fleet.nodes):
                    program.start()
                yield fleet
            finally:
                stop_all([*fleet.nodes, fleet.redis], 0.0)
    except (NotAllowed, CommandError) as error:
        pytest.skip(f"no network split: {error}")


async def test_a_split_during_pulls(split: Split) -> None:
    """One node is cut off from peers and Redis with its caches half-way: both sides answer, ready all the time."""
    for place in range(1, NODES + 2):
        await until(lambda place=place: split.is_ready(place))  # type: ignore[misc]
    for number in range(ROUNDS):
        victim = number + 1
        others = [place for place in range(1, NODES + 1) if place != victim]
        await split.wait_whole()
        talks = [[{"role": "user", "content": opening(3 * number + i, 140)}] for i in range(3)]
        for talk in talks:
            await go_on(split, victim, talk)
        await asyncio.sleep(0.5)  # the news, before the cable is slow
        split.network.slow_down(victim, "400kbit")
        began_s = time.monotonic()
        turns = [
            asyncio.ensure_future(go_on(split, place, talk))
            for place, talk in zip([*others, victim], talks, strict=True)
        ]
        await asyncio.sleep(0.3)
        split.network.split(victim)
        found = await asyncio.gather(*turns)
        print(f"round {number}: {time.monotonic() - began_s:.1f} s, {found}")
        assert not any(details["peer_tokens"] for details in found), "the split came too late"
        await until(lambda: says_trouble(split, victim), 30.0)  # noqa: B023
        for place, talk in zip((others[1], victim, others[0]), talks, strict=True):
            await go_on(split, place, talk)
            assert await split.is_ready(place)
        split.network.join(victim)
        split.network.speed_up(victim)
        await split.wait_whole()
        details = [await go_on(split, place, talk) for place, talk in zip((victim, *others), talks, strict=True)]
        assert any(found["peer_tokens"] for found in details), details
        for i, talk in enumerate(talks):
            assert [m["content"] for m in talk] == await converse_alone(split, 3 * number + i), (number, i)


async def says_trouble(split: Split, place: int) -> bool:
    """Whether the node at `place` says that it does not reach the directory, and is ready all the same."""
    status, said = await split.ask(place, "/readyz")
    assert status == 200, said
    return "degraded" in said


async def go_on(split: Split, place: int, talk: list[dict[str, str]]) -> Mapping[str, int]:
    """The next turn of a conversation, and what comes after it."""
    reply, details = await split.say(place, talk)
    talk.append({"role": "assistant", "content": reply})
    talk.append({"role": "user", "content": f"Go on, part {len(talk)}."})
    return details


async def converse_alone(split: Split, number: int) -> list[str]:
    """What is said in conversation `number` with the node that is in no fleet."""
    talk = [{"role": "user", "content": opening(number, 140)}]
    for _ in range(4):
        await go_on(split, NODES + 1, talk)
    return [message["content"] for message in talk]

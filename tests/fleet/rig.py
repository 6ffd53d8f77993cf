"""A fleet of real processes, and conversations with it over HTTP."""

import asyncio
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import aiohttp

from dsuf.trial.ports import can_bind

NO_THINKING = {"type": "disabled"}
WORDS = ("river", "stone", "window", "paper", "candle", "garden", "silver", "engine")
TOTALS = ("device_tokens", "host_tokens", "peer_tokens", "computed_tokens")


def opening(number: int, words: int) -> str:
    """What a conversation begins with, so long that caches matter."""
    return f"Note {number}. " + " ".join(WORDS[(number + i * (number + 3)) % len(WORDS)] for i in range(words))


def find_ports() -> int:
    """A base port whose neighbours, as a fleet uses them, are free; below those that the system gives away."""
    for base in random.sample(range(10_000, 32_000, 500), 40):
        if all(
            can_bind("127.0.0.1", base + above) for start in (0, 100, 200, 300) for above in range(start, start + 8)
        ):
            return base
    raise AssertionError("no room for a fleet's ports")


class Chat:
    """A conversation. `details` tells where the prompt tokens of its turns came from. `held_tokens` are those that the
    turn before had left behind somewhere, `recomputed_tokens` those of them that were computed all the same.
    """

    def __init__(self, session: aiohttp.ClientSession, opening: str, **fields: Any) -> None:
        self.session, self.fields = session, fields
        self.messages: list[Mapping[str, str]] = [{"role": "user", "content": opening}]
        self.replies: list[str] = []
        self.details: list[Mapping[str, int]] = []
        self.held_tokens = 0
        self.recomputed_tokens = 0
        self._left_tokens = 0

    async def ask(self, url: str, *, max_tokens: int = 6) -> Mapping[str, int]:
        """Have the conversation answered at `url`; where the prompt came from. Raises `AssertionError` otherwise."""
        body = {
            "model": "deepseek-flash", "messages": self.messages, "max_tokens": max_tokens, "temperature": 0,
            "thinking": NO_THINKING, **self.fields,
        }  # fmt: skip
        async with self.session.post(f"{url}/v1/chat/completions", json=body) as reply:
            text = await reply.text()
            assert reply.status == 200, (reply.status, text)
        found = json.loads(text)
        details: Mapping[str, int] = found["usage"]["prompt_tokens_details"]
        assert sum(details[name] for name in TOTALS) == found["usage"]["prompt_tokens"]
        self.held_tokens += self._left_tokens
        new_tokens = found["usage"]["prompt_tokens"] - self._left_tokens
        self.recomputed_tokens += max(0, details["computed_tokens"] - new_tokens)
        self._left_tokens = found["usage"]["total_tokens"]
        self.replies.append(found["choices"][0]["message"]["content"])
        self.details.append(details)
        self.messages.append({"role": "assistant", "content": self.replies[-1]})
        return details

    def say(self, text: str) -> None:
        """The next thing that the user says."""
        self.messages.append({"role": "user", "content": text})


def add_up(chats: Sequence[Chat], *, first: bool) -> dict[str, int]:
    """Prompt tokens by source, of all first turns or of all later ones."""
    details = [found for chat in chats for found in (chat.details[:1] if first else chat.details[1:])]
    return {name: sum(found[name] for found in details) for name in TOTALS}


async def wait_settled(url: str, within_s: float = 20.0) -> Mapping[str, Any]:
    """The facts of the node at `url` once nothing of its caches is in use; fails where that does not come about."""
    facts: dict[str, Any] = {}
    async with aiohttp.ClientSession() as session, asyncio.timeout(within_s):
        while True:
            async with session.get(f"{url}/server_info") as reply:
                facts = (await reply.json())["node"]
            caches, turns = facts["session_cache"], facts["turns"]
            idle = not any(caches[name] for name in ("turns", "copies", "pages_held", "leases", "filling", "dying"))
            if idle and not any(turns.values()) and not facts["fleet"].get("guests", {}).get("offers"):
                return facts
            await asyncio.sleep(0.05)


async def wait_known(url: str, within_s: float = 30.0) -> None:
    """Wait until the node at `url` knows what others keep."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(within_s):
        while True:
            async with session.get(f"{url}/server_info") as reply:
                if (await reply.json())["node"]["fleet"]["directory"]["entries"]:
                    return
            await asyncio.sleep(0.1)


async def wait_told(url: str, other: str, within_s: float = 30.0) -> None:
    """Wait until the node at `other` knows as many prefixes as the one at `url` keeps."""
    async with aiohttp.ClientSession() as session, asyncio.timeout(within_s):
        while True:
            found = []
            for each in (url, other):
                async with session.get(f"{each}/server_info") as reply:
                    found.append((await reply.json())["node"]["fleet"]["directory"])
            if found[0]["own"] and not found[0]["unsent"] and found[1]["entries"] >= found[0]["own"]:
                return
            await asyncio.sleep(0.05)


async def read_ready(url: str) -> str:
    """Status and text of what the node at `url` says about being ready."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/readyz") as reply:
        return f"{reply.status} {await reply.text()}"

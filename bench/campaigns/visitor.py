"""One client of a soak: does one thing after the other, chosen at random, and checks each answer."""

import asyncio
import json
import random
import time
from collections.abc import Awaitable, Callable
from typing import Any

import aiohttp

from bench.campaigns.tally import Tally
from bench.chat import Reply, stream
from bench.conversation import Conversation, Shape

SHAPE = Shape(system_words=120, prompt_words=40, turns=3, max_tokens=24, thinking_share=0.2)
DEADLINE_S = 400.0
CHAT, MESSAGES = "/v1/chat/completions", "/v1/messages"
CANARIES = ("Count the pages.", "Where does a token go?", "Name the node. " * 60)

_BAD: tuple[tuple[str, str, bytes, int], ...] = (
    ("POST", CHAT, b"{", 400),
    ("POST", CHAT, b'{"model": "deepseek-flash"}', 400),
    ("POST", CHAT, b'{"model": "deepseek-flash", "messages": [{"role": "nobody", "content": "x"}]}', 400),
    ("POST", CHAT, b'{"messages": [{"role": "user", "content": "x"}], "max_tokens": -1}', 400),
    ("POST", MESSAGES, b"[]", 400),
    ("POST", "/v1/nothing", b"{}", 404),
    ("GET", CHAT, b"", 405),
)


class Visitor:
    """A client with a key, whose doings are drawn from `chance` alone. What goes wrong is told to `tally`."""

    def __init__(self, client: aiohttp.ClientSession, url: str, key: str, chance: random.Random, tally: Tally) -> None:
        self._client = client
        self._url = url
        self._headers = {"authorization": f"Bearer {key}"}
        self._chance = chance
        self._tally = tally
        self._doings: dict[Callable[[], Awaitable[None]], int] = {
            self.talk: 6, self.ask_whole: 3, self.send_message: 2, self.ask_long: 1,
            self.leave_stream: 3, self.leave_whole: 2, self.send_nonsense: 3, self.ask_canary: 2, self.ask_hurried: 1,
        }  # fmt: skip

    async def visit(self, until_s: float) -> None:
        """Do things until the monotonic time `until_s`."""
        while time.monotonic() < until_s:
            doing = self._chance.choices(list(self._doings), list(self._doings.values()))[0]
            name = doing.__name__
            try:
                async with asyncio.timeout(3 * DEADLINE_S):
                    await doing()
                self._tally.count(name)
            except (aiohttp.ClientError, OSError, TimeoutError, LookupError, ValueError) as error:
                self._tally.fault(name, f"{type(error).__name__}: {error}")
            await asyncio.sleep(self._chance.expovariate(4.0))

    async def talk(self) -> None:
        """A conversation of some turns, which shares its beginning with all others."""
        conversation = Conversation(SHAPE, self._chance)
        while not conversation.over:
            reply = await self._stream(conversation.ask() | self._draw_class())
            if reply.error is not None:
                self._tally.fault("talk", reply.error)
                return
            self._tally.check_usage("talk", reply.usage)
            conversation.hear(reply)

    async def ask_whole(self) -> None:
        """A reply that is not streamed."""
        async with self._post(CHAT, self._draw_body(stream=False)) as response:
            answer = await response.json()
            if response.status != 200 or answer["choices"][0]["finish_reason"] not in ("length", "stop", "tool_calls"):
                raise ValueError(f"status {response.status}: {str(answer)[:200]}")
            self._tally.check_usage("ask_whole", answer["usage"])

    async def send_message(self) -> None:
        """A stream in the other protocol."""
        body = {"model": "deepseek-flash", "max_tokens": 20, "stream": True}
        body |= {"messages": [{"role": "user", "content": f"Number {self._chance.randrange(1000)}"}]}
        async with self._post(MESSAGES, body) as response:
            text = await response.text()
            if response.status != 200 or "event: message_stop" not in text:
                raise ValueError(f"status {response.status}: {text[-200:]}")

    async def ask_long(self) -> None:
        """A long prompt with a short reply."""
        words = " ".join(str(self._chance.randrange(10_000)) for _ in range(self._chance.randrange(400, 1200)))
        reply = await self._stream(self._draw_body() | {"messages": [{"role": "user", "content": words}]})
        if reply.error is not None:
            self._tally.fault("ask_long", reply.error)
        else:
            self._tally.check_usage("ask_long", reply.usage)

    async def ask_hurried(self) -> None:
        """A request with a deadline that it may well miss: either the whole answer or the error for that."""
        headers = self._headers | {"x-dsuf-timeout-s": str(self._chance.choice((0.2, 1.0, 5.0)))}
        async with self._client.post(self._url + CHAT, json=self._draw_body(stream=False), headers=headers) as response:
            answer = await response.json()
            if (response.status, "error" in answer) not in ((200, False), (504, True)):
                raise ValueError(f"status {response.status}: {str(answer)[:200]}")

    async def leave_stream(self) -> None:
        """A stream that is left after some events, or before the first."""
        events = self._chance.choice((0, 0, 1, 5, 20))
        async with self._post(CHAT, self._draw_body() | {"max_tokens": 400}) as response:
            for _ in range(events):
                await response.content.readline()
            response.close()

    async def leave_whole(self) -> None:
        """A request that is left after some time, whatever it has come to."""
        try:
            async with asyncio.timeout(self._chance.uniform(0, 1.5)):
                async with self._post(CHAT, self._draw_body(stream=False) | {"max_tokens": 400}) as response:
                    await response.read()
        except TimeoutError:
            return

    async def send_nonsense(self) -> None:
        """A request that must be refused, with the status that it must be refused with."""
        method, path, body, status = self._chance.choice(_BAD)
        headers = self._headers
        if self._chance.random() < 0.2:
            headers, status = {"authorization": "Bearer nobody"}, 401
        async with self._client.request(method, self._url + path, data=body or None, headers=headers) as response:
            text = await response.text()
            if response.status != status or "error" not in json.loads(text):
                raise ValueError(f"{method} {path} {body[:40]!r}: status {response.status}, not {status}: {text[:100]}")

    async def ask_canary(self) -> None:
        """A greedy prompt whose reply must be the same whenever it is asked."""
        prompt = self._chance.choice(CANARIES)
        body = {"model": "deepseek-flash", "stream": True, "stream_options": {"include_usage": True}, "temperature": 0}
        body |= {"max_tokens": 32, "thinking": {"type": "disabled"}, "messages": [{"role": "user", "content": prompt}]}
        reply = await self._stream(body)
        if reply.error is not None:
            self._tally.fault("ask_canary", reply.error)
            return
        self._tally.check_usage("ask_canary", reply.usage)
        if (first := self._tally.answers.setdefault(prompt, reply.content)) != reply.content:
            self._tally.fault("ask_canary", f"{reply.content!r} instead of {first!r}")

    def _draw_body(self, *, stream: bool = True) -> dict[str, Any]:
        """The first request of some conversation."""
        body = Conversation(SHAPE, self._chance).ask() | self._draw_class() | {"stream": stream}
        return body if stream else {name: value for name, value in body.items() if name != "stream_options"}

    def _draw_class(self) -> dict[str, Any]:
        """Whom a request is for, and how urgent it is."""
        return {"user_id": f"user-{self._chance.randrange(5)}", "priority": self._chance.choice((0, 0, 0, 5, 50))}

    async def _stream(self, body: dict[str, Any]) -> Reply:
        """The reply to a streamed chat request."""
        return await stream(self._client, self._url + CHAT, body, self._headers, DEADLINE_S)

    def _post(self, path: str, body: dict[str, Any]) -> Any:
        """A request, for use in an `async with`."""
        return self._client.post(self._url + path, json=body, headers=self._headers)

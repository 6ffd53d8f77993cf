"""A streaming chat client that notes when what arrived."""

import asyncio
import time
from collections.abc import Mapping
from typing import Any

import aiohttp
import msgspec

from bench.figures import Record, read_sources

_DATA = b"data: "
_TEXTS = ("content", "reasoning_content")


class Reply(msgspec.Struct, kw_only=True):
    """A reply as far as it has come: its text, its calls by index, why it ended, what went wrong."""

    arrivals_s: list[float] = []
    content: str = ""
    calls: dict[int, dict[str, Any]] = {}
    finish: str | None = None
    usage: dict[str, Any] = {}
    done: bool = False
    error: str | None = None
    retry_after_s: float | None = None

    def take(self, data: bytes, now_s: float) -> None:
        """One data line of the stream."""
        if data == b"[DONE]":
            self.done = True
            return
        event = msgspec.json.decode(data)
        if "error" in event:
            self.error = f"stream: {event['error'].get('type', 'error')}"
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices", ()):
            self.finish = choice.get("finish_reason") or self.finish
            delta = choice.get("delta", {})
            self.content += delta.get("content") or ""
            self._take_calls(delta.get("tool_calls") or ())
            if any(delta.get(name) for name in (*_TEXTS, "tool_calls")):
                self.arrivals_s.append(now_s)

    def _take_calls(self, parts: Any) -> None:
        """Add pieces of tool calls to what came before."""
        for part in parts:
            function = part.get("function", {})
            call = self.calls.setdefault(part["index"], {"id": "", "name": "", "arguments": ""})
            call["id"] = part.get("id") or call["id"]
            call["name"] += function.get("name") or ""
            call["arguments"] += function.get("arguments") or ""

    def record(self, turn: int, started_s: float) -> Record:
        """What is kept of it."""
        return Record(
            turn=turn, started_s=started_s, ended_s=time.monotonic(), arrivals_s=tuple(self.arrivals_s),
            completion_tokens=self.usage.get("completion_tokens", 0), prompt_tokens=self.usage.get("prompt_tokens", 0),
            sources=read_sources(self.usage), error=self.error,
        )  # fmt: skip


async def stream(
    client: aiohttp.ClientSession, url: str, body: Mapping[str, Any], headers: Mapping[str, str], deadline_s: float
) -> Reply:
    """The reply to `body` at `url` (…/chat/completions); whatever goes wrong stands in its `error`."""
    reply = Reply()
    try:
        async with asyncio.timeout(deadline_s), client.post(url, json=body, headers=headers) as response:
            if response.status != 200:
                reply.error = f"status {response.status}"
                if (wait := response.headers.get("retry-after", "")).isdigit():
                    reply.retry_after_s = float(wait)
                await response.read()
                return reply
            async for line in response.content:
                if line.startswith(_DATA):
                    reply.take(line[len(_DATA) :].rstrip(), time.monotonic())
        if not reply.done and reply.error is None:
            reply.error = "no end"
    except TimeoutError:
        reply.error = "deadline"
    except (aiohttp.ClientError, ConnectionError) as error:
        reply.error = reply.error or type(error).__name__
    return reply

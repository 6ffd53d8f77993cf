"""A server on loopback over scripted tickets, and raw sockets to be rude to it with."""

import asyncio
import contextlib
import json
import re
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
from aiohttp import web

from dsuf.api.connection import ApiRunner
from dsuf.api.keyring import Key, Keyring
from dsuf.api.parts import Parts, Readiness, Settings
from dsuf.api.server import build_app
from dsuf.recipe.vocabulary import Vocabulary
from dsuf.types import EngineFacts, StepResult, Times, Turn

MODEL = "deepseek-flash"
CONTEXT_TOKENS = 1_048_576

Step = StepResult | Exception | float
"""What a scripted ticket does next: give a result, raise, or sleep for some seconds (infinity: until cancelled)."""


class ScriptedTicket:
    """A ticket that plays its script and remembers that it was cancelled."""

    def __init__(self, turn: Turn, script: Sequence[Step], on_delivered: Callable[[], None], *, pushes: bool) -> None:
        self.turn, self.on_delivered, self.pushes = turn, on_delivered, pushes
        self.script = list(script)
        self.cancelled = asyncio.Event()
        self.reason: str | None = None
        self.used_tokens: int | None = None
        self.given = 0
        self.iterated = 0
        self.take: Callable[[StepResult], bool] | None = None
        self.ended = False
        self.submitted_s = time.monotonic()

    @property
    def times(self) -> Times:
        return Times(submitted_s=self.submitted_s, attached_s=self.submitted_s + 0.001)

    async def __aiter__(self) -> AsyncIterator[StepResult]:
        for step in self.script:
            await asyncio.sleep(0)
            if isinstance(step, float):
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.cancelled.wait(), None if step == float("inf") else step)
            if self.cancelled.is_set():
                return
            if isinstance(step, Exception):
                raise step
            if isinstance(step, StepResult):
                self.given += 1
                self.ended = step.finish is not None
                if self.given > 1 and self.take is not None and not self.ended and self.take(step):
                    self.on_delivered()
                else:
                    self.iterated += 1
                    yield step

    def offer_to(self, take: Callable[[StepResult], bool]) -> None:
        self.take = take if self.pushes else None

    def cancel(self, reason: str = "abort", used_tokens: int | None = None) -> None:
        if self.reason is None:
            self.reason, self.used_tokens = reason, used_tokens
        self.cancelled.set()


class ScriptedSubmit:
    """Plays `script` for every turn; `refusal` is raised instead where it is set. With `pushes` results are offered."""

    def __init__(self) -> None:
        self.script: Callable[[Turn], Sequence[Step]] = lambda turn: [StepResult(turn=turn.id, finish="stop")]
        self.refusal: Exception | None = None
        self.pushes = True
        self.on_delivered: Callable[[], None] = lambda: None
        self.tickets: list[ScriptedTicket] = []

    def submit(self, turn: Turn) -> ScriptedTicket:
        if self.refusal is not None:
            raise self.refusal
        self.tickets.append(ScriptedTicket(turn, self.script(turn), self.on_delivered, pushes=self.pushes))
        return self.tickets[-1]

    @property
    def last(self) -> ScriptedTicket:
        return self.tickets[-1]


@dataclass
class FakeStatus:
    """A node's state, set by hand."""

    draining: bool = False
    failing: list[str] = field(default_factory=list)
    dead: list[str] = field(default_factory=list)
    flushed: int = 0

    def liveness(self) -> Readiness:
        return Readiness(not self.dead, self.dead)

    def readiness(self) -> Readiness:
        failing = [*self.failing, *(["draining"] if self.draining else [])]
        return Readiness(not failing, failing)

    def metrics_text(self) -> bytes:
        return b"dsuf_example_total 1.0\n"

    def facts(self) -> Mapping[str, object]:
        return {"role": "both"}

    def flush_cache(self) -> int:
        self.flushed += 1
        return 7


class CountingMetrics:
    """Counts in lists."""

    def __init__(self) -> None:
        self.responses: list[tuple[str, int]] = []
        self.disconnects: list[str] = []
        self.conversion_errors: list[str] = []
        self.malformed_calls = 0

    def count_response(self, endpoint: str, status: int) -> None:
        self.responses.append((endpoint, status))

    def count_disconnect(self, stage: str) -> None:
        self.disconnects.append(stage)

    def count_conversion_error(self, endpoint: str) -> None:
        self.conversion_errors.append(endpoint)

    def count_malformed_call(self) -> None:
        self.malformed_calls += 1


@dataclass
class Rig:
    """A running server and everything around it; `keys` can be changed."""

    url: str
    port: int
    client: aiohttp.ClientSession
    submit: ScriptedSubmit
    status: FakeStatus
    metrics: CountingMetrics
    vocabulary: Vocabulary
    keys: Keyring

    def play(self, *pieces: str | Sequence[int], finish: str = "stop", prefilled: bool = False) -> None:
        """Answer every turn with `pieces`, one a step."""
        ids = [tuple(self.vocabulary.encode(piece)) if isinstance(piece, str) else tuple(piece) for piece in pieces]

        def script(turn: Turn) -> list[Step]:
            steps: list[Step] = [StepResult(turn=turn.id, prefilled=1)] if prefilled else []
            steps += [StepResult(turn=turn.id, ids=piece) for piece in ids]
            return [*steps, StepResult(turn=turn.id, finish=finish)]

        self.submit.script = script

    async def post(self, path: str, body: Any, **headers: str) -> aiohttp.ClientResponse:
        """POST `body` (an object, or raw bytes) and read the response."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"} | {name.replace("_", "-"): v for name, v in headers.items()}
        response = await self.client.post(self.url + path, data=data, headers=headers)
        await response.read()
        return response

    async def chat(self, **fields: Any) -> aiohttp.ClientResponse:
        """A chat completion with `fields` over a small default body."""
        return await self.post("/v1/chat/completions", chat_body(**fields))

    async def message(self, **fields: Any) -> aiohttp.ClientResponse:
        """A Messages request with `fields` over a small default body."""
        return await self.post("/v1/messages", message_body(**fields))


def chat_body(**fields: Any) -> dict[str, Any]:
    """A small valid body; fields given as `...` are left out."""
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Say hi."}]} | fields
    return {name: value for name, value in body.items() if value is not ...}


message_body = chat_body


def as_key(key: str | Key) -> Key:
    """A key without bounds, where only its text is given."""
    return key if isinstance(key, Key) else Key(text=key)


@contextlib.asynccontextmanager
async def serve(vocabulary: Vocabulary, logprobs: bool = False, **settings: Any) -> AsyncIterator[Rig]:
    """Run the application on a free port of the loopback interface."""
    submit, status, metrics = ScriptedSubmit(), FakeStatus(), CountingMetrics()
    keys = Keyring([as_key(key) for key in settings.pop("keys", ())], settings.pop("admin_keys", ()))
    facts = EngineFacts(
        name="scripted", device="none", context_tokens=CONTEXT_TOKENS, max_turns=64, vocabulary=vocabulary.size,
        eos_id=vocabulary.eos_id, logprobs=logprobs,
    )  # fmt: skip
    parts = Parts(
        submit=submit, vocabulary=vocabulary, facts=facts, status=status, metrics=metrics, keys=keys,
        settings=Settings(**({"context_tokens": CONTEXT_TOKENS} | settings)),
    )  # fmt: skip
    runner = ApiRunner(build_app(parts), shutdown_s=1.0)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    timeout = aiohttp.ClientTimeout(total=20)
    try:
        async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:
            yield Rig(f"http://127.0.0.1:{port}", port, client, submit, status, metrics, vocabulary, keys)
    finally:
        await runner.cleanup()


def read_events(text: str) -> list[tuple[str | None, str]]:
    """The events of a stream, as (name, data); comments are left out."""
    events = []
    for block in text.split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        if lines:
            fields = dict(line.split(": ", 1) for line in lines)
            events.append((fields.get("event"), fields["data"]))
    return events


def read_objects(text: str) -> list[dict[str, Any]]:
    """The JSON objects of a stream's events."""
    return [json.loads(data) for _, data in read_events(text) if data != "[DONE]"]


def hide_ids(text: str) -> str:
    """`text` without what differs between two equal replies: ids, times."""
    text = re.sub(r"(chatcmpl-|msg_|call_\d\d_|toolu_)[0-9A-Za-z_-]+", r"\1X", text)
    return re.sub(r'"created":\d+', '"created":0', text)


async def connect(port: int, path: str, body: Any, *, close: bool = False) -> socket.socket:
    """A raw connection on which a whole request was sent."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    loop = asyncio.get_running_loop()
    raw = socket.socket()
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)  # so that who does not read is soon noticed
    raw.setblocking(False)
    await loop.sock_connect(raw, ("127.0.0.1", port))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n"
    await loop.sock_sendall(raw, head.encode() + (b"connection: close\r\n" if close else b"") + b"\r\n" + data)
    return raw


def leave(raw: socket.socket, how: str) -> None:
    """Close in one of the ways that clients do."""
    if how == "half-close":
        raw.shutdown(socket.SHUT_WR)
        return
    if how == "reset":
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


async def receive(raw: socket.socket, timeout_s: float = 10.0) -> bytes:
    """Everything until the server closes; a reset counts as that."""
    loop, parts = asyncio.get_running_loop(), []
    async with asyncio.timeout(timeout_s):
        with contextlib.suppress(ConnectionError):
            while piece := await loop.sock_recv(raw, 1 << 16):
                parts.append(piece)
    return b"".join(parts)


async def until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Wait for `condition`; raises `TimeoutError`."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - conditions are plain state, without an event
            await asyncio.sleep(0.005)

"""Questions and answers between two nodes over one wire, many at a time, each with a number and a deadline."""

import asyncio
from collections.abc import Awaitable, Callable

from dsuf.errors import DsufError, PeerError, PeerLost
from dsuf.kv.transport.wire import (
    GIVES_BACK,
    Answer,
    Cancel,
    Failed,
    Message,
    Ping,
    Pong,
    Question,
    Reply,
    Request,
    Wire,
    decode,
    encode,
)
from dsuf.observe.log import log_event

MOST_REQUESTS = 256
"""Questions of one side that may be under way at a time."""
SILENCE_S = 10.0
"""A peer of which nothing was heard for so long is gone; it is asked for a sign of life before."""

_LONGEST_S = 600.0
_TEXT_LENGTH = 500

Handle = Callable[[Question], Awaitable[Answer]]


async def refuse(body: Question) -> Answer:
    """The answer of a side that only asks."""
    return Failed("nothing is given away here")


class Link:
    """One end. `handle` answers the other's questions, each in a task of its own, cancelled where nobody waits for it
    any more. `on_end` is called once, when the wire is broken or closed.

    Numbers are the asker's. One that comes twice is answered once; an answer that nobody waits for is dropped.
    """

    def __init__(
        self, wire: Wire, handle: Handle = refuse, *, silence_s: float = SILENCE_S,
        on_end: Callable[[], None] = lambda: None,
    ) -> None:  # fmt: skip
        self._wire, self._handle, self._silence_s, self._on_end = wire, handle, silence_s, on_end
        self._asked: dict[int, asyncio.Future[Answer]] = {}
        self._answering: dict[int, asyncio.Task[None]] = {}
        self._seen: dict[int, None] = {}
        self._number = 0
        self._loop = asyncio.get_running_loop()
        self._heard_s, self._heard = self._loop.time(), asyncio.Event()
        self._lost: PeerLost | None = None
        self._timer = self._loop.call_later(silence_s / 3, self._watch)
        self._running = self._loop.create_task(self._run())

    @property
    def is_open(self) -> bool:
        """Whether the other end can be asked."""
        return self._lost is None

    async def ask(self, body: Question, seconds: float) -> Answer:
        """The other's answer. Raises `TimeoutError`, `PeerLost`; `PeerError` for `Failed`, but for an unknown turn."""
        if self._lost is not None:
            raise PeerLost(str(self._lost))
        if len(self._asked) >= MOST_REQUESTS:
            raise PeerError(f"{MOST_REQUESTS} questions are under way to one peer already")
        self._number += 1
        number = self._number
        answer: asyncio.Future[Answer] = self._loop.create_future()
        self._asked[number] = answer
        try:
            async with asyncio.timeout(seconds):
                self._send(Request(number, seconds, body))
                reply = await answer
        finally:
            del self._asked[number]
            if not answer.done() or answer.cancelled():
                self._take_back(number, body)
        if isinstance(reply, Failed) and not reply.unknown:
            raise PeerError(reply.text)
        return reply

    async def probe(self, seconds: float) -> bool:
        """Whether there is a sign of life within `seconds`, for which the other end is asked."""
        self._heard.clear()
        self._send(Ping())
        try:
            async with asyncio.timeout(seconds):
                await self._heard.wait()
        except TimeoutError:
            return False
        return self._lost is None

    def end(self, why: str) -> None:
        """Break off: whoever waits gets `PeerLost`; idempotent."""
        if self._lost is not None:
            return
        self._lost = PeerLost(why)
        self._timer.cancel()
        self._heard.set()
        self._wire.close()
        for answer in self._asked.values():
            if not answer.done():
                answer.set_exception(PeerLost(why))
        for task in self._answering.values():
            task.cancel()
        self._on_end()

    async def wait_ended(self) -> None:
        """Wait until the wire is broken or closed."""
        await asyncio.wait({self._running})

    async def close(self) -> None:
        """Break off, and wait until nothing goes on."""
        self.end("closed")
        await asyncio.wait({self._running, *self._answering.values()})
        await self._wire.wait_closed()

    async def _run(self) -> None:
        """Take what comes until there is no more."""
        try:
            while True:
                frame = await self._wire.receive()
                self._heard_s = self._loop.time()
                self._heard.set()
                self._take(decode(frame))
        except PeerError as error:
            self.end(str(error))
        except Exception as error:
            log_event("peer connection failed", level="error", error=error)
            self.end("a fault on this side")

    def _take(self, message: Message) -> None:
        """One message."""
        if isinstance(message, Request):
            self._begin(message)
        elif isinstance(message, Reply):
            answer = self._asked.get(message.number)
            if answer is not None and not answer.done():
                answer.set_result(message.body)
        elif isinstance(message, Cancel):
            if (task := self._answering.get(message.number)) is not None:
                task.cancel()
        elif isinstance(message, Ping):
            self._send(Pong())

    def _take_back(self, number: int, body: Question) -> None:
        """Nobody waits for the answer any more. A cancellation can come in one breath with its question, which then
        would not even be begun."""
        if self._lost is None and not isinstance(body, GIVES_BACK):
            self._send(Cancel(number))

    def _begin(self, request: Request) -> None:
        """Answer a question in a task, unless it came before, or too many are under way."""
        if request.number in self._seen or self._lost is not None:
            return
        self._seen[request.number] = None
        if len(self._seen) > 4 * MOST_REQUESTS:
            del self._seen[next(iter(self._seen))]
        if len(self._answering) >= MOST_REQUESTS:
            self._send(Reply(request.number, Failed("too many questions at a time")))
            return
        task = self._loop.create_task(self._answer(request))
        self._answering[request.number] = task
        task.add_done_callback(lambda _: self._answering.pop(request.number, None))

    async def _answer(self, request: Request) -> None:
        """Answer one question. What fails here is told without details, but for errors that are meant for people."""
        body: Answer
        try:
            async with asyncio.timeout(min(max(request.timeout_s, 0.0), _LONGEST_S)):
                body = await self._handle(request.body)
        except TimeoutError:
            body = Failed("not in time")
        except DsufError as error:
            body = Failed(str(error)[:_TEXT_LENGTH])
        except Exception as error:
            log_event("peer not answered", level="warning", error=error, what=type(request.body).__name__)
            body = Failed("a fault on the other side")
        try:
            self._send(Reply(request.number, body))
        except PeerError as error:
            self._send(Reply(request.number, Failed(str(error))))

    def _send(self, message: Message) -> None:
        """Send, or find out that the wire is broken."""
        if self._lost is None:
            try:
                self._wire.send(encode(message))
            except PeerLost as error:
                self.end(str(error))

    def _watch(self) -> None:
        """Ask for a sign of life where it is silent, and end where it stays so."""
        silent_s = self._loop.time() - self._heard_s
        if silent_s >= self._silence_s:
            self.end(f"nothing was heard for {silent_s:.0f} s")
            return
        if silent_s >= self._silence_s / 3:
            self._send(Ping())
        if self._lost is None:
            self._timer = self._loop.call_later(self._silence_s / 3, self._watch)

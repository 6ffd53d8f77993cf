"""Questions and answers over a wire that holds frames back."""

import asyncio

import pytest

from dsuf.kv.transport.link import Link
from dsuf.kv.transport.wire import Answer, Ask, Disconnect, Done, Leave, Question, Release


class Held:
    """Implements `Wire`: one way to another end, on which nothing moves while it is `shut`."""

    def __init__(self) -> None:
        self.frames: asyncio.Queue[bytes] = asyncio.Queue()
        self.open = asyncio.Event()
        self.open.set()
        self.other = self

    def send(self, frame: bytes) -> None:
        """Put it on its way."""
        self.other.frames.put_nowait(frame)

    async def receive(self) -> bytes:
        """The next frame, as soon as the wire is open."""
        frame = await self.frames.get()
        await self.open.wait()
        return frame

    def close(self) -> None:
        """Nothing is to be closed."""

    async def wait_closed(self) -> None:
        """Nothing is left."""


@pytest.mark.parametrize(
    "body", [Leave("t"), Release(1), Disconnect(1), Ask("t", 0, False)], ids=lambda b: type(b).__name__
)
async def test_what_gives_something_back_is_done_however_late_it_comes(body: Question) -> None:
    """Question and cancellation arrive together, when nobody waits any more; what only asks is not even begun."""
    done: list[Question] = []

    async def handle(question: Question) -> Answer:
        done.append(question)
        return Done()

    ours, theirs = Held(), Held()
    ours.other, theirs.other = theirs, ours
    asker, answerer = Link(ours), Link(theirs, handle)
    running = [link._running for link in (asker, answerer)]
    try:
        theirs.open.clear()
        with pytest.raises(TimeoutError):
            await asker.ask(body, 0.02)
        theirs.open.set()
        assert isinstance(await asker.ask(Leave("last"), 5.0), Done)
        assert done == ([Leave("last")] if isinstance(body, Ask) else [body, Leave("last")])
    finally:
        asker.end("over")
        answerer.end("over")
        for task in running:
            task.cancel()
        await asyncio.wait(running)

"""A wire between two nodes that can be cut, frozen, slowed down or made to lie."""

import asyncio
import contextlib
from collections.abc import Callable


class Proxy:
    """Passes connections on to `port`. What comes back is counted over all of them: after `cut_at` bytes everything is
    cut, after `freeze_at` nothing moves any more in either direction; the byte at `flip_at` has one bit turned over.
    Each piece takes `slow_s`."""

    def __init__(self) -> None:
        self.port = 0
        self.came_bytes = 0
        self.cut_at: int | None = None
        self.freeze_at: int | None = None
        self.flip_at: int | None = None
        self.slow_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []

    async def start(self, port: int) -> None:
        """Listen."""
        self._to = port
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Cut everything."""
        self._server.close()
        self._cut()
        for task in list(self._tasks):
            task.cancel()
        while self._tasks:
            await asyncio.wait(self._tasks)
            await asyncio.sleep(0)
        await self._server.wait_closed()

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._to)
        except OSError:
            writer.transport.abort()
            return
        self._writers += [writer, far_writer]
        for source, sink, back in ((reader, far_writer, False), (far_reader, writer, True)):
            task = asyncio.create_task(self._pass(source, sink, self._change if back else bytes))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pass(
        self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, change: Callable[[bytes], bytes]
    ) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(4096):
                await asyncio.sleep(self.slow_s)
                data = change(data)
                if self.freeze_at is not None and self.came_bytes > self.freeze_at:
                    await asyncio.Event().wait()
                if self.cut_at is not None and self.came_bytes > self.cut_at:
                    self._cut()
                    return
                sink.write(data)
                await sink.drain()
        sink.transport.abort()

    def _change(self, data: bytes) -> bytes:
        before, self.came_bytes = self.came_bytes, self.came_bytes + len(data)
        if self.flip_at is None or not before <= self.flip_at < self.came_bytes:
            return data
        at = self.flip_at - before
        return data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]

    def _cut(self) -> None:
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

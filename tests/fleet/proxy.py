"""What stands between peers: a TCP relay that can be slow, silent or broken, and that knows when bytes flow."""

import asyncio
import contextlib
from collections.abc import Callable

_READ_BYTES = 16 << 10


class Proxy:
    """Relays `port` to `target` on loopback. A node that advertises `port` is reached through it by its peers.

    `pace_bytes_s` bounds what comes from the node, `silent` holds back everything in both directions. `arm` has
    something happen in the midst of what the node sends. `cut` breaks all connections.
    """

    def __init__(self, port: int, target: int) -> None:
        self.port, self.target = port, target
        self.pace_bytes_s = 0.0
        self.silent = False
        self.flips = 0
        self.sent_bytes = 0
        self._at_bytes = 0
        self._action: Callable[[], None] | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: asyncio.Server | None = None

    @property
    def armed(self) -> bool:
        """Whether what was armed has yet to happen."""
        return self._action is not None

    async def start(self) -> None:
        """Take connections."""
        self._server = await asyncio.start_server(self._relay, "127.0.0.1", self.port)

    def arm(self, size_bytes: int, action: Callable[[], None]) -> None:
        """Call `action` once the node has sent `size_bytes` more, before the last of them are passed on."""
        self._at_bytes, self._action = self.sent_bytes + size_bytes, action

    def heal(self) -> None:
        """Be a good relay from now on."""
        self.pace_bytes_s, self.silent, self.flips, self._action = 0.0, False, 0, None

    def cut(self) -> None:
        """Break all connections."""
        for writer in self._writers:
            writer.transport.abort()

    async def close(self) -> None:
        """End everything."""
        self.heal()
        self.cut()
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _relay(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection, both ways, until either side ends it."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._writers.add(writer)
        try:
            theirs, ours = await asyncio.open_connection("127.0.0.1", self.target)
            self._writers.add(ours)
            try:
                both = (self._pump(reader, ours, False), self._pump(theirs, writer, True))
                ways = [asyncio.ensure_future(way) for way in both]
                await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
                for way in ways:
                    way.cancel()
                await asyncio.gather(*ways, return_exceptions=True)
            finally:
                self._writers.discard(ours)
                ours.transport.abort()
        except OSError:
            pass  # the node is not there: its peer sees the connection end
        finally:
            self._writers.discard(writer)
            writer.transport.abort()
            self._tasks.discard(task)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, outward: bool) -> None:
        """Pass on what comes from one side; `outward` is from the node to its peer."""
        with contextlib.suppress(OSError):
            while data := await reader.read(_READ_BYTES):
                if outward:
                    data = await self._send(data)
                while self.silent:  # noqa: ASYNC110 - a relay that stands still has nothing better to do
                    await asyncio.sleep(0.02)
                writer.write(data)
                await writer.drain()

    async def _send(self, data: bytes) -> bytes:
        """What becomes of bytes from the node."""
        self.sent_bytes += len(data)
        if self._action is not None and self.sent_bytes >= self._at_bytes:
            action, self._action = self._action, None
            action()
        left_bytes = float(len(data))
        while self.pace_bytes_s and left_bytes > 0:  # which may be over before they are through
            await asyncio.sleep(0.02)
            left_bytes -= 0.02 * self.pace_bytes_s
        if self.flips and len(data) == _READ_BYTES:
            self.flips -= 1
            middle = len(data) // 2
            data = data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :]
        return data

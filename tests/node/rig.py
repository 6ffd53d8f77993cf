"""A node on the test's own loop with the scripted engine, and clients that are plain sockets."""

import asyncio
import contextlib
import io
import json
import socket
import struct
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dsuf.config import load_settings
from dsuf.node.node import Node, bind
from dsuf.node.startup import Startup

IDLE = {"queued": 0, "attached": 0, "running": 0, "writing": 0}


def write_script(folder: Path, rules: Sequence[Mapping[str, object]]) -> Path:
    """A script file of `rules`."""
    path = folder / "script.json"
    path.write_text(json.dumps({"rules": rules}))
    return path


@contextlib.asynccontextmanager
async def running(model: Path, script: Path, **settings: Any) -> AsyncIterator[Node]:
    """A node that has started. The system keeps few bytes that a client does not read, so that writing soon waits."""
    values = {"port": 0, "model": str(model), "engine": "scripted", "script": str(script)} | settings
    loaded = load_settings(values)
    with bind("127.0.0.1", 0) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16_384)
        node = Node(loaded, listener, Startup(io.StringIO()))
        try:
            await node.start()
            yield node
        finally:
            assert await node.stop()


class Client:
    """One connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    async def connect(cls, node: Node, *, buffer_bytes: int | None = None) -> "Client":
        """A new connection to `node`; with `buffer_bytes` it takes in little more than that while it does not read."""
        raw = socket.socket()
        raw.setblocking(False)
        if buffer_bytes is not None:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        await asyncio.get_running_loop().sock_connect(raw, ("127.0.0.1", int(node.url.rpartition(":")[2])))
        return cls(*await asyncio.open_connection(sock=raw))

    async def ask(self, text: str, *, path: str = "/v1/chat/completions", stream: bool = True, **fields: Any) -> None:
        """Send a request for generation."""
        body = {"model": "deepseek-flash", "stream": stream, "messages": [{"role": "user", "content": text}]}
        body |= {"thinking": {"type": "disabled"}, "max_tokens": 1000}
        await self.send("POST", path, json.dumps(body | fields).encode())

    async def send(self, method: str, path: str, body: bytes = b"") -> None:
        """Send a request with a JSON body."""
        lines = (
            f"{method} {path} HTTP/1.1",
            "host: x",
            "content-type: application/json",
            f"content-length: {len(body)}",
        )
        self.writer.write("\r\n".join((*lines, "", "")).encode() + body)
        await self.writer.drain()

    async def read_until(self, text: bytes, within_s: float = 10.0) -> bytes:
        """Read to the end of the next `text`."""
        async with asyncio.timeout(within_s):
            return await self.reader.readuntil(text)

    async def read_all(self, within_s: float = 10.0) -> bytes:
        """Read until the server closes; raises `ConnectionError` if it aborts."""
        async with asyncio.timeout(within_s):
            return await self.reader.read()

    async def read_reply(self, within_s: float = 10.0) -> tuple[int, dict[str, str], Any]:
        """Status, headers and decoded body of a response that says its length."""
        head = (await self.read_until(b"\r\n\r\n", within_s)).decode()
        status_line, *lines = head.strip().split("\r\n")
        headers = dict(line.lower().split(": ", 1) for line in lines)
        body = await self.reader.readexactly(int(headers["content-length"]))
        return int(status_line.split()[1]), headers, json.loads(body)

    def close(self) -> None:
        """FIN in both directions."""
        self.writer.close()

    def half_close(self) -> None:
        """FIN, still reading."""
        self.writer.write_eof()

    def reset(self) -> None:
        """RST."""
        raw = self.writer.get_extra_info("socket")
        raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()


async def get(node: Node, path: str) -> tuple[int, dict[str, str], Any]:
    """The JSON reply to a GET."""
    client = await Client.connect(node)
    try:
        await client.send("GET", path)
        return await client.read_reply()
    finally:
        client.close()

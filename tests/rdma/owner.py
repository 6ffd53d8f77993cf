"""The node that is read from, in a test machine: a process that does to itself whatever a case asks for.

python3 -m tests.rdma.owner     # starts that process, again whenever it is killed, until the file `done` appears
"""

import asyncio
import contextlib
import inspect
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import count
from typing import Any

import msgspec

from dsuf.errors import DsufError
from dsuf.kv.blocks import Blocks, map_memory
from dsuf.kv.point import seal
from dsuf.kv.transport.adapter import Adapter
from dsuf.kv.transport.queue_pair import QueuePairEnd
from dsuf.kv.transport.rdma import RdmaFabric
from dsuf.kv.transport.verbs import VerbsDevice
from tests.rdma.report import DONE

PORT = 7077
VerbsDevice.ack_timeout = 16  # an emulated processor, with others beside it, is slow to answer
BLOCK = 64 << 10
BLOCKS = 512


def write_blocks(blocks: Blocks, seed: int) -> None:
    """A pattern of its own in each block."""
    for block in range(blocks.count):
        blocks.view(block)[:] = (seed * 1_000_003 + block).to_bytes(8, "little") * (BLOCK // 8)


def freeze(seconds: float) -> None:
    """Stop this process for so long."""
    subprocess.Popen(["bash", "-c", f"sleep {seconds}; kill -CONT {os.getpid()}"])
    os.kill(os.getpid(), signal.SIGSTOP)


class Owner:
    """One connection's worth of an arena that can be read."""

    def __init__(self) -> None:
        self.blocks = Blocks(BLOCK, map_memory(BLOCK * BLOCKS))
        write_blocks(self.blocks, 1)
        self.device = VerbsDevice(os.environ["DSUF_ADDRESS"])
        self.adapter = Adapter(self.device, self.blocks.memory, BLOCK)
        self.half = RdmaFabric(self.adapter).owner()

    def connect(self, end: Any) -> Any:
        return self.half.accept(msgspec.convert(end, QueuePairEnd))

    def disconnect(self, number: int) -> None:
        self.half.destroy(number)

    def fence(self) -> None:
        """What happens when a lease runs out: nobody reads here any more, and the blocks serve something else."""
        self.half.close()
        write_blocks(self.blocks, 2)

    def rewrite(self) -> None:
        """What must not happen: blocks change while they may be read."""
        write_blocks(self.blocks, 3)

    def deregister(self) -> None:
        self.adapter.region.close()

    def serve_one_read(self) -> None:
        self.device.reads = 1

    def digests(self, blocks: list[int]) -> list[bytes]:
        return [seal(self.blocks.view(block)) for block in blocks]

    def pairs(self) -> int:
        return len(self.adapter)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    def freeze(self, seconds: float) -> None:
        freeze(seconds)

    def cut_link(self, seconds: float) -> None:
        """Lose everything for so long, once the answer has left."""
        card = os.environ["DSUF_CARD"]
        lose = f"sleep 0.3; tc qdisc replace dev {card} root netem loss 100%; sleep {seconds}; "
        subprocess.Popen(["bash", "-c", lose + f"tc qdisc del dev {card} root"])

    def close(self) -> None:
        self.half.close()
        self.adapter.close()


async def serve(make: Callable[[], Any], port: int) -> None:
    """What each connection asks of an object of its own; a request is its number, its name, and what it takes."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        owner = make()
        try:
            while head := await reader.read(4):
                number, name, arguments = msgspec.msgpack.decode(await reader.readexactly(int.from_bytes(head, "big")))
                try:
                    answer = getattr(owner, name)(*arguments)
                    reply = [number, True, await answer if inspect.isawaitable(answer) else answer]
                except DsufError as error:
                    reply = [number, False, str(error)]
                body = msgspec.msgpack.encode(reply)
                writer.write(len(body).to_bytes(4, "big") + body)
        except ConnectionError:
            pass
        finally:
            ended = owner.close()
            if inspect.isawaitable(ended):
                await ended
            writer.close()

    server = await asyncio.start_server(answer, os.environ["DSUF_ADDRESS"], port)
    while not DONE.exists():  # noqa: ASYNC110 - a shared folder has no event
        await asyncio.sleep(0.2)
    server.close()


class Control:
    """A connection to an owner, as the other node has one."""

    @classmethod
    async def open(cls, address: str, port: int = PORT) -> "Control":
        """Waits until the owner is there."""
        control = cls()
        control.numbers = count(1)
        async with asyncio.timeout(60):
            while True:
                try:
                    control.reader, control.writer = await asyncio.open_connection(address, port)
                    return control
                except OSError:
                    await asyncio.sleep(0.2)

    async def ask(self, name: str, *arguments: Any) -> Any:
        """The answer; raises `DsufError` with the owner's."""
        asked = self.tell(name, *arguments)
        number = 0
        while number != asked:  # answers that nobody waited for come first
            head = await self.reader.readexactly(4)
            number, good, answer = msgspec.msgpack.decode(await self.reader.readexactly(int.from_bytes(head, "big")))
        if not good:
            raise DsufError(answer)
        return answer

    def tell(self, name: str, *arguments: Any) -> int:
        """Without waiting for an answer; the request's number."""
        number = next(self.numbers)
        body = msgspec.msgpack.encode([number, name, arguments])
        self.writer.write(len(body).to_bytes(4, "big") + body)
        return number

    async def end(self, name: str) -> None:
        """Ask for something that ends the other side, and wait until it has."""
        self.tell(name)
        with contextlib.suppress(ConnectionError):
            await self.reader.read()
        self.close()

    def close(self) -> None:
        self.writer.close()


def run(module: str, make: Callable[[], Any], port: int) -> None:
    """Serve, or start the process that does, until the file `done` appears."""
    if sys.argv[1:] == ["once"]:
        asyncio.run(serve(make, port))
    else:
        while not DONE.exists():
            subprocess.run([sys.executable, "-m", module, "once"], check=False)


if __name__ == "__main__":
    run("tests.rdma.owner", Owner, PORT)

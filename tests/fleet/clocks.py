"""Times of day for the nodes of a fleet, other than the machine's.

Of a library of our own, since libfaketime takes a lock at every wait of a thread: a node is ten times slower with it.
"""

import shutil
import struct
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

import aiohttp

OFF_S = 300


def find_compiler() -> str | None:
    """The C compiler, where there is one."""
    return shutil.which("cc") or shutil.which("gcc")


class Clocks:
    """Times of day, kept in `folder`, for nodes 1 to `nodes`, which can be set while these run. Without a compiler they
    have the machine's."""

    def __init__(self, folder: Path, nodes: int) -> None:
        self._folder, self._library = folder, folder / "clock.so"
        for number in range(1, nodes + 1):
            if not self._path(number).exists():
                self.set(number, 0)

    def set(self, number: int, off_s: int) -> None:
        """Node `number` is `off_s` ahead from now on."""
        with self._path(number).open("r+b" if self._path(number).exists() else "wb") as file:
            file.write(struct.pack("=q", off_s))

    def build(self) -> None:
        """Compile what lets a process see another time of day."""
        if (compiler := find_compiler()) is not None and not self._library.exists():
            source = Path(__file__).with_name("clock.c")
            command = [compiler, "-O1", "-shared", "-fPIC", "-o", str(self._library), str(source), "-ldl"]
            subprocess.run(command, check=True)

    def environ(self, number: int) -> Mapping[str, str]:
        """What node `number` has to find in its environment."""
        if not self._library.exists():
            return {}
        return {"LD_PRELOAD": str(self._library), "CLOCK_FILE": str(self._path(number))}

    def _path(self, number: int) -> Path:
        return self._folder / f"clock{number}"


async def read_off_s(session: aiohttp.ClientSession, url: str) -> float:
    """How far the node at `url` is ahead, by the time that it gives a reply."""
    body = {"model": "deepseek-flash", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1}
    async with session.post(f"{url}/v1/chat/completions", json=body) as reply:
        return float((await reply.json())["created"]) - time.time()

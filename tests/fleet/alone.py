"""What a node alone answers: the measure of a fleet's replies."""

import asyncio
import signal
from collections.abc import Sequence
from pathlib import Path

import aiohttp

from dsuf.trial.fleet import TrialFleet
from tests.fleet.breakage import FLAGS, WORDS
from tests.fleet.rig import Chat, find_ports, opening


class Alone:
    """A node that is asked each conversation of a fleet's rounds once. Use within `async with`."""

    def __init__(self, folder: Path) -> None:
        self.fleet = TrialFleet(1, folder, port=find_ports(), flags=FLAGS)
        self._known: dict[int, Sequence[str]] = {}

    async def __aenter__(self) -> "Alone":
        """Start it."""
        await asyncio.to_thread(self.fleet.start)
        return self

    async def __aexit__(self, *_: object) -> None:
        """End it."""
        for program in self.fleet.programs:
            program.send(signal.SIGKILL)
        await asyncio.to_thread(self.fleet.stop, 5.0)

    async def replies(self, number: int) -> Sequence[str]:
        """Those of conversation `number`."""
        if number not in self._known:
            async with aiohttp.ClientSession() as session:
                chat = Chat(session, opening(number, WORDS))
                for turn in range(3):
                    await chat.ask(self.fleet.node_url(1))
                    chat.say(f"Go on, part {turn}.")
            self._known[number] = chat.replies
        return self._known[number]

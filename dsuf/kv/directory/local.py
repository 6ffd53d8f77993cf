"""The directory of a node that is alone."""

from collections.abc import Mapping

from dsuf.kv.directory.contract import Candidate, Health, Member
from dsuf.kv.trace import Trace


class LocalDirectory:
    """Implements `Directory`: there is nobody else."""

    async def start(self) -> None:
        """There is nothing to wait for."""

    def find(self, trace: Trace, *, replay_tokens: int = 0) -> list[Candidate]:
        """Nobody else keeps anything."""
        return []

    def members(self) -> list[Member]:
        """Nobody."""
        return []

    def health(self) -> Health:
        """Well."""
        return Health()

    def counters(self) -> Mapping[str, int]:
        """Nothing."""
        return {"members": 0, "entries": 0, "own": 0, "unsent": 0, "up": 1}

    async def withdraw(self) -> None:
        """Nobody has to know."""

    async def close(self) -> None:
        """Nothing is open."""

"""The memory of the host arena: one contiguous buffer, cut into blocks of a page each.

A peer reads blocks without asking, so each has a generation, which changes whenever the block is given out or comes
back: bytes that were read are good only if the generation is the same before and after.
"""

import mmap
from collections.abc import Sequence

SLICE = 256
"""Pages that are copied in one go, so that neither the event loop nor steps of an engine wait for long."""


def map_memory(size_bytes: int) -> memoryview:
    """Anonymous memory that takes room only as it is written."""
    return memoryview(mmap.mmap(-1, size_bytes) if size_bytes else bytearray())


class Blocks:
    """Blocks of `block_bytes` in `memory`; what is left over at its end is not used."""

    def __init__(self, block_bytes: int, memory: memoryview) -> None:
        self.block_bytes = block_bytes
        self.count = len(memory) // block_bytes
        self.generations = [0] * self.count
        self._memory = memory
        self._free = list(range(self.count))[::-1]
        self._used = bytearray(self.count)

    @property
    def memory(self) -> memoryview:
        """All blocks, one after the other."""
        return self._memory

    @property
    def free(self) -> int:
        """Blocks that nobody has."""
        return len(self._free)

    def blocks_for(self, size_bytes: int) -> int:
        """Blocks that hold so many bytes."""
        return -(-size_bytes // self.block_bytes)

    def take(self, count: int) -> list[int]:
        """`count` blocks; there are so many."""
        taken = [self._free.pop() for _ in range(count)]
        for block in taken:
            self._used[block] = 1
            self.generations[block] += 1
        return taken

    def give(self, blocks: Sequence[int]) -> None:
        """Blocks that nobody reads or writes any more come back."""
        for block in blocks:
            assert self._used[block], block
            self._used[block] = 0
            self.generations[block] += 1
            self._free.append(block)

    def view(self, block: int) -> memoryview:
        """The bytes of `block`."""
        return self._memory[block * self.block_bytes : (block + 1) * self.block_bytes]

    def pieces(self, blocks: Sequence[int], size_bytes: int) -> list[memoryview]:
        """The first `size_bytes` of `blocks`, block by block."""
        views = [self.view(block) for block in blocks]
        return [view[: size_bytes - i * self.block_bytes] for i, view in enumerate(views)]

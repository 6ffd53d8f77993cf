"""Neighbouring buffers as one, so that bytes move in few large calls."""

import ctypes
from collections.abc import Iterator, Sequence

CHUNK_BYTES = 4 << 20


def join_neighbours(views: Sequence[memoryview]) -> list[memoryview]:
    """The bytes of `views` in their order, those that lie one behind the other in one memory as one view. All can be
    written to."""
    runs: list[memoryview] = []
    first, start, end = memoryview(b""), 0, 0
    for view in views:
        if not len(view):
            continue
        address = ctypes.addressof(ctypes.c_char.from_buffer(view))
        if address != end or first.obj is not view.obj:
            runs += _cut(first, start, end)
            first, start = view, address
        end = address + len(view)
    return [*runs, *_cut(first, start, end)]


def cut_chunks(runs: Sequence[memoryview], size_bytes: int = CHUNK_BYTES) -> Iterator[list[memoryview]]:
    """The bytes of `runs` in pieces of `size_bytes` (the last one is shorter), each as a list of views."""
    chunk: list[memoryview] = []
    room = size_bytes
    for run in runs:
        at = 0
        while at < len(run):
            part = run[at : at + room]
            chunk.append(part)
            at, room = at + len(part), room - len(part)
            if not room:
                yield chunk
                chunk, room = [], size_bytes
    if chunk:
        yield chunk


def _cut(view: memoryview, start: int, stop: int) -> list[memoryview]:
    """The bytes from address `start` to `stop` of the memory that `view`, which begins there, is of; none of none."""
    if stop - start == len(view):
        return [view] if len(view) else []
    whole = memoryview(view.obj).cast("B")
    base = ctypes.addressof(ctypes.c_char.from_buffer(whole))
    return [whole[start - base : stop - base]]

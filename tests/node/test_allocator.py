"""What was freed goes back to the system, wherever in a heap it lies and whichever thread had it."""

import asyncio
import ctypes
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest

from dsuf.node import allocator

ROOT = Path(__file__).parents[2]
GLIBC = hasattr(ctypes.CDLL(None), "malloc_trim")
PROGRAM = """
import os, sys, threading
import numpy as np
from dsuf.node.allocator import give_back, share_heap

def resident_mib():
    return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

kept, freed, end = [], threading.Event(), threading.Event()

def work():
    np.ones(30 << 17)  # 30 MiB, whose end raises the size from which the system is asked for each piece
    large = []
    for number in range(3):
        large.append(np.ones(15 << 17))
        if number < 2:
            kept.append(np.ones(1 << 13))  # 64 KiB, above the large one in the heap
    large.clear()
    freed.set()
    end.wait()

assert share_heap()
thread, before = threading.Thread(target=work), resident_mib()
thread.start()
freed.wait()
print(round(resident_mib() - before))
give_back()
print(round(resident_mib() - before))
end.set()
"""


@pytest.mark.skipif(not GLIBC, reason="another C library")
def test_what_a_thread_freed_goes_back_wherever_it_lies() -> None:
    """45 MiB, between what the thread keeps and at the end. Of a heap of its own glibc 2.36 would keep the end."""
    tuned = {name for name in os.environ if name.startswith(("MALLOC_", "GLIBC_"))}
    plain = {name: value for name, value in os.environ.items() if name not in tuned} | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROGRAM]
    output = subprocess.run(command, env=plain, capture_output=True, text=True, check=True, timeout=60).stdout
    held_mib, left_mib = map(int, output.split())
    assert held_mib > 40
    assert left_mib < 5


async def test_it_is_done_at_once_and_again_until_cancelled() -> None:
    done = asyncio.Event()
    calls: list[int] = []

    def note() -> None:
        calls.append(1)
        if len(calls) == 3:
            loop.call_soon_threadsafe(done.set)

    loop = asyncio.get_running_loop()
    with patch.object(allocator, "give_back", note):
        task = asyncio.create_task(allocator.give_back_regularly(0.001))
        async with asyncio.timeout(5):
            await done.wait()
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def test_another_c_library_is_left_alone() -> None:
    with patch.object(allocator, "_find", lambda name: None):
        assert not allocator.share_heap()
        allocator.give_back()

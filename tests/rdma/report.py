"""Cases that are tried in a test machine, and the file in which the host reads how they ended."""

import asyncio
import os
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import msgspec

EXCHANGE = Path("/exchange")
DONE = EXCHANGE / "done"
"""Appears when nothing more will be tried."""


class Report(msgspec.Struct):
    """How a case ended."""

    case: str
    good: bool
    text: str
    seconds: float


async def try_all(
    kind: str, names: Sequence[str], attempt: Callable[[str], Awaitable[str]], limit_s: float
) -> list[Report]:  # fmt: skip
    """Try the cases of `names`, each for so long at most; the file `report.KIND` has a line for each."""
    reports = []
    with (EXCHANGE / f"report.{kind}").open("wb", buffering=0) as file:
        for name in names:
            reports.append(await _try(name, attempt, limit_s))
            file.write(msgspec.json.encode(reports[-1]) + b"\n")
            print(reports[-1], flush=True)
    return reports


async def _try(name: str, attempt: Callable[[str], Awaitable[str]], limit_s: float) -> Report:
    """One case; descriptors that are left open are a failure."""
    started_s, before = time.monotonic(), _count_files()
    good, text = True, ""
    try:
        async with asyncio.timeout(limit_s):
            text = await attempt(name)
    except Exception as error:
        good, text = False, "".join(traceback.format_exception(error)[-4:])
    give_up_s = time.monotonic() + 3
    while _count_files() > before and time.monotonic() < give_up_s:  # noqa: ASYNC110 - descriptors have no event
        await asyncio.sleep(0.05)
    if (left := _count_files()) > before:
        good, text = False, f"{text}; {left} descriptors instead of {before}"
    return Report(name, good, text, round(time.monotonic() - started_s, 2))


def _count_files() -> int:
    return len(os.listdir("/proc/self/fd"))

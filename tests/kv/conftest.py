"""Small copies take the way of large ones, through threads, in every second test."""

import zlib

import pytest

from dsuf.kv import calls


@pytest.fixture(autouse=True)
def threads(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which ones is fixed by their names."""
    if zlib.crc32(request.node.name.encode()) % 2:
        monkeypatch.setattr(calls, "SMALL_BYTES", -1)

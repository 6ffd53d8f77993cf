"""The number of threads reaches the library that uses them."""

import numpy as np
import pytest

from dsuf.errors import CommandError
from dsuf.node import threads
from dsuf.node.threads import count_threads, limit_threads


def test_the_limit_is_what_the_library_says() -> None:
    assert np.ones(2).sum() == 2
    before = count_threads()
    if before is None:
        pytest.skip("NumPy here uses no OpenBLAS")
    try:
        limit_threads(1)
        assert count_threads() == 1
        limit_threads(0)
        assert count_threads() == 1
    finally:
        limit_threads(before)
    assert count_threads() == before


def test_another_library_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "_find_libraries", list)
    limit_threads(0)
    with pytest.raises(CommandError, match="threads = 2"):
        limit_threads(2)

"""How many CPU threads matrix products use. NumPy has no call for it, so the library behind it is told."""

import ctypes
from pathlib import Path

from dsuf.errors import CommandError

_PREFIXES_SUFFIXES = (("scipy_openblas", "64_"), ("openblas", "64_"), ("openblas", ""))


def limit_threads(count: int) -> None:
    """Let NumPy's matrix products use `count` threads; 0 leaves them all cores.

    Raises `CommandError` where NumPy is built on a library that is not OpenBLAS.
    """
    if count == 0:
        return
    for library in _find_libraries():
        for prefix, suffix in _PREFIXES_SUFFIXES:
            if hasattr(library, name := f"{prefix}_set_num_threads{suffix}"):
                getattr(library, name)(ctypes.c_int(count))
                return
    raise CommandError(f"threads = {count}: NumPy here uses no OpenBLAS; set its library's own variable instead")


def count_threads() -> int | None:
    """How many they use now, None where that cannot be told."""
    for library in _find_libraries():
        for prefix, suffix in _PREFIXES_SUFFIXES:
            if hasattr(library, name := f"{prefix}_get_num_threads{suffix}"):
                return int(getattr(library, name)())
    return None


def _find_libraries() -> list[ctypes.CDLL]:
    """The OpenBLAS libraries that are loaded in this process."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return []
    paths = dict.fromkeys(line.split(maxsplit=5)[5] for line in lines if "openblas" in line)
    return [ctypes.CDLL(path) for path in paths]

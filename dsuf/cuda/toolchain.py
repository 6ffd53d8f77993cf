"""nvcc: find it, compile a source for one target, keep the binary by content, read what the assembler says of it.

A binary is named by a digest of everything that it depends on: the source, all headers, flags, macros and the
compiler's own version. So nothing is ever stale, and two checkouts share a cache.
"""

import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dsuf.errors import CommandError

TARGETS = ("sm_90a", "sm_100a", "sm_103a")
"""Architectures that the sources are written for: H100 and H200, B200, B300."""

FOLDER = Path(__file__).parents[2] / "kernels"
COMPILE_TIMEOUT_S = 300.0
_FLAGS = ("-cubin", "-std=c++17", "-O3", "-lineinfo", "-Xptxas", "-v")
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_USED = re.compile(r"Used (\d+) registers(?:.*?, (\d+) bytes smem)?")
_SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")


class Resources(NamedTuple):
    """What the assembler reports of one entry, a thread's registers and a block's static shared memory."""

    entry: str
    registers: int
    shared_bytes: int
    spill_bytes: int


class Binary(NamedTuple):
    """A compiled source: the file, and its entries."""

    source: str
    sm: str
    path: Path
    entries: tuple[Resources, ...]


class Toolchain:
    """The compiler at `nvcc` with the sources under `folder`, keeping binaries in `cache`."""

    def __init__(self, nvcc: str, folder: Path, cache: Path) -> None:
        self.nvcc, self.folder, self.cache = nvcc, folder, cache
        self.version = _run([nvcc, "--version"]).strip().splitlines()[-1]
        headers = sorted((folder / "include").iterdir())
        self.headers = hashlib.sha256(b"".join(path.name.encode() + path.read_bytes() for path in headers)).digest()

    def build(self, source: str, sm: str, macros: Mapping[str, str]) -> Binary:
        """The binary of `kernels/any/<source>.cu` for `sm`, compiled now unless it is kept; raises `CommandError`."""
        path = self.folder / "any" / f"{source}.cu"
        arguments = self._arguments(sm, macros)
        state = [self.version, *arguments[:-2], path.read_text()]
        digest = hashlib.sha256(self.headers + "\0".join(state).encode()).hexdigest()[:24]
        kept = self.cache / f"{source}-{sm}-{digest}.cubin"
        if not kept.with_suffix(".txt").exists():
            self._compile(path, arguments, kept)
        return Binary(source, sm, kept, tuple(parse_report(kept.with_suffix(".txt").read_text())))

    def build_all(self, sources: Iterable[str], sm: str, macros: Mapping[str, str]) -> list[Binary]:
        """Binaries of all `sources`, as many at once as there are cores."""
        with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
            return list(pool.map(lambda source: self.build(source, sm, macros), sources))

    def _arguments(self, sm: str, macros: Mapping[str, str]) -> list[str]:
        # Spelled out: the short -arch=sm_90a would also compile for the plain architecture, which lacks instructions.
        target = f"-gencode=arch={sm.replace('sm', 'compute')},code={sm}"
        return [*_FLAGS, target, *(f"-D{k}={v}" for k, v in sorted(macros.items())), "-I", str(self.folder / "include")]

    def _compile(self, path: Path, arguments: Sequence[str], kept: Path) -> None:
        """Compile into place; the report is written last, and says that the binary is whole."""
        self.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".build-", dir=self.cache) as made:
            out, report = Path(made) / "out.cubin", Path(made) / "out.txt"
            report.write_text(_run([self.nvcc, *arguments, str(path), "-o", str(out)]))
            out.replace(kept)
            report.replace(kept.with_suffix(".txt"))


def find_toolchain(folder: Path = FOLDER, cache: Path | None = None) -> Toolchain:
    """The tool chain of this machine; raises `CommandError` if the sources or nvcc are not there."""
    if not (folder / "any").is_dir():
        raise CommandError(f"no kernel sources at {folder}: run this from a checkout")
    nvcc = shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")
    if nvcc is None:
        raise CommandError("no nvcc on PATH: install the CUDA compiler, 13.0 or newer, to build kernels")
    return Toolchain(nvcc, folder, cache or cache_folder(os.environ))


def cache_folder(environment: Mapping[str, str]) -> Path:
    """Where binaries are kept: `kernels` in DSUF_CACHE_DIR, else in the user's cache."""
    base = environment.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environment.get("DSUF_CACHE_DIR") or f"{base}/dsuf").expanduser().absolute() / "kernels"


def parse_report(text: str) -> list[Resources]:
    """The entries in what `ptxas -v` printed, in its order."""
    entries = []
    for part in re.split(r"(?=ptxas info\s+: Compiling entry function)", text):
        name, used, spills = _ENTRY.search(part), _USED.search(part), _SPILLS.search(part)
        if name and used:
            spilled = sum(map(int, spills.groups())) if spills else 0
            entries.append(Resources(name[1], int(used[1]), int(used[2] or 0), spilled))
    return entries


def _run(command: Sequence[str]) -> str:
    """What `command` prints; raises `CommandError` with its first line that names an error."""
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=COMPILE_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CommandError(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = done.stdout.splitlines() or ["no output"]
        raise CommandError(next((line for line in lines if "error" in line), lines[-1]))
    return done.stdout

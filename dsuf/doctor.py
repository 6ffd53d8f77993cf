"""Say what this machine has, one line a thing, and what is missing for what. Changes nothing, always exits 0.

ok       there, and good enough
note     works, with a limit that is worth knowing
missing  the feature named at the end of the line is not available
"""

import argparse
import ctypes.util
import importlib.util
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from dsuf.config import Settings
from dsuf.cuda.machine import find_lack
from dsuf.errors import CommandError, DeviceError
from dsuf.kv.transport.adapter import check_memlock
from dsuf.trial.fleet import find_program
from dsuf.trial.ports import can_bind

PROBE_TIMEOUT_S = 10.0
REDIS_ADDRESS = ("127.0.0.1", 6379)
# Embedded checkpoint, token maps and what the tests make; a released checkpoint is far larger and lies elsewhere.
CACHE_NEED_BYTES = 2 << 30


class Finding(NamedTuple):
    """What one probe found: a state, what is there, and (if missing) what it is needed for."""

    state: Literal["ok", "note", "missing"]
    text: str
    needed_for: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """`dsuf doctor` takes no arguments."""


def run(args: argparse.Namespace) -> int:
    """Print every finding; always 0, since a missing thing is only missing for some uses."""
    for title, probe in PROBES:
        print(format_line(title, probe()), flush=True)
    return 0


def format_line(title: str, finding: Finding) -> str:
    """One line of the report."""
    needed = f" (needed for: {finding.needed_for})" if finding.needed_for else ""
    return f"{finding.state:8} {title:12} {finding.text}{needed}"


def probe_python() -> Finding:
    """The interpreter."""
    return Finding("ok", f"{platform.python_version()} at {sys.executable}")


def probe_packages() -> Finding:
    """The packages that the base installation needs."""
    absent = [name for name in BASE_PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        return Finding("missing", f"not importable: {', '.join(absent)}", "bin/serve (run it once: it installs them)")
    return Finding("ok", f"all {len(BASE_PACKAGES)} base packages")


def probe_cores() -> Finding:
    """Cores that this process may use."""
    usable = len(os.sched_getaffinity(0))
    return Finding("ok" if usable > 1 else "note", f"{usable} of {os.cpu_count()} cores, {platform.machine()}")


def probe_memory() -> Finding:
    """Memory, total and available."""
    rows = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    total, free = (int(rows[key].split()[0]) * 1024 for key in ("MemTotal", "MemAvailable"))
    state: Literal["ok", "note"] = "ok" if free > 2 << 30 else "note"
    return Finding(state, f"{format_bytes(total)}, {format_bytes(free)} available")


def probe_blas() -> Finding:
    """The linear algebra library that the reference engine computes with, and its threads."""
    blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    names = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "OPENBLAS_CORETYPE")
    given = ", ".join(f"{name}={os.environ[name]}" for name in names if name in os.environ)
    return Finding("ok", f"{blas['name']} {blas['version']}, {given or 'one thread a core'}")


def probe_gpu() -> Finding:
    """NVIDIA GPUs and their driver, as nvidia-smi lists them."""
    listed = run_tool("nvidia-smi", "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader")
    if listed:
        return Finding("ok", "; ".join(listed.splitlines()))
    if ctypes.util.find_library("cuda"):
        return Finding("note", "libcuda is there, nvidia-smi lists no GPU", "the CUDA engine")
    return Finding("missing", "no NVIDIA driver", "the CUDA engine; the reference engine runs on the CPU")


def probe_nvcc() -> Finding:
    """The CUDA compiler."""
    said = run_tool("nvcc", "--version")
    release = next((line for line in said.splitlines() if "release" in line), "")
    if release:
        return Finding("ok", release.strip())
    return Finding("missing", "no nvcc on PATH", "compiling kernels")


def probe_cuda_engine() -> Finding:
    """Whether this machine's GPU can run the kernels."""
    if lack := find_lack():
        return Finding("missing", lack, "the CUDA engine; the reference engine runs on the CPU")
    return Finding("ok", "the CUDA engine can be loaded")


def probe_gcc() -> Finding:
    """The host compiler. Every package of the locks comes as a wheel, so only nvcc asks for one."""
    said = run_tool("gcc", "--version")
    return Finding("ok", said.splitlines()[0]) if said else Finding("missing", "no gcc on PATH", "compiling kernels")


def probe_redis() -> Finding:
    """A Redis server to start, and one that already answers at the usual address."""
    binary = shutil.which("redis-server")
    answers = answers_ping(REDIS_ADDRESS)
    where = f"{REDIS_ADDRESS[0]}:{REDIS_ADDRESS[1]}"
    if answers:
        return Finding("ok", f"answers at {where}")
    if binary:
        return Finding("ok", f"{binary}; nothing answers at {where}")
    return Finding("missing", f"no redis-server on PATH, nothing answers at {where}", "a fleet of several nodes")


def probe_haproxy() -> Finding:
    """The balancer that `bin/fleet` starts; a fleet of one's own takes any."""
    try:
        path = find_program("haproxy")
    except CommandError:
        return Finding("missing", "no haproxy (Debian, Ubuntu: apt-get install haproxy)", "trying a fleet: bin/fleet")
    said = run_tool(path, "-v")
    return Finding("ok", f"{path}, {said.splitlines()[0]}") if said else Finding("note", f"{path} does not run")


def probe_rdma() -> Finding:
    """RDMA devices and the Python binding of rdma-core."""
    folder = Path("/sys/class/infiniband")
    devices = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    binding = importlib.util.find_spec("pyverbs") is not None
    if devices and binding:
        try:
            check_memlock(Settings().cache_bytes)
        except DeviceError as error:
            return Finding("note", f"{', '.join(devices)}; {error}", "cache pulls by RDMA; TCP does the same, slower")
        return Finding("ok", ", ".join(devices))
    lacks = [] if devices else ["no RDMA device"]
    lacks += [] if binding else ["no pyverbs (Debian, Ubuntu: python3-pyverbs)"]
    return Finding("missing", ", ".join(lacks), "cache pulls by RDMA; TCP does the same, slower")


def probe_ports() -> Finding:
    """The ports that a node listens on unless told otherwise."""
    defaults = Settings()
    taken = [str(port) for port in (defaults.port, defaults.control_port) if not can_bind(defaults.host, port)]
    if taken:
        return Finding("note", f"in use: {', '.join(taken)} (choose others with --port, --control-port)")
    return Finding("ok", f"{defaults.port} and {defaults.control_port} are free")


def probe_files() -> Finding:
    """How many files and connections a process may hold."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return Finding("ok" if soft >= 1024 else "note", f"{soft} open files a process (at most {hard})")


def probe_cache() -> Finding:
    """The disk behind the cache directory."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    folder = Path(os.environ.get("DSUF_CACHE_DIR") or f"{base}/dsuf").expanduser().absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    free = shutil.disk_usage(there).free
    if not os.access(there, os.W_OK):
        return Finding("missing", f"{there} is not writable", "the embedded model (set DSUF_CACHE_DIR)")
    return Finding("ok" if free > CACHE_NEED_BYTES else "note", f"{format_bytes(free)} free at {there}")


def run_tool(*command: str) -> str:
    """What `command` prints, or an empty text if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def answers_ping(address: tuple[str, int]) -> bool:
    """Whether a Redis server answers at `address`; one that asks for a password is a server too."""
    try:
        with socket.create_connection(address, timeout=1.0) as connection:
            connection.sendall(b"PING\r\n")
            return connection.recv(64).startswith((b"+PONG", b"-NOAUTH"))
    except OSError:
        return False


def format_bytes(count: int) -> str:
    """`count` bytes in GiB, with one decimal."""
    return f"{count / (1 << 30):.1f} GiB"


BASE_PACKAGES = (
    "aiohttp",
    "cv2",
    "deepseek_recipe",
    "hiredis",
    "huggingface_hub",
    "llguidance",
    "ml_dtypes",
    "msgspec",
    "prometheus_client",
    "redis",
    "safetensors",
    "tokenizers",
    "uvloop",
)

PROBES: Sequence[tuple[str, Callable[[], Finding]]] = (
    ("Python", probe_python),
    ("packages", probe_packages),
    ("cores", probe_cores),
    ("memory", probe_memory),
    ("BLAS", probe_blas),
    ("GPU, driver", probe_gpu),
    ("nvcc", probe_nvcc),
    ("CUDA engine", probe_cuda_engine),
    ("gcc", probe_gcc),
    ("Redis", probe_redis),
    ("haproxy", probe_haproxy),
    ("RDMA", probe_rdma),
    ("ports", probe_ports),
    ("open files", probe_files),
    ("cache disk", probe_cache),
)

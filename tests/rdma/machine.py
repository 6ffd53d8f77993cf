"""Runs a command in one small test machine with soft-RoCE, or in two that are joined by a link.

    python3 -m tests.rdma.machine 1|2 COMMAND...        # e.g. 1 python3 -m tests.rdma.guest

The project is at /project there, read only; what the command leaves in /exchange comes back. Nothing listens on the
host, and all machines are gone when `run_machines` returns.
"""

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.rdma.image import ROOT, image_folder, make_image

LIMIT_S = 240
PROBE_S = 8
MEMORY_MIB = 1024
EMULATED = ("-accel", "tcg,thread=multi,tb-size=256", "-cpu", "max")
NATIVE = ("-accel", "kvm", "-cpu", "host")


class Outcome(NamedTuple):
    """What became of a run: a code for each machine (None: it gave none), what it printed, files of `exchange`."""

    codes: list[int | None]
    outputs: list[str]
    files: dict[str, str]
    seconds: float
    trouble: str


def run_machines(
    image: Path, count: int, command: Sequence[str], *, limit_s: float = LIMIT_S, keep: Path | None = None
) -> Outcome:  # fmt: skip
    """Run `command` in `count` machines from `image`, which must not change meanwhile; they are ended after `limit_s`.

    With `keep` the shared folder is copied there.
    """
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="dsuf-rdma-") as name:
        work = Path(name)
        exchange = work / "exchange"
        exchange.mkdir()
        (exchange / "command").write_text(shlex.join(command) + "\n")
        machines: list[subprocess.Popen[bytes]] = []
        try:
            machines.extend(_start(image, work, number, count) for number in range(count))
            trouble = _wait(machines, started_s + limit_s)
        finally:
            for machine in machines:
                machine.kill()
                machine.wait()
        outcome = _collect(work, count, time.monotonic() - started_s, trouble)
        if keep is not None:
            shutil.copytree(work, keep, dirs_exist_ok=True, ignore=lambda _, names: [n for n in names if n == "link"])
    return outcome


def _start(image: Path, work: Path, number: int, count: int) -> subprocess.Popen[bytes]:
    """Machine `number`. The first of two listens on a socket file, which the other one opens."""
    link = work / "link"
    ends = ("user,id=link,restrict=on",) if count == 1 else (
        f"stream,id=link,server=on,addr.type=unix,addr.path={link}",
        f"stream,id=link,server=off,addr.type=unix,addr.path={link}",
    )  # fmt: skip
    give_up_s = time.monotonic() + 10
    while number and not link.exists() and time.monotonic() < give_up_s:
        time.sleep(0.05)
    accelerator = NATIVE if runs_natively(image) else EMULATED
    words = f"console=ttyS0 quiet panic=-1 mitigations=off nokaslr dsuf.node={number} dsuf.nodes={count}"
    command = [
        "nice", "-n", "5", *_bare(image), *accelerator, "-m", str(MEMORY_MIB), "-smp", "2" if count == 1 else "1",
        "-append", words, "-serial", f"file:{work / f'console.{number}'}",
        "-drive", f"file={image / 'disk'},if=none,id=disk,format=raw,snapshot=on,cache=unsafe",
        "-device", "virtio-blk-pci,drive=disk", "-device", "virtio-rng-pci",
        "-netdev", ends[number], "-device", f"virtio-net-pci,netdev=link,mac=52:54:00:77:00:{number + 1:02}",
    ]  # fmt: skip
    for tag, path, more in (("exchange", work / "exchange", ""), ("project", ROOT, ",readonly=on")):
        command += ["-fsdev", f"local,id={tag},path={path},security_model=none,multidevs=remap{more}",
                    "-device", f"virtio-9p-pci,fsdev={tag},mount_tag={tag}"]  # fmt: skip
    with (work / f"machine.{number}").open("wb") as log:
        return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)


def _bare(image: Path) -> list[str]:
    """A machine with its kernel, and nothing else."""
    return ["qemu-system-x86_64", "-M", "q35", "-nodefaults", "-no-user-config", "-display", "none", "-no-reboot",
            "-kernel", str(image / "vmlinux"), "-initrd", str(image / "initrd")]  # fmt: skip


def runs_natively(image: Path) -> bool:
    """Whether this machine can run another one on its own processor. Being allowed to is not enough: where it is itself
    one of many layers, a kernel may start and never say a word. So one is started once."""
    if not os.access("/dev/kvm", os.R_OK | os.W_OK):
        return False
    verdict = image / f"native.{os.uname().release}"
    if not verdict.exists():
        command = [*_bare(image), *NATIVE, "-m", "256", "-serial", "stdio", "-append", "console=ttyS0 panic=-1"]
        try:
            said = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=PROBE_S).stdout
        except subprocess.TimeoutExpired as late:
            said = late.stdout or b""
        verdict.write_text("yes" if b"Linux version" in said else "no")
    return verdict.read_text() == "yes"


def _wait(machines: Sequence[subprocess.Popen[bytes]], until_s: float) -> str:
    """Wait until all machines have ended; what went wrong, or nothing."""
    for number, machine in enumerate(machines):
        try:
            machine.wait(max(0.0, until_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return f"machine {number} did not end in time"
    return ""


def _collect(work: Path, count: int, seconds: float, trouble: str) -> Outcome:
    """What the machines left."""
    exchange = work / "exchange"

    def read(path: Path) -> str:
        return path.read_text(errors="replace") if path.exists() else ""

    codes = [int(text) if (text := read(exchange / f"ended.{n}")) else None for n in range(count)]
    if not trouble and None in codes:
        trouble = "a machine ended before its command: " + " | ".join(
            read(work / f"{name}.{n}")[-500:] for name in ("console", "machine") for n in range(count)
        )
    outputs = [read(exchange / f"output.{n}") for n in range(count)]
    files = {path.name: read(path) for path in exchange.iterdir() if path.is_file()}
    return Outcome(codes, outputs, files, seconds, trouble)


if __name__ == "__main__":
    result = run_machines(make_image(image_folder()), int(sys.argv[1]), sys.argv[2:])
    for number, text in enumerate(result.outputs):
        print(f"---- machine {number}: {result.codes[number]}\n{text}", end="")
    ready = ", ".join(text.strip() for name, text in sorted(result.files.items()) if name.startswith("ready."))
    print(f"---- {result.seconds:.1f} s, ready after {ready} s; {result.trouble or 'ok'}")
    sys.exit(max((1 if code is None else code for code in result.codes), default=1))

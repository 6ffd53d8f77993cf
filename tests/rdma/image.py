"""A small Debian for tests of RDMA: a kernel that has soft-RoCE, a root disk with pyverbs, a first file system.

    python3 -m tests.rdma.image [FOLDER]      # as root, on Debian 12; where FOLDER is up to date it does nothing

Everything comes from Debian's packages, but for the few Python packages that the lock file of this project pins, which
Debian does not have or has too old. The result is kept outside the checkout and is used by all of them.
"""

import fcntl
import gzip
import hashlib
import lzma
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
LIMIT_S = 500
FILES = ("vmlinux", "initrd", "disk")
TOOLS = {"qemu-system-x86_64": "qemu-system-x86", "mmdebstrap": "mmdebstrap", "mke2fs": "e2fsprogs", "depmod": "kmod",
         "busybox": "busybox-static", "apt-get": "apt", "dpkg-deb": "dpkg"}  # fmt: skip
"""Programs that are needed, and the package that has each."""
GUEST = ("python3", "python3-pyverbs", "ibverbs-providers", "iproute2", "kmod", "mount", "libstdc++6",
         "redis-server")  # fmt: skip
WHEELS = ("msgspec", "numpy", "prometheus-client", "redis", "hiredis", "async-timeout", "xxhash")
DISK_MODULES = ("virtio_pci", "virtio_blk", "crc32c_generic", "crc32c_intel", "ext4")
MODULES = ("virtio_net", "virtio_rng", "9p", "9pnet_virtio", "crc32_generic", "crc32_pclmul", "crc32c_generic",
           "ib_uverbs", "rdma_rxe", "sch_netem")  # fmt: skip
SBIN = {**os.environ, "PATH": os.environ.get("PATH", "") + ":/usr/sbin:/sbin", "DEBIAN_FRONTEND": "noninteractive"}


class NoImage(Exception):
    """This machine cannot have the image; the text says why."""


def image_folder() -> Path:
    """Where it is kept."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("DSUF_RDMA_IMAGE") or Path(base).expanduser() / "dsuf" / "rdma-image")


def missing_tools() -> list[str]:
    """Debian packages to install first."""
    return [package for tool, package in TOOLS.items() if shutil.which(tool, path=SBIN["PATH"]) is None]


def make_image(folder: Path) -> Path:
    """Build what is not there yet; the folder. Raises `NoImage`."""
    key = _key()
    stamp = folder / "key"
    if stamp.exists() and stamp.read_text() == key and all((folder / name).exists() for name in FILES):
        return folder
    if os.geteuid():
        raise NoImage("the image of the test machine has to be built by root")
    if missing := missing_tools():
        raise NoImage("apt-get install " + " ".join(missing))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (stamp.exists() and stamp.read_text() == key):  # while this one waited, another one may have built it
            _replace(folder)
            stamp.write_text(key)
    return folder


def _replace(folder: Path) -> None:
    """Build all files; those of machines that run are not touched."""
    (folder / "key").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as name:
        _build(Path(name))
        for file in FILES:
            (Path(name) / file).replace(folder / file)


def _build(work: Path) -> None:
    """All files, in `work`."""
    modules = _fetch_kernel(work)
    root = work / "root"
    _run("mmdebstrap", "--quiet", "--variant=essential", f"--include={','.join(GUEST)}", "--format=directory",
         *(f"--dpkgopt=path-exclude=/usr/share/{part}/*" for part in ("doc", "man", "locale", "info")),
         "bookworm", str(root), env={**SBIN, "TMPDIR": str(work)})  # fmt: skip
    _add_wheels(work, root)
    for path in _with_needs(modules, (*DISK_MODULES, *MODULES)):
        target = root / "lib/modules" / modules.name / path
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(modules / path, target)
    for name in ("modules.builtin", "modules.order"):
        shutil.copy(modules / name, root / "lib/modules" / modules.name / name)
    _run("depmod", "-b", str(root), modules.name)
    shutil.copy(HERE / "guest.sh", root / "sbin/guest")
    (root / "sbin/guest").chmod(0o755)
    for name in ("project", "exchange"):
        (root / name).mkdir()
    size_mib = int(subprocess.check_output(["du", "-sm", str(root)]).split()[0]) + 64
    _run("mke2fs", "-q", "-t", "ext4", "-O", "^has_journal", "-m", "0", "-d", str(root), str(work / "disk"),
         f"{size_mib}M")  # fmt: skip
    _pack_first_files(work, modules)


def _fetch_kernel(work: Path) -> Path:
    """Debian's own kernel, unpacked; the folder of its modules. The flavour for clouds has neither rxe nor 9p."""
    _run("apt-get", "update", "-qq")
    shown = subprocess.check_output(["apt-cache", "depends", "linux-image-amd64"], text=True, env=SBIN)
    package = next(line.split()[-1] for line in shown.splitlines() if "Depends: linux-image-" in line)
    os.chmod(work, 0o755)
    _run("apt-get", "download", "-qq", "-o", "APT::Sandbox::User=root", package, cwd=work)
    _run("dpkg-deb", "-x", str(next(work.glob("*.deb"))), str(work / "kernel"))
    version = package.removeprefix("linux-image-")
    _run("depmod", "-b", str(work / "kernel"), version)
    packed = (work / "kernel/boot" / f"vmlinuz-{version}").read_bytes()
    (work / "vmlinux").write_bytes(_unpack_kernel(packed))
    return work / "kernel/lib/modules" / version


def _unpack_kernel(image: bytes) -> bytes:
    """The program within a compressed kernel: started as it is, an emulated processor need not unpack it."""
    for magic, unpack in ((b"\xfd7zXZ\0", lzma.LZMADecompressor), (b"\x1f\x8b\x08", None)):
        at = image.find(magic)
        while at >= 0:
            try:
                program = gzip.decompress(image[at:]) if unpack is None else unpack().decompress(image[at:])
            except (lzma.LZMAError, OSError, EOFError):
                program = b""
            if program.startswith(b"\x7fELF"):
                return program
            at = image.find(magic, at + 1)
    raise NoImage("the kernel's package holds no program that can be unpacked here")


def _with_needs(modules: Path, names: Sequence[str]) -> list[str]:
    """Files of modules and of all that they need, in the order in which they load."""
    needs: dict[str, list[str]] = {}
    for line in (modules / "modules.dep").read_text().splitlines():
        path, _, rest = line.partition(":")
        needs[path] = rest.split()
    named = {Path(path).name.split(".")[0].replace("-", "_"): path for path in needs}
    wanted = [named[name] for name in names if name in named]  # the others are part of the kernel
    return list(dict.fromkeys(path for top in wanted for path in (*reversed(needs[top]), top)))


def _add_wheels(work: Path, root: Path) -> None:
    """The pinned packages that the guest's Python needs, checked against the lock file."""
    rows = (ROOT / "requirements-dev.lock").read_text().replace("\\\n", " ").splitlines()
    lock = work / "wheels.lock"
    # What a row says of the interpreter is about the guest's, and pip would ask its own.
    wanted = (re.sub(r" ; .*?(?= +--hash)", "", row) for row in rows if row.split("==")[0] in WHEELS)
    lock.write_text("\n".join(wanted))
    _run(sys.executable, "-m", "pip", "install", "-qq", "--no-input", "--no-deps", "--disable-pip-version-check",
         "--no-compile", "--require-hashes", "--only-binary", ":all:", "--python-version", "3.11", "--implementation",
         "cp", "--abi", "cp311", "--platform", "manylinux_2_28_x86_64", "--platform", "manylinux_2_17_x86_64",
         "--platform", "manylinux2014_x86_64", "--platform", "any", "--target", str(root / "wheels"), "-r", str(lock),
         )  # fmt: skip
    for tests in (root / "wheels").rglob("tests"):
        shutil.rmtree(tests)


def _pack_first_files(work: Path, modules: Path) -> None:
    """The file system with which the kernel starts: what it takes to reach the disk."""
    files = {"bin": None, "dev": None, "disk": None, "modules": None}
    contents: dict[str, bytes | None] = dict(files)
    contents["bin/busybox"] = Path(shutil.which("busybox", path=SBIN["PATH"]) or "").read_bytes()
    contents["init"] = (HERE / "first.sh").read_bytes()
    for number, path in enumerate(_with_needs(modules, DISK_MODULES)):
        contents[f"modules/{number:02}.ko"] = (modules / path).read_bytes()
    packed = b"".join(_entry(number, *item) for number, item in enumerate([*contents.items(), ("TRAILER!!!", b"")], 1))
    (work / "initrd").write_bytes(gzip.compress(packed, 1))


def _entry(number: int, name: str, content: bytes | None) -> bytes:
    """One file (a folder: None) in the kernel's format: 13 numbers in hexadecimal, the name, the content."""
    mode = stat.S_IFDIR | 0o755 if content is None else stat.S_IFREG | 0o755
    body = content or b""
    fields = (number, mode, 0, 0, 1, 0, len(body), 0, 0, 0, 0, len(name) + 1, 0)
    head = b"070701" + b"".join(b"%08X" % field for field in fields) + name.encode() + b"\0"
    return head + bytes(-len(head) % 4) + body + bytes(-len(body) % 4)


def _run(*command: str, cwd: Path | None = None, env: dict[str, str] = SBIN) -> None:
    """Run a program; raises `NoImage` with its last words."""
    try:
        done = subprocess.run(command, cwd=cwd, env=env, capture_output=True, text=True, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        raise NoImage(f"{command[0]} did not end within {LIMIT_S} s") from None
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise NoImage(f"{command[0]} failed: {last}")


def _key() -> str:
    """What the image is made from. Not the versions: one that was built once stays until that changes."""
    parts = [(HERE / name).read_bytes() for name in ("image.py", "guest.sh", "first.sh")]
    return hashlib.sha256(b"".join(parts)).hexdigest()


if __name__ == "__main__":
    try:
        print(make_image(Path(sys.argv[1]) if len(sys.argv) > 1 else image_folder()))
    except NoImage as reason:
        sys.exit(f"image: {reason}")

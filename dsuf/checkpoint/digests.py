"""SHA-256 digests of the files of a checkpoint, in the format of `sha256sum`: one line a file, hex and name."""

import hashlib
import re
from collections.abc import Callable, Mapping
from pathlib import Path

from dsuf.errors import CheckpointError

DIGESTS_NAME = "SHA256SUMS"
"""Where `fetch` leaves the digests that the hub stated."""

_CHUNK_BYTES = 1 << 22
_line = re.compile(r"([0-9a-fA-F]{64}) [ *](.+)")


def read_digests(path: Path) -> dict[str, str]:
    """Digest by file name, out of `path`; raises `CheckpointError` naming the first line that is not one."""
    try:
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"cannot read digests from {path}: {' '.join(str(error).split())}") from error
    digests: dict[str, str] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        match = _line.fullmatch(line.rstrip())
        name = match[2].removeprefix("./") if match else ""
        if not match or name.startswith("/") or ".." in Path(name).parts:
            raise CheckpointError(f"{path}, line {number}: not a SHA-256 digest and a file name")
        digests[name] = match[1].lower()
    return digests


def write_digests(path: Path, digests: Mapping[str, str]) -> None:
    """Write `digests` to `path` so that `sha256sum --check` understands it."""
    path.write_text("".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items())), "utf-8")


def digest_file(path: Path, advance: Callable[[int], None]) -> str:
    """SHA-256 of `path` in hex; `advance` is told of every few MB read. Raises OSError."""
    sha = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            sha.update(chunk)
            advance(len(chunk))
    return sha.hexdigest()

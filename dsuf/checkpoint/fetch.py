"""Downloading a release from the Hugging Face hub, or from a server that speaks its protocol.

A file gets its name in the directory once it is complete and has the digest that the hub states; until then it lies
under `.partial`, from where the next run goes on. The library's own download begins a file anew in another process, so
its lower-level `http_get` is used, except for files that the hub gives out only in chunks (Xet).
"""

import hashlib
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path, PurePosixPath
from typing import IO

import msgspec
from huggingface_hub import HfApi, hf_hub_download, hf_hub_url
from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError, RevisionNotFoundError
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, disable_progress_bars  # type: ignore[attr-defined]

from dsuf.checkpoint.digests import digest_file
from dsuf.errors import CheckpointError, CommandError

RELEASE = "deepseek-ai/DeepSeek-V4.1-Flash"
REVISION = "dba1be0a40aa45a94ad051997016db3960a90277"
"""What is fetched by default: the revision that this server was written for."""

PARTIAL_NAME = ".partial"
HTTP_LIMIT_BYTES = 50_000_000_000
"""The hub serves larger files through Xet only."""

_LISTING_TIMEOUT_S = 30.0

Advance = Callable[[int], None]


class RemoteFile(msgspec.Struct, frozen=True):
    """A file of a release and what the hub says of it: size, and SHA-256 (large files) or git id (small ones)."""

    name: str
    size_bytes: int | None
    sha256: str | None
    git_id: str | None


class Release(msgspec.Struct, frozen=True):
    """A revision of a repository. `revision` is a commit; `endpoint` None is the hub."""

    repo: str
    revision: str
    endpoint: str | None
    files: tuple[RemoteFile, ...]

    @property
    def bytes(self) -> int:
        """Size of all files."""
        return sum(file.size_bytes or 0 for file in self.files)


class Stopped(Exception):
    """Raised inside a download that the user interrupted."""


def list_release(repo: str, revision: str, endpoint: str | None) -> Release:
    """What `repo` holds at `revision`; raises `CommandError` if there is none, `CheckpointError` without an answer."""
    try:
        info = HfApi(endpoint=endpoint).model_info(
            repo, revision=revision, files_metadata=True, timeout=_LISTING_TIMEOUT_S
        )
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError) as error:
        raise CommandError(f"no such release: {repo} at {revision}: {_one_line(error)}") from error
    except Exception as error:  # the library lets through whatever its HTTP client raises
        raise CheckpointError(f"cannot list {repo}: {_one_line(error)}") from error
    files = tuple(
        RemoteFile(
            name=_checked_name(sibling.rfilename),
            size_bytes=sibling.size if sibling.size is not None or sibling.lfs is None else sibling.lfs.size,
            sha256=sibling.lfs.sha256 if sibling.lfs else None,
            git_id=None if sibling.lfs else sibling.blob_id,
        )
        for sibling in info.siblings or ()
        if not sibling.rfilename.startswith(".")
    )
    return Release(repo, info.sha or revision, endpoint, files)


def fetch_release(
    release: Release, directory: Path, jobs: int, advance: Advance, digests: dict[str, str]
) -> Iterator[str]:
    """Download what `directory` lacks of `release`, `jobs` files at once; yields a line for each file that failed.

    `advance` is told, from several threads, of bytes that need no more downloading. The SHA-256 of each good file goes
    into `digests`. Raises `CommandError` if the disk is too small.
    """
    disable_progress_bars()
    directory.mkdir(parents=True, exist_ok=True)
    _check_space(release, directory)
    stop = threading.Event()
    download = Download(release, directory, advance, stop)
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="fetch")
    try:
        running = {pool.submit(download.fetch, file): file for file in release.files}
        for future in as_completed(running):
            file = running[future]
            try:
                digests[file.name] = future.result()
            except CheckpointError as error:
                yield f"{file.name}: {error}"
            except Exception as error:  # as above; the file is named, and what was received stays for the next run
                yield f"{file.name}: download failed: {_one_line(error)}"
    finally:
        stop.set()
        pool.shutdown(cancel_futures=True)
    if len(digests) == len(release.files):
        shutil.rmtree(directory / PARTIAL_NAME, ignore_errors=True)


class Download:
    """Fetching single files of a release into a directory."""

    def __init__(self, release: Release, directory: Path, advance: Advance, stop: threading.Event) -> None:
        self._release = release
        self._directory = directory
        self._advance = advance
        self._stop = stop

    def fetch(self, file: RemoteFile) -> str:
        """Have `file` in the directory and return its SHA-256; raises `CheckpointError` on a wrong digest."""
        place, partial = self._directory / file.name, self._directory / PARTIAL_NAME / file.name
        if place.is_file() and place.stat().st_size == file.size_bytes:
            digest, problem = _examine(place, file)
            if problem is None:
                self._advance(file.size_bytes)
                return digest
        partial.parent.mkdir(parents=True, exist_ok=True)
        self._receive(file, partial)
        digest, problem = _examine(partial, file)
        if problem is not None:
            partial.unlink()  # going on from wrong bytes would never get better
            raise CheckpointError(problem)
        place.parent.mkdir(parents=True, exist_ok=True)
        partial.replace(place)
        return digest

    def _receive(self, file: RemoteFile, partial: Path) -> None:
        """Download `file` to `partial`, after the bytes that are there."""
        release = self._release
        if file.size_bytes is not None and file.size_bytes > HTTP_LIMIT_BYTES:
            hf_hub_download(release.repo, file.name, revision=release.revision, endpoint=release.endpoint,
                            local_dir=self._directory / PARTIAL_NAME)  # fmt: skip
            self._advance(file.size_bytes)
            return
        url = hf_hub_url(release.repo, file.name, revision=release.revision, endpoint=release.endpoint)
        headers = {**build_hf_headers(), "Accept-Encoding": "identity"}
        with partial.open("ab") as stream:
            have = stream.tell()
            if file.size_bytes is not None and have > file.size_bytes:
                stream.truncate(0)
                have = 0
            self._advance(have)
            counted = CountedFile(stream, self._advance, self._stop)
            http_get(url, counted, resume_size=have, headers=headers, expected_size=file.size_bytes)  # type: ignore[arg-type]
            os.fsync(stream.fileno())


class CountedFile:
    """What `http_get` needs of a file, telling of progress and breaking off on demand."""

    def __init__(self, stream: IO[bytes], advance: Advance, stop: threading.Event) -> None:
        self._stream = stream
        self._advance = advance
        self._stop = stop

    def write(self, data: bytes) -> int:
        """Append `data`; raises `Stopped` after an interruption."""
        if self._stop.is_set():
            raise Stopped("interrupted")
        self._advance(len(data))
        return self._stream.write(data)

    def tell(self) -> int:
        """Position in the file."""
        return self._stream.tell()

    def seek(self, offset: int) -> int:
        """Go to `offset`."""
        return self._stream.seek(offset)

    def truncate(self) -> int:
        """Cut the file at the position: the server did not go on where it was asked to."""
        self._stream.flush()
        self._advance(self._stream.tell() - os.fstat(self._stream.fileno()).st_size)
        return self._stream.truncate()


def _examine(path: Path, file: RemoteFile) -> tuple[str, str | None]:
    """SHA-256 of `path`, and how it differs from what the hub states of `file`."""
    digest, size = digest_file(path, lambda _: None), path.stat().st_size
    if file.size_bytes is not None and size != file.size_bytes:
        return digest, f"refused: it has {size} bytes, the hub states {file.size_bytes}"
    if file.sha256 is not None and digest != file.sha256.lower():
        return digest, f"digest mismatch, refused: SHA-256 is {digest}, the hub states {file.sha256}"
    if file.sha256 is None and file.git_id is not None:
        content = path.read_bytes()
        git_id = hashlib.sha1(b"blob %d\0" % len(content) + content, usedforsecurity=False).hexdigest()
        if git_id != file.git_id:
            return digest, f"digest mismatch, refused: git id is {git_id}, the hub states {file.git_id}"
    return digest, None


def _checked_name(name: str) -> str:
    """`name` if it stays inside the directory; raises `CheckpointError`."""
    parts = PurePosixPath(name).parts
    if not name.isprintable() or "\\" in name or name.startswith("/") or ".." in parts or not parts:
        raise CheckpointError(f"the hub lists a file that cannot be: {name!r}")
    return name


def _check_space(release: Release, directory: Path) -> None:
    """Raise `CommandError` if what is missing does not fit on the disk."""
    have = sum(path.stat().st_size for file in release.files for path in
               (directory / file.name, directory / PARTIAL_NAME / file.name) if path.is_file())  # fmt: skip
    missing, free = release.bytes - have, shutil.disk_usage(directory).free
    if missing > free:
        raise CommandError(f"{directory}: {missing:,} bytes are missing and {free:,} are free on the disk")


def _one_line(error: BaseException) -> str:
    """The text of `error` in one line of bearable length."""
    return " ".join(str(error).split())[:300] or type(error).__name__

"""Plan, verify or fetch a released checkpoint.

plan says what a configuration asks for, without any weights. verify checks the names, dtypes, shapes, offsets and
lengths of a directory (it reads headers only), and SHA-256 digests of its files where they are given. fetch downloads a
release, goes on where an interrupted download stopped, and refuses a file whose digest is not the one that the hub
states.
"""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path

from dsuf.checkpoint.config import load_config
from dsuf.checkpoint.digests import DIGESTS_NAME, read_digests, write_digests
from dsuf.checkpoint.fetch import RELEASE, REVISION, fetch_release, list_release
from dsuf.checkpoint.inventory import expected_tensors, tally
from dsuf.checkpoint.plan import format_plan
from dsuf.checkpoint.progress import Progress
from dsuf.checkpoint.verify import find_digest_faults, find_faults, shard_names
from dsuf.errors import CheckpointError, CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of `dsuf weights`."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True, title="actions")
    plan = actions.add_parser(
        "plan", help="count the tensors and bytes that a configuration asks for", allow_abbrev=False
    )
    plan.add_argument("--config", metavar="FILE", type=Path, required=True, help="config.json, nested or flat form")
    verify = actions.add_parser("verify", help="check a checkpoint directory", allow_abbrev=False)
    verify.add_argument("directory", metavar="DIR", type=_directory, help="holds config.json, the index and the shards")
    verify.add_argument(
        "--digests", metavar="FILE", type=Path, help="SHA-256 digests, a line a file as sha256sum has them"
    )
    fetch = actions.add_parser("fetch", help="download a release, or go on doing so", allow_abbrev=False)
    fetch.add_argument("repo", metavar="REPO", nargs="?", default=RELEASE, help=f"default: {RELEASE}")
    fetch.add_argument("directory", metavar="DIR", type=_directory, help="where the files go; made if it is not there")
    fetch.add_argument("--revision", metavar="R", help="branch, tag or commit (default: one that is known to work)")
    fetch.add_argument("--endpoint", metavar="URL", help="another server that speaks the hub's protocol")
    fetch.add_argument("--jobs", metavar="N", type=int, default=4, help="files downloaded at once (default: 4)")


def _directory(text: str) -> Path:
    """`text` as a path; nothing at all, as an unset variable in a script gives it, is not the current directory."""
    if not text.strip():
        raise argparse.ArgumentTypeError("is empty")
    return Path(text)


def run(args: argparse.Namespace) -> int:
    """Carry out the chosen action; 0 done, 1 a fault was found. Raises `CommandError` for an unusable argument."""
    if args.action == "plan":
        return _plan(args.config)
    if args.action == "fetch":
        revision = args.revision or (REVISION if args.repo == RELEASE else "main")
        return _fetch(args.repo, revision, args.endpoint, args.directory, args.jobs)
    return _verify(args.directory, args.digests)


def _plan(path: Path) -> int:
    """Print the table of the configuration in `path`."""
    try:
        config = load_config(path)
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    print(format_plan(tally(expected_tensors(config))))
    return 0


def _verify(directory: Path, digests_path: Path | None) -> int:
    """Print every fault of the checkpoint in `directory`, then the verdict."""
    if not directory.is_dir():
        raise CommandError(f"{directory} is not a directory")
    try:
        digests = read_digests(digests_path) if digests_path else {}
    except CheckpointError as error:
        raise CommandError(str(error)) from error
    shards = len(shard_names(directory))
    progress = Progress("headers", shards, sys.stderr, "shards")
    faults = find_faults(directory, progress.advance)
    progress.close()
    for fault in faults:
        print(fault)
    count = len(faults) + _print_digest_faults(directory, digests)
    print(
        f"{directory}: " + (f"{count} fault{'s' * (count > 1)} found" if count else f"{shards} shards, no fault found")
    )
    return 1 if count else 0


def _print_digest_faults(directory: Path, digests: Mapping[str, str]) -> int:
    """Print each file that differs from its digest; returns how many do."""
    if not digests:
        return 0
    sizes = [path.stat().st_size for name in digests if (path := directory / name).is_file()]
    progress, count = Progress("digests", sum(sizes), sys.stderr), 0
    for fault in find_digest_faults(directory, digests, progress.advance):
        progress.clear()
        print(fault, flush=True)
        count += 1
    progress.close()
    return count


def _fetch(repo: str, revision: str, endpoint: str | None, directory: Path, jobs: int) -> int:
    """Download, print every file that failed, and leave the digests of those that are there."""
    if not 1 <= jobs <= 64:
        raise CommandError(f"--jobs is {jobs}; it must be 1 to 64")
    if directory.exists() and not directory.is_dir():
        raise CommandError(f"{directory} is not a directory")
    try:
        release = list_release(repo, revision, endpoint)
    except CheckpointError as error:
        print(error)
        return 1
    print(f"{repo} at {release.revision}: {len(release.files)} files, {release.bytes:,} bytes", flush=True)
    progress, digests, failed = Progress("fetch", release.bytes, sys.stderr), dict[str, str](), 0
    for line in fetch_release(release, directory, jobs, progress.advance, digests):
        progress.clear()
        print(line, flush=True)
        failed += 1
    progress.close()
    write_digests(directory / DIGESTS_NAME, digests)
    if failed:
        print(f"{directory}: {failed} of {len(release.files)} files are not there; the same command goes on")
        return 1
    print(f"{directory}: {len(digests)} files with the right digests, listed in {DIGESTS_NAME}")
    return 0

"""The released DeepSeek command-line client `dsh`, run once without a terminal against a server.

    .venv/bin/python tests/clients/dsh.py --base-url http://127.0.0.1:8000 "What is in this folder?"

The client is a self-contained program inside a wheel; it is installed once into a cache directory, by its digest. Each
run has a private, empty home and an environment of its own, so that no setting or key of the user gets in.

Two generations are tested. They speak different protocols:

    0.2.1rc2    POST /v1/messages          (Anthropic Messages)
    0.1.5rc1    POST /chat/completions     (OpenAI Chat Completions)

Exit codes: 0 answered, 1 the client failed, 2 wrong use, 3 no answer or not the expected one, 4 cannot be installed,
124 took too long.
"""

import argparse
import fcntl
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import venv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

PACKAGE = "deepseek-harness-runtime-bin"
# The wheels for x86-64 Linux. What is not one of these is not run.
DIGESTS = {
    "0.2.1rc2": "0a0a4eb85a22cd9339972e6a5ced77a27ec791353a5b220e3e10b8cdbbdeca39",
    "0.1.5rc1": "ad877237382baff4628969a9ebdbfe38486d971b7987c032d0e29775759b5229",
}
NEWEST = "0.2.1rc2"
# The wheel of this version lacks a file of the plug-in that asks for a session title, and does not start with it.
WITHOUT_TITLE = {"0.1.5rc1"}
INSTALL_TIMEOUT_S = 300.0
# Variables of the caller that the client may see; everything else could change what it does.
PASSED_ON = ("PATH", "LANG", "LC_ALL", "TZ", "TMPDIR")


class InstallError(Exception):
    """The client cannot be had on this machine."""


class Outcome(NamedTuple):
    """How a run ended: exit status (124 where it took too long), the final answer, and what went to stderr."""

    status: int
    answer: str
    errors: str


def find_cache() -> Path:
    """The folder for installed clients, inside the one that the server uses too."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.environ.get("DSUF_CACHE_DIR") or f"{base}/dsuf").expanduser() / "clients"


def install(version: str, cache: Path) -> Path:
    """The path of `dsh` at `version`, installed under `cache` if it is not there; raises `InstallError`."""
    if platform.machine() != "x86_64" or platform.system() != "Linux":
        raise InstallError(f"no wheel of dsh {version} for {platform.system()} on {platform.machine()}")
    folder = cache / f"dsh-{version}"
    program, stamp = folder / "bin" / "dsh", folder / "digest"
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with lock(cache / f"dsh-{version}.lock"):
            if not stamp.exists() or stamp.read_text() != DIGESTS[version]:
                venv.create(folder, clear=True, with_pip=True)
                pip_install(folder, version)
                stamp.write_text(DIGESTS[version])
    except (OSError, subprocess.SubprocessError) as error:
        raise InstallError(f"dsh {version} cannot be installed: {error}") from error
    return program


def pip_install(folder: Path, version: str) -> None:
    """Install the wheel into the environment at `folder`; raises a `SubprocessError`."""
    requirement = folder / "requirement.txt"
    requirement.write_text(f"{PACKAGE}=={version} --hash=sha256:{DIGESTS[version]}\n")
    pip = [folder / "bin" / "python", "-m", "pip", "install", "-qq", "--no-input", "--disable-pip-version-check"]
    options = ["--no-deps", "--only-binary", ":all:", "--require-hashes", "--requirement", requirement]
    subprocess.run([*pip, *options], check=True, timeout=INSTALL_TIMEOUT_S, stdin=subprocess.DEVNULL)


@contextmanager
def lock(path: Path) -> Iterator[None]:
    """Hold the lock file `path`: two test runs share the cache."""
    with path.open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        yield


def make_environment(home: Path, base_url: str, permission: str) -> dict[str, str]:
    """The client's whole environment."""
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return passed_on | {
        "HOME": str(home),
        "DSH_HOME": str(home),
        "DEEPSEEK_BASE_URL": base_url.rstrip("/"),
        "DEEPSEEK_API_KEY": "any",
        "DSH_TELEMETRY_DISABLED": "1",
        "DSH_PERMISSION_MODE": permission,
        "NO_PROXY": "127.0.0.1,localhost",
        "no_proxy": "127.0.0.1,localhost",
    }


def write_patch(home: Path, version: str, title: bool, max_tokens: int | None) -> list[str]:
    """Arguments that change the client's built-in profile where a run asks for it."""
    entries: list[dict[str, object]] = []
    if not title or version in WITHOUT_TITLE:
        entries.append({"id": "session-title-llm", "disabled": True})
    if max_tokens is not None:
        entries.append({"id": "llm-deepseek", "config": {"maxTokens": max_tokens}})
    if not entries:
        return []
    path = home / "patch.yml"
    path.write_text(json.dumps(entries))  # every JSON text is YAML
    return ["--patch", str(path)]


def run(
    program: Path,
    version: str,
    base_url: str,
    prompt: str,
    *,
    folder: Path,
    permission: str = "workspace-write",
    title: bool = True,
    max_tokens: int | None = None,
    timeout_s: float = 120.0,
) -> Outcome:
    """Ask once, in `folder`. The client retries by itself, so a faulty server shows as a slow run, then as status 1."""
    with tempfile.TemporaryDirectory(prefix="dsh-home-", ignore_cleanup_errors=True) as name:
        home = Path(name)
        process = subprocess.Popen(
            [program, "--profile", "headless", *write_patch(home, version, title, max_tokens), prompt],
            cwd=folder,
            env=make_environment(home, base_url, permission),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            answer, errors = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            answer, errors = end(process)
            return Outcome(124, answer.strip(), errors)
        except BaseException:
            end(process)
            raise
    return Outcome(process.returncode, answer.strip(), errors)


def end(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End the client and what it started: politely, then for certain. Returns what it had printed."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        os.killpg(process.pid, number)
        try:
            return process.communicate(timeout=5)
        except subprocess.TimeoutExpired:
            continue
    return "", ""


def main(argv: Sequence[str] | None = None) -> int:
    """The command line above."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompt")
    parser.add_argument("--base-url", required=True, help="root of the server, http://HOST:PORT")
    parser.add_argument("--version", choices=DIGESTS, default=NEWEST, help="generation of the client")
    parser.add_argument("--folder", type=Path, default=Path(), help="folder that the client works in (default: this)")
    parser.add_argument("--permission", default="workspace-write", help="what its tools may do (default: %(default)s)")
    parser.add_argument("--max-tokens", type=int, help="tokens that an answer may have (default: the client's)")
    parser.add_argument("--no-title", action="store_true", help="leave out the side request for a title")
    parser.add_argument("--expect", help="text that the answer must contain")
    parser.add_argument("--timeout", type=float, default=300.0, metavar="SECONDS", help="default: %(default)s")
    args = parser.parse_args(argv)
    try:
        program = install(args.version, find_cache())
    except InstallError as error:
        print(f"dsh: {error}", file=sys.stderr)
        return 4
    outcome = run(
        program,
        args.version,
        args.base_url,
        args.prompt,
        folder=args.folder,
        permission=args.permission,
        title=not args.no_title,
        max_tokens=args.max_tokens,
        timeout_s=args.timeout,
    )
    print(outcome.answer)
    print(outcome.errors, file=sys.stderr, end="")
    if outcome.status:
        return outcome.status if outcome.status == 124 else 1
    return 0 if outcome.answer and (args.expect or "") in outcome.answer else 3


if __name__ == "__main__":
    # So that the client and its private home go away with us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())

"""`dsuf weights fetch` from a local server: whole, interrupted, resumed, refused."""

import hashlib
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from dsuf.__main__ import main
from dsuf.checkpoint import fetch
from dsuf.errors import CheckpointError
from tests.checkpoint.hub import COMMIT, REPO, Hub, serving

BIG = "model-00001-of-00001.safetensors"
FILES = {
    BIG: random.Random(1).randbytes(300_000),
    "config.json": b'{"a": 1}',
    "inference/config.json": b"{}",
    ".gitattributes": b"x",
}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.setattr("time.sleep", lambda _: None)  # the library's pause before it tries again
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 4096)  # what it receives before it writes
    with serving(Hub(dict(FILES))) as hub:
        yield hub


def run(hub: Hub, directory: Path, *more: str) -> int:
    return main(["weights", "fetch", REPO, str(directory), "--endpoint", hub.url, *more])


def kept(directory: Path) -> dict[str, bytes]:
    """Everything in `directory`, by name."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_fetch_gives_the_files_and_their_digests(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(hub, tmp_path / "new" / "dir") == 0
    files = kept(tmp_path / "new" / "dir")
    sums = files.pop("SHA256SUMS").decode().splitlines()
    assert files == {name: content for name, content in FILES.items() if not name.startswith(".")}
    assert sums == [f"{hashlib.sha256(files[name]).hexdigest()}  {name}" for name in sorted(files)]
    assert f"{REPO} at {COMMIT}: 3 files" in capsys.readouterr().out
    assert (
        main(["weights", "verify", str(tmp_path / "new/dir"), "--digests", str(tmp_path / "new/dir/SHA256SUMS")]) == 1
    )
    assert "digest" not in capsys.readouterr().out  # the files are no checkpoint, and all of them are as published


def test_second_run_downloads_nothing(hub: Hub, tmp_path: Path) -> None:
    assert run(hub, tmp_path) == 0
    hub.requests.clear()
    assert run(hub, tmp_path) == 0
    assert hub.requests == []


def test_broken_connection_is_taken_up_within_a_run(hub: Hub, tmp_path: Path) -> None:
    hub.cuts[BIG] = [100_000]
    assert run(hub, tmp_path) == 0
    assert (tmp_path / BIG).read_bytes() == FILES[BIG]
    first, second = (asked for name, asked in hub.requests if name == BIG)
    assert first is None and second is not None and 90_000 < int(second[6:-1]) <= 100_000


def test_next_run_goes_on_where_the_last_one_stopped(hub: Hub, tmp_path: Path) -> None:
    partial = tmp_path / fetch.PARTIAL_NAME / BIG
    partial.parent.mkdir()
    partial.write_bytes(FILES[BIG][:123_456])
    assert run(hub, tmp_path) == 0
    assert (tmp_path / BIG).read_bytes() == FILES[BIG]
    assert [asked for name, asked in hub.requests if name == BIG] == ["bytes=123456-"]
    assert not partial.parent.exists()


def test_interrupted_run_keeps_what_it_received(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.cuts[BIG] = [200_000] + 9 * [0]
    assert run(hub, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith(f"{BIG}: download failed: ")]
    assert lines[-1].endswith("1 of 3 files are not there; the same command goes on")
    assert not (tmp_path / BIG).exists()
    received = (tmp_path / fetch.PARTIAL_NAME / BIG).stat().st_size
    assert 190_000 < received <= 200_000
    hub.cuts.clear()
    hub.requests.clear()
    assert run(hub, tmp_path) == 0
    assert hub.requests == [(BIG, f"bytes={received}-")]
    assert (tmp_path / BIG).read_bytes() == FILES[BIG]


def test_server_without_ranges_sends_the_whole_again(hub: Hub, tmp_path: Path) -> None:
    hub.honours_range = False
    partial = tmp_path / fetch.PARTIAL_NAME / BIG
    partial.parent.mkdir()
    partial.write_bytes(b"\0" * 1000)
    assert run(hub, tmp_path) == 0
    assert (tmp_path / BIG).read_bytes() == FILES[BIG]


@pytest.mark.parametrize("name", [BIG, "config.json"])
def test_wrong_digest_is_refused(hub: Hub, tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    hub.lies.add(name)
    assert run(hub, tmp_path) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines if "digest mismatch" in line] == [f"{name}: digest mismatch"]
    assert name not in kept(tmp_path)
    assert f"{fetch.PARTIAL_NAME}/{name}" not in kept(tmp_path)
    assert name not in kept(tmp_path)["SHA256SUMS"].decode().split()
    hub.lies.clear()
    assert run(hub, tmp_path) == 0


def test_damaged_file_is_fetched_again(hub: Hub, tmp_path: Path) -> None:
    (tmp_path / BIG).write_bytes(b"\0" * len(FILES[BIG]))
    partial = tmp_path / fetch.PARTIAL_NAME / BIG
    partial.parent.mkdir()
    partial.write_bytes(b"\0" * (len(FILES[BIG]) + 1))
    assert run(hub, tmp_path) == 0
    assert (tmp_path / BIG).read_bytes() == FILES[BIG]


def test_files_beyond_the_http_limit_take_the_librarys_way(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fetch, "HTTP_LIMIT_BYTES", 100_000)
    assert run(hub, tmp_path) == 0
    assert (tmp_path / BIG).read_bytes() == FILES[BIG]


@pytest.mark.parametrize("name", ["../outside", "/etc/x", "a/../../b", "a\nb", "a\\b"])
def test_names_that_leave_the_directory_are_refused(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.files[name] = b"x"
    if name.startswith("."):
        hub.files["x/" + name] = hub.files.pop(name)
    with pytest.raises(CheckpointError, match="cannot be"):
        fetch.list_release(REPO, "main", hub.url)
    assert run(hub, tmp_path / "dir") == 1
    assert not (tmp_path / "dir").exists()


def test_unusable_arguments(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    unusable = (
        ["no/such", str(tmp_path)], ["not a name!", str(tmp_path)], [REPO, str(tmp_path / "file")],
        [REPO, str(tmp_path), "--jobs", "0"], [REPO, str(tmp_path), "--revision", "other"],
    )  # fmt: skip
    for argv in unusable:
        assert main(["weights", "fetch", *argv, "--endpoint", hub.url]) == 2
        assert len(capsys.readouterr().err.splitlines()) == 1


def test_server_that_does_not_answer_is_a_failure_not_a_wrong_use(tmp_path: Path) -> None:
    assert main(["weights", "fetch", REPO, str(tmp_path), "--endpoint", "http://127.0.0.1:9"]) == 1


def test_disk_too_small(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = os.statvfs(tmp_path)
    assert usage.f_bavail > 0
    monkeypatch.setattr(fetch.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    assert run(hub, tmp_path) == 2


@pytest.mark.parametrize("arguments", [[""], [REPO, ""], [REPO, " "]])
def test_no_directory_is_not_the_current_one(
    hub: Hub, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as caught:
        main(["weights", "fetch", *arguments, "--endpoint", hub.url])
    assert caught.value.code == 2
    captured = capsys.readouterr()
    assert "DIR: is empty" in captured.err and captured.err.count("\n") == 1
    assert (hub.requests, kept(tmp_path)) == ([], {})

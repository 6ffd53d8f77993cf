"""The test tiers themselves: what runs when, that everything left out is said, and when two workers share the tests."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TESTS = """
import time, pytest
def test_plain(): pass
@pytest.mark.full
def test_long(): pass
def test_impossible(): pytest.skip("no such device")
def test_slow(): time.sleep(0.5)
"""


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project with our conftest, four tests, and a sign of life ten times a second."""
    source = (Path(__file__).parent / "conftest.py").read_text()
    assert "SIGN_OF_LIFE_S = 30.0" in source
    folder = tmp_path_factory.mktemp("project")
    (folder / "conftest.py").write_text(source.replace("SIGN_OF_LIFE_S = 30.0", "SIGN_OF_LIFE_S = 0.1"))
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = full: x\n")
    (folder / "test_it.py").write_text(TESTS)
    shutil.copy(ROOT / "tests" / "workers.py", folder)
    return folder


@pytest.fixture(scope="module")
def short_lines(project: Path) -> list[str]:
    """What the short tier prints."""
    return run(project)


def run(project: Path, *arguments: str) -> list[str]:
    """The lines that pytest prints there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=200).stdout.splitlines()


def test_short_tier(short_lines: list[str]) -> None:
    """Without --full the long test is left out, and both it and the impossible one are named; the count is last."""
    assert "NOT RUN: 1 x no such device" in short_lines
    assert any(line.startswith("NOT RUN: 1 x full tier") for line in short_lines)
    assert short_lines[-1].startswith("2 passed, 1 skipped, 1 deselected")


def test_full_tier(project: Path) -> None:
    """With --full only the impossible one is left."""
    lines = run(project, "--full")
    assert [line for line in lines if line.startswith("NOT RUN:")] == ["NOT RUN: 1 x no such device"]
    assert lines[-1].startswith("3 passed, 1 skipped")


def test_sign_of_life(short_lines: list[str]) -> None:
    """A long test is named while it runs."""
    assert any(line.startswith("... test_it.py::test_slow: running for") for line in short_lines)


@pytest.mark.full
@pytest.mark.timeout(240)
def test_two_workers_say_the_same(project: Path, short_lines: list[str]) -> None:
    """What was left out, the count and the sign of life: all as from one process."""
    pytest.importorskip("xdist", reason="no pytest-xdist (it is in requirements-dev.lock)")
    lines = run(project, "-n", "2", "-p", "workers")
    assert [line for line in lines if line.startswith("NOT RUN:")] == [
        line for line in short_lines if line.startswith("NOT RUN:")
    ]
    assert lines[-1].startswith("2 passed, 1 skipped, 1 deselected")
    assert any(line.startswith("... test_it.py::test_slow: running for") for line in lines)


def test_what_starts_programs_is_one_piece() -> None:
    """So no two such tests run at once; everything else is handed out by the file."""
    workers = pytest.importorskip("tests.workers", reason="no pytest-xdist", exc_type=ImportError)
    assert workers.scope_of("tests/fleet/test_fleet.py::test_one[a::b]") == "programs"
    assert workers.scope_of("tests/web/test_page.py::test_two") == "programs"
    assert workers.scope_of("tests/sched/test_policy.py::test_three[x::y]") == "tests/sched/test_policy.py"
    names = ["tests/sched/test_policy.py", "tests/fleet/test_fleet.py", "tests/turns/test_late.py"]
    for full, order in ((False, [1, 2, 0]), (True, [2, 0, 1])):
        assert sorted(names, key=lambda name: workers.place(name, full)) == [names[number] for number in order]
    assert [part for part in workers.PROGRAMS + workers.LONG if not (ROOT / part).exists()] == []


@pytest.mark.parametrize(
    ("arguments", "two"),
    [
        ("", True), ("--full -x", True), ("-vv --durations=9", True), ("tests/sched", False), ("-k policy", False),
        ("--full --lf", False), ("-n 4", False),
    ],
)  # fmt: skip
def test_who_picks_tests_out_gets_one_process(tmp_path: Path, arguments: str, two: bool) -> None:
    """`bin/test` with an interpreter that says what it was told to run."""
    for name, body in (("python", 'echo "$*"'), ("nproc", "echo 2")):
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"DSUF_NO_SETUP": "1", "DSUF_PYTHON": str(tmp_path / "python")}
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"
    command = [ROOT / "bin" / "test", *arguments.split()]
    lines = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60).stdout.splitlines()
    workers = ["-n", "2", "-p", "tests.workers", "--timeout", "480"] if two else []
    assert lines[-1].split() == ["-m", "pytest", "-q", *workers, *arguments.split()]

"""The test tiers themselves: what runs when, and that everything left out is said."""

import subprocess
import sys
from pathlib import Path

import pytest

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
    return folder


@pytest.fixture(scope="module")
def short_lines(project: Path) -> list[str]:
    """What the short tier prints."""
    return run(project)


def run(project: Path, *arguments: str) -> list[str]:
    """The lines that pytest prints there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=project, capture_output=True, text=True, timeout=60).stdout.splitlines()


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

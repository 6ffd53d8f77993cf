"""The wheel: every module and data file of `dsuf/` is in it, and nothing else of the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.mark.full
def test_wheel_holds_the_package(tmp_path: Path) -> None:
    """Built without a network, by the locked build backend."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=100)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        scripts = next(archive.read(name) for name in archive.namelist() if name.endswith("entry_points.txt"))
    tracked = subprocess.run(["git", "ls-files", "dsuf"], cwd=ROOT, check=True, capture_output=True, text=True)
    assert set(tracked.stdout.split()) - packed == set()
    assert {name for name in packed if not name.startswith("dsuf/")} == set()
    assert b"dsuf = dsuf.__main__:main" in scripts


def test_locks_name_no_host() -> None:
    """Lock files pin versions and digests; where they come from is the installing machine's business."""
    for lock in ROOT.glob("requirements*.lock"):
        text = lock.read_text()
        assert "://" not in text
        assert "index-url" not in text
        assert text.count("==") <= text.count("--hash=sha256:")


def test_locks_agree() -> None:
    """A package has one version in all three files: the development lock must be the base lock and more."""
    base, *others = (
        pinned(ROOT / name) for name in ("requirements.lock", "requirements-dev.lock", "requirements-cuda.lock")
    )
    for other in others:
        assert base <= other


def pinned(lock: Path) -> set[str]:
    """The `name==version` of every row of a lock file; markers may differ, since another extra can widen them."""
    return {line.split()[0] for line in lock.read_text().splitlines() if "==" in line and line[0].isalpha()}

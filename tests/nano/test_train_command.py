"""`bin/train-nano` where it cannot train: one line says what is missing."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = Path(__file__).parents[2] / "bin" / "train-nano"
BARE = '#!/bin/sh\nexec {python} -S -E "$@"\n'  # no site packages: nothing that training needs


@pytest.mark.parametrize(("bare", "missing"), [(True, "torch"), (False, "does not run")])
def test_says_what_is_missing(tmp_path: Path, bare: bool, missing: str) -> None:
    python = tmp_path / "python"
    if bare:
        python.write_text(BARE.format(python=sys.executable))
        python.chmod(0o755)
    told = subprocess.run(
        [COMMAND, "package.npz", "--out", str(tmp_path / "out")],
        env=os.environ | {"DSUF_TORCH_PYTHON": str(python)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert told.returncode == 2
    assert told.stderr.startswith("train-nano: missing: ") and missing in told.stderr
    assert len(told.stderr.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_help_needs_nothing(tmp_path: Path) -> None:
    """What the program is for is told by any machine."""
    env = os.environ | {"DSUF_TORCH_PYTHON": str(tmp_path / "none")}
    told = subprocess.run([COMMAND, "--help"], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert told.returncode == 0 and not told.stderr and "bin/train-nano FILE --out DIR" in told.stdout

"""The recorded primitives and hashes, row by row."""

import io
from pathlib import Path

import pytest

from dsuf.golden.folder import Folder
from dsuf.golden.hashes import compare_hashes
from dsuf.golden.layout import primitive_groups
from dsuf.golden.primitives import COMPARISONS
from dsuf.golden.report import Report

GOLDEN = Path(__file__).parents[1] / "golden"


@pytest.fixture(scope="module")
def folder() -> Folder:
    return Folder.open(GOLDEN)


@pytest.mark.parametrize("group", COMPARISONS)
def test_primitive(folder: Folder, group: str) -> None:
    out = io.StringIO()
    report = Report(out)
    COMPARISONS[group](report, folder.cases["primitives"], group, folder.config)
    assert report.exit_code == 0, out.getvalue()


def test_every_group_is_compared(folder: Folder) -> None:
    assert primitive_groups(iter(folder.cases["primitives"])) == dict.fromkeys(COMPARISONS, True)


def test_hashes(folder: Folder) -> None:
    out = io.StringIO()
    report = Report(out)
    compare_hashes(report, folder)
    assert report.exit_code == 0, out.getvalue()
    assert folder.cases["engram_hash"].unused() == []

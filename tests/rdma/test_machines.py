"""Reading by RDMA over real verbs: soft-RoCE in small machines that are built on first use and kept."""

import shutil
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest

from tests.rdma.cases import CASES
from tests.rdma.image import NoImage, image_folder, make_image
from tests.rdma.machine import Outcome, run_machines
from tests.rdma.report import Report
from tests.rdma.turns import TURNS

ALONE = {
    "reads": ["caches_come_over", "wrong_key", "killed_meanwhile", "fenced", "cancelled"],
    "turns": ["resumes_elsewhere", "keeper_killed_meanwhile"],
}
"""Cases that are tried within one machine too: there packets take another way."""

pytestmark = [pytest.mark.full, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def image() -> Path:
    """What the machines start from."""
    try:
        return make_image(image_folder())
    except NoImage as reason:
        pytest.skip(f"no machine with soft-RoCE, so no RDMA over real verbs: {reason}")


@pytest.fixture(scope="module")
def of_two(image: Path) -> Mapping[str, Report]:
    """All cases, between two machines."""
    return try_cases(image, 2, {"reads": list(CASES), "turns": list(TURNS)}, limit_s=600)


@pytest.fixture(scope="module")
def of_one(image: Path) -> Mapping[str, Report]:
    """Some, within one."""
    return try_cases(image, 1, ALONE, limit_s=400)


def try_cases(image: Path, count: int, cases: Mapping[str, list[str]], *, limit_s: float) -> Mapping[str, Report]:
    """What came of each case; one that fails is tried once more, by itself.

    Time runs unevenly in an emulated machine beside others, and packets are lost in it, which deadlines do not know. A
    case that fails twice has failed.
    """
    reports: dict[str, Report] = {}
    for _ in range(2):
        left = {kind: [name for name in names if not is_good(reports.get(name))] for kind, names in cases.items()}
        words = [f"{kind}={','.join(names)}" for kind, names in left.items() if names]
        if words:
            print("trying", *words)
            outcome = run_machines(image, count, ["python3", "-m", "tests.rdma.tries", *words], limit_s=limit_s)
            reports |= read_reports(outcome)
    return reports


def is_good(report: Report | None) -> bool:
    """Whether a case was tried and held."""
    return report is not None and report.good


def read_reports(outcome: Outcome) -> Mapping[str, Report]:
    """By case, or fail with what the machines said."""
    lines = [line for kind in ALONE for line in outcome.files.get(f"report.{kind}", "").splitlines()]
    print(f"{outcome.seconds:.0f} s; {outcome.trouble}", *outcome.outputs, sep="\n")
    assert lines, outcome
    reports = [msgspec.json.decode(line, type=Report) for line in lines]
    return {report.case: report for report in reports}


@pytest.mark.parametrize("name", [*CASES, *TURNS])
def test_between_two_machines(of_two: Mapping[str, Report], name: str) -> None:
    assert name in of_two, f"not tried: the machines ended after {list(of_two)}"
    assert of_two[name].good, of_two[name].text


@pytest.mark.parametrize("name", [name for names in ALONE.values() for name in names])
def test_within_one_machine(of_one: Mapping[str, Report], name: str) -> None:
    assert name in of_one, f"not tried: the machine ended after {list(of_one)}"
    assert of_one[name].good, of_one[name].text


def test_an_image_is_built_once(image: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next one finds it, even where nothing could be built."""
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    assert make_image(image) == image


def test_what_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    monkeypatch.setattr("os.geteuid", lambda: 0)
    with pytest.raises(NoImage, match="apt-get install qemu-system-x86 mmdebstrap"):
        make_image(tmp_path / "image")

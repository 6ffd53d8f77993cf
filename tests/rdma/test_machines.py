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
    return read_reports(run_machines(image, 2, ["python3", "-m", "tests.rdma.tries", "reads", "turns"], limit_s=600))


@pytest.fixture(scope="module")
def of_one(image: Path) -> Mapping[str, Report]:
    """Some, within one."""
    words = [f"{kind}={','.join(names)}" for kind, names in ALONE.items()]
    return read_reports(run_machines(image, 1, ["python3", "-m", "tests.rdma.tries", *words], limit_s=400))


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

"""Which cases the checkers see, and what is made of their reports."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.campaigns.checkers import (
    APART_TIMEOUT_S,
    ENGINE,
    TIMEOUT_S,
    check,
    choose_cases,
    group,
    pick_small,
    read_report,
)

NAMES = [
    *(f"tests/kernels/test_a.py::test_one[tiny-{i}-{i + 1}]" for i in range(10)),
    "tests/kernels/test_a.py::test_one[released-3-4]",
    "tests/kernels/test_b.py::test_two[2-tiny]",
    "tests/kernels/test_b.py::test_three[tiny]",
    "tests/kernels/test_b.py::test_four",
]


def test_cases() -> None:
    """First, last and middle of each test at the smallest sizes, whatever the order of parameters."""
    assert choose_cases(NAMES, "racecheck", 3) == [NAMES[0], NAMES[4], NAMES[9], NAMES[11], NAMES[12]]
    assert choose_cases(NAMES, "memcheck", 1) == [NAMES[0], NAMES[11], NAMES[12]]


def test_small_cases_of_clustered_kernels() -> None:
    """As few zeros as there are, then small numbers; words do not count."""
    parts = ["0-0-few", "1-0-few", "9-9-few", "2-1-few", "300-1-dim", "1.5-3-x2"]
    names = [f"tests/kernels/test_index.py::test_a[tiny-{part}]" for part in parts]
    assert pick_small(names) == [names[3], names[5]]
    assert pick_small(names[:1]) == names[:1]
    assert choose_cases(names, "racecheck", 3) == [names[3], names[5]]
    assert choose_cases(names, "initcheck", 2) == [names[0], names[5]]


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        ("78 passed in 2.55s\n========= ERROR SUMMARY: 0 errors\n", (0, 78)),
        ("5 passed in 1s\n========= ERROR SUMMARY: 3 errors\n", (3, 5)),
        ("7 passed\n========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)\n", (1, 7)),
        ("7 passed\n========= RACECHECK SUMMARY: 0 hazards displayed (0 errors, 0 warnings)\n", (0, 7)),
        ("7 passed\nkilled", (None, 7)),
    ],
)
def test_reports(output: str, expected: tuple[int | None, int]) -> None:
    """Errors are counted; a tool that says nothing is not taken for a clean one."""
    assert read_report(output) == expected


def test_groups() -> None:
    """The race checker takes tests of clustered kernels apart, the others take all together and the engine."""
    cases = [f"tests/kernels/{name}" for name in (
        "test_rotate.py::test_rotation[tiny-1]", "test_attend.py::test_a[tiny-1]", "test_attend.py::test_a[tiny-2]",
        "test_attend.py::test_b[tiny-2]",
    )]  # fmt: skip
    assert group("memcheck", cases) == [[*cases, ENGINE]]
    assert group("racecheck", cases) == [cases[:1], cases[1:3], cases[3:]]


def test_a_row_adds_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the processes found and passed; a test that did not end is named, and is no fault."""
    outcomes = {ENGINE: (0, 3), "tests/kernels/test_store.py::test_c[tiny-1]": (None, 0)}
    limits_s = dict[str, float]()

    def run(tool: str, names: list[str], limit_s: float) -> tuple[int | None, int]:
        limits_s[names[-1]] = limit_s
        return outcomes.get(names[-1], (2, len(names)))

    monkeypatch.setattr("bench.campaigns.checkers.run_under", run)
    cases = ["tests/kernels/test_attend.py::test_a[tiny-1]", "tests/kernels/test_attend.py::test_b[tiny-1]"]
    with ThreadPoolExecutor(2) as pool:
        whole = check("memcheck", cases, 3, pool)
        assert (whole["cases"], whole["passed"], whole["errors"], whole["clean"]) == (3, 3, 0, True)
        row = check("racecheck", [*cases, "tests/kernels/test_store.py::test_c[tiny-1]"], 3, pool)
    assert (row["cases"], row["passed"], row["errors"], row["clean"]) == (3, 2, 4, False)
    assert row["unfinished"] == "test_c"
    assert limits_s[ENGINE] == TIMEOUT_S and limits_s[cases[0]] == APART_TIMEOUT_S

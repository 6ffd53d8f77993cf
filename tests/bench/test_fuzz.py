"""The fuzz campaign: what it sends, what it takes for a fault, and its short twin."""

import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from bench.campaigns.fuzz import Fuzz, find_wrong_body
from bench.campaigns.rudeness import Visit, draw
from bench.server import Server

ROOT = Path(__file__).parents[2]
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def test_visits_are_of_every_kind_and_come_again() -> None:
    visits = [draw(random.Random(f"0 {number}")) for number in range(600)]
    assert visits == [draw(random.Random(f"0 {number}")) for number in range(600)]
    kinds = Counter(visit.kind for visit in visits)
    assert len(kinds) == 10 and min(kinds.values()) >= 1
    assert {visit.end for visit in visits} == {"read", "shut", "fin", "rst"}
    assert any("\ufffd" in b"".join(visit.pieces).decode(errors="replace") for visit in visits), "no text"


@pytest.mark.parametrize(
    ("kind", "reply", "faults"),
    [
        ("right", OK, 0), ("right", b"", 1), ("right", OK.replace(b"200", b"400"), 1), ("cut", b"", 0),
        ("damaged", OK.replace(b"200", b"500"), 1), ("damaged", OK.replace(b"200", b"400"), 0), ("nested", OK + OK, 1),
        ("pipelined", OK + OK, 0), ("damaged", OK.replace(b"{}", b"{,"), 1),
    ],
)  # fmt: skip
def test_faults_are_seen(kind: str, reply: bytes, faults: int) -> None:
    fuzz = Fuzz(Server("http://127.0.0.1:1", 0), 1, 0)
    fuzz._judge(Visit(kind=kind, pieces=[b""]), 0, reply)
    assert fuzz.tally.fault_count == faults


def test_a_body_that_is_not_there_as_a_whole_is_not_judged() -> None:
    assert find_wrong_body(OK[:-1]) is None and find_wrong_body(b"") is None


@pytest.mark.full
@pytest.mark.timeout(400)
def test_three_thousand_requests() -> None:
    command = [sys.executable, "bench/campaigns/fuzz.py", "--requests", "3000", "--seed", "7", "--discard"]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=380)
    assert run.returncode == 0, run.stdout + run.stderr

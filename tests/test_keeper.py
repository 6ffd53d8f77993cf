"""What looks after a program of a fleet, and what is told of its end. The programs here end by themselves."""

import io
import logging
import sys
from pathlib import Path

import pytest

from dsuf.config import Settings
from dsuf.node.startup import Startup
from dsuf.observe.log import JsonFormatter
from dsuf.trial.keeper import Keeper, describe_end
from dsuf.trial.program import Program


class Rig:
    """A keeper of a program that ends with code 3, at a time that the test sets."""

    def __init__(self, folder: Path, *command: str) -> None:
        self.program = Program("node1", command or ["/bin/sh", "-c", "exit 3"], folder)
        self.now_s = 0.0
        self.told: list[str] = []
        self.keeper = Keeper(self.program, self.told.append, lambda: True, clock=lambda: self.now_s)

    def end(self) -> None:
        """It has ended, and the keeper has seen that."""
        assert self.program.wait(20.0)
        self.keeper.look()


def test_what_ends_begins_again_later_each_time_and_stays_away_in_the_end(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.program.start()
    for start, pause_s in enumerate((1.0, 2.0, 4.0)):
        pid = rig.program.pid
        rig.end()
        assert rig.told.pop() == f"node1 ended with code 3; it starts again in {pause_s:.0f} s"
        rig.now_s += pause_s - 0.01
        rig.keeper.look()
        assert rig.program.pid == pid, start
        rig.now_s += 0.02
        rig.keeper.look()
        assert rig.program.pid != pid, start
    rig.end()
    for _ in range(3):
        rig.keeper.look()
        rig.now_s += 100.0
    assert rig.told == ["node1 ended with code 3; it stays away, after 3 starts within 60 s"]
    assert rig.keeper.away


def test_what_ends_now_and_then_begins_again_for_ever(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.program.start()
    for _ in range(6):
        rig.end()
        rig.now_s += 30.0
        rig.keeper.look()
    assert not rig.keeper.away
    assert {line.rpartition("in ")[2] for line in rig.told} == {"1 s", "2 s"}


def test_what_is_ready_again_is_told_once(tmp_path: Path) -> None:
    """And what was ready from the beginning is not told."""
    rig = Rig(tmp_path, sys.executable, "-c", "import time; time.sleep(60)")
    rig.program.start()
    rig.keeper.look()
    rig.program.kill()
    rig.keeper.look()
    rig.now_s += 5.0
    try:
        for _ in range(3):
            rig.keeper.look()
    finally:
        rig.program.kill()
    assert rig.told == ["node1 ended with signal 9 (Killed); it starts again in 1 s", "node1 is ready again"]


def test_what_cannot_be_started_is_told_and_stays_away(tmp_path: Path) -> None:
    rig = Rig(tmp_path)
    rig.program.start()
    rig.program.command = ["/no/such/program"]
    for _ in range(4):
        rig.end()
        rig.now_s += 5.0
        rig.keeper.look()
    assert rig.keeper.away
    assert [line for line in rig.told if "No such file" in line] == 3 * [
        "node1: /no/such/program: No such file or directory"
    ]


def log_line(level: int, text: str) -> str:
    """A line of a node's log."""
    return JsonFormatter().format(logging.LogRecord("dsuf", level, "", 0, text, None, None)) + "\n"


@pytest.mark.parametrize("useful", [True, False])
def test_of_a_nodes_log_only_what_may_say_why_is_told(tmp_path: Path, useful: bool) -> None:
    """Not how it started, with lines to copy for an address that is dead; and nothing of the run before."""
    said = io.StringIO()
    Startup(said).ready("http://127.0.0.1:9001", Settings(), useful=useful)
    own = [log_line(logging.INFO, "turn"), log_line(logging.ERROR, "engine"), "Fatal Python error: Aborted\n"]
    text = log_line(logging.WARNING, "early") + said.getvalue() + "".join(own) + log_line(logging.INFO, "turn")
    (tmp_path / "text").write_text(text)
    (tmp_path / "node1.log").write_text("a run before\n")
    program = Program("node1", ["/bin/sh", "-c", f"cat {tmp_path}/text; exit 3"], tmp_path)
    program.start()
    assert program.wait(20.0)
    assert describe_end(program) == "\n  ".join(("node1 ended with code 3", own[1].strip(), own[2].strip()))
    assert "a run before" not in program.tail()


def test_of_redis_log_only_warnings_are_told(tmp_path: Path) -> None:
    time = "30 Nov 2026 12:53:13.123"
    lines = [
        f"81:C {time} # WARNING Memory overcommit must be enabled!", f"81:M {time} * Ready to accept connections tcp",
        f"81:M {time} * 100 changes in 300 seconds. Saving...", f"81:M {time} # Out of memory",
    ]  # fmt: skip
    (tmp_path / "redis.log").write_text("\n".join(lines))
    assert Program("redis", [], tmp_path).complaints() == lines[3:]


def test_a_long_log_is_told_by_its_end(tmp_path: Path) -> None:
    (tmp_path / "x.log").write_text("".join(f"{number} {'x' * 1000}\n" for number in range(1000)))
    told = Program("x", [], tmp_path).complaints()
    assert [line.split()[0] for line in told] == [str(number) for number in range(994, 1000)]
    assert max(map(len, told)) == 400

"""Two workers at a time (pytest-xdist): a file is one worker's, and what starts programs is all one worker's.

`bin/test` loads this with `-p tests.workers -n 2` where it runs everything. Servers, fleets, browsers and emulated
machines are told by their deadlines: never do two tests run at once that start such programs. In the short tier the
other worker computes meanwhile, since much of what programs do is waiting. The full tier tries them under loads of its
own, which take the whole machine: there they come last, when what only computes is done. pytest-xdist may be absent, so
nothing else imports this.
"""

from typing import Any

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

PROGRAMS = (
    "tests/bench/", "tests/clients/", "tests/deploy/", "tests/fleet/", "tests/kv/directory/", "tests/kv/transport/",
    "tests/node/", "tests/rdma/", "tests/replay/", "tests/repro/", "tests/web/", "tests/sched/test_promises.py",
    "tests/test_balancer.py", "tests/test_command_line.py", "tests/test_keeper.py", "tests/test_packaging.py",
    "tests/test_setup.py", "tests/test_tiers.py", "tests/test_trial.py",
)  # fmt: skip
"""And what is measured by the clock."""
LONG = ("tests/reference/", "tests/nano/", "tests/turns/", "tests/recipe/", "tests/cuda/")
"""Begun early, so that no long file is left to one worker in the end."""


class FilesApart(LoadScopeScheduling):
    """Hands out whole files, in the order in which they were collected; the programs are one piece."""

    def _split_scope(self, nodeid: str) -> str:
        return scope_of(nodeid)


def scope_of(nodeid: str) -> str:
    """What a test may not be parted from: its file, or all that starts programs."""
    return "programs" if nodeid.startswith(PROGRAMS) else nodeid.partition("::")[0]


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> FilesApart:
    """Whole files."""
    config.option.loadscopereorder = False
    return FilesApart(config, log)


def place(nodeid: str, full: bool) -> tuple[bool, bool]:
    """By what tests are sorted: the longest pieces first, but programs last in the full tier."""
    return nodeid.startswith(PROGRAMS) == full, not nodeid.startswith(LONG)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Files are handed out in this order."""
    items.sort(key=lambda item: place(item.nodeid, config.getoption("--full")))


def pytest_deselected(items: list[pytest.Item]) -> None:
    """A worker counts what it leaves out, since its parent collects nothing."""
    output: dict[str, Any] | None = getattr(items[0].config, "workeroutput", None)
    if output is not None:
        output["left_out"] = output.get("left_out", 0) + len(items)


def pytest_testnodedown(node: Any) -> None:
    """The parent shows that count in its last line; each worker left out the same."""
    stats = node.config.pluginmanager.getplugin("terminalreporter").stats
    if left_out := getattr(node, "workeroutput", {}).get("left_out", 0):
        stats["deselected"] = [node] * left_out

"""The command of the test machines: on one of them, or the second of two, all cases; on the other what they need.

python3 -m tests.rdma.tries reads[=NAME,NAME] turns[=NAME,NAME]
"""

import os
import subprocess
import sys

from tests.rdma.report import DONE

HELPERS = {"reads": "tests.rdma.owner", "turns": "tests.rdma.keeper"}
CASES = {"reads": "tests.rdma.cases", "turns": "tests.rdma.turns"}


def main(wanted: list[str]) -> int:
    """Whether anything failed."""
    first, last = os.environ["DSUF_NODE"] == "0", os.environ["DSUF_NODE"] == str(int(os.environ["DSUF_NODES"]) - 1)
    kinds = {kind: names.split(",") if names else [] for kind, _, names in (word.partition("=") for word in wanted)}
    helpers = [subprocess.Popen([sys.executable, "-m", HELPERS[kind]]) for kind in kinds] if first else []
    failed = 0
    if last:
        try:
            for kind, names in kinds.items():
                failed |= subprocess.run([sys.executable, "-m", CASES[kind], *names]).returncode
        finally:
            DONE.touch()
    for helper in helpers:
        helper.wait()
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

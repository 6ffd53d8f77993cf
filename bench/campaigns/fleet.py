"""Faults in a fleet of real processes, many times each: peers and Redis fail while caches travel.

What happens in a round, and what must hold, is in tests/fleet/breakage.py; the full tier of the tests runs three of
each fault. Figures are kept after every lap.

    python bench/campaigns/fleet.py [--rounds 20] [--faults killed,cut] [--publish]
"""

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.report import Row, publish
from tests.fleet.alone import Alone
from tests.fleet.breakage import Breakage, Round
from tests.fleet.clocks import find_compiler
from tests.fleet.faults import FAULTS


class Campaign:
    """`rounds` of each of `faults`; `keep` is handed a row for each after every lap."""

    def __init__(self, faults: Sequence[str], rounds: int, keep: Callable[[list[Row]], object]) -> None:
        self._found: dict[str, list[Round]] = {fault: [] for fault in faults}
        self._rounds, self._keep = rounds, keep

    @property
    def rows(self) -> list[Row]:
        """What was found so far."""
        return [summarise(fault, found) for fault, found in self._found.items() if found]

    async def run(self, folder: Path) -> None:
        """Run them all: those in which nearly all time is waiting in a fleet of their own, beside the others."""
        waiting = [fault for fault in self._found if fault == "redis paused"]
        others = [fault for fault in self._found if fault not in waiting]
        async with asyncio.TaskGroup() as group:
            for name, faults in (("waiting", waiting), ("others", others)):
                if faults:
                    group.create_task(self._run_laps(faults, folder / name))

    async def _run_laps(self, faults: Sequence[str], folder: Path) -> None:
        """Faults in turn, so that each finds what the others left behind."""
        folders = [folder / name for name in ("alone", "fleet")]
        for each in folders:
            each.mkdir(parents=True)
        async with Alone(folders[0]) as alone, Breakage(folders[1], alone.replies) as rig:
            for number in range(self._rounds):
                for fault in faults:
                    self._found[fault].append(await rig.run(fault, number))
                    for problem in self._found[fault][-1].problems:
                        print(f"{fault}, round {number}: {problem}", flush=True)
                self._keep(self.rows)


def summarise(fault: str, rounds: Sequence[Round]) -> Row:
    """Rounds, those with problems, pulls by result, later turns' prompt tokens by source, and times."""
    pulls, tokens = Counter[str](), Counter[str]()
    for each in rounds:
        pulls.update(each.pulls)
        tokens.update(each.tokens)
    return {
        "fault": fault, "rounds": len(rounds), "bad": sum(bool(each.problems) for each in rounds),
        **{name: pulls[name] for name in ("whole", "missed", "late", "failed", "refused")},
        "from_peers": tokens["peer_tokens"], "computed": tokens["computed_tokens"],
        "most_over_budget_s": max(each.overrun_s for each in rounds),
        "longest_round_s": max(each.seconds for each in rounds),
    }  # fmt: skip


def main() -> None:
    """Run, print, and with --publish keep the figures; exit code 1 where a round had a problem."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--faults", default=",".join(FAULTS), help="some of: %(default)s")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    faults = args.faults.split(",")
    if unknown := set(faults) - set(FAULTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    if "clocks off" in faults and find_compiler() is None:
        parser.error("clocks off: no C compiler on this machine")
    keep = (lambda rows: publish("fleet", rows)) if args.publish else (lambda rows: print(*rows, sep="\n", flush=True))
    campaign = Campaign(faults, args.rounds, keep)
    with tempfile.TemporaryDirectory(prefix="dsuf-campaign-") as folder:
        asyncio.run(campaign.run(Path(folder)))
    sys.exit(any(row["bad"] for row in campaign.rows))


if __name__ == "__main__":
    main()

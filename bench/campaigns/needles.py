"""Needles in a fleet: three nodes behind a plain balancer, conversations that ask for what earlier turns told, and the
same with one node. Every answer has to be right, every later turn has to reuse its beginning, all replies have to be
those of one node.

    python bench/campaigns/needles.py [--sessions 40] [--model dsuf/nano] [--pack PACK] [--publish]
"""

import argparse
import asyncio
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.nano.data.draw import Draw
from bench.nano.data.package import Package
from bench.report import publish
from dsuf.trial.fleet import TrialFleet
from tests.fleet.needles import TURNS, Result, compare, tabulate
from tests.fleet.rig import find_ports

NODES = 3
TEXT_TOKENS = 600
TEXT_LETTERS = 500
"""More than a page: less is computed rather than fetched."""
TEXTS = 10


def read_texts(pack: Path | None) -> list[str]:
    """Texts that the shipped model was not trained on: of its package, or paragraphs of the readme."""
    if pack is None:
        readme = (Path(__file__).parents[2] / "README.md").read_text()
        plain = [part for part in readme.split("\n\n") if part[:1].isalpha()]
        return [" ".join(part.split()) for part in plain if len(part) > TEXT_LETTERS][:TEXTS]
    package = Package.load(pack)
    draw = Draw(package, "fleet needles", held=True)
    return ["".join(package.tokenizer.decode(piece.ids) for piece in draw.filler(TEXT_TOKENS)) for _ in range(TEXTS)]


async def run(sessions: int, flags: Sequence[str], texts: Sequence[str], folder: Path) -> Result:
    """Start both, and compare them."""
    fleets = []
    for name, count in (("fleet", NODES), ("alone", 1)):
        (folder / name).mkdir(parents=True)
        fleets.append(TrialFleet(count, folder / name, port=find_ports(), flags=flags, tied=True))
        fleets[-1].start()
    try:
        return await compare(fleets[0].url, fleets[1].node_url(1), sessions, texts)
    finally:
        for program in (program for fleet in fleets for program in fleet.programs):
            program.kill()


def main() -> int:
    """Run, print, and with --publish keep the figures; 1 where something is not as it has to be."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=40)
    parser.add_argument("--model", type=Path, help="a checkpoint (default: what `bin/serve` serves)")
    parser.add_argument("--pack", type=Path, help="package with texts (default: paragraphs of the readme)")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    flags = ["--prefill", "exact", "--threads", "1", "--cache-bytes", str(512 << 20)]
    flags += ["--model", str(args.model)] if args.model is not None else []
    with tempfile.TemporaryDirectory(prefix="dsuf-needles-") as folder:
        found = asyncio.run(run(args.sessions, flags, read_texts(args.pack), Path(folder)))
    rows = [tabulate(found, f"{NODES} nodes, {TURNS} turns a session")]
    for right, said in found.wrong:
        print(f"wrong: {said!r} for {right!r}")
    if args.publish:
        publish("fleet-needles", rows)
    else:
        print(*rows, sep="\n")
    good = found.right == found.questions and found.equal == found.sessions and not found.without_reuse
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())

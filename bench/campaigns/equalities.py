"""Greedy replies and caches of one checkpoint on the CUDA engine, made in every way that must make no difference.

Prompts are those of a file that `greedy.py record` has made. The first way is all together, whole, without drafts, from
graphs; beside it with drafts and with steps launched ahead, in chunks, one after the other, kernel by kernel, with the
Engram tables in pinned memory. Tokens must be equal, and so must the cache that the first prompt leaves. Ranks that
share the GPU round their parts to BF16 before they add them up, so theirs are counted alone.

    python bench/campaigns/equalities.py FILE [--model DIR] [--tokens 256] [--ranks 2] [--publish]
"""

import argparse
import asyncio
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.campaigns.greedy import load
from bench.report import Row, publish
from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.cuda.engine import CudaEngine
from dsuf.cuda.machine import Machine, Setup
from dsuf.cuda.rank_loader import load_ranks
from tests.cuda.drive import generate, read_caches

CONTEXT_TOKENS = 4096
PLAIN_PROMPTS = 2
"""Prompts that are answered kernel by kernel, which takes long."""

Prompts = Sequence[NDArray[np.int64]]


class Said(NamedTuple):
    """Replies to all prompts, and the cache of the first when it was the last to be asked."""

    replies: list[list[int]]
    cache: bytes


class Way(NamedTuple):
    """How replies are made: all together or one after the other, and what `generate` is told."""

    name: str
    told: Mapping[str, int]
    together: bool = True


WAYS = (
    Way("whole, without drafts", {}),
    Way("drafts", {"drafts": 5}),
    Way("one draft, steps ahead", {"drafts": 1, "ahead": 3}),
    Way("chunks of 37", {"chunk": 37}),
    Way("chunks of 7 launched ahead, drafts", {"chunk": 7, "ahead": 2, "drafts": 5}),
    Way("alone", {}, together=False),
    Way("alone, drafts", {"drafts": 5}, together=False),
)


def say(engine: CudaEngine, prompts: Prompts, tokens: int, way: Way) -> Said:
    """Replies made in one way."""
    told: dict[str, Any] = dict(way.told)
    if way.together:
        replies = generate(engine, prompts, tokens, **told)
    else:
        replies = [generate(engine, [prompt], tokens, **told)[0] for prompt in prompts]
    (last,) = generate(engine, prompts[:1], tokens, **told)
    # The last token is chosen and not in the cache.
    return Said([*replies, last], read_caches(engine.machine, len(prompts[0]) + len(last) - 1))


def compare(name: str, own: Said, expected: Said) -> Row:
    """How many replies and tokens differ, and whether the caches do; of a reply tokens count from where it parts."""
    different, parted = 0, 0
    for ours, theirs in zip(own.replies, expected.replies, strict=True):
        length = max(len(ours), len(theirs))
        same = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), None)
        if same is None and len(ours) != len(theirs):
            same = min(len(ours), len(theirs))
        if same is not None:
            different, parted = different + length - same, parted + 1
    return {
        "way": name, "replies": len(own.replies), "tokens": sum(map(len, own.replies)), "parted": parted,
        "different": different, "same_cache": own.cache == expected.cache,
    }  # fmt: skip


def compare_ways(
    engine: CudaEngine, prompts: Prompts, tokens: int, first: Said, ways: Sequence[Way] = WAYS[1:]
) -> Iterator[Row]:
    """A row a way, beside what was said first; the last is one without graphs."""
    for way in ways:
        yield compare(way.name, say(engine, prompts, tokens, way), first)
    plain = CudaEngine(engine.machine, "weights", "exact", captures=False)
    said = first._replace(replies=[*first.replies[:PLAIN_PROMPTS], first.replies[-1]])
    try:
        yield compare("kernel by kernel, drafts", say(plain, prompts[:PLAIN_PROMPTS], tokens, ways[0]), said)
    finally:
        asyncio.run(plain.close(keep_machine=True))


def measure(model: Path, prompts: Prompts, tokens: int, ranks: Sequence[int]) -> tuple[list[Row], str]:
    """All rows, and the device."""
    setup = Setup(context_tokens=CONTEXT_TOKENS, max_turns=len(prompts))
    engine = CudaEngine(Machine.load(model, setup), "weights", "exact")
    first, device = say(engine, prompts, tokens, WAYS[0]), engine.facts.device
    rows = list(compare_ways(engine, prompts, tokens, first))
    asyncio.run(engine.close())
    pinned = CudaEngine(Machine.load(model, msgspec.structs.replace(setup, engram_on_host=True)), "weights", "exact")
    rows.append(compare("Engram tables pinned", say(pinned, prompts, tokens, WAYS[0]), first))
    asyncio.run(pinned.close())
    for count in ranks:
        split = CudaEngine(load_ranks(model, setup, count, streams=8), "weights", "exact")
        own = say(split, prompts, tokens, WAYS[0])
        rows.append(compare(f"{count} ranks", own, first))
        found = compare_ways(split, prompts, tokens, own, WAYS[1:3])
        rows += [{**row, "way": f"{count} ranks, {row['way']}"} for row in found]
        asyncio.run(split.close())
    return rows, device


def hold(rows: Sequence[Row]) -> bool:
    """Whether all is equal that must be: every way beside the first of the same ranks."""
    judged = [row for row in rows if not str(row["way"]).endswith("ranks")]
    return all(not row["different"] and row["same_cache"] for row in judged)


def main() -> None:
    """Compare, print and with --publish keep the figures; exit code 1 if something differs that must not."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model", type=Path, help="a checkpoint; without one the embedded model")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--ranks", type=int, nargs="*", default=[], help="ranks that share the GPU, run by run")
    parser.add_argument("--publish", action="store_true")
    args = parser.parse_args()
    prompts = [np.array(prompt) for prompt in load(args.file).prompts]
    model = args.model or ensure_embedded(Path.home() / ".cache" / "dsuf")
    rows, device = measure(model, prompts, args.tokens, args.ranks)
    rows = [{"model": model.name, **row} for row in rows]
    print(*rows, sep="\n", flush=True)
    if args.publish:
        publish("equalities", rows, device)
    sys.exit(not hold(rows))


if __name__ == "__main__":
    main()

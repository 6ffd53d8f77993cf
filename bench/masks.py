"""What masks cost: the time to compile a grammar, and to say what may come behind a token and behind five drafts.

Replies are random walks: each token is drawn from those that are allowed. A question is asked as an engine asks it,
from another thread, and timed until its answer is there; the threads let others run while they compute.

    python bench/masks.py [--tokens 1500]
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from bench.report import Row, publish
from bench.schemas import make_schema
from dsuf.checkpoint.forms import NANO, RELEASED
from dsuf.recipe.grammar import write_calls, write_json, write_regex
from dsuf.recipe.masks import Masks
from dsuf.recipe.vocabulary import load_vocabulary
from dsuf.types import Constraint

DRAFTS = 5
REPLY_TOKENS = 150


def list_grammars(masks: Masks) -> Iterator[tuple[str, str]]:
    """Name and grammar of each kind."""
    yield "any JSON object", write_json("")
    wide = {f"field{i}": {"type": "string" if i % 2 else "integer"} for i in range(40)}
    yield "40 fields", write_json(json.dumps({"type": "object", "properties": wide, "required": list(wide)}))
    yield "generated schema", write_json(json.dumps(make_schema(3)))
    yield "expression", write_regex("[A-Z][a-z]{3,30}( [0-9]{1,4}){2,60}")
    tools = [{"name": f"tool{i}", "parameters": {"type": "object", "properties": wide}} for i in range(20)]
    yield "20 tools of 40 fields", write_calls(tools, masks.vocabulary.dsml_id, opened=True)


def walk(masks: Masks, grammar: str, tokens: int, rng: np.random.Generator) -> tuple[list[float], list[float]]:
    """Seconds of each question, without drafts and with some that may come."""
    plain_s, drafted_s = list[float](), list[float]()
    while len(plain_s) < tokens:
        mask, ids = masks.open(Constraint(grammar=grammar)), list[int]()
        for _ in range(REPLY_TOKENS):
            begun = time.perf_counter()
            row = mask.ask(ids, ()).result().rows[0]
            plain_s.append(time.perf_counter() - begun)
            drafts = [draw(row, masks, rng)]
            while len(drafts) < DRAFTS:  # a walk ahead, which costs what is not counted
                drafts.append(draw(mask.ask((), drafts).result().rows[-1], masks, rng))
            begun = time.perf_counter()
            mask.ask((), drafts).result()
            drafted_s.append(time.perf_counter() - begun)
            ids = drafts[:1]
            if ids[0] == masks.vocabulary.eos_id:
                break
    return plain_s, drafted_s


def draw(row: bytes | None, masks: Masks, rng: np.random.Generator) -> int:
    """One of the tokens that `row` allows."""
    bits = np.unpackbits(np.frombuffer(row or masks.within_reasoning, np.uint8), bitorder="little")
    return int(rng.choice(np.flatnonzero(bits)))


def measure(name: str, directory: Path, tokens: int) -> Iterator[Row]:
    """A row for each grammar over the vocabulary in `directory`."""
    vocabulary = load_vocabulary(directory)
    masks, rng = Masks(vocabulary, vocabulary.size), np.random.default_rng(1)
    masks.check(write_regex("a"))  # the tokenizer is read with the first grammar
    for kind, grammar in list_grammars(masks):
        begun = time.perf_counter()
        masks.check(grammar)
        compiled_s = time.perf_counter() - begun
        plain_s, drafted_s = walk(masks, grammar, tokens, rng)
        yield {
            "vocabulary": name, "tokens": vocabulary.size, "grammar": kind, "compile_ms": compiled_s * 1e3,
            "median_us": statistics.median(plain_s) * 1e6, "p99_us": np.quantile(plain_s, 0.99) * 1e6,
            "drafts": DRAFTS, "drafted_median_us": statistics.median(drafted_s) * 1e6,
            "drafted_p99_us": np.quantile(drafted_s, 0.99) * 1e6,
        }  # fmt: skip


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1500)
    args = parser.parse_args()
    rows = [row for name, directory in (("released", RELEASED), ("dsuf-nano", NANO))
            for row in measure(name, directory, args.tokens)]  # fmt: skip
    publish("masks", rows)


if __name__ == "__main__":
    main()

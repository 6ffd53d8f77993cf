"""Speed of the reference engine on this CPU: prefill of a long prompt, then decode behind it, and where the time goes.

The floor of a step is the time of its matrix products alone, measured in the same run on the same weights: what remains
above it is the price of many small array operations.

    python bench/reference.py [--prompt-tokens 6000] [--decode-tokens 60] [--profile]
"""

import argparse
import cProfile
import io
import pstats
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import numpy as np

from bench.report import RESULTS, publish, time_ms
from dsuf.checkpoint.synthetic import ensure_embedded
from dsuf.node.threads import limit_threads
from dsuf.reference.arithmetic import F64, I64, matmul
from dsuf.reference.cache import SequenceCache
from dsuf.reference.loader import load_model
from dsuf.reference.model import Model
from dsuf.reference.pages import PAGE_TOKENS, PagePool, PageTable

CHUNK = 256
"""Positions a prefill step, as `bin/serve` takes them."""

PREFILLS = 3


def make_tables(model: Model, count: int, tokens: int) -> list[PageTable]:
    """Page tables for sequences of `tokens` positions in one pool, the pages dealt out in a random order."""
    each = -(-tokens // PAGE_TOKENS)
    pool = PagePool(model.config, model.arithmetic, count * each)
    pages = np.random.default_rng(2).permutation(count * each).reshape(count, each)
    return [PageTable(pool, own.tolist()) for own in pages]


def prefill(model: Model, table: PageTable, ids: I64, mode: str) -> SequenceCache:
    """A cache with `ids` in it, in the pages of `table`; the logits behind them are computed too."""
    cache = model.new_cache(table)
    for start in range(0, len(ids), CHUNK):
        part = ids[start : start + CHUNK]
        if mode == "replay":
            output = model.prefill_replay(cache, part, last=start + CHUNK >= len(ids))
        else:
            output = model.forward([(cache, part)])
    assert output is not None
    model.logits(output, slice(-1, None))
    return cache


def fork(model: Model, tables: list[PageTable], ids: I64, state: bytes) -> list[SequenceCache]:
    """A cache in the pages of each table that goes on behind `ids`, whose rows are in those of the first."""
    caches = [model.new_cache(table) for table in tables]
    for table, cache in zip(tables, caches, strict=True):
        table.pool.pages[table.pages] = table.pool.pages[tables[0].pages]
        cache.load_state(ids, state)
    return caches


def decode(model: Model, caches: list[SequenceCache]) -> None:
    """One step of every sequence."""
    output = model.forward([(cache, cache.ids[-1:]) for cache in caches])
    model.logits(output, slice(None))


def products(model: Model, rows: int) -> None:
    """The matrix products of one pass over `rows` rows, on the model's weights and inputs of ones."""
    for layer in model.layers:
        attention, moe = layer.attention.projections, layer.moe
        dense: list[F64] = [attention.wq_a, attention.wq_b, attention.wkv, attention.wo_b, moe.router.weight]
        dense += [moe.shared_w13, moe.shared_w2, layer.attn_site.fn, layer.ffn_site.fn]
        dense += [moe.w13[0]] * moe.router.chosen + [moe.w2[0]] * moe.router.chosen
        for weight in dense:
            matmul(np.ones((rows, weight.shape[1]), np.float32), weight)
    matmul(np.ones((1, model.head.shape[1]), np.float32), model.head)


def profile(model: Model, cache: SequenceCache, tokens: int) -> Path:
    """Write where the time of `tokens` decode steps goes."""
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.enable()
    for _ in range(tokens):
        decode(model, [cache])
    profiler.disable()
    pstats.Stats(profiler, stream=text).strip_dirs().sort_stats("tottime").print_stats(25)
    path = RESULTS / "reference-decode-profile.txt"
    kept = [line for line in text.getvalue().splitlines() if line.strip()]
    path.write_text(f"{tokens} decode steps behind {cache.length - tokens} tokens\n" + "\n".join(kept) + "\n")
    return path


def main() -> None:
    """Measure and publish."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt-tokens", type=int, default=6000)
    parser.add_argument("--decode-tokens", type=int, default=60)
    parser.add_argument("--profile", action="store_true", help="also write a profile of the decode steps")
    args = parser.parse_args()
    limit_threads(0)  # as `bin/serve` does
    with tempfile.TemporaryDirectory() as folder:
        model = load_model(ensure_embedded(Path(folder)))
    ids = np.random.default_rng(1).integers(3, model.config.vocab_size, args.prompt_tokens)
    tables, rows = make_tables(model, 4, len(ids) + 2 * args.decode_tokens + 64), []
    for mode in ("replay", "exact"):
        median, p90 = time_ms(lambda: prefill(model, tables[0], ids, mode), PREFILLS)  # noqa: B023
        floor_ms = time_ms(lambda: products(model, CHUNK), 5)[0] * len(ids) / CHUNK
        rows.append(row(f"prefill, {mode}", 1, len(ids), median, p90, floor_ms, len(ids) / median * 1e3))
    state = prefill(model, tables[0], ids, "replay").read_state()
    for streams in (1, 4):
        caches = fork(model, tables[:streams], ids, state)
        median, p90 = time_ms(lambda: decode(model, caches), args.decode_tokens)  # noqa: B023
        floor_ms, _ = time_ms(lambda: products(model, streams), 30)  # noqa: B023
        rows.append(row("decode", streams, len(ids), median, p90, floor_ms, streams / median * 1e3))
    publish("reference", rows)
    if args.profile:
        print(f"written: {profile(model, fork(model, tables[:1], ids, state)[0], args.decode_tokens)}")


def row(what: str, rows: int, context: int, median: float, p90: float, floor: float, rate: float) -> dict[str, object]:
    """One line of the table."""
    return {
        "what": what, "rows": rows, "context": context, "median_ms": median, "p90_ms": p90, "floor_ms": floor,
        "ratio": median / floor, "tokens_per_s": rate,
    }  # fmt: skip


if __name__ == "__main__":
    main()

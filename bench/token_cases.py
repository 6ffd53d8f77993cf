"""What the kernel benchmark times around the layers: places, embedding, the draft head, the choice of tokens."""

from collections.abc import Iterator
from typing import Any

import cupy

from bench.kernel_cases import CONFIG, Case, N, bf16, f32, i32

RING, PAGE_TOKENS, STEPS = 256, 128, 8


def i64(*shape: int) -> Any:
    """Zeros."""
    return cupy.zeros(shape, cupy.int64)


def zeros(*shape: int) -> Any:
    """Zeros."""
    return cupy.zeros(shape, cupy.int32)


def place_cases(rows: int, context_tokens: int) -> Iterator[Case]:
    """Where a turn's rows go, and how they enter the streams."""
    live, pages = {"live": i32([rows]), "rows": rows}, context_tokens // PAGE_TOKENS
    of_row = {"row_slot": zeros(rows), "row_position": i32(cupy.arange(rows) + context_tokens - rows)}
    of_row |= {"row_id": zeros(rows)}
    yield Case(
        "place_rows", "", lambda: {"ids": zeros(1, RING)},
        live | of_row | {
            "table": i32(cupy.arange(pages)), "floors": zeros(1, 4), "engram_ids": zeros(CONFIG.vocab_size),
            "positions": i64(rows), "group_positions": i64(rows), "ring_place": i64(rows), "entry_place": i64(2, rows),
            "reachable": zeros(2, rows), "keep": i64(rows), "partner": i64(rows),
            "history": i64(rows, N["engram_shifts"]), "windows": zeros(3, rows, N["window"]), "turns": 1, "ring": RING,
            "table_pages": pages, "page_tokens": PAGE_TOKENS, "halves": 8, "pad_id": 0, "fresh": 0,
        },
        rows * 12 * N["window"],
    )  # fmt: skip
    yield Case(
        "keep_ids", "", lambda: {"ids": zeros(1, RING)}, live | of_row | {"turns": 1, "ring": RING}, 16 * rows
    )  # fmt: skip
    streams = bf16(rows, N["streams"], N["dim"])
    yield Case(
        "embed_rows", "", lambda: {"embedding": bf16(1024, N["dim"])},
        live | {"row_id": zeros(rows), "streams": streams, "pre": f32(rows, N["streams"])},
        rows * N["dim"] * 2 * (N["streams"] + 1),
    )  # fmt: skip
    yield Case(
        "mean_streams", "", lambda: {"streams": bf16(rows, N["streams"], N["dim"])},
        live | {"taps": bf16(rows, N["taps"], N["dim"]), "tap": 0}, rows * N["dim"] * 2 * (N["streams"] + 1),
    )  # fmt: skip


def token_cases(rows: int) -> Iterator[Case]:
    """A block of drafts of one turn, its judgement, and the turn's new state."""
    vocabulary, block, rank = CONFIG.vocab_size, N["block"], N["markov_rank"]
    turn, one = zeros(1), i32([1])
    state = {"length": i32([1000]), "anchor": zeros(1)}
    block_rows = {"row_slot": zeros(1, block), "row_position": zeros(1, block), "row_id": zeros(1, block)}
    chosen = {"anchors": zeros(1, block), "drafts": zeros(1, block)}
    yield Case(
        "gather_turns", "", lambda: {"wanted": zeros(1)},
        {"done": zeros(1), "turn": turn, "live_turns": zeros(1), "live_rows": zeros(1), "batch": 1, "turns": 1}, 20,
    )  # fmt: skip
    yield Case(
        "place_drafts", "", lambda: {"turn": turn},
        state | block_rows | {
            "floors": zeros(1, 4), "positions": i64(1, block), "windows": zeros(1, block, N["window"] + block),
            "live": one, "batch": 1, "turns": 1, "ring": RING, "noise_id": CONFIG.dspark_noise_token_id,
        },
        4 * block * (N["window"] + block),
    )  # fmt: skip
    yield Case(
        "place_verify", "", lambda: {"turn": turn},
        state | {
            "drafts": zeros(1, block), "confidence": None, "verified": zeros(1), "first": zeros(1),
            "row_slot": zeros(rows), "row_position": zeros(rows), "row_id": zeros(rows), "live_rows": zeros(1),
            "live": one, "batch": 1, "turns": 1, "rows": rows, "limit": min(block, rows - 1), "threshold": 0.0,
        },
        12 * rows,
    )  # fmt: skip
    logits = f32(1, block, vocabulary)
    yield Case(
        "add_markov", "one turn", lambda: {"head": bf16(vocabulary, rank)},
        chosen | {
            "embed": bf16(vocabulary, rank), "logits": logits, "live": one, "batch": 1, "place": 0,
            "vocabulary": vocabulary,
        },
        vocabulary * (2 * rank + 8),
    )  # fmt: skip
    yield Case(
        "rate_drafts", "", lambda: {"streams": bf16(1, block, N["streams"], N["dim"])},
        chosen | {
            "pre": f32(1, block, N["streams"]), "embed": bf16(vocabulary, rank), "weight": f32(N["dim"] + rank),
            "confidence": f32(1, block), "live": one, "batch": 1,
        },
        block * N["dim"] * N["streams"] * 2,
    )  # fmt: skip
    yield from choice_cases(rows)


def choice_cases(rows: int) -> Iterator[Case]:
    """Arg-max, draws and acceptance over a model's whole vocabulary."""
    vocabulary, block = CONFIG.vocab_size, N["block"]
    live, drafts = {"live": i32([rows]), "rows": rows}, min(block, rows - 1)
    yield Case(
        "pick_tokens", "", lambda: {"logits": f32(rows, vocabulary)},
        live | {"picked": zeros(rows), "best": f32(rows), "vocabulary": vocabulary}, 4 * rows * vocabulary,
    )  # fmt: skip
    turns = {"seed": i64(1), "turns": 1, "vocabulary": vocabulary}
    for note, temperature, top_p in (("greedy", 0.0, 1.0), ("sampled", 1.0, 1.0), ("nucleus of 0.95", 1.0, 0.95)):
        yield Case(
            "sample_rows", note, lambda: {"logits": f32(rows, vocabulary) * 3},
            live | turns | {
                "row_slot": zeros(rows), "row_position": i32(cupy.arange(rows)), "picked": zeros(rows),
                "temperature": cupy.full(1, temperature), "top_p": cupy.full(1, top_p), "peak": f32(rows),
                "least": f32(rows), "last": zeros(rows), "mass": i64(rows), "first": 0, "step": 1, "purpose": 0,
            },
            4 * rows * vocabulary,
        )  # fmt: skip
    found = {"peak": cupy.full(rows, 12, cupy.float32), "least": cupy.full(rows, -99, cupy.float32)}
    found |= {"last": zeros(rows), "mass": cupy.full(rows, 1 << 52), "picked": zeros(rows)}
    own = {f"draft_{name}": value for name, value in found.items() if name != "picked"}
    judged = turns | found | own | {
        "draft_logits": f32(1, block, vocabulary) * 3, "drafts": zeros(1, block), "turn": zeros(1), "first": zeros(1),
        "verified": i32([drafts]), "length": i32([1000]), "temperature": cupy.full(1, 1.0), "over": i64(1, block),
        "kept": zeros(1), "next": zeros(1), "live": i32([1]), "batch": 1, "rows": rows, "rule": 1,
    }  # fmt: skip
    for entry, places in (("weigh_drafts", drafts - 1), ("judge_drafts", 1)):
        yield Case(entry, "", lambda: {"logits": f32(rows, vocabulary) * 3}, judged, 8 * places * vocabulary)
    yield Case(
        "advance_turns", "", lambda: {"turn": zeros(1)},
        {
            "drafts": zeros(1, block), "verified": zeros(1), "first": zeros(1), "kept": zeros(1), "next": i32([5]),
            "length": zeros(1), "anchor": zeros(1), "generated": zeros(1), "max_tokens": i32([1 << 30]),
            "done": zeros(1), "feed_place": i64(rows), "results": zeros(STEPS, 2, 7 + block), "sequence": i64(STEPS),
            "step": i64(1), "live": i32([1]), "batch": 1, "turns": 1, "rows": rows, "ring": RING, "fed": 1, "eos_id": 1,
            "result_steps": STEPS,
        },
        80,
    )  # fmt: skip
